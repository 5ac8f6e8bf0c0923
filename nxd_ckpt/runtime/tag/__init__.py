"""A tag that is opened: its trees, verified and read, put together for other sizes or as whole tensors."""
