"""What the tools take by keyword, as ``core.options`` describes it: the commands make their flags and help of it.

Knows no torch, which ``nxd-ckpt --help`` does not wait for.
"""
