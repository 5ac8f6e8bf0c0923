"""Conversions without a cluster: the optimizer of a tag, or a whole tag, for other sizes. On any CPU host."""

from nxd_ckpt.convert.resharding import reshard
from nxd_ckpt.convert.zero1 import convert_zero1

__all__ = ["convert_zero1", "reshard"]
