"""Keywords of the tools, as `nxd_ckpt.core.option_classes` describes them. The commands' flags derive from them.

Imports no torch, which ``nxd-ckpt --help`` does not wait for.
"""
