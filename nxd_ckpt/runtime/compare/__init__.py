"""Two tags side by side: which tensors and values differ, and by how much."""
