"""JSON documents: what is damaged, or could mean two things, is refused; what is written is JSON."""

import json
import math
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core import document
from nxd_ckpt.errors import MalformedFile

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(st.text(), VALUES, max_size=4)


@given(value=DOCUMENTS, data=st.data())
def test_what_is_cut_off_is_not_read(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value)
    end = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(MalformedFile, match=r"cut\.json: not valid JSON"):
        document.small(text[:end].encode(), "cut.json")


@pytest.mark.parametrize("text", ['{"list":[1 2]}', '{"list":[1,]}', "{1:2}", '{"a" 1}', '{"a":1,}', "{} x", "[1]"])
def test_what_is_no_such_object_is_refused(text: str) -> None:
    """Commas stand between elements, names are strings, nothing follows."""
    with pytest.raises(MalformedFile, match=r"wrong\.json"):
        document.small(text.encode(), "wrong.json")


@pytest.mark.parametrize("text", ['{"a": 1, "b": {}, "a": 2}', '{"list": [], "list": []}', '{"c": [{"d": 1, "d": 1}]}'])
def test_a_name_that_is_there_twice_is_refused(text: str) -> None:
    """Nothing tells which value counts."""
    with pytest.raises(MalformedFile, match=r"names\.json.* is there twice"):
        document.small(text.encode(), "names.json")


@given(
    value=VALUES,
    name=st.text(),
    is_ascii=st.booleans(),
    before_colon=st.sampled_from(["", "", " ", "\n"]),
    separators=st.sampled_from([(",", ":"), (", ", ": ")]),
)
def test_no_writing_hides_a_name_that_is_there_twice(
    value: Any, name: str, is_ascii: bool, before_colon: str, separators: tuple[str, str]
) -> None:
    """Neither space, nor escapes, nor texts that begin with a colon."""
    other = json.dumps([value, ":", '":'], separators=separators, ensure_ascii=is_ascii)
    members = f"{json.dumps(name)}:1", f"{json.dumps(name, ensure_ascii=is_ascii)}{before_colon}:2"
    with pytest.raises(MalformedFile, match=r"names\.json.* is there twice"):
        document.small(f'{{{members[0]},"/":{other},{members[1]}}}'.encode(errors="surrogatepass"), "names.json")


@given(value=DOCUMENTS)
def test_a_document_is_read_however_it_is_written(value: dict[str, Any]) -> None:
    """Texts of other programs, with space and escapes, too."""
    texts = document.plain(value), json.dumps(value), json.dumps(value, indent=1, ensure_ascii=False)
    assert [value] * 3 == [document.small(text.encode(errors="surrogatepass"), "any.json") for text in texts]


@given(value=VALUES)
def test_what_is_written_is_json(value: Any) -> None:
    """A mapping that is no dict counts as one; what JSON has no word for is refused."""
    assert {"name": [value]} == json.loads(document.plain(MappingProxyType({"name": [value]})))
    with pytest.raises(ValueError, match="JSON"):
        document.plain([value, math.nan])
