"""``nxd-ckpt inspect``: contents of one checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.command import TEMPLATES, Command, add_options, options_of
from nxd_ckpt.cli.text import group_names
from nxd_ckpt.core import units
from nxd_ckpt.core.mesh import Mesh
from nxd_ckpt.core.units import size
from nxd_ckpt.options.execution import OpenOptions


def _run(args: argparse.Namespace) -> int:
    from nxd_ckpt.cli.inspection import View, inspection, template

    options = args.storage_options
    if args.template is not None:
        print(template(args.dir, args.tag, args.template, options))
        return 0
    depth = sys.maxsize if args.largest is not None and args.by_prefix is None else args.by_prefix  # each by itself
    if args.largest is not None and args.tensors is not None:
        raise argparse.ArgumentTypeError("--largest is of global tensors: leave out --tensors")
    view = View(args.rank, args.tensors, depth, options_of(args, OpenOptions)["partitions"])
    document = inspection(args.dir, args.tag, view, options)
    prefixes = document["prefixes"]
    if prefixes is not None and args.largest is not None:
        sized = [group for group in prefixes if group["nbytes"] is not None]
        unsized = [group for group in prefixes if group["nbytes"] is None]  # each may be the largest
        unsized.sort(key=lambda group: -group["local_nbytes"])
        document["prefixes"] = unsized + sorted(sized, key=lambda group: -group["nbytes"])[: args.largest]
    text.show(document, _lines(document, prefixes), as_json=args.json)
    return 1 if document["problems"] else 0


def _lines(document: dict[str, Any], prefixes: list[dict[str, Any]] | None) -> Iterator[str]:
    yield "/".join(filter(None, (document["directory"], document["tag"]))) + (" (latest)" if document["latest"] else "")
    if prefixes is not None:
        yield _total(prefixes)
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


def _total(prefixes: list[dict[str, Any]]) -> str:
    keys = ("tensors", "known_nbytes", "tensors_of_unknown_size")
    tensors, nbytes, unknown = (sum(group[key] for group in prefixes) for key in keys)
    without = f" without the {unknown} whose cut, and so size, is not known" if unknown else ""
    return f"{units.count(tensors, 'tensor')}, {size(nbytes)}{without}"


def _prefixes(prefixes: list[dict[str, Any]]) -> Iterator[str]:
    rows = (
        (
            group["prefix"],
            str(group["tensors"]),
            ", ".join(group["dtypes"]),
            "various" if group["shapes"] > 1 else _shape(group),
            f"{size(group['local_nbytes'])} on a rank" if group["nbytes"] is None else size(group["nbytes"]),
            ", ".join(group["cuts"]) if len(group["cuts"]) < 2 else "various",
        )
        for group in prefixes
    )
    if prefixes:
        yield from text.table(("PREFIX", "TENSORS", "DTYPES", "GLOBAL", "SIZE", "CUT"), rows)


def _shape(group: dict[str, Any]) -> str:
    return text.shape(group["shape"]) if group["local_shape"] is None else f"{group['local_shape']} on a rank"


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
        metavar="DEPTH",
        nargs="?",
        type=int,
        const=0,
        help="show instead the global tensors of model and optimizer, grouped by the first DEPTH parts of their names; "
        "without DEPTH, names that differ only in numbers are one group",
    )
    instead.add_argument(
        "--template",
        choices=[flag[2:] for flag in TEMPLATES],
        help="print instead a JSON file for the option of that name, to be filled in: what the tag does not record and "
        "conversions to other sizes need. Names of parameters are those of usual param groups, if they fit",
    )
    parser.add_argument(
        "--largest",
        metavar="N",
        type=int,
        help="show only the N largest tensors, or groups of --by-prefix, the largest first; before them come those of "
        "unknown size",
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
