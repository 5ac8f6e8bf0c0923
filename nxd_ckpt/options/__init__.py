"""Keywords of the tools, as ``core.option_classes`` describes them: the commands make their flags and help of them.

Knows no torch, which ``nxd-ckpt --help`` does not wait for.
"""
