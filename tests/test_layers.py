"""The architecture: imports point down, the core is pure, torch-xla stays behind `live`, functions and modules
are short, tests share helpers."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "nxd_ckpt"

# From bottom to top: a module imports from its own folder and from those before. "" is nxd_ckpt/__init__.py itself.
ORDER = (
    *("surroundings", "errors", "version", "core", "effects", "formats", "storage", "options", "live"),
    *("coordination", "layouts", "tag", "reshard", "commit", "hugging_face", "saving", "loading", "keywords", "output"),
    *("torch_dcp", "conversion", "migrate", "tiers", "checkpoint", "checkpointer", "examine", "api", "prune"),
    *("converting", "verify", "adapters", "dcp", "drop_in", "", "run", "cli", "integrations", "emulation", "testing"),
)
LEVEL_OF = {layer: level for level, layer in enumerate(ORDER)}

# Nothing else is below core, so that it is pure transitively.
PURE = ("surroundings", "errors", "version", "core")
ALSO_PURE = tuple(f"nxd_ckpt.hugging_face.{name}" for name in ("mapping", "packing", "sizes", "torchtitan_names"))
IMPURE = {
    *("torch", "numpy"),
    *("os", "io", "pathlib", "tempfile", "shutil", "glob", "mmap", "socket", "subprocess"),
    *("time", "datetime", "random", "threading", "asyncio", "concurrent"),
}

# What runs in a simulated world asks nxd_ckpt.effects for time and threads; peers watches connections of the system's.
SIMULATED = ("coordination", "layouts", "tag", "reshard", "commit", "hugging_face", "saving", "loading", "checkpointer")
TIME_AND_THREADS = {"time", "threading", "queue"}
NOT_SIMULATED = ("nxd_ckpt.coordination.peers",)

# They read and write files of checkpoints: nothing in them knows an object of a training.
OFFLINE = ("layouts", "tag", "reshard", "hugging_face", "output", "conversion", "migrate")

# What looks at tags, checks, copies, keeps and removes them runs where there is no torch: folders, and modules.
WITHOUT_TORCH = (
    *("cli", "commit", "storage", "tiers", "prune", "conversion.cp", "tag.listing", "tag.verify"),
    *("examine.report_document", "examine.report_page"),
)

DEVICE_LIBRARIES = {"torch_xla", "torch_neuronx", "libneuronxla", "neuronx_distributed"}
MAY_USE_DEVICE = ("live", "emulation", "testing")  # testing: the self-test trains on it
MAY_USE_DEVICE_AT_IMPORT = ("emulation",)

LINES_OF_A_FUNCTION = 60
LINES_OF_A_MODULE = 600


class Import(NamedTuple):
    """One imported module, as a dotted name."""

    target: str
    line: int
    at_import_time: bool


_tree = cache(ast.parse)  # several tests look at the same modules


def _layer(module: str) -> str:
    """``nxd_ckpt.core.box`` -> ``core``; the package itself -> ``""``."""
    return [*module.split("."), ""][1]


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _targets(node: ast.AST, module: str, is_package: bool) -> list[str]:
    """The dotted names that ``node`` imports; for ``from a import b`` that is ``a.b``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = module.split(".")
        base = parents[: len(parents) - node.level + is_package] if node.level else []
        origin = ".".join(base + ([node.module] if node.module else []))
        return [f"{origin}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in ("import_module", "__import__"):
            return [str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant)]
    return []


@cache
def _imports_of(source: str, module: str, is_package: bool) -> list[Import]:
    return [*_imports(_tree(source), module, is_package)]


def _imports(node: ast.AST, module: str, is_package: bool, at_import_time: bool = True) -> Iterator[Import]:
    """Every import under ``node``, those inside functions and for type checkers only included."""
    for target in _targets(node, module, is_package):
        yield Import(target, getattr(node, "lineno", 0), at_import_time)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
        isinstance(node, ast.If) and _is_type_checking(node.test)
    ):
        at_import_time = False
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, module, is_package, at_import_time)


def _may_import(module: str, target: str) -> bool:
    """Whether the order allows ``module`` of the package to import ``target`` of the package."""
    target_layer = _layer(target)
    if target_layer not in LEVEL_OF:
        target_layer = ""  # `from nxd_ckpt import name`: something that __init__ offers
    return LEVEL_OF[target_layer] <= LEVEL_OF[_layer(module)]


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """What the source of ``module`` does against the architecture, one sentence each."""
    layer = _layer(module)
    if layer not in LEVEL_OF:
        return [f"{module}: {layer!r} is in no layer; give it a place in ORDER"]
    found = []
    for target, line, at_import_time in _imports_of(source, module, is_package):
        where, top = f"{module}:{line} imports {target}", target.split(".")[0]
        if top == "nxd_ckpt" and not _may_import(module, target):
            found.append(f"{where}: imports point down, from {layer!r} to {_layer(target)!r} is not down")
        if layer in OFFLINE and target.startswith("nxd_ckpt.live"):
            found.append(f"{where}: {layer!r} reads files, and knows no live objects")
        if (layer in PURE or module in ALSO_PURE) and (top in IMPURE or target == "nxd_ckpt.effects"):
            found.append(f"{where}: it is pure, and knows no torch, no IO and no clock")
        if layer in SIMULATED and top in TIME_AND_THREADS and module not in NOT_SIMULATED:
            found.append(f"{where}: nxd_ckpt.effects gives time and threads")
        if top in DEVICE_LIBRARIES and layer not in MAY_USE_DEVICE:
            found.append(f"{where}: only {', '.join(MAY_USE_DEVICE)} may")
        elif top in DEVICE_LIBRARIES and at_import_time and layer not in MAY_USE_DEVICE_AT_IMPORT:
            found.append(f"{where}: move it into the function that needs it")
    return found


