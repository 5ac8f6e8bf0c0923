"""Bytes <-> trees of tensors: the torch zip container, xser references, safe unpickling, CRC-32."""
