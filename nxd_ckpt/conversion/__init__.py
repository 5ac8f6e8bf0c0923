"""Tags in another form: other sizes, other places, one archive, Hugging Face, torch DCP, whole tensors."""
