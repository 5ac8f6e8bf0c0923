"""What other libraries call: torch.distributed.checkpoint's reader and writer."""
