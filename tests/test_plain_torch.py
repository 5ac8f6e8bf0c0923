"""Plain CPU torch is enough: nothing outside the XLA adapter and the emulation needs torch-xla or NxD."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]

# A fresh interpreter: imports of these are noted and fail, as on a machine without them.
PROGRAM = """
import importlib, sys

tried = []

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch_xla", "torch_neuronx", "libneuronxla", "neuronx_distributed"}:
            tried.append(name)
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Absent())
import nxd_ckpt
print(tried)
for name in sys.argv[1:]: importlib.import_module(name)
print(tried)
try:
    import torch_xla
except ModuleNotFoundError as error:
    print(error)
"""


def test_every_reader_and_tool_imports_without_torch_xla() -> None:
    """Neither the package nor any module but the emulation, the XLA adapter, integrations and the ``__main__`` entry
    points tries for torch-xla or neuronx-distributed, which cannot be imported there even where they are installed."""
    others = ("nxd_ckpt.emulation", "nxd_ckpt.live.torch_xla", "nxd_ckpt.integrations.")
    names = (
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((REPOSITORY / "nxd_ckpt").rglob("*.py"))
    )
    plain = [name for name in names if not name.startswith(others) and not name.endswith("__main__")]
    assert "nxd_ckpt.errors" in plain
    command = [sys.executable, "-c", PROGRAM, *plain]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (0, "[]\n[]\nblocked: torch_xla\n") == (done.returncode, done.stdout), done.stderr
