"""Every exception that nxd_ckpt raises on purpose.

Each message names the thing (tag, rank, file, tensor), what was expected, what was found, and what to do next::

    CheckpointError (RuntimeError)
    ├── InvalidArgument (ValueError)             a parameter that no rank could honour
    │   └── InvalidTag
    ├── UnsupportedState                         SPMD, sparse tensors, ...: named, with what to use instead
    ├── UnsupportedSystem                        this operating system lacks what was asked for
    ├── CheckpointNotFound (FileNotFoundError)   no directory, no complete tag, no such tag
    │   └── PartNotFound                         the tag has no model / optimizer / scheduler / rank file
    │       └── PartLost                         it had it when it was saved
    ├── ResumeDiffers (AssertionError)           what is live after a load is not what it meant to put there
    ├── TagReplaced                              another save took the tag's place while it was read, or it was removed
    ├── CorruptCheckpoint                        what is on disk is not what was written
    │   ├── MalformedFile                        truncated, or not the format its name says
    │   │   └── UnreadableFormat                 written so, but not for this version: no damage
    │   └── DigestMismatch                       the bytes of a tensor or file changed
    ├── UnsafePickle (UnpicklingError)           a pickle that is more than data
    ├── IncompatibleState                        checkpoint and live objects do not fit
    │   ├── KeyMismatch                          missing or unexpected names under strict
    │   ├── ShapeMismatch
    │   ├── DtypeMismatch
    │   ├── OptimizerMismatch (ValueError)       ZeRO-1 into plain, plain into ZeRO-1, other groups
    │   └── TopologyMismatch                     saved on other dp/tp/pp/ep sizes
    ├── CheckpointerClosed                       a save or step after its end
    ├── DirectoryInUse                           another live job writes here
    ├── DirectoryNotShared                       the ranks see different directories
    ├── StorageError (OSError)                   a file system or store refused or failed
    ├── StagingTooLarge (MemoryError)            one tensor does not fit under the staging cap
    ├── HostExhausted (MemoryError)              this host has no memory, or no threads, left
    ├── SaveFailed                               this save did not become visible, on any rank
    │   ├── RanksDisagree                        on the tag, or on what is saved or loaded
    │   └── DirectoryTakenOver (DirectoryInUse)  another job has saved here since this one took the directory
    ├── OutcomeUnknown                           rank 0 gave no verdict in time: look at the directory
    ├── ReplicaLost                              a rank that shares the reading failed or is gone
    └── PeerTimeout                              a rank did not answer in an agreement

A class is also what neuronx_distributed or torch raise there, so that ``except`` clauses written for them hold.

An exception is made from its message alone, so that one rank's error can be raised again, as the same class, on every
other rank (`to_wire`, `from_wire`).
"""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

from nxd_ckpt.surroundings import FunctionT, neutral, untraced


class CheckpointError(RuntimeError):
    """Base of all errors that nxd_ckpt raises on purpose."""


class InvalidArgument(CheckpointError, ValueError):
    """A parameter that cannot be honoured; nothing was written."""


class InvalidTag(InvalidArgument):
    """A tag that is empty, absolute, hidden, or not a plain directory name."""


class UnsupportedState(CheckpointError):
    """State that this library does not save (SPMD, ``Partial`` DTensors, context parallel experts)."""


