"""Other trainers' checkpointing by nxd_ckpt, a module for each; it imports that trainer, and nothing imports it."""
