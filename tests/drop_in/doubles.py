"""A stand-in for neuronx-distributed: its modules and the names in them. Each function fails when it is called."""

from pathlib import Path

_FUNCTIONS = """
def {name}(*args, **keywords):
    raise AssertionError("neuronx_distributed's own {name} was called")
"""

_CHECKPOINT_IO = """
import os

from neuronx_distributed.parallel_layers.checkpointing import load, save


class NeuronCheckpointIO:
    def __init__(self, save_load_xser=True, weights_only=False):
        self.save_load_xser, self.weights_only = save_load_xser, weights_only

    def save_checkpoint(self, checkpoint, path, storage_options=None, master_dp_only=True):
        raise AssertionError("neuronx_distributed's own save_checkpoint was called")

    def load_checkpoint(self, checkpoint_path, master_dp_only=True):
        raise AssertionError("neuronx_distributed's own load_checkpoint was called")

    def remove_checkpoint(self, path):
        raise AssertionError("neuronx_distributed's own remove_checkpoint was called")

    def teardown(self):
        pass
"""


def _functions(*names: str) -> str:
    return "".join(_FUNCTIONS.format(name=name) for name in names)


MODULES = {
    "__init__.py": """
from . import parallel_layers
from .trainer.checkpoint import finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint

def neuronx_distributed_config(**keywords):
    return keywords
""",
    "trainer/__init__.py": "from .checkpoint import load_checkpoint, save_checkpoint\n",
    "trainer/checkpoint.py": "g_iostate = None\n"
    + _functions("save_checkpoint", "load_checkpoint", "has_checkpoint", "finalize_checkpoint"),
    "parallel_layers/__init__.py": "from .checkpointing import load, save\n",
    "parallel_layers/checkpointing.py": _functions("save", "load"),
    "lightning/__init__.py": "from .checkpoint_io import NeuronCheckpointIO\n",
    "lightning/checkpoint_io.py": _CHECKPOINT_IO,
}


def write_package(directory: Path) -> Path:
    """Write the package into ``directory``, which is to be on ``sys.path``."""
    for name, text in MODULES.items():
        file = directory / "neuronx_distributed" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return directory