class UnsupportedSystem(CheckpointError):
    """The operating system lacks what this needs; the message says what that is, and what works."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """No such directory, no complete tag in it, or no such tag."""


class PartNotFound(CheckpointNotFound):
    """The tag lacks a part that was asked for (model, optimizer, scheduler, a rank's file)."""


class PartLost(PartNotFound):
    """A file that the tag had when it was saved is gone: the tag is damaged."""


class ResumeDiffers(CheckpointError, AssertionError):
    """A run that was loaded is not the run that was saved; names the first differences."""


class TagReplaced(CheckpointError):
    """The tag that was being read is not there any more: it was removed, or another save has its name now."""


class CorruptCheckpoint(CheckpointError):
    """Damage: the bytes on disk are not those that were written."""


class MalformedFile(CorruptCheckpoint):
    """A file is truncated or is not of the format that its name says."""


class UnreadableFormat(MalformedFile):
    """A file cannot be read by this version, though its bytes are those that were written: it is not damaged.

    It is a MalformedFile for programs that pass over checkpoints which cannot be loaded.
    """


class DigestMismatch(CorruptCheckpoint):
    """The bytes of a file or tensor are not those that were written."""


class UnsafePickle(CheckpointError, pickle.UnpicklingError):
    """A pickle asks for something that is not plain data."""


class IncompatibleState(CheckpointError):
    """The checkpoint and the live objects do not fit together; nothing was changed."""


class KeyMismatch(IncompatibleState):
    """Names are missing from, or unexpected in, the checkpoint."""


class ShapeMismatch(IncompatibleState):
    """A tensor has another shape in the checkpoint than live."""


class DtypeMismatch(IncompatibleState):
    """A tensor has another dtype in the checkpoint than live."""


class OptimizerMismatch(IncompatibleState, ValueError):
    """The optimizer in the checkpoint is of another kind or structure than the live one."""


class TopologyMismatch(IncompatibleState):
    """The checkpoint was saved on other dp/tp/pp/ep sizes than the live ones."""


class CheckpointerClosed(CheckpointError):
    """A call of a Checkpointer that was closed before, other than a load."""


class DirectoryInUse(CheckpointError):
    """Another live job holds the lease on the checkpoint directory, or on the output of a conversion."""


class DirectoryNotShared(CheckpointError):
    """The ranks of the job do not see the same checkpoint directory."""


class StorageError(CheckpointError, OSError):
    """A file system or store refused or failed: permissions, a full or read-only disk, a network.

    ``errno`` is the system's, where it gave one; the error itself is the ``__cause__``.
    """


class StagingTooLarge(CheckpointError, MemoryError):
    """The state cannot be staged within the memory cap, not even in waves."""


class HostExhausted(CheckpointError, MemoryError):
    """The host, or a limit set on the process, has no memory or no threads left for what was asked."""


class SaveFailed(CheckpointError):
    """A save did not become visible; the message names rank, file and cause."""


class DirectoryTakenOver(SaveFailed, DirectoryInUse):
    """A save failed because another job took the directory over, when this one gave no sign of life."""


class RanksDisagree(SaveFailed):
    """The ranks did not make the same save or load."""


class OutcomeUnknown(CheckpointError):
    """No verdict arrived in time: the save may or may not have become visible."""


class ReplicaLost(CheckpointError):
    """A rank that this one shares the reading with failed or is gone; if its error is known, that is raised instead."""


class PeerTimeout(CheckpointError):
    """A rank did not answer in time."""


def _tree(base: type[CheckpointError]) -> Iterator[type[CheckpointError]]:
    yield base
    for child in base.__subclasses__():
        yield from _tree(child)


def _exhausted(error: BaseException) -> BaseException:
    """Return HostExhausted for an error that means no memory or threads; any other error unchanged."""
    if isinstance(error, CheckpointError):
        return error
    is_thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    if not is_thread and not isinstance(error, MemoryError) and getattr(error, "errno", None) != errno.ENOMEM:
        return error
    return HostExhausted(
        f"this host, or a limit set on the process, has no {'threads' if is_thread else 'memory'} left "
        f"({type(error).__name__}: {error}); free some, or raise the limit (ulimit, the container's)"
    )


_ADVICE = {
    errno.EROFS: "choose a directory on a disk that can be written to",
    errno.ENOSPC: "free space there, or keep fewer checkpoints (num_kept_ckpts=, retain=)",
    errno.EDQUOT: "free space there, or have the quota raised",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EACCES: "choose a directory that this user may read and write",
}


def to_wire(error: BaseException) -> tuple[str, str]:
    """Return ``error`` as (class name, message), to be sent to other ranks."""
    error = _exhausted(error)
    name = type(error).__name__
    if isinstance(error, CheckpointError):
        return name, str(error)
    if not isinstance(error, OSError):
        return "CheckpointError", f"{name}: {error}"
    advice = _ADVICE.get(error.errno or 0)
    if error.errno == errno.ENOENT and error.filename is None and len(error.args) == 2:
        advice = "if the working directory was removed, change to another one"
    return "StorageError", f"{name}: {error}" + ("" if advice is None else f"; {advice}")


def in_words(wire: tuple[str, str]) -> str:
    """Return ``DigestMismatch: model/x.pt ...``; errors of other libraries already name their class."""
    name, message = wire
    return message if name in ("CheckpointError", "StorageError") else f"{name}: {message}"


def from_wire(name: str, message: str, rank: int) -> CheckpointError:
    """Return the exception that ``rank`` raised, as the same class, with the rank before its message."""
    classes = {cls.__name__: cls for cls in _tree(CheckpointError)}
    return classes.get(name, CheckpointError)(f"on rank {rank}: {message}")


def as_checkpoint_errors(function: FunctionT) -> FunctionT:
    """Decorate a public function: it runs in the context `translated`."""

    @wraps(function)
    def public(*args: Any, **kwargs: Any) -> Any:
        with translated():
            return function(*args, **kwargs)

    return untraced(cast("FunctionT", public))


@contextmanager
def translated() -> Iterator[None]:
    """Context in which all errors that come out are CheckpointErrors, and torch's modes are neutral.

    Errors of the system, of a store, and exhausted memory or threads are translated. Inside, errors stay what they
    are: a reader must be able to tell a missing file from a full disk. Modes that the caller set for its thread are
    away meanwhile, see `nxd_ckpt.surroundings`.
    """
    try:
        with neutral():
            yield
    except CheckpointError:
        raise
    except RecursionError as error:
        raise UnsupportedState(f"state or content that is nested too deeply, or contains itself ({error})") from error
    except (OSError, MemoryError, RuntimeError) as error:
        exhausted = _exhausted(error)
        if exhausted is not error:
            raise exhausted from error
        if not isinstance(error, OSError):
            raise
        storage_error = StorageError(to_wire(error)[1])
        storage_error.errno = error.errno
        raise storage_error from error
    except EOFError as error:  # a file became shorter while it was read
        raise MalformedFile(str(error)) from error
