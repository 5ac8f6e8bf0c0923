"""Conversion between tags and Hugging Face directories, by the rules of a mapping."""
