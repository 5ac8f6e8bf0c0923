"""What commands that write say of what they made."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nxd_ckpt.cli import text
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size

if TYPE_CHECKING:
    from nxd_ckpt.convert import Converted


def show_done(
    args: argparse.Namespace,
    done: Any,
    lines: Callable[[dict[str, Any]], Iterable[str]],
    *,
    is_well: bool = True,
    **more: Any,
) -> None:
    """Print what was written, or would be: the fields of ``done`` and ``more``, and ``lines`` of these for people.

    Nothing with --quiet, if all ``is_well``.
    """
    document = {**asdict(done), **more, "dry_run": args.dry_run}
    if args.json or not (args.quiet and is_well):
        text.show(document, lines(document), as_json=args.json)


def show_converted(args: argparse.Namespace, done: Converted) -> None:
    """The same of a conversion that has no more to say."""
    show_done(args, done, _converted)


def _converted(document: dict[str, Any]) -> Iterator[str]:
    sizes = "" if document["topology"] is None else f"{units.topology(document['topology'])}, "
    verb = "would be" if document["dry_run"] else "is"
    yield f"{document['source']} {verb} converted to {document['target']}: {sizes}{size(document['nbytes'])}"


def hindrances(side: str, document: dict[str, Any]) -> Iterator[str]:
    """What a dry run says of names on that side that no rule maps, and of tensors that are missing."""
    if document["unknown"]:
        yield "no rule maps:"
        rules = document["unknown"].items()
        yield from text.table((side, "closest rules"), [(name, ", ".join(close)) for name, close in rules])
    if document["missing"]:
        yield f"missing, though every such model has them: {', '.join(document['missing'])}"
