"""Live torch objects as trees of tensors, and back: the only place that knows torch-xla and neuronx-distributed.

Both are looked up lazily and only where the process has imported them already; everything here imports on plain torch.
"""
