"""JSON read element by element is what any JSON parser reads, however it is laid out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core import document
from nxd_ckpt.errors import MalformedFile

pytestmark = [pytest.mark.plain, pytest.mark.once]

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.fixed_dictionaries(
    {"rest": VALUES, "list": st.lists(VALUES, max_size=4), "object": st.dictionaries(st.text(), VALUES, max_size=4)}
)


@given(value=DOCUMENTS, indent=st.sampled_from([None, 0, 2, "\t"]), order=st.permutations(["rest", "list", "object"]))
def test_elements_are_made_in_place(value: dict[str, Any], indent: int | str | None, order: list[str]) -> None:
    """Of the members that are asked for, with white space or without, in any order; the others stay as they are."""
    text = json.dumps({name: value[name] for name in order}, indent=indent)
    expected = {
        "rest": value["rest"],
        "list": [("made", element) for element in value["list"]],
        "object": {name: ("made", element) for name, element in value["object"].items()},
    }
    made = document.read(f" {text}\n", dict.fromkeys(["list", "object"], lambda element: ("made", element)))
    assert expected == made


def test_equal_objects_are_made_once() -> None:
    """However many forms there are, and also if one begins like another."""
    forms: list[Any] = [{"a": number} for number in range(12)] + [{}, {"a": {}}, {"a": 1, "b": 2}, [1]]
    values = {f"{turn} {number}": form for turn in range(3) for number, form in enumerate([*forms, {}])}
    made: list[Any] = []

    def make(value: Any) -> list[Any]:
        made.append(value)
        return [value]

    fields = document.read(json.dumps({"object": values}), {"object": make})
    assert {name: [value] for name, value in values.items()} == fields["object"]
    assert len(made) < len(values)


@given(value=DOCUMENTS, data=st.data())
def test_what_is_cut_off_is_not_read(value: dict[str, Any], data: st.DataObject) -> None:
    """Wherever it ends, before the last brace."""
    text = json.dumps(value)
    end = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(ValueError, match=r"line 1 column|expected"):
        document.read(text[:end], {"list": bool, "object": bool})


NONE_OF_THEM = ['{"list":1}', '{"list":[1 2]}', '{"list":[1,]}', '{"list":[}', "{1:2}", '{"a" 1}', '{"a":1,}', "{} x"]


@pytest.mark.parametrize("text", NONE_OF_THEM)
def test_what_is_no_such_object_is_refused(text: str) -> None:
    """A member whose elements are wanted has some, commas stand between them, names are strings, nothing follows."""
    with pytest.raises(ValueError, match="expected"):
        document.read(text, {"list": bool})


@pytest.mark.parametrize("text", ['{"a": 1, "b": {}, "a": 2}', '{"list": [], "list": []}', '{"c": [{"d": 1, "d": 1}]}'])
def test_a_name_that_is_there_twice_is_refused(text: str) -> None:
    """Nothing tells which value counts. Of what is read element by element only the document's own are looked at."""
    with pytest.raises(MalformedFile, match=r"names\.json.* is there twice"):
        document.small(text.encode(), "names.json")
    if not text.startswith('{"c"'):
        with pytest.raises(ValueError, match=" is there twice"):
            document.read(text, {"list": bool})


@given(name=st.text(), numbers=st.lists(st.integers()), value=VALUES)
def test_what_is_written_is_json(name: str, numbers: list[int], value: Any) -> None:
    """Texts put together are the document of their parts."""
    text = document.members({name: document.array([document.integers(numbers), document.plain(value)])})
    assert {name: [numbers, value]} == json.loads(text)
