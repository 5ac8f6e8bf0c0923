"""Conversion between bytes and trees of tensors: the torch zip container, xser references, safe unpickling, CRC-32."""
