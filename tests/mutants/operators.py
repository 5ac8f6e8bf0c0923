"""Which small changes of a module are tried: its *mutants*. Pure.

Only bodies of functions are changed. Texts stay (they are what messages are made of), and so do annotations, the
arguments of what is raised, and what is logged.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}
_NEGATED_BY_A_SWAP = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One change: ``replacement`` in place of what ``holder`` has under ``field``, there at ``index`` if it is a list.

    ``before`` and ``after`` are the code in question, in the function ``where``, in ``lines`` (first and last).
    """

    where: str
    lines: tuple[int, int]
    before: str
    after: str
    holder: ast.AST
    field: str
    index: int | None
    replacement: ast.AST

    @property
    def name(self) -> str:
        """What it is known by: the same as long as that line is."""
        return f"{self.where}: {self.before} -> {self.after}"

    def apply(self) -> None:
        """Change the tree that it was found in."""
        ast.fix_missing_locations(self.replacement)
        if self.index is None:
            setattr(self.holder, self.field, self.replacement)
        else:
            getattr(self.holder, self.field)[self.index] = self.replacement


def mutants(tree: ast.Module) -> list[Mutant]:
    """All mutants of a module, from top to bottom."""
    found = [mutant for where, function in _functions(tree, "") for mutant in _within(function, where)]
    return sorted(found, key=lambda mutant: mutant.lines)


def _functions(node: ast.AST, path: str) -> Iterator[tuple[str, _Function]]:
    """The functions and methods of a module, each with its path; those inside of functions belong to these."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield f"{path}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{path}{child.name}.")


def _within(function: _Function, where: str) -> Iterator[Mutant]:
    for index, statement in enumerate(function.body):
        yield from _of(statement, where, function, "body", index)


def _of(node: ast.AST, where: str, holder: ast.AST, field: str, index: int | None) -> Iterator[Mutant]:
    """The mutants of a node, and of all below it."""
    if _is_text(node):
        return
    for replacement, after in _replacements(node, holder):
        location = _shown(node)
        lines = (location.lineno, location.end_lineno or location.lineno)  # type: ignore[attr-defined]
        ast.copy_location(replacement, location)
        yield Mutant(where, lines, _line(location), after, holder, field, index, replacement)
    if isinstance(node, ast.Raise):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args" if isinstance(node, _Function) else ""):
            continue
        if isinstance(value, ast.AST):
            yield from _of(value, where, node, name, None)
        elif isinstance(value, list):
            for at, item in enumerate(value):
                if isinstance(item, ast.AST):
                    yield from _of(item, where, node, name, at)


def _is_text(node: ast.AST) -> bool:
    """Whether it is a docstring, a text, or writes to the log."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or ast.unparse(node).startswith("logger.")
    return isinstance(node, ast.JoinedStr)


def _replacements(node: ast.AST, holder: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """What may stand in place of a node, and how it reads."""
    if isinstance(node, ast.stmt):
        yield from _of_statement(node, holder)
    elif isinstance(node, ast.expr):
        for other in _of_expression(node, holder):
            yield other, _line(other)
    elif isinstance(node, ast.ExceptHandler) and node.type is not None:
        nothing = ast.ExceptHandler(ast.Tuple([], ast.Load()), node.name, node.body)
        yield nothing, "(not caught)"


def _of_statement(node: ast.stmt, holder: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    only = isinstance(holder, ast.If) and len(holder.body) == 1  # removing that is what a false condition does
    stores = isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple))
    if isinstance(node, (ast.Expr, ast.AugAssign, ast.Delete)) or stores or (isinstance(node, ast.Raise) and not only):
        # Kept where it is never run: else names would no longer be local to the function.
        yield ast.If(ast.Constant(False), [node], []), "(removed)"
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield ast.Return(ast.Constant(None)), "return None"
    elif isinstance(node, ast.Continue):
        yield ast.Break(), "break"
    elif isinstance(node, ast.Break):
        yield ast.Continue(), "continue"


def _of_expression(node: ast.expr, holder: ast.AST) -> Iterator[ast.expr]:
    if _is_condition(node, holder):
        yield ast.UnaryOp(ast.Not(), node)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(_swapped(node.op), node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
        yield ast.BinOp(node.left, _swapped(node.op), node.right)
    elif isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            others = [*node.ops[:at], _swapped(operator), *node.ops[at + 1 :]]
            yield ast.Compare(node.left, others, node.comparators)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield ast.Constant(node.value + 1)  # type: ignore[operator]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "suppress":
        yield ast.Call(node.func, [], [])


def _is_condition(node: ast.expr, holder: ast.AST) -> bool:
    """Whether it decides, and none of the other changes turns it round."""
    decides = (isinstance(holder, (ast.If, ast.While, ast.IfExp)) and node is holder.test) or (
        isinstance(holder, ast.comprehension) and node in holder.ifs
    )
    swapped = isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], _NEGATED_BY_A_SWAP)
    return decides and not swapped and not isinstance(node, (ast.UnaryOp, ast.Constant))


def _swapped(operator: ast.AST) -> Any:
    return _SWAPPED[type(operator)]()


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _shown(node: ast.AST) -> ast.AST:
    """Of a handler the exception that it catches, of all else itself."""
    return node.type if isinstance(node, ast.ExceptHandler) and node.type is not None else node


def _line(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())
