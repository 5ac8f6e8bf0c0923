"""``nxd-ckpt prune``: tags removed by rules."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.options import add_options, options_of
from nxd_ckpt.core import units
from nxd_ckpt.core.retention import Best, Every, Last, Rule, Within
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.tags import PruneOptions

NAME = "prune"
EXAMPLE = "nxd-ckpt prune run1 --last 3 --every 1000 --dry-run"
SUMMARY = "remove the checkpoints that no rule keeps"
DESCRIPTION = (
    "Remove the complete tags in a directory that none of the given rules keeps. Pinned tags and the newest one stay "
    "in any case, and so does whatever is not a complete checkpoint. A job that saves there is not disturbed: the "
    "command is refused while it lives."
)

_UNITS = {"d": "days", "h": "hours", "min": "minutes"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a checkpoint directory or URL")
    rules = parser.add_argument_group("rules, of which at least one is needed")
    for flag, metavar, rule, about in (
        ("--last", "N", _last, "keep the newest N tags"),
        ("--every", "STEPS", _every, "keep the tags whose step, a number in the name, is a multiple of STEPS"),
        (
            "--best",
            "METRIC[:N[:max]]",
            _best,
            "keep the N tags (default: 1) with the lowest METRIC that was given to the save, or the highest",
        ),
        ("--within", "TIME", _within, "keep the tags saved at most TIME before the newest: 30min, 2h, 3d"),
    ):
        rules.add_argument(flag, dest="retain", metavar=metavar, type=rule, action="append", help=about)
    add_options(parser, PruneOptions)
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.prune import prune_checkpoints

    if not args.retain:
        raise argparse.ArgumentTypeError("give at least one rule: --last, --every, --best or --within")
    done = prune_checkpoints(args.directory, args.retain, **options_of(args, PruneOptions))
    document = {
        "directory": done.directory,
        "kept": [{"tag": tag, "because": list(why)} for tag, why in done.kept.items()],
        "removed": list(done.removed),
        "dry_run": args.dry_run,
    }
    text.show(document, _lines(document), as_json=args.json)
    return 0


def _lines(document: dict[str, Any]) -> Iterator[str]:
    removed = len(document["removed"])
    verb = "would be" if document["dry_run"] else "is" if removed == 1 else "are"
    yield f"{document['directory']}: {units.count(removed, 'tag')} {verb} removed"
    kept = [(one["tag"], "stays", ", ".join(one["because"])) for one in document["kept"]]
    yield from text.table(("TAG", "", "BECAUSE"), [*((tag, "goes", "") for tag in document["removed"]), *kept])


def _last(given: str) -> Rule:
    return _made(lambda: Last(_count(given)))


def _every(given: str) -> Rule:
    return _made(lambda: Every(_count(given)))


def _best(given: str) -> Rule:
    metric, _, rest = given.partition(":")
    count, _, mode = rest.partition(":")
    return _made(lambda: Best(metric, _count(count or "1"), mode or "min"))  # type: ignore[arg-type]


def _within(given: str) -> Rule:
    found = re.fullmatch(r"([0-9.]+) ?(d|h|min)", given)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 30min, 2h or 3d, found {given!r}")
    return _made(lambda: Within(**{_UNITS[found[2]]: float(found[1])}))


def _count(given: str) -> int:
    try:
        return int(given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {given!r}") from error


def _made(make: Callable[[], Rule]) -> Rule:
    try:
        return make()
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from error
