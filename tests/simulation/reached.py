"""``python -m tests.simulation.reached``: which branches of the code that commits and coordinates schedules come by.

At the start of each block of its modules (of a function, of an ``if`` and of what it has for an ``else``, of a loop, a
handler) a call is put in that notes it. Tracing would not do: tasks are greenlets.
"""

from __future__ import annotations

import argparse
import ast
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from tests.support.reliability import REPOSITORY, date_and_commit, put, table

MODULES = (
    *(f"nxd_ckpt.commit.{name}" for name in ("session", "voting", "publication", "commit")),
    *(f"nxd_ckpt.coordination.{name}" for name in ("lease", "journal", "intents")),
)


class Branch(NamedTuple):
    """The block that begins at a ``line`` of a module; ``is_else``: what runs if that line, an ``if``, is false."""

    module: str
    line: int
    is_else: bool = False


_KNOWN, _REACHED = set[Branch](), set[Branch]()


class _Marking(ast.NodeTransformer):
    """Put the call into each block."""

    def __init__(self, module: str) -> None:
        self._module = module

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, (ast.FunctionDef, ast.For, ast.While, ast.If, ast.ExceptHandler)):
            start = int(isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None)
            if node.body[start:] and ast.unparse(node.body[start]) != "...":
                node.body.insert(start, self._mark(Branch(self._module, node.body[start].lineno), node.body[start]))
        if isinstance(node, ast.If):
            branch = Branch(self._module, node.lineno, is_else=True)
            node.orelse.insert(0, self._mark(branch, node))
        return node

    def _mark(self, branch: Branch, at: ast.AST) -> ast.Expr:
        _KNOWN.add(branch)
        call = ast.parse(f"_reached_({branch.module!r}, {branch.line}, {branch.is_else})").body[0]
        assert isinstance(call, ast.Expr)
        for node in ast.walk(call):
            ast.copy_location(node, at)
        return call


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        tree = _Marking(fullname).visit(ast.parse(Path(self.path).read_bytes()))
        return compile(ast.fix_missing_locations(tree), self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["_reached_"] = lambda *branch: _REACHED.add(Branch(*branch))
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        file = str(_file(fullname))
        return spec_from_file_location(fullname, file, loader=_Loader(fullname, file))


def _file(module: str) -> Path:
    return REPOSITORY / f"{module.replace('.', '/')}.py"


def _run(count: int) -> int:
    """So many schedules of each place; returns how many there were. The modules must not be imported before."""
    sys.meta_path.insert(0, _Finder())
    from tests.simulation.broken import SCHEDULES
    from tests.simulation.schedule import run

    logging.disable(logging.CRITICAL)
    gc.disable()
    for place, schedule_of in SCHEDULES.items():
        before = len(_REACHED)
        for seed in range(count):
            run(schedule_of(seed))
            if seed % 50 == 0:
                gc.collect()
        print(f"{place}: {len(_REACHED) - before} more", flush=True)
    return count * len(SCHEDULES)


def _function_of(module: str) -> Callable[[int], str]:
    """The name of the innermost function, with its class, around a line."""
    spans = list[tuple[int, int, str]]()

    def visit(nodes: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[int, int, str]]:
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.lineno, node.end_lineno or node.lineno, prefix + node.name
                yield from visit(node.body, f"{prefix}{node.name}.")

    spans.extend(visit(ast.parse(_file(module).read_text()).body, ""))
    return lambda line: max((span for span in spans if span[0] <= line <= span[1]), default=(0, 0, ""))[2]


def _row(module: str) -> list[str]:
    known = {branch for branch in _KNOWN if branch.module == module}
    missed, function_of = sorted(known - _REACHED), _function_of(module)
    lines = _file(module).read_text().splitlines()
    for branch in missed:
        print(f"{module}:{branch.line} {'not ' if branch.is_else else ''}{lines[branch.line - 1].strip()}")
    counts = dict[str, int]()
    for branch in missed:
        name = f"`{function_of(branch.line)}`"
        counts[name] = counts.get(name, 0) + 1
    listed = ", ".join(name if count == 1 else f"{name} {count}" for name, count in counts.items())
    print(f"{module}: {listed}")
    return [f"`{module.removeprefix('nxd_ckpt.')}`", f"{len(known - set(missed))} of {len(known)}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.reached", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="how many schedules of each place")
    parser.add_argument("--write", action="store_true", help="write what was found into tests/counts.md")
    given = parser.parse_args()
    (_, date), (_, commit) = date_and_commit()
    schedules = _run(given.count)
    text = table(map(_row, MODULES), ["module", "branches reached"])
    print(text)
    if given.write:
        put("branches reached", f"On {date}, commit {commit}, by {schedules:,} schedules:\n\n{text}")


if __name__ == "__main__":
    main()
