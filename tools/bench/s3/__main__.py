"""What S3 clients cost a process, against a server on this machine that costs next to nothing.

    python -m tools.bench.s3 --mib 1024 --rounds 7

Each client has a process of its own, and takes a turn at an upload and at a download in every round, in an order that
changes from round to round. Of each: processor seconds per GiB of its process, all threads included, and GiB/s. Needs
a C compiler, boto3, awscrt and s3torchconnector; who is not installed is left out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import shlex
import statistics
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from nxd_ckpt.formats.crc32 import crc32
from tools.bench import host
from tools.bench.s3.clients import CLIENTS

GIB = 2**30
WAYS = ("put", "get")


class Turn(NamedTuple):
    """Seconds by the clock, and of all processors that the client's process took."""

    elapsed: float
    processor: float


@contextmanager
def sink(pattern: Path) -> Iterator[tuple[int, int]]:
    """The server, compiled and running: its port and its process id."""
    program = pattern.with_name("sink")
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[:1]
    source = Path(__file__).with_name("sink.c")
    subprocess.run([*compiler, "-O2", "-pthread", "-o", str(program), str(source)], check=True)
    with subprocess.Popen([str(program), str(pattern)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process.pid
        finally:
            process.terminate()


def serve(name: str, port: int, pattern: Path, files: int, pipe: Connection) -> None:
    """The client ``name``, in a process of its own: does what it is told, and says what it cost."""
    source = memoryview(host.pages(pattern.stat().st_size))
    target = memoryview(host.pages(len(source)))
    pattern.open("rb", buffering=0).readinto(source)
    keys = [f"file{number}-{len(source)}" for number in range(files)]
    try:
        client = CLIENTS[name](port, crc32(source))
        client.put(keys, source)
        client.get(keys, target)
        pipe.send("" if source == target else "other bytes than the server's")
    except ImportError as error:
        pipe.send(str(error))
        return
    while way := pipe.recv():
        before, started = _processor(), time.monotonic()
        getattr(client, way)(keys, source if way == "put" else target)
        pipe.send(Turn(time.monotonic() - started, _processor() - before))
    os._exit(0)  # the CRT's threads may hold up an exit


def _processor(pid: int | None = None) -> float:
    if pid is None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rounds(pipes: dict[str, Connection], count: int, server: int) -> Iterator[tuple[str, str, Turn, float]]:
    """(client, way, what it cost, the server's processor seconds) of every turn."""
    names = list(pipes)
    for number in range(count):
        first = number % len(names)
        order = names[first:] + names[:first]
        for name in order[::-1] if number % 2 else order:
            for way in WAYS:
                before = _processor(server)
                pipes[name].send(way)
                yield name, way, pipes[name].recv(), _processor(server) - before


def _row(turns: list[tuple[Turn, float]], gib: float) -> str:
    cost = sorted(turn.processor / gib for turn, _ in turns)
    speed = statistics.median(gib / turn.elapsed for turn, _ in turns)
    server = statistics.median(seconds for _, seconds in turns) / gib
    return f"{statistics.median(cost):.3f} ({cost[0]:.3f} - {cost[-1]:.3f}) | {speed:.2f} | {server:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="bytes of an upload and of a download (default: 1024)")
    parser.add_argument("--file-mib", type=int, default=128, help="bytes of a file (default: 128)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each that count (default: 7)")
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS), help="who takes part")
    args = parser.parse_args()
    files = max(1, args.mib // args.file_mib)
    gib = files * args.file_mib / 1024
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="bench_s3_") as directory, ExitStack() as stack:
        pattern = Path(directory, "pattern")
        pattern.write_bytes(os.urandom(args.file_mib * 2**20))
        port, server = stack.enter_context(sink(pattern))
        pipes: dict[str, Connection] = {}
        for name in args.clients:
            pipe, other = fork.Pipe()
            process = fork.Process(target=serve, args=(name, port, pattern, files, other), daemon=True)
            process.start()
            other.close()
            if missing := pipe.recv():
                print(f"{name}: left out: {missing}")
            else:
                pipes[name] = pipe
        found: dict[tuple[str, str], list[tuple[Turn, float]]] = {}
        for name, way, turn, seconds in rounds(pipes, args.rounds, server):
            found.setdefault((way, name), []).append((turn, seconds))
        print(f"{files} files of {args.file_mib} MiB, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}")
        print("| | | processor s/GiB | GiB/s | server's s/GiB |\n|---|---|---|---|---|")
        for way in WAYS:
            for name in pipes:
                print(f"| {way} | {name} | {_row(found[way, name], gib)} |")
        for pipe in pipes.values():
            pipe.send("")


if __name__ == "__main__":
    main()
