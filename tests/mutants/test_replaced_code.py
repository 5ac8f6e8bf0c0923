"""A change to the code of functions reaches those that exist."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.replaced_code import replace_code

BEFORE, AFTER = (compile(f"def answer(): return {number}", "changed.py", "exec") for number in (1, 2))


@pytest.fixture
def frozen() -> Iterator[None]:
    """Keep from the collector again all that a test let it see: tests/conftest.py does so after each file."""
    yield
    gc.freeze()


def test_functions_that_the_collector_does_not_see_are_changed(frozen: None) -> None:
    names = dict[str, Any]()
    exec(BEFORE, names)
    gc.freeze()
    replace_code(BEFORE, AFTER)
    assert 2 == names["answer"]()


def test_a_module_without_functions_is_refused(frozen: None) -> None:
    """No mutant of it would be one, and every test would pass."""
    absent = compile("answer = 1", "absent.py", "exec")
    with pytest.raises(LookupError, match=r"absent\.py"):
        replace_code(absent, absent)
