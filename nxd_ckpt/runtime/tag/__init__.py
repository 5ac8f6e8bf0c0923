"""An opened tag: how it is chosen, opened, read and verified."""
