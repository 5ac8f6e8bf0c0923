"""A tag or a live model as Hugging Face tensors, and the other way."""
