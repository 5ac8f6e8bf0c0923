"""NxD names <-> coordinates: which tags a directory holds, and one tag's files as trees of tensors."""
