"""Resharding: a tag as a rank of any sizes sees it, or as whole tensors."""
