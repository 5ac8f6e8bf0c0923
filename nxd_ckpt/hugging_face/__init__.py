"""Tags and Hugging Face directories in terms of each other, by the rules of a mapping."""
