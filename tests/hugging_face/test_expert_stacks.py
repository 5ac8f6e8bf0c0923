"""256 experts of a layer in one tensor: it is never whole in memory, in whatever form it comes or goes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.convert import MIB
from tools.bench.experts import make

pytestmark = [pytest.mark.both, pytest.mark.soak]

GROWTH = """
import resource, sys
from nxd_ckpt import convert

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

hf, work = sys.argv[1:]
before = peak()
convert(hf, f"{work}/run/step_0", to="tag", names="nxd", durable=False)
convert(f"{work}/run/step_0", f"{work}/out", to="hf", config=hf, durable=False)
for form in ("dcp", "torchtitan", "tag"):
    convert(f"{work}/run/step_0", f"{work}/{form}/step_0", to=form, names="hf", config=hf, durable=False)
print(peak() - before)
"""


def test_a_stack_of_experts_is_never_whole_in_memory(tmp_path: Path) -> None:
    """Gate and up of the layer are 512 MiB; what a whole one would need is far above what all forms together need."""
    hf = tmp_path / "hf"
    make(hf, layers=1, hidden=1024, wide=512)
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(hf), str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert int(done.stdout.split()[-1]) < 200 * MIB
