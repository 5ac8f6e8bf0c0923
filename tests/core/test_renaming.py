"""Names: what is renamed to what, and which are left out, against a slow reference."""

from fnmatch import fnmatchcase

from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core.name_patterns import Ignored, Renaming, unmatched
from nxd_ckpt.errors import InvalidArgument

NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join)
GLOBS = st.text("ab*?/[]!", min_size=1, max_size=5)
KEYS = st.text("ab.", min_size=1, max_size=3)


@given(st.lists(NAMES, max_size=5), st.lists(GLOBS, max_size=4))
def test_globs_stand_for_paths_and_all_below(names: list[str], globs: list[str]) -> None:
    """As fnmatch has it, for the name itself or a path above it; one that ends in ``*`` also for what is below."""
    ignored = Ignored(globs)
    above = {name: [name[:end] for end in range(1, len(name) + 1) if (name + "/")[end] == "/"] for name in names}
    hits = {name: [glob for glob in globs if any(fnmatchcase(path, glob) for path in above[name])] for name in names}
    assert {name: bool(found) for name, found in hits.items()} == {name: ignored.matches(name) for name in names}
    hit = {glob for found in hits.values() for glob in found}
    below = [f"{path}/" for name in names for path in above[name]]
    hit |= {glob for glob in globs if glob.endswith("*") and any(fnmatchcase(path, glob) for path in below)}
    assert [glob for glob in globs if glob not in hit] == unmatched(globs, names)
    covered = [name for name in names if ignored.covers(name)]
    assert [] == [name for name in covered if not ignored.matches(f"{name}/c")]


@given(st.dictionaries(KEYS, KEYS, max_size=3), st.sampled_from(["", "a", "a."]), st.sets(KEYS, max_size=4))
def test_names_go_there_and_back(mapping: dict[str, str], prefix: str, live: set[str]) -> None:
    """Two live names never mean one saved one; else each is found again, and what is no live name is marked."""
    renaming = Renaming(mapping, prefix)
    saved = [mapping.get(name, prefix + name) for name in live]
    try:
        renaming.validate()
        renaming.refuse_collisions(live, lambda name: [name])
    except InvalidArgument:
        everything = [mapping.get(name, prefix + name) for name in {*live, *mapping}]
        assert len(set(everything)) < len(everything)
        return
    assert len(set(saved)) == len(saved)
    assert (saved, sorted(live)) == ([renaming.saved(n) for n in live], sorted(map(renaming.live, saved)))
    assert all(map(renaming.concerns, saved))
    for name in ("b", "zz", "a.b"):
        assert name == renaming.saved(renaming.live(name))
