"""A tag that is opened: its trees, proved and read, put together for other sizes or as whole tensors."""
