"""Conversion of tags: to other sizes, other places, one archive, Hugging Face, torch DCP, whole tensors."""
