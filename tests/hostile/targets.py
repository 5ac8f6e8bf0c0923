"""Everything that parses a file: one :class:`Target` each, which reads its bytes as the library does."""

import io
import os
import random
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path

import torch

from nxd_ckpt import Checkpointer, checkpoint_statistics, open_checkpoint
from nxd_ckpt.coordination import journal, lease
from nxd_ckpt.coordination.control_files import HEARTBEAT, JOURNAL, LEASE, staging_dir, statistics_file
from nxd_ckpt.core import document
from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.core.manifest import load_index, load_manifest, load_parameters
from nxd_ckpt.core.names import DONE, MANIFEST, MARKER, NEWEST, info_file, tensor_file
from nxd_ckpt.core.votes import load_verdict, load_vote, raise_error_of
from nxd_ckpt.errors import SaveFailed
from nxd_ckpt.formats.safetensors import read_header
from nxd_ckpt.formats.tensors import StorageSpan
from nxd_ckpt.formats.torch_zip import read_tree
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.formats.unpickle import unpickle
from nxd_ckpt.hugging_face.mappings import find_mapping
from nxd_ckpt.integrations.trainer_tags import TrainerTag
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.layouts.hugging_face_directory import CONFIG, HuggingFaceDirectory
from nxd_ckpt.layouts.quantization import quantization_of
from nxd_ckpt.layouts.torch_dcp import DcpFiles, read_metadata
from nxd_ckpt.layouts.weight_files import INDEX
from nxd_ckpt.migrate.optimum_metadata import read_metadata as read_optimum
from nxd_ckpt.storage.archive_storage import find_members
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.digest_lists import DIGESTS
from nxd_ckpt.tag.directory import clash, is_checkpoint_of_ours_or_nxd, list_tags
from nxd_ckpt.testing.storage import MemoryStorage
from tests.formats.helpers import pread_of, rendered, saved
from tests.hostile import findings, servers, valid
from tests.hostile.budget import PART, PICKLE_PART
from tests.hostile.damage import (
    damaged,
    damaged_inside,
    damaged_json,
    damaged_manifest,
    damaged_pickle,
    damaged_safetensors,
    damaged_tar,
)

Damage = Callable[[random.Random, bytes, bytes], bytes]

LARGEST = 2**16
"""Bytes of a finding that is changed further. Larger ones are tried as they are: each would take as long as a hundred
others."""


@dataclass(frozen=True)
class Target:
    """A reader, files that it reads, and those that once were too much for it.

    ``damage`` changes a file in its own terms; every second input is changed byte by byte instead. ``part`` is of
    how many bytes each may take the budget.
    """

    name: str
    read: Callable[[bytes], object]
    valid: Sequence[bytes]
    damage: Damage = damaged
    findings: Sequence[bytes] = ()
    part: int = PART

    def input(self, seed: int) -> bytes:
        """The damaged file of that number."""
        rng = random.Random(seed)
        files = self._files
        data, other = rng.choice(files if rng.random() < 0.2 else self.valid), rng.choice(files)
        return rng.choice([damaged, self.damage])(rng, data, other)

    @cached_property
    def _files(self) -> Sequence[bytes]:
        return [*self.valid, *(finding for finding in self.findings if len(finding) <= LARGEST)]


def _index(data: bytes) -> None:
    try:
        load_parameters(data, "index.json")
    finally:
        load_index(data, "index.json")


def _manifest(data: bytes) -> None:
    load_manifest(data, "manifest.json")


def _vote(data: bytes) -> None:
    vote = load_vote(data, "vote.json")
    with suppress(SaveFailed):
        raise_error_of(vote)


def _holding(files: dict[str, bytes], renames: bool = True) -> Storage:
    """A directory with one good tag, and ``files``."""
    storage: Storage = MemoryStorage("hostile store")
    if renames:
        storage = LocalStorage(Path(_SCRATCH.name, f"tags-{os.getpid()}"), durable=False)
    storage.remove("")
    for key, data in {f"step_3/{MANIFEST}": valid.MANIFESTS[0], f"step_3/{DONE}": b"1", **files}.items():
        storage.write(key, data)
    return storage


