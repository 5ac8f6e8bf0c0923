"""Keywords of the tools, as `nxd_ckpt.core.option_classes` describes them.

The commands' flags and help derive from them.

Imports no torch, which ``nxd-ckpt --help`` does not wait for.
"""
