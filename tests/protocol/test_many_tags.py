"""What looking at a store of many tags asks for: as much of each tag, however many there are."""

import importlib
from collections.abc import Callable

import pytest

from nxd_ckpt import examine_checkpoint, open_checkpoint
from nxd_ckpt.cli import directory_commands
from nxd_ckpt.cli.main import main
from nxd_ckpt.prune import pin_checkpoint
from nxd_ckpt.tag.listing import list_checkpoints, tags_to_verify
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation, recording
from tests.protocol.stores import Process

RUN = "the-directory"
OPENERS = ("tag.verify", "checkpoint", "tag.listing", "prune", "examine.report_document", "storage.urls")
"""Where a storage is opened by its path."""


def test_operations_grow_with_the_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same number for each: of a listing, a report, a verification of all, the doctor, and each look of a watch.
    A tag that is named costs the same beside any number of others."""
    store, log = MemoryStorage(), list[Operation]()
    job, counts = Process(store), (2, 3, 4)
    importlib.import_module("nxd_ckpt.cli.inspection")  # else it would import, and keep, what is set here
    for module in OPENERS:
        monkeypatch.setattr(f"nxd_ckpt.{module}.open_storage", lambda *_, **__: HookedStorage(store, recording(log)))
    looks: list[int] = []

    def look(seconds: float) -> None:
        looks.append(len(log))
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(directory_commands, "sleep", look)
    actions: dict[str, Callable[[], object]] = {
        "list": lambda: list_checkpoints(RUN),
        "report": lambda: main(["report", RUN, "--json"]),
        "verify": lambda: [verify_checkpoint(RUN, tag) for tag in tags_to_verify(RUN)],
        "doctor": lambda: main(["doctor", RUN]),
        "watch": lambda: main(["watch", RUN]),
        "named": lambda: (examine_checkpoint(open_checkpoint(RUN, "0")), pin_checkpoint(RUN, "0")),
    }
    costs: dict[str, list[int]] = {name: [] for name in (*actions, "look")}
    assert None is job.save("0", 0)
    pin_checkpoint(RUN, "0")
    for number in range(1, max(counts)):
        assert None is job.save(str(number), number)
        main(["report", RUN, "--json"])  # what it counts is kept
        looks.clear()
        for name, act in actions.items():
            before = len(log)
            act()
            costs[name].append(len(log) - before)
        costs["look"].append(looks[1] - looks[0])
    job.end()
    grown = {name: (second - first, third - second) for name, (first, second, third) in costs.items()}
    assert all(first == second for first, second in grown.values()), costs
    assert (0, 0) == grown["named"], costs