def _lease(data: bytes) -> None:
    storage = _holding({LEASE: data, HEARTBEAT: data})
    holder = lease.read(storage)
    assert holder is not None
    lease.last_beat(storage, holder)


def _journal(data: bytes) -> None:
    storage = _holding({JOURNAL: data, f"{staging_dir('run-1')}/{DONE}": b"1"})
    journal.recover(storage)
    assert not journal.is_open(storage)
    assert storage.is_file(f"step_3/{DONE}")


def _intent(data: bytes) -> None:
    storage = _holding({staging_dir("run-1"): data, f"half/{MARKER}": b"1"}, renames=False)
    journal.saves_of(storage, "step_3")
    journal.clear(storage, staging_dir("run-1"), lambda: True)
    assert storage.is_file(f"step_3/{DONE}")


def _marker(name: str, data: bytes) -> None:
    for renames in (True, False):
        storage = _holding({name: data}, renames)
        for tag in list_tags(storage):
            is_checkpoint_of_ours_or_nxd(storage, tag.tag)
            clash(storage, tag.tag)


def _pickle(data: bytes) -> None:
    spans = {str(key): StorageSpan(f"data/{key}", 64 * key, 4, None) for key in range(3)}
    unpickle(data, "file.pt", spans)


def _torch(data: bytes) -> None:
    read_tree(pread_of(data), len(data), "file.pt")


_INFO = info_file("x.pt")
_XSER = {"x.pt": rendered(image_of(valid.REFERENCES)), _INFO: saved(valid.INFO)} | {
    tensor_file("x.pt", tid): saved(torch.ones(2)) for tid in (0, 1)
}


def _references(name: str, data: bytes) -> None:
    TagFiles(_holding({**_XSER, name: data}), "").joined("x.pt")


def _experts(data: bytes) -> None:
    TagFiles(_holding({**_XSER, "x.pt": data}), "").marked_experts("x.pt")


def _safetensors(data: bytes) -> None:
    read_header(pread_of(data), len(data), "x.safetensors")


def _hugging_face(name: str, data: bytes) -> None:
    files = {CONFIG: valid.CONFIGS[0], INDEX: valid.WEIGHT_MAPS[0], "a.safetensors": valid.SAFETENSORS[0]}
    held = HuggingFaceDirectory(_holding({**files, name: data}))
    held.dequantize(quantization_of(held.config, held.where))
    for tensor in held.names:
        held.tensor(tensor)
    mapping = find_mapping(None, held.config)
    mapping.required(mapping.sizes(held.config, 1, "trn1"))


_SCRATCH = tempfile.TemporaryDirectory()


