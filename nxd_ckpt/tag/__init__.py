"""One tag on a storage, or a directory of them: recognising, opening, reading, verifying, listing."""
