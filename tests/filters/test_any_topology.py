"""Filters and names on whatever sizes: what is left out stays, the rest is what the whole model gives, bit for bit."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_ckpt import Topology
from tests.reshard.ranks import fresh, load_rank, save_job
from tests.reshard.strategies import Case, cases
from tests.reshard.whole import Layout, Weight, expected, part
from tests.tag.equality import difference


@dataclass(frozen=True)
class Filtered:
    """A case, what its weights were called when they were saved, and what a load leaves out."""

    case: Case
    key_mapping: dict[str, str]
    prefix: str
    globs: tuple[str, ...]
    by_callable: bool

    def saved_name(self, name: str) -> str:
        return self.key_mapping.get(name, self.prefix + name)

    @property
    def saved(self) -> tuple[list[Weight], Layout]:
        """The job that saved, under its own names."""
        layout, name_of = self.case.saved, self.saved_name
        others = {w.name: replace(w, name=name_of(w.name), alias=w.name) for w in self.case.weights}
        weights = [w if name_of(w.name) == w.name else others[w.name] for w in self.case.weights]
        return weights, replace(
            layout,
            cuts={name_of(name): cut for name, cut in layout.cuts.items()},
            groups=tuple(tuple(map(name_of, group)) for group in layout.groups),
            stages={name_of(name): stages for name, stages in layout.stages.items()},
        )

    @property
    def options(self) -> dict[str, Any]:
        """What a load is given for it."""

        def chosen(names: list[str]) -> list[str]:
            return [name for name in names if self.ignores(name)]

        ignore_keys = chosen if self.by_callable else self.globs
        return {"key_mapping": self.key_mapping, "prefix": self.prefix, "ignore_keys": ignore_keys}

    def ignores(self, name: str) -> bool:
        """The reference: every glob, on the name and on every path above it."""
        parts = name.split("/")
        paths = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        return any(fnmatchcase(path, glob) for path in paths for glob in self.globs)


@st.composite
def filtered(draw: st.DrawFn) -> Filtered:
    case = draw(cases())
    names = [weight.name for weight in case.weights]
    mapping = {name: f"other_{name}" for name in draw(st.sets(st.sampled_from(names)))}
    some = st.sampled_from(names)
    glob = st.one_of(
        some.map("model/{}".format),
        some.map("optim/{}".format),
        some.map("optim/{}/exp_avg".format),
        some.map("optim/{}/master_weights".format),
        st.sampled_from(
            ["optim/*/exp_avg_sq", "*/step", "optim/param_groups", "optim/*", "model", "*[01]", "user_content"]
        ),
    )
    globs = draw(st.lists(glob, max_size=3))
    return Filtered(case, mapping, draw(st.sampled_from(["", "outer_"])), tuple(globs), draw(st.booleans()))


def after(given: Filtered, at: Topology, before: dict[str, Any]) -> dict[str, Any]:
    """What the rank ``at`` holds after the load, that held ``before``."""
    case, layout = given.case, given.case.live
    loaded = expected(case.weights, layout, at)
    weights = {weight.name: weight for weight in case.weights}
    model = {
        name: before["model"][name] if given.ignores(f"model/{name}") else value
        for name, value in loaded["model"].items()
    }
    optimizer = {}
    for name, entry in loaded["optimizer"].items():
        path, was, cut = f"optim/{name}", before["optimizer"][name], layout.cuts[name]
        keys = [key for key in dict.fromkeys([*entry, *was]) if key not in ("shard", "options")]
        sources = {key: was if given.ignores(f"{path}/{key}") else entry for key in keys}
        found = {key: sources[key][key] for key in sorted(sources) if key in sources[key]}
        if layout.zero1:
            if given.ignores(f"model/{name}"):  # its shard is a copy of it
                found["shard"] = was["shard"]
            elif given.ignores(f"{path}/master_weights") or not layout.master_weights:
                found["shard"] = part(weights[name].value.float(), cut, at, sharded=True)
            else:
                found["shard"] = entry["shard"]
        found["options"] = was["options"] if given.ignores("optim/param_groups") else entry["options"]
        optimizer[name] = found
    return {"model": model, "optimizer": optimizer}


def in_order(held: dict[str, Any]) -> dict[str, Any]:
    """The same, with entries in the order of :func:`after`: that in which they were kept or loaded says nothing."""
    last = ("shard", "options")
    optimizer = {
        name: {key: entry[key] for key in [*sorted(entry.keys() - {*last}), *last] if key in entry}
        for name, entry in held["optimizer"].items()
    }
    return {**held, "optimizer": optimizer}


@settings(deadline=None, max_examples=12)
@given(given=filtered())
def test_what_is_left_out_stays_and_the_rest_is_loaded(given: Filtered) -> None:
    """Any names, prefix, globs or callable; any sizes, cuts and files; live state that exists or not."""
    case = given.case
    with TemporaryDirectory() as directory:
        weights, layout = given.saved
        save_job(Path(directory), weights, layout, **case.save_options)
        for at in case.live.ranks:
            rank = fresh(case.weights, case.live, at, stepped=at.rank % 2 == 1)
            before = rank.held()
            content = load_rank(
                Path(directory),
                rank,
                partitions=case.live.partitions,
                strict=False,
                strict_model_weights=True,
                **given.options,
            )
            assert (None if given.ignores("user_content") else {"saved": 1}) == content
            wanted, held = after(given, at, before), in_order(rank.held())
            whole_groups = not any(given.ignores(f"optim/{w.name}") for w in case.weights)
            if not whole_groups:  # options of a group of which all is left out stay: see test_load
                for name in held["optimizer"]:
                    del held["optimizer"][name]["options"], wanted["optimizer"][name]["options"]
            assert None is difference(wanted, held)
