"""Mutants that no test can notice, or none should: why, by module and name."""

from __future__ import annotations

from collections.abc import Mapping

ACCEPTED: Mapping[str, Mapping[str, str]] = {
    "formats/unpickle": {
        "_Safe.__init__: False -> True": "the tree is copied then, and is the same",
        "_are_counts: return False -> return None": "as little true, for those who ask",
    },
    "formats/sealed": {
        "StandIn.real: raise NotImplementedError -> (removed)": "abstract: every subclass has its own",
    },
    "runtime/coordination/lease": {
        "acquire: DirectoryInUse -> (not caught)": "what is given back then is not this run's, so nothing is",
    },
    "runtime/save/publication": {
        "InPlace.begin: storage.make_dir(self.tag) -> (removed)": "the marker, written next, makes it as well",
        "_empty: storage.make_dir(tag) -> (removed)": "the marker, written next, makes it as well",
    },
    "runtime/save/commit": {
        "_clean_up: int(number) < counter -> int(number) <= counter": "on that attempt all have voted, which is enough",
    },
    "core/retention": {
        "Best.chosen: 1 -> 2": "only the sign matters: a factor changes no order",
    },
}
