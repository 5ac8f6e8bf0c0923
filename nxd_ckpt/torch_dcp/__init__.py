"""torch.distributed.checkpoint's storage reader and writer on tags."""