def _mapping(data: bytes) -> None:
    file = Path(_SCRATCH.name, f"{os.getpid()}.json")
    file.write_bytes(data)
    mapping = find_mapping(file, {})
    mapping.required(mapping.sizes({"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4}, 1, "trn1"))
    mapping.split(["model.layers.0.mlp.down_proj.weight"])


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        for offset, memory in ranges:
            found = self._data[offset : offset + len(memory)]
            if len(found) != len(memory):
                raise EOFError(f"{len(memory) - len(found)} bytes missing")
            memory[:] = found

    def close(self) -> None:
        """Nothing is open."""


def _archive(data: bytes) -> None:
    find_members(_Bytes(data), len(data), "x.tar")


def _digests(data: bytes) -> None:
    directory = Path(_SCRATCH.name, f"{os.getpid()}-sealed")
    directory.mkdir(exist_ok=True)
    for name, content in (valid.SEALED, (DIGESTS, data)):
        (directory / name).write_bytes(content)
    TrainerTag(str(directory), "training_state", is_sealed=True).verify_files()


@cache
def _counted() -> Path:
    """A directory with a tag whose tensors were counted."""
    directory = Path(_SCRATCH.name, "counted")
    with Checkpointer(directory, durable=False) as saver:
        saver.save("t", {"w": torch.tensor([[3.0], [4.0]])})
    checkpoint_statistics(open_checkpoint(directory))
    return directory


def _statistics(data: bytes) -> None:
    """What is not used is counted anew."""
    directory = Path(_SCRATCH.name, f"{os.getpid()}-counted")
    if not directory.exists():
        shutil.copytree(_counted(), directory)
    (directory / _STATISTICS).write_bytes(data)
    checkpoint_statistics(open_checkpoint(directory))


def _kept() -> bytes:
    return (_counted() / _STATISTICS).read_bytes()


def _optimum(data: bytes) -> None:
    read_optimum({"x.json": document.small(data, "x.json")})


def _metadata(data: bytes) -> None:
    read_metadata(TagFiles(_holding({".metadata": data, "__0_0.distcp": bytes(8)}), ""), DcpFiles(""))


def _pickles_of(files: Sequence[bytes]) -> list[bytes]:
    return [zipfile.ZipFile(io.BytesIO(file)).read("archive/data.pkl") for file in files]


_STATISTICS = statistics_file("t")
_HOSTILE = [b"\x80\x04" + pickled + b"." for pickled in findings.HOSTILE.values()]

_TARGETS = [
    Target("index", _index, valid.INDEXES, damaged_json),
    Target("manifest", _manifest, valid.MANIFESTS, damaged_manifest),
    Target("vote", _vote, valid.VOTES, damaged_json),
    Target("verdict", lambda data: load_verdict(data, "verdict.json"), valid.VERDICTS, damaged_json),
    Target("lease", _lease, valid.LEASES, damaged_json),
    Target("journal", _journal, valid.JOURNALS, damaged_json),
    Target("intent", _intent, valid.INTENTS, damaged_json),
    Target("done", partial(_marker, f"step_3/{DONE}"), valid.DONES),
    Target("newest", partial(_marker, NEWEST), valid.NEWESTS),
    Target("torch file", _torch, valid.TORCH_FILES, damaged_inside, part=PICKLE_PART),
    Target("pickle", _pickle, _pickles_of(valid.TORCH_FILES), damaged_pickle, _HOSTILE, part=PICKLE_PART),
    Target("xser references", partial(_references, "x.pt"), [_XSER["x.pt"]], damaged_inside, part=PICKLE_PART),
    Target("xser experts", _experts, [_XSER["x.pt"]], damaged_inside, part=PICKLE_PART),
    Target("xser info", partial(_references, _INFO), [_XSER[_INFO]], damaged_inside, part=PICKLE_PART),
    Target("safetensors", _safetensors, valid.SAFETENSORS, damaged_safetensors, [*findings.SAFETENSORS.values()]),
    Target("config.json", partial(_hugging_face, CONFIG), valid.CONFIGS, damaged_json),
    Target("weight map", partial(_hugging_face, INDEX), valid.WEIGHT_MAPS, damaged_json),
    Target("mapping", _mapping, valid.MAPPINGS, damaged_json),
    Target("digests", _digests, valid.DIGESTS, damaged_json),
    Target("DCP names", lambda data: DcpNames.from_json(data, "dcp_names.json"), valid.DCP_NAMES, damaged_json),
    Target("statistics", _statistics, [_kept()], damaged_json),
    Target("optimum's metadata", _optimum, valid.OPTIMUMS, damaged_json),
    Target("archive", _archive, valid.ARCHIVES, damaged_tar, [*findings.ARCHIVES.values()]),
    Target("DCP metadata", _metadata, valid.METADATA, damaged_pickle, part=PICKLE_PART),
    Target("requests to a host", servers.requests(Path(_SCRATCH.name)), servers.REQUESTS, servers.damaged_message),
    Target("answers of a host", servers.answers, servers.ANSWERS, servers.damaged_message),
    Target("words between ranks", servers.words, servers.WORDS, servers.damaged_line),
    Target("hello to rank 0", servers.admission, [hello + servers.WORDS[0] for hello in servers.HELLOS]),
]
TARGETS: dict[str, Target] = {
    target.name: replace(target, findings=[*target.findings, *findings.found(target.name)]) for target in _TARGETS
}
