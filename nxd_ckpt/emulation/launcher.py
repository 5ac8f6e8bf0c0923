"""Launcher of the processes of an emulated world, which also makes them end together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from nxd_ckpt.emulation.world import PORT_VARIABLE

_POLL_SECONDS = 0.05


def free_ports() -> tuple[int, int]:
    """Return two TCP ports on this host that nothing listens on at this instant."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


def rank_environment(rank: int, size: int, ports: tuple[int, int]) -> dict[str, str]:
    """This process' environment, with what tells a child that it is ``rank`` of ``size``.

    ``ports`` are those of the script's own rendezvous, ``MASTER_PORT``, and of the emulation's. All ranks count as
    one host. What the user set for ``OMP_NUM_THREADS`` and ``XLA_FLAGS`` stays.
    """
    # Compiling is most of an emulated run; without LLVM's optimisations it takes a sixth of the time.
    environment = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"} | dict(os.environ)
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may not resolve
    return environment | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]),
        PORT_VARIABLE: str(ports[1]),
        "PJRT_DEVICE": "CPU",
    }


def launch(nproc: int, command: Sequence[str], *, grace: float = 5.0) -> int:
    """Run ``command`` (a script or ``-m module``, and its arguments) in ``nproc`` emulated processes.

    Standard streams pass through. SIGINT and SIGTERM are forwarded; a second one kills. When a rank fails,
    the others get ``grace`` seconds to end by themselves, as many again after SIGTERM, then SIGKILL. If this
    process is killed, the ranks get SIGTERM.

    Returns:
        The exit code of the first rank that failed (128 + signal number when a signal ended it), else 0.
    """
    ports = free_ports()
    lifeline, alive_end = os.pipe()  # its far end closes when this process ends, however it ends
    reports, report_end = os.pipe()
    arguments = [sys.executable, "-m", "nxd_ckpt.emulation.child", str(lifeline), str(report_end), *command]
    ranks = [
        subprocess.Popen(
            arguments,
            env=rank_environment(rank, nproc, ports),
            pass_fds=[lifeline, report_end],
            start_new_session=True,  # a terminal's Ctrl-C arrives once, from here
        )
        for rank in range(nproc)
    ]
    os.close(lifeline)
    os.close(report_end)
    previous = _forward_signals(ranks)
    try:
        return _wait(ranks, grace, reports)
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        for process in ranks:
            process.kill()
        os.close(alive_end)
        os.close(reports)


def _forward_signals(ranks: Sequence[subprocess.Popen[bytes]]) -> dict[int, signal._HANDLER]:
    forwarded = False

    def forward(signum: int, _frame: FrameType | None) -> None:
        nonlocal forwarded
        _signal_all(ranks, signal.SIGKILL if forwarded else signum)
        forwarded = True

    return {signum: signal.signal(signum, forward) for signum in (signal.SIGINT, signal.SIGTERM)}


def _wait(ranks: Sequence[subprocess.Popen[bytes]], grace: float, reports: int) -> int:
    os.set_blocking(reports, False)
    while (failed := _first_failure(ranks, reports)) is None:
        if _all_ended(ranks):
            return 0
        time.sleep(_POLL_SECONDS)
    rank, code = failed
    print(f"nxd_ckpt.emulation: rank {rank} ended with exit code {code}; ending the others", file=sys.stderr)
    for escalation in (None, signal.SIGTERM, signal.SIGKILL):
        if escalation is not None:
            _signal_all(ranks, escalation)
        deadline = time.monotonic() + grace
        while not _all_ended(ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    return code


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]], reports: int) -> tuple[int, int] | None:
    """Return (rank, exit code), once a rank has ended.

    Other ranks fail because of the first, and may end sooner: a rank that a signal ended, and the rank that reported
    first, come before them.
    """
    failed = [(rank, code) for rank, process in enumerate(ranks) if (code := process.poll())]
    if not failed:
        return None
    for rank, code in failed:
        if code < 0:
            return rank, 128 - code
    with suppress(BlockingIOError):
        if first := os.read(reports, 4096).partition(b"\n")[0]:
            rank, code = map(int, first.split())
            return rank, code
    return failed[0]


def _all_ended(ranks: Sequence[subprocess.Popen[bytes]]) -> bool:
    return all(process.poll() is not None for process in ranks)


def _signal_all(ranks: Sequence[subprocess.Popen[bytes]], signum: int) -> None:
    for process in ranks:
        process.send_signal(signum)
