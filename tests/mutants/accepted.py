"""Mutants that no test can notice, or none should: why, by module and name."""

from collections.abc import Mapping

_AT_IMPORT = "it ran when the module was imported, before a mutant could take its place"

ACCEPTED: Mapping[str, Mapping[str, str]] = {
    "formats/machine": {
        "Machine._work: 8 -> 9": "an int counts a ninth less, and so does what its bytes allow",
        "Machine._work: 0 -> 1": "one more for each call, which has several bytes, and each byte allows four",
        "Machine._spend: self._work_left < 0 -> self._work_left <= 0": "one less of a MiB",
        "Machine._spend: 0 -> 1": "one less of a MiB",
        **dict.fromkeys(
            (
                "_without_stand_in: return load -> return None",
                "_unknown: return refuse -> return None",
                "_opcodes: 0 -> 1",
                "_opcodes: return {b'': (_end, 0), "
                "**{code: (load, objects.get(code, 0)) for code, load in known.items()}} -> return None",
            ),
            _AT_IMPORT,
        ),
        "check_walk: values > most -> values >= most": "check_count asks again",
        "check_walk: len(stack) > limits.TREE_DEPTH -> len(stack) >= limits.TREE_DEPTH": "check_count asks again",
        "_values_of: return node -> return None": "only a torch.Size gets there, which holds numbers",
        "check_walk: 0 -> 1": "nothing has either for an id",
        "check_walk: continue -> break": "the walk goes on with the same iterator, where it was",
    },
    "formats/safe_globals": {
        **dict.fromkeys(
            (
                "_path: return Call(make) -> return None",
                "_none_of: return lambda: kind.__new__(kind) -> return None",
                "_both: return {(f'numpy.{core}.{module}', name): value for core in ('core', '_core')} -> return None",
                "_paths: os.name == 'nt' -> os.name != 'nt'",
                "_paths: return {(module, name): kind for module in ('pathlib', 'pathlib._local') "
                "for name, kind in kinds.items()} -> return None",
            ),
            _AT_IMPORT,
        ),
        **dict.fromkeys(
            (
                "_defaultdict: not isinstance(factory, type) or factory not in BUILTIN_TYPES -> "
                "not isinstance(factory, type) and factory not in BUILTIN_TYPES",
                "call_builtin: not isinstance(kind, type) or kind not in BUILTIN_TYPES -> "
                "not isinstance(kind, type) and kind not in BUILTIN_TYPES",
            ),
            "a pickle gets no types but these",
        ),
        "Keys.check: kind is str or (kind is int and -_OWN_HASH < key < _OWN_HASH) or isinstance(key, Inert) -> "
        "kind is str and (kind is int and -_OWN_HASH < key < _OWN_HASH) and isinstance(key, Inert)": (
            "keys that need not be looked at are, and pass"
        ),
        "_check_nesting: 1 -> 2": "twice the work of a number as a key is still far less than its bytes allow",
    },
    "formats/unpickle": {"_are_counts: return False -> return None": "as little true, for those who ask"},
    "formats/inert": {"StandIn.real: raise NotImplementedError -> (removed)": "abstract: every subclass has its own"},
    "coordination/lease": {
        "acquire: DirectoryInUse -> (not caught)": "what is given back then is not this run's, so nothing is",
    },
    "commit/publication": {
        "InPlace.begin: storage.make_dir(self.tag) -> (removed)": "the marker, written next, makes it as well",
        "InPlace._empty: storage.make_dir(self.tag) -> (removed)": "the marker, written next, makes it as well",
    },
    "commit/commit": {
        "commit: 0.0 -> 1.0": "the clock says more than a second after 1970",
        "_clean_up: int(number) < counter -> int(number) <= counter": "on that attempt all have voted, which is enough",
    },
    "core/retention_rules": {"Best.chosen: 1 -> 2": "only the sign matters: a factor changes no order"},
}
