"""An attempt that is about to become a tag: one rank, its storage, and a session that says little."""

from dataclasses import replace

from nxd_ckpt.commit.publication import Publication
from nxd_ckpt.commit.session import Session
from nxd_ckpt.core.manifest import dump_manifest
from nxd_ckpt.core.names import DONE, MANIFEST, MARKER
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import DirectoryInUse
from nxd_ckpt.storage.base import Storage
from tests.core.documents import MANIFEST as DOCUMENT

TAKEN = DirectoryInUse("it was taken over")
ATTEMPT, TAG = "run-2", "one"
MODEL = "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"
TIME = 1_700_000_000.0
_PAIR = Topology(dp=2)


def manifest(attempt: str = ATTEMPT) -> bytes:
    return dump_manifest(replace(DOCUMENT, tag=TAG, attempt=attempt))


class LeasedSession(Session):
    """One whose lease is asked for: ``answers`` in turn, the last again and again; None is a lease that holds."""

    answers: list[BaseException | None]

    def require(self, *, strictly: bool = False) -> None:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is not None:
            raise answer


def session(storage: Storage, *answers: BaseException | None, topology: Topology = _PAIR) -> LeasedSession:
    double = LeasedSession(storage, topology, "run", 0.1)
    double.answers = list(answers) or [None]
    return double


def whole(storage: Storage, tag: str = TAG, attempt: str = "run-1") -> None:
    """A complete tag of ours, with one file."""
    for name, data in ((MARKER, b"1"), (MANIFEST, manifest(attempt)), (MODEL, b"old"), (DONE, b"1")):
        storage.write(f"{tag}/{name}", data)


def written(storage: Storage, one: Publication) -> None:
    """What a save writes before it is published."""
    one.put(storage, {MODEL: b"new"})
    one.put(storage, {MANIFEST: manifest()})
