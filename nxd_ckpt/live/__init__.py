"""Live torch objects as trees of tensors, and back: the only place that knows torch-xla and neuronx-distributed."""
