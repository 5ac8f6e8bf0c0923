"""docs/coming-from.md is true: every row's code runs, does what the row says, and their calls are theirs."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_ckpt
from nxd_ckpt.cli.main import main
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.directory import list_tags
from tests.docs.markdown import REPOSITORY, code_blocks, tables
from tests.support.s3_server import S3Server

PAGE = REPOSITORY / "docs" / "coming-from.md"
SYSTEMS = ["neuronx-distributed", "OLMo-core", "Composer", "ColossalAI", "torch.distributed.checkpoint"]

_CODE, _PROOF = re.compile(r"`([^`]+)`"), re.compile(r"<!-- (.+) -->$")
_BREAK = "<br>"


@dataclass(frozen=True)
class Row:
    """Their calls, ours one after the other, and an expression that holds once these have run, and not before."""

    system: str
    theirs: str
    ours: list[str]
    proof: str

    @staticmethod
    def of(system: str, cells: list[str]) -> Row:
        """Raises ValueError for a row that cannot be run, or whose effect nothing proves."""
        theirs, ours, difference = cells
        proof = _PROOF.search(difference)
        if proof is None or not _CODE.findall(ours) or _CODE.sub("", ours).replace(_BREAK, "").strip():
            raise ValueError(f"{system}: {theirs} has nothing but code beside it, or no <!-- proof --> at its end")
        return Row(system, theirs, _CODE.findall(ours), proof[1])

    def __str__(self) -> str:
        return f"{self.system}: {self.theirs}"


ROWS = [Row.of(system, row) for system in SYSTEMS for row in tables(PAGE)[system]]


def tags(path: str) -> list[str]:
    """The complete tags of a directory."""
    return sorted(info.tag for info in list_tags(open_storage(path)) if info.complete)


def same(a: Any, b: Any) -> bool:
    """Whether modules, optimizers or state dicts hold equal tensors under the same names."""
    flat_a, flat_b = (_flat(one if isinstance(one, dict) else one.state_dict()) for one in (a, b))
    return flat_a.keys() == flat_b.keys() and all(torch.equal(flat_a[name], flat_b[name]) for name in flat_a)


def _flat(tree: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return {key: tensor for name, value in items for key, tensor in _flat(value, (*path, name)).items()}


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    nxd_ckpt.close_checkpointers()


@pytest.fixture(scope="module")
def llama_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a Llama."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    directory = tmp_path_factory.mktemp("hugging-face") / "llama-hf"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture
def needed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Helpers of proofs, and what the row mentions: the directory llama-hf and a live ``llama``, s3://bucket."""
    row: Row = request.node.callspec.params["row"]
    names: dict[str, Any] = {"tags": tags, "same": same, "__name__": "page"}
    if "llama" in " ".join(row.ours):
        directory = shutil.copytree(request.getfixturevalue("llama_hf"), tmp_path / "llama-hf")
        transformers = import_module("transformers")
        names["pretrained"] = partial(transformers.AutoModelForCausalLM.from_pretrained, local_files_only=True)
        names["llama"] = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(directory)
        )
    if "s3://" in " ".join(row.ours):
        server: S3Server = request.getfixturevalue("s3_server")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
    return names


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_row_runs_and_does_what_it_says(row: Row, needed: dict[str, Any]) -> None:
    """After the page's setup, in a directory of its own: the proof holds after the row's code, and not before."""
    (setup,) = code_blocks(PAGE, "python")
    exec(compile(setup, str(PAGE), "exec"), needed)
    assert not holds(row.proof, needed)
    for code in row.ours:
        if code.startswith("nxd-ckpt "):
            assert 0 == main(shlex.split(code)[1:])
        else:
            exec(code, needed)
    assert True is eval(row.proof, needed)


def holds(proof: str, names: dict[str, Any]) -> bool:
    """False too where the proof speaks of what is not there yet."""
    try:
        return bool(eval(proof, names))
    except Exception:
        return False


def test_all_tables_are_those_of_systems() -> None:
    assert SYSTEMS == list(tables(PAGE))
    assert all(len(tables(PAGE)[system]) > 3 for system in SYSTEMS)


def parameters_of_olmo_core() -> dict[str, set[str]]:
    """The keywords of OLMo-core's checkpoint functions, from its source: importing it takes seconds."""
    spec = find_spec("olmo_core")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0]) / "distributed" / "checkpoint" / "__init__.py"
    functions = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {one.name: {argument.arg for argument in one.args.args + one.args.kwonlyargs} for one in functions}


def parameters_of_dcp() -> dict[str, set[str]]:
    """The keywords of torch DCP's functions and classes."""
    package = "torch.distributed.checkpoint"
    modules = [import_module(name) for name in (package, f"{package}.format_utils", f"{package}.state_dict")]
    found = {name: value for module in modules for name, value in vars(module).items()}
    takers = {name: value for name, value in found.items() if inspect.isfunction(value) or inspect.isclass(value)}
    return {
        name: set(inspect.signature(value).parameters)
        for name, value in takers.items()
        if value.__module__.startswith(package)
    }


@pytest.mark.parametrize(
    ("system", "parameters"),
    [("OLMo-core", parameters_of_olmo_core), ("torch.distributed.checkpoint", parameters_of_dcp)],
)
def test_their_calls_are_theirs(system: str, parameters: Callable[[], dict[str, set[str]]]) -> None:
    """Functions of the names on the page take the keywords on the page, where these libraries are installed."""
    known = parameters()
    theirs = "\n".join(code for row in ROWS if row.system == system for code in _CODE.findall(row.theirs))
    calls = [node for node in ast.walk(ast.parse(theirs)) if isinstance(node, ast.Call)]
    named = [(ast.unparse(call.func).removeprefix("dcp."), {word.arg for word in call.keywords}) for call in calls]
    checked = [(name, keywords) for name, keywords in named if name in known]
    assert len(checked) > 6
    assert [] == [(name, keywords - known[name]) for name, keywords in checked if not keywords <= known[name]]
