"""Verifying a whole tag, and the result."""

from nxd_ckpt.tag.verify import Verification, verify_checkpoint

__all__ = ["Verification", "verify_checkpoint"]
