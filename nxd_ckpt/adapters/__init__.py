"""Entry points for other libraries: torch.distributed.checkpoint's reader and writer."""
