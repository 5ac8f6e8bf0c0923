"""Bytes by key. ``base`` states the contract, ``local`` is a directory; ``nxd_ckpt.testing.storage`` ships doubles."""
