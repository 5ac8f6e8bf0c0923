"""Storage reader and writer for torch.distributed.checkpoint, on tags."""
