"""``nxd-ckpt diff``: what two tags differ in, and by how much."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.options import add_options, opening
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size
from nxd_ckpt.options.opening import OpenOptions

if TYPE_CHECKING:
    from nxd_ckpt.checkpoint import Checkpoint
    from nxd_ckpt.examine.diff import Difference, TensorDifference, ValueDifference
    from nxd_ckpt.reshard.whole_tag import GlobalTensor
    from nxd_ckpt.tag.listing import Options

NAME = "diff"
EXAMPLE = "nxd-ckpt diff run1/step_200 run1/step_300"
SUMMARY = "what two checkpoints differ in, and by how much"
DESCRIPTION = (
    "Compare two tags, of nxd_ckpt or neuronx-distributed, whatever sizes they were saved on: tensors of model and "
    "optimizer by name, options of param groups, scheduler and user content. Tensors are verified by their digests on "
    "the way; those with equal digests are the same without being read. Exit code 0 if nothing differs, 1 if something "
    "does or could not be compared, 2 for an error."
)
_SHOWN = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for side in ("A", "B"):
        parser.add_argument(side.lower(), metavar=side, help="a tag, or a directory for its latest one; or their URL")
    parser.add_argument(
        "--prefix",
        metavar="GLOB",
        action="append",
        help="compare only what has a name that begins so: model/, 'optim/*/exp_avg', user_content/; again for more",
    )
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        help="take tensors for the same in which no element differs by more, whatever their dtypes",
    )
    parser.add_argument("--full", action="store_true", help="read tensors whose recorded digests are equal, too")
    parser.add_argument("--all", action="store_true", help=f"show all that differs, not {_SHOWN} of a kind")
    add_options(parser, OpenOptions)
    text.add_quiet(parser)
    text.add_json(parser)
    parser.set_defaults(code_of_error=2)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.examine.diff import diff_checkpoints
    from nxd_ckpt.tag.identity import of_latest

    places = [_locate(path, args) for path in (args.a, args.b)]

    def compared() -> tuple[Checkpoint, Checkpoint, Difference]:
        a, b = (_open(*place, args) for place in places)
        found = diff_checkpoints(
            a,
            b,
            prefix=args.prefix or (),
            tolerance=args.tolerance,
            full=args.full,
            progress=not args.quiet,
        )
        return a, b, found

    a, b, found = of_latest(any(tag is None for _, tag, _ in places), compared)
    document = {
        "a": _side(a),
        "b": _side(b),
        "same": not found,
        "same_tensors": found.same_tensors,
        "same_digests": found.same_digests,
        "nbytes": found.nbytes,
        "tensors": [_tensor(difference) for difference in found.tensors],
        "values": [_value(difference) for difference in found.values],
        "problems": list(found.problems),
    }
    if args.json or found or not args.quiet:
        text.show(document, _lines(document, None if args.all else _SHOWN), as_json=args.json)
    return 1 if found else 0


def _locate(path: str, args: argparse.Namespace) -> tuple[str, str | None, Options]:
    """Directory (or URL), tag if one is named, and what it is opened with."""
    from nxd_ckpt.storage.urls import options_for
    from nxd_ckpt.tag.listing import locate

    options = options_for(path, args.storage_options)
    return *locate(path, None, options), options


def _open(directory: str, tag: str | None, options: Options, args: argparse.Namespace) -> Checkpoint:
    from nxd_ckpt.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(directory, tag, storage_options=options)
    if checkpoint.manifest is not None:
        return checkpoint
    return open_checkpoint(directory, checkpoint.tag, **opening(args, options))


def _side(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"tag": checkpoint.opened.where, "topology": checkpoint.topology.sizes}


def _tensor(difference: TensorDifference) -> dict[str, Any]:
    from nxd_ckpt.cli.values import plain

    return {
        "name": difference.name,
        "kind": difference.kind,
        "a": _form(difference.a),
        "b": _form(difference.b),
        "differing": difference.differing,
        "nans": difference.nans,
        "max_difference": plain(difference.max_difference),
        "relative_norm": plain(difference.relative_norm),
        "problem": difference.problem,
    }


def _form(told: GlobalTensor | None) -> dict[str, Any] | None:
    if told is None:
        return None
    return {"dtype": told.dtype, "shape": None if told.shape is None else list(told.shape)}


def _value(difference: ValueDifference) -> dict[str, Any]:
    from nxd_ckpt.cli.values import short
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
    changed = [one for one in tensors if one["kind"] == "values"]
    if changed:
        yield from ("", f"{units.count(len(changed), 'tensor')} with other values, the most different first")
        changed.sort(key=lambda one: float(one["relative_norm"]), reverse=True)
        head = ("NAME", "ELEMENTS", "MAX", "RELATIVE", "A", "B")
        yield from _limited(text.table(head, map(_changed, changed[:limit])), len(changed), limit)
    others = [one for one in tensors if one["kind"] != "values"]
    if others:
        yield from ("", f"{units.count(len(others), 'tensor')} that one tag lacks, or has in another shape or dtype")
        kinds = ((one["name"], one["kind"], _form_text(one["a"]), _form_text(one["b"])) for one in others[:limit])
        yield from _limited(text.table(("NAME", "WHAT", "A", "B"), kinds), len(others), limit)
        yield from (f"  {one['name']}: {one['problem']}" for one in others[:limit] if one["problem"])
    if values:
        yield from ("", f"{units.count(len(values), 'other value')} not the same")
        rows = ((one["name"], one["a"] or "-", one["b"] or "-") for one in values[:limit])
        yield from _limited(text.table(("NAME", "A", "B"), rows), len(values), limit)
    yield from (f"problem: {problem}" for problem in document["problems"])


def _changed(one: dict[str, Any]) -> tuple[str, ...]:
    nans = f" ({one['nans']} NaN)" if one["nans"] else ""
    numbers = (f"{float(one[key]):.3g}" for key in ("max_difference", "relative_norm"))
    return one["name"], f"{one['differing']}{nans}", *numbers, _form_text(one["a"]), _form_text(one["b"])


def _form_text(form: dict[str, Any] | None) -> str:
    return "-" if form is None else f"{form['dtype']} {text.shape(form['shape'])}"


def _limited(lines: list[str], total: int, limit: int | None) -> Iterator[str]:
    yield from lines
    if limit is not None and total > limit:
        yield f"  and {total - limit} more (--all shows them)"
