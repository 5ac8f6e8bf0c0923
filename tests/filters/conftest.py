"""Every test here begins and ends without a checkpointer that holds a directory."""

from collections.abc import Iterator

import pytest

from nxd_ckpt import close_checkpointers


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_checkpointers()
