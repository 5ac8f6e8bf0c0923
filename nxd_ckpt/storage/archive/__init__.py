"""Archives of tags as read-only storages: tar, and compressed tar."""
