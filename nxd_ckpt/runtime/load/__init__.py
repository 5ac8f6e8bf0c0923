"""A load: what goes where, agreed on by all ranks before anything changes."""
