"""The disks of three hosts together are a storage like any other."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nxd_ckpt.storage.base import Storage
from nxd_ckpt.testing.contract import StorageContract
from tests.hosts.views import World


class TestHosts(StorageContract):
    """As rank 0's host sees them, another one, and another one with replicas."""

    @pytest.fixture(params=[(0, 1), (1, 1), (2, 2)], ids=["home", "another", "replicated"])
    def storage(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
        here, replicas = request.param
        world = World(tmp_path, 3, replicas)
        yield world.views[here]
        world.close()
