"""One tag on a storage: its files, opening, reading, verifying, and the listing of a directory."""
