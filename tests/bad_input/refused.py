"""What is refused wherever it turns up: tags that are no plain names, and a class that is no plain data."""

TAGS = ["", "/abs", "a/b", "..", "../up", ".hidden", "a\\b", "nul\0", "x" * 256, True, 1.5]


class Settings:
    """A user's class: importable, and no plain data."""
