"""torch's autograd counts devices at the first backward pass of a process: torch-xla has to be there before it."""

from importlib.util import find_spec

if find_spec("torch_xla") is not None:
    import torch_xla

    torch_xla.device()
