"""Writing a conversion's output: files laid out first, filled in bounded memory, visible at the end."""
