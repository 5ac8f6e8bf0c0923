"""A secret that all ranks of a job know, and nobody who reads the store in which they agreed on it."""

import secrets
from functools import partial

import pytest
import torch.distributed as dist

from nxd_ckpt.coordination.agreement import Words
from nxd_ckpt.coordination.rendezvous import KeyPair, job_secret
from nxd_ckpt.errors import MalformedFile, PeerTimeout
from tests.support.threads import in_threads


class Recording:
    """A store that keeps all that was ever in it, as a stranger would who reads it from the beginning."""

    def __init__(self) -> None:
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self.seen: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.seen.append(value)
        self._store.set(key, value)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


@pytest.mark.parametrize("world_size", [2, 40])
def test_all_ranks_have_the_secret_and_the_store_does_not(world_size: int) -> None:
    """Also ranks that have it from another rank than rank 0."""
    store, secret, results = Recording(), secrets.token_bytes(32), dict[int, bytes]()

    def run(rank: int) -> None:
        own = secret if rank == 0 else secrets.token_bytes(32)
        results[rank] = job_secret(Words(store, rank, 600.0), rank, world_size, own)

    in_threads(*(partial(run, rank) for rank in range(world_size)))
    assert dict.fromkeys(range(world_size), secret) == results
    assert not any(secret.hex() in text for text in store.seen)


def test_a_rank_that_does_not_come_is_named() -> None:
    """As in any other word that ranks wait for."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(PeerTimeout, match="rank 0 waited 0 s for rank 1"):
        job_secret(Words(store, 0, 0.2), 0, 2, secrets.token_bytes(32))


@pytest.mark.parametrize("public", ["", "0", "1", "-5", "zz", "f" * 513, "1.5", 7, None], ids=repr)
def test_what_is_no_key_is_refused(public: str) -> None:
    """Above all 0, 1 and the like, with which the key would be known to all."""
    with pytest.raises(MalformedFile, match="expected a public key"):
        KeyPair().key_with(public)
