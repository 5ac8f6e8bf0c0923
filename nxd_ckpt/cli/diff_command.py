"""``nxd-ckpt diff``: differences between two tags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.command import TEMPLATES, Command, located, opening
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size
from nxd_ckpt.options.execution import OpenOptions

if TYPE_CHECKING:
    from nxd_ckpt.checkpoint import Checkpoint
    from nxd_ckpt.examine.diff import Difference, TensorDifference, ValueDifference
    from nxd_ckpt.reshard.whole_tag import GlobalTensor
    from nxd_ckpt.tag.listing import Options

_SHOWN = 50

_FLAGS = {flag[2:].replace("-", "_"): flag for flag in TEMPLATES}


def _run(args: argparse.Namespace) -> int:
    from nxd_ckpt.examine.diff import diff_checkpoints
    from nxd_ckpt.tag.identity import of_latest

    locations = [located(path, args) for path in (args.a, args.b)]

    def compare() -> tuple[Checkpoint, Checkpoint, Difference]:
        a, b = (_open(*location, args) for location in locations)
        difference = diff_checkpoints(
            a,
            b,
            prefix=args.prefix or (),
            tolerance=args.tolerance,
            full=args.full,
            progress=not args.quiet,
        )
        return a, b, difference

    a, b, difference = of_latest(any(tag is None for _, tag, _ in locations), compare)
    document = {
        "a": _side(a),
        "b": _side(b),
        "same": not difference,
        "same_tensors": difference.same_tensors,
        "same_digests": difference.same_digests,
        "nbytes": difference.nbytes,
        "tensors": [_tensor(tensor) for tensor in difference.tensors],
        "values": [_value(value) for value in difference.values],
        "problems": list(difference.problems),
    }
    if args.json or difference or not args.quiet:
        text.show(document, _lines(document, None if args.all else _SHOWN), as_json=args.json)
    return 1 if difference else 0


def _open(directory: str, tag: str | None, options: Options, args: argparse.Namespace) -> Checkpoint:
    from nxd_ckpt.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(directory, tag, storage_options=options)
    if checkpoint.manifest is not None:
        return checkpoint
    return open_checkpoint(directory, tag or checkpoint.tag or None, **opening(args, options))


def _side(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"tag": checkpoint.opened.where, "topology": checkpoint.topology.sizes}


def _tensor(difference: TensorDifference) -> dict[str, Any]:
    from nxd_ckpt.cli.inspection import plain

    return {
        "name": difference.name,
        "kind": difference.kind,
        "a": _form(difference.a),
        "b": _form(difference.b),
        "differing": difference.differing,
        "nans": difference.nans,
        "max_difference": plain(difference.max_difference),
        "relative_norm": plain(difference.relative_norm),
        "problem": None if difference.problem is None else text.in_flags(difference.problem, _FLAGS),
    }


def _form(tensor: GlobalTensor | None) -> dict[str, Any] | None:
    if tensor is None:
        return None
    return {"dtype": tensor.dtype, "shape": None if tensor.shape is None else list(tensor.shape)}


def _value(difference: ValueDifference) -> dict[str, Any]:
    from nxd_ckpt.cli.inspection import short
    from nxd_ckpt.examine.diff import ABSENT

    a, b = (None if value is ABSENT else short(value) for value in (difference.a, difference.b))
    return {"name": difference.name, "a": a, "b": b}


def _lines(document: dict[str, Any], limit: int | None) -> Iterator[str]:
    for side in ("a", "b"):
        yield f"{side.upper()}: {document[side]['tag']} ({units.topology(document[side]['topology'])})"
    tensors, values = document["tensors"], document["values"]
    digests = f" ({document['same_digests']} by their digests)" if document["same_digests"] else ""
    same = units.count(document["same_tensors"], "tensor")
    yield f"  {same} the same{digests}; {size(document['nbytes'])} of each were read"
    changed = [tensor for tensor in tensors if tensor["kind"] == "values"]
    if changed:
        yield from ("", f"{units.count(len(changed), 'tensor')} with other values, the most different first")
        changed.sort(key=lambda tensor: float(tensor["relative_norm"]), reverse=True)
        head = ("NAME", "ELEMENTS", "MAX", "RELATIVE", "A", "B")
        yield from _limited(text.table(head, map(_changed, changed[:limit])), len(changed), limit)
    others = [tensor for tensor in tensors if tensor["kind"] != "values"]
    if others:
        yield from ("", f"{units.count(len(others), 'tensor')} that one tag lacks, or has in another shape or dtype")
        shown = others[:limit]
        kinds = ((tensor["name"], tensor["kind"], *map(_form_text, (tensor["a"], tensor["b"]))) for tensor in shown)
        yield from _limited(text.table(("NAME", "WHAT", "A", "B"), kinds), len(others), limit)
        yield from (f"  {tensor['name']}: {tensor['problem']}" for tensor in shown if tensor["problem"])
    if values:
        yield from ("", f"{units.count(len(values), 'other value')} not the same")
        rows = ((value["name"], value["a"] or "-", value["b"] or "-") for value in values[:limit])
        yield from _limited(text.table(("NAME", "A", "B"), rows), len(values), limit)
    yield from (f"problem: {problem}" for problem in document["problems"])


def _changed(tensor: dict[str, Any]) -> tuple[str, ...]:
    nans = f" ({tensor['nans']} NaN)" if tensor["nans"] else ""
    numbers = (f"{float(tensor[key]):.3g}" for key in ("max_difference", "relative_norm"))
    forms = map(_form_text, (tensor["a"], tensor["b"]))
    return tensor["name"], f"{tensor['differing']}{nans}", *numbers, *forms


def _form_text(form: dict[str, Any] | None) -> str:
    return "-" if form is None else f"{form['dtype']} {text.shape(form['shape'])}"


def _limited(lines: list[str], total: int, limit: int | None) -> Iterator[str]:
    yield from lines
    if limit is not None and total > limit:
        yield f"  and {total - limit} more (--all shows them)"


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix",
        metavar="GLOB",
        action="append",
        help="compare only names with this beginning: model/, 'optim/*/exp_avg', user_content/; repeatable",
    )
    parser.add_argument(
        "--tolerance", metavar="X", type=float, help="treat differences up to X as equal, whatever the dtypes"
    )
    parser.add_argument("--full", action="store_true", help="also read tensors whose recorded digests are equal")
    parser.add_argument("--all", action="store_true", help=f"show all differences, not {_SHOWN} of a kind")


DIFF = Command(
    "diff",
    example="nxd-ckpt diff run1/step_200 run1/step_300",
    summary="show how two checkpoints differ, and by how much",
    description=(
        "Compare two tags, of nxd_ckpt or neuronx-distributed, saved on any sizes: tensors of model and optimizer by "
        "name, options of param groups, scheduler and user content. Tensors are verified by their digests when they "
        "are read; those with equal digests are equal and are not read. Exit code 0 if nothing differs, 1 if "
        "something differs or could not be compared, 2 for an error."
    ),
    operands=(
        ("A", "a tag, or a directory for its latest one; or their URL"),
        ("B", "a tag, or a directory for its latest one; or their URL"),
    ),
    add_flags=_add_flags,
    options=OpenOptions,
    quiet=True,
    run=_run,
    code_of_error=2,
)
