"""Output of conversions: files are laid out first, filled in bounded memory, and become visible at the end."""