def _modules() -> dict[str, Path]:
    """Every module of the package by dotted name."""
    paths = {path: path.relative_to(PACKAGE.parent).with_suffix("").parts for path in PACKAGE.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): path for path, parts in paths.items()}


def test_every_module_respects_the_layers() -> None:
    """Imports point down, the core is pure, and torch-xla is imported lazily and only where MAY_USE_DEVICE says."""
    modules = _modules()
    assert "nxd_ckpt.core.topology" in modules
    found = [
        sentence
        for module, path in sorted(modules.items())
        for sentence in violations(module, path.read_text(), path.name == "__init__.py")
    ]
    assert [] == found, "\n".join(found)


def _graph() -> dict[str, set[str]]:
    """Return the modules that each module imports at import time."""
    modules = _modules()
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        imports = _imports_of(path.read_text(), module, path.name == "__init__.py")
        targets = {found.target for found in imports if found.at_import_time}
        graph[module] = {name if name in modules else name.rpartition(".")[0] or name for name in targets} - {module}
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also inside one layer, imports at import time form no cycle."""
    TopologicalSorter(_graph()).prepare()  # raises CycleError, which names the circle


def test_what_looks_at_tags_imports_no_torch() -> None:
    """Neither does anything that it imports when it is imported."""
    graph = _graph()
    below = tuple(f"nxd_ckpt.{name}" for name in WITHOUT_TORCH)
    roots = [module for module in graph if f"{module}.".startswith(tuple(f"{name}." for name in below))]
    reached, ways = set(roots), {root: root for root in roots}
    for module in roots:  # which grows
        for target in graph.get(module, set()) - reached:
            reached.add(target)
            ways[target] = f"{ways[module]} -> {target}"
            roots.append(target)
    assert len(roots) > 100
    assert [] == [way for target, way in ways.items() if target.split(".")[0] == "torch"]


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("nxd_ckpt.core.box", "from nxd_ckpt.storage.local import LocalStorage", "imports point down"),
        ("nxd_ckpt.core.box", "from ..storage import base", "imports point down"),
        ("nxd_ckpt.core.names", "def f():\n    import nxd_ckpt.live.zero1", "imports point down"),
        ("nxd_ckpt.commit.commit", "from nxd_ckpt import save_checkpoint", "imports point down"),
        ("nxd_ckpt.core.reads", "def f():\n    from os.path import join", "is pure"),
        ("nxd_ckpt.hugging_face.sizes", "import torch", "is pure"),
        ("nxd_ckpt.formats.xser", "def f():\n    import torch_xla", "only live"),
        ("nxd_ckpt.saving.staging", "importlib.import_module('torch_xla')", "only live"),
        ("nxd_ckpt.live.nxd", "class A:\n    import torch_xla", "into the function"),
        ("nxd_ckpt.reshard.target", "from nxd_ckpt.live.zero1 import Zero1Optimizer", "knows no live objects"),
        ("nxd_ckpt.commit.voting", "import time", "effects gives time"),
        ("nxd_ckpt.utils", "", "is in no layer"),
    ],
)
def test_a_wrong_import_is_named(module: str, source: str, complaint: str) -> None:
    """The check sees each kind of violation, and its sentence names the module."""
    (sentence,) = violations(module, source)
    assert sentence.startswith(module)
    assert complaint in sentence


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("nxd_ckpt.core.reads", "from nxd_ckpt.core.box import Box\nimport nxd_ckpt.errors"),
        ("nxd_ckpt.core.reads", "from . import box\nfrom ..errors import ShapeMismatch"),
        ("nxd_ckpt.cli", "from nxd_ckpt import api, converting, errors"),
        ("nxd_ckpt.live.nxd", "def f():\n    import torch_xla"),
        ("nxd_ckpt.live.nxd", "if TYPE_CHECKING:\n    import torch_xla"),
        ("nxd_ckpt.emulation.install", "import torch_xla\nfrom nxd_ckpt.storage import local"),
    ],
)
def test_a_right_import_is_accepted(module: str, source: str) -> None:
    assert [] == violations(module, source)


def too_long(module: str, source: str) -> list[str]:
    """The functions of ``module``, and itself, that have more lines than they may, docstrings included."""
    measured = [(module, len(source.splitlines()), LINES_OF_A_MODULE)] + [
        (f"{module}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1, LINES_OF_A_FUNCTION)
        for node in ast.walk(_tree(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    return [f"{name}: {lines} lines, at most {most}" for name, lines, most in measured if lines > most]


def test_functions_fit_on_a_screen() -> None:
    """No function of the package has more than 60 lines, and no module more than 600."""
    found = [sentence for module, path in sorted(_modules().items()) for sentence in too_long(module, path.read_text())]
    assert [] == found, "\n".join(found)


def test_what_tests_share_is_in_no_test_module() -> None:
    """Helpers have modules of their own, so that no test module imports another."""
    folder = Path(__file__).parent
    found = [
        f"{path.relative_to(folder)}:{line} imports {target}"
        for path in sorted(folder.rglob("*.py"))
        if re.search(r"import (\([^)]*|.*)\btest_|\.test_", source := path.read_text())
        for target, line, _ in _imports_of(source, "tests", is_package=True)
        if target.startswith("tests.") and ".test_" in target
    ]
    assert [] == found
