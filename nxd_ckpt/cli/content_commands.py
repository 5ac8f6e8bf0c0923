"""``nxd-ckpt inspect`` and ``diff``: contents of one checkpoint, and differences between two."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.command import TEMPLATES, Command, add_options, located, opening, options_of
from nxd_ckpt.cli.text import group_names
from nxd_ckpt.core import units
from nxd_ckpt.core.mesh import Mesh
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.units import size
from nxd_ckpt.options.execution import OpenOptions

if TYPE_CHECKING:
    from nxd_ckpt.checkpoint import Checkpoint
    from nxd_ckpt.core.manifest import Parts
    from nxd_ckpt.examine.diff import Difference, TensorDifference, ValueDifference
    from nxd_ckpt.reshard.whole_tag import GlobalTensor
    from nxd_ckpt.tag.listing import Options


def _run(args: argparse.Namespace) -> int:
    from nxd_ckpt.cli.inspection import View, inspection, template

    options = args.storage_options
    if args.template is not None:
        print(template(args.dir, args.tag, args.template, options))
        return 0
    view = View(args.rank, args.tensors, args.by_prefix, options_of(args, OpenOptions)["partitions"])
    document = inspection(args.dir, args.tag, view, options)
    text.show(document, _lines(document), as_json=args.json)
    return 1 if document["problems"] else 0


def _lines(document: dict[str, Any]) -> Iterator[str]:
    yield "/".join(filter(None, (document["directory"], document["tag"]))) + (" (latest)" if document["latest"] else "")
    if document["prefixes"] is not None:
        yield from _prefixes(document["prefixes"])
    elif document["tensors"] is None:
        yield from text.pairs(_facts(document))
        yield from _parameters(document["parameters"])
        yield from _optimizer(document["optimizer"])
        yield from _user_content(document["user_content"])
    else:
        yield from _tensors(document["tensors"], document["rank"])
    if document["problems"]:
        yield ""
        yield from (f"problem: {problem}" for problem in document["problems"])


def _facts(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if document["order_time"] is not None:
        yield "saved", f"{units.time_of_day(document['order_time'])} UTC, {units.duration(document['age_seconds'])} ago"
    attempt = f", attempt {document['attempt']}" if document["attempt"] else ""
    yield "by", text.writer(document["written_by"]) + attempt
    if document["versions"]:
        yield "versions", ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    ranks = "" if document["world_size"] is None else f", {units.count(document['world_size'], 'rank')}"
    order = ", in an order of their own" if document["standard_rank_order"] is False else ""
    yield "topology", f"{units.topology(document['topology'])}{ranks}{order}"
    if document["meshes"]:
        yield ("mesh" if len(document["meshes"]) == 1 else "meshes"), ", ".join(map(_mesh, document["meshes"]))
    if document["per_rank"]:
        yield "per rank", first_of(document["per_rank"])
    yield "parts", text.parts(document["parts"])
    yield "files", _form(document["parts"])
    seconds = {name: value for name, value in document["timings"].items() if name.endswith("_seconds")}
    if seconds:
        yield "took", ", ".join(f"{name.removesuffix('_seconds')} {value:.2f} s" for name, value in seconds.items())
    if document["metrics"]:
        yield "metrics", ", ".join(f"{name} {text.metric(value)}" for name, value in document["metrics"].items())
    sizes = document["sizes"]
    total = {key: sum(counts[key] for counts in sizes.values()) for key in ("files", "nbytes")}
    for part, counts in {**sizes, "total": total}.items():
        yield part.replace("_", " "), f"{size(counts['nbytes'])} in {units.count(counts['files'], 'file')}"


def _mesh(mesh: dict[str, Any]) -> str:
    """Describe a mesh: ``fsdp=2 tp=4``, or ``2 of tp=4``."""
    count = "" if mesh["count"] == 1 else f"{mesh['count']} of "
    return count + Mesh(tuple(mesh["names"]), tuple(mesh["shape"]), ()).describe()


def _form(parts: dict[str, Any]) -> str:
    form = "one per tensor (xser)" if parts["use_xser"] else "one per rank"
    return form if parts["lower_precision_weights"] else f"{form}, without weights that master weights stand for"


def _parameters(parameters: list[dict[str, Any]] | None) -> Iterator[str]:
    if not parameters:
        return
    yield from ("", f"model: {units.count(len(parameters), 'tensor')}")
    named = []
    for parameter in parameters:
        shapes = (text.shape(parameter[key]) for key in ("shape", "global_shape"))
        trained = {True: "yes", False: "no", None: "?"}[parameter["trainable"]]
        named.append((parameter["name"], (parameter["dtype"] or "?", *shapes, parameter["cut"], trained)))
    rows = ((name, *form) for name, _, form in group_names(named))
    yield from text.table(("NAME", "DTYPE", "LOCAL", "GLOBAL", "CUT", "TRAINED"), rows)


def _prefixes(groups: list[dict[str, Any]]) -> Iterator[str]:
    unknown = sum(group["tensors"] for group in groups if group["nbytes"] is None)
    nbytes = sum(group["nbytes"] or 0 for group in groups)
    without = f" without the {unknown} whose cut, and so size, is not known" if unknown else ""
    yield f"{units.count(sum(group['tensors'] for group in groups), 'tensor')}, {size(nbytes)}{without}"
    if groups:
        head = ("PREFIX", "TENSORS", "DTYPE", "GLOBAL", "SIZE", "CUT")
        yield from text.table(head, map(_group, groups))


def _group(group: dict[str, Any]) -> tuple[str, ...]:
    is_known = group["nbytes"] is not None
    local_size = "?" if group["local_nbytes"] is None else f"{size(group['local_nbytes'])} on a rank"
    local_shape = "?" if group["local_shape"] is None else f"{group['local_shape']} on a rank"
    return (
        group["prefix"],
        str(group["tensors"]),
        group["dtype"],
        text.shape(group["shape"]) if is_known else local_shape,
        size(group["nbytes"]) if is_known else local_size,
        group["cut"] or "",
    )


def _optimizer(optimizer: dict[str, Any] | None) -> Iterator[str]:
    if optimizer is None:
        return
    counts = f"{units.count(optimizer['parameters'], 'parameter')}, {optimizer['parameters_with_state']} with state"
    named = "" if optimizer["names_known"] else ", known by number only"
    entries = ", ".join(optimizer["entries"]) or "none"
    masters = "with" if optimizer["master_weights"] else "without"
    yield from ("", f"optimizer of rank {optimizer['rank']}: {optimizer['kind']}, {counts}{named}")
    yield f"  state: {entries}; {masters} master weights"
    all_options = [group["options"] for group in optimizer["param_groups"]]
    names = dict.fromkeys(name for options in all_options for name in options)
    differing = {name for name in names if any(own.get(name) != all_options[0].get(name) for own in all_options)}
    for number, group in enumerate(optimizer["param_groups"]):
        items = group["options"].items()
        options = " ".join(f"{key}={value}" for key, value in items if key in differing or value not in (None, False))
        owner = f" of {group['optimizer']}" if group["optimizer"] else ""
        yield f"  group {number}{owner}: {units.count(group['parameters'], 'parameter')}; {options}"


def _user_content(content: dict[str, Any] | None) -> Iterator[str]:
    if content is None:
        return
    if content["refused"]:
        yield from ("", f"user content: not shown: {content['refused']}")
        return
    yield from ("", f"user content: {content['type']}")
    rows = [(entry["key"] or "", entry["type"], entry["value"]) for entry in content["entries"]]
    yield from text.table(("KEY", "TYPE", "VALUE"), rows)


def _tensors(tensors: list[dict[str, Any]], rank: int) -> Iterator[str]:
    yield f"tensors of rank {rank}: {len(tensors)}"
    if tensors:
        head = ("NAME", "DTYPE", "SHAPE", "BYTES", "OFFSET", "FILE", "IN THE GLOBAL TENSOR")
        yield from text.table(head, map(_tensor, tensors))


def _tensor(tensor: dict[str, Any]) -> tuple[str, ...]:
    stored = tensor["offset"] is not None
    pieces = tensor["pieces"]
    return (
        tensor["name"],
        tensor["dtype"] or "?",
        text.shape(tensor["shape"]),
        str(tensor["nbytes"]) if stored else "-",
        str(tensor["offset"]) if stored else "-",
        tensor["file"] if stored else "(in no file)",
        "?" if pieces is None else " ".join(map(_box, pieces)) or "padding only",
    )


def _box(piece: dict[str, Any]) -> str:
    ends = (f"{start}:{start + size}" for start, size in zip(piece["offset"], piece["size"], strict=True))
    return f"[{', '.join(ends)}]"


def _add_flags(parser: argparse.ArgumentParser) -> None:
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--tensors",
        metavar="PATTERN",
        nargs="?",
        const="*",
        help="show instead where the rank's tensors are stored: all, or those with a matching name ('model/*.weight')",
    )
    instead.add_argument(
        "--by-prefix",
        action="store_true",
        help="show instead the global tensors of model and optimizer; names that differ only in numbers are one group",
    )
    instead.add_argument(
        "--template",
        choices=[flag[2:] for flag in TEMPLATES],
        help="print instead a JSON file for the option of that name, to be filled in: what the tag does not record and "
        "conversions to other sizes need. Names of parameters are those of usual param groups, if they fit",
    )
    add_options(parser, OpenOptions, only=("partitions",))
    parser.add_argument("--rank", metavar="N", type=int, default=0, help="show this global rank's view (default: 0)")


INSPECT = Command(
    "inspect",
    example="nxd-ckpt inspect run1/step_300 --tensors 'optim/*'",
    summary="show what one checkpoint holds",
    description=(
        "Show one complete tag: sizes, versions, parameters and how they are partitioned, the optimizer's groups and "
        "state, the keys of the user content. Only the structure is read, and no code of the checkpoint is run. Facts "
        "that neuronx-distributed does not record are shown as '?' or 'unknown'. Exit code 1 if a part cannot be "
        "read."
    ),
    operands=(
        ("DIR", "a checkpoint directory or URL, or a tag in it"),
        ("TAG?", "which one (default: the latest complete one)"),
    ),
    add_flags=_add_flags,
    run=_run,
)


_SHOWN = 50

_FLAGS = {flag[2:].replace("-", "_"): flag for flag in TEMPLATES}


def _diff(args: argparse.Namespace) -> int:
    from nxd_ckpt.examine.diff import diff_checkpoints
    from nxd_ckpt.tag.identity import of_latest

    locations = [located(path, args) for path in (args.a, args.b)]

    def compare() -> tuple[Checkpoint, Checkpoint, Difference]:
        a, b = (_open_tag(*location, args) for location in locations)
        difference = diff_checkpoints(
            a,
            b,
            prefix=args.prefix or (),
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
        "tensors": [_tensor_difference(tensor) for tensor in difference.tensors],
        "values": [_value_difference(value) for value in difference.values],
        "problems": list(difference.problems),
    }
    if args.json or difference or not args.quiet:
        lines = _diff_lines(document, None) if args.all else _summed_up(document, {"A": a.parts, "B": b.parts})
        text.show(document, lines, as_json=args.json)
    return 1 if difference else 0


_FIELDS = {"model": "model", "optim": "optimizer", "scheduler": "scheduler", "user_content": "user_content"}
"""Parts in names, each with its field of `Parts`."""


def _summed_up(document: dict[str, Any], parts: Mapping[str, Parts]) -> Iterator[str]:
    """Yield the lines of the differences, with a single one for a part that one side lacks."""
    lacking = {
        part: side for side, present in parts.items() for part, name in _FIELDS.items() if not getattr(present, name)
    }
    rest, counts = dict(document), Counter[str]()
    for kind in ("tensors", "values"):
        part_of = [each["name"].partition("/")[0] for each in document[kind]]
        rest[kind] = [each for part, each in zip(part_of, document[kind], strict=True) if part not in lacking]
        counts.update(part for part in part_of if part in lacking)
    yield from _diff_lines(rest, _SHOWN)
    if counts:
        yield ""
    for part, number in counts.items():
        noun = _FIELDS[part].replace("_", " ")
        yield f"{lacking[part]} has no {noun}: {units.count(number, 'name')} missing (--all lists them)"


def _open_tag(directory: str, tag: str | None, options: Options, args: argparse.Namespace) -> Checkpoint:
    from nxd_ckpt.checkpoint import open_checkpoint

    open_options = opening(args, options)
    checkpoint = open_checkpoint(directory, tag, storage_options=options)
    if checkpoint.manifest is not None or OpenOptions(**open_options) == OpenOptions(storage_options=options):
        return checkpoint
    return open_checkpoint(directory, tag or checkpoint.tag or None, **open_options)


def _side(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"tag": checkpoint.opened.where, "topology": checkpoint.topology.sizes}


def _tensor_difference(difference: TensorDifference) -> dict[str, Any]:
    from nxd_ckpt.cli.inspection import plain

    return {
        "name": difference.name,
        "kind": difference.kind,
        "a": _form_of(difference.a),
        "b": _form_of(difference.b),
        "differing": difference.differing,
        "nans": difference.nans,
        "max_difference": plain(difference.max_difference),
        "relative_norm": plain(difference.relative_norm),
        "problem": None if difference.problem is None else text.in_flags(difference.problem, _FLAGS),
    }


def _form_of(tensor: GlobalTensor | None) -> dict[str, Any] | None:
    if tensor is None:
        return None
    return {"dtype": tensor.dtype, "shape": None if tensor.shape is None else list(tensor.shape)}


def _value_difference(difference: ValueDifference) -> dict[str, Any]:
    from nxd_ckpt.cli.inspection import short
    from nxd_ckpt.examine.diff import ABSENT

    a, b = (None if value is ABSENT else short(value) for value in (difference.a, difference.b))
    return {"name": difference.name, "a": a, "b": b}


def _diff_lines(document: dict[str, Any], limit: int | None) -> Iterator[str]:
    for side in ("a", "b"):
        yield f"{side.upper()}: {document[side]['tag']} ({units.topology(document[side]['topology'])})"
    tensors = document["tensors"]
    values = document["values"]
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


def _add_diff_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix",
        metavar="GLOB",
        action="append",
        help="compare only names with this beginning: model/, 'optim/*/exp_avg', user_content/; repeatable",
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
    add_flags=_add_diff_flags,
    options=OpenOptions,
    quiet=True,
    run=_diff,
    code_of_error=2,
)
