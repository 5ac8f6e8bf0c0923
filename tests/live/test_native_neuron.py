"""Two things are called torch-neuronx. The native one, from 2.13 on, is not taken for the backend of torch-xla."""

from pathlib import Path

from tests.support.processes import run_program

# What the native package does when it is imported, as far as others see it: the device is torch's own.
NATIVE = """
import types

import torch

torch.utils.rename_privateuse1_backend("neuron")
torch._register_device_module("neuron", types.ModuleType("torch.neuron"))
torch.neuron.is_available = lambda: False
torch.neuron.device_count = lambda: 0
"""

PROGRAM = """
import sys

import torch
import torch_neuronx

import nxd_ckpt
from nxd_ckpt.live import torch_xla
from nxd_ckpt.live.data_position import capture_random_state, restore_random_state

assert torch.device("neuron", 0).type == "neuron"
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
random = capture_random_state()
nxd_ckpt.save_checkpoint("run", "step_1", model, optimizer, rank_content=random)
other, content = torch.nn.Linear(4, 2), {}
fresh = torch.optim.AdamW(other.parameters())
nxd_ckpt.load_checkpoint("run", "step_1", other, fresh, rank_content=content)
restore_random_state(content)
print(torch.equal(model.weight, other.weight), "xla" in content, torch_xla.is_running(), torch_xla.is_spmd())
print(sorted({"torch_xla", "neuronx_distributed"} & sys.modules.keys()))
print(nxd_ckpt.open_checkpoint("run").manifest.versions["torch_neuronx"])
"""


def test_the_native_backend_is_not_taken_for_torch_xla(tmp_path: Path) -> None:
    """Beside the native package nothing looks for torch-xla, saves are plain, and the tag says which it was."""
    packages = tmp_path / "packages"
    (packages / "torch_neuronx").mkdir(parents=True)
    (packages / "torch_neuronx" / "__init__.py").write_text(NATIVE)
    (packages / "torch_neuronx-2.14.3.0.dist-info").mkdir()
    (packages / "torch_neuronx-2.14.3.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch-neuronx\nVersion: 2.14.3.0\n"
    )
    outcome = run_program(f"import os, sys\nos.chdir({str(tmp_path)!r})\nsys.path.insert(0, 'packages')\n{PROGRAM}")
    assert (0, "True False False False\n[]\n2.14.3.0\n") == (outcome.returncode, outcome.stdout), outcome.stderr
