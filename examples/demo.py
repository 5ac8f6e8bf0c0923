"""Train, be killed in the middle of a save, resume: and end with the same model, bit for bit.

Runs ``train_llama.py`` three times on this machine, four processes each (data parallel 2 x tensor parallel 2) in
CPU-XLA emulation: without interruption; with one process killed while a checkpoint is being written; and once more
with the same command as the killed run. The exit code is 0 only if the resumed run equals the uninterrupted one in
every bit.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from demo_job import RANKS, Job, RunFailed, kill_during_save, step_of

import nxd_ckpt
from nxd_ckpt.formats.tensors import iter_tensors

LEGEND = """
stall: how long save_checkpoint held the training loop, to copy the state into host memory (at the first save of
       a run also to claim the directory and reserve that memory).
write: seconds that the slowest rank took to bring its files to disk, in the background.
bytes: of all ranks' files. Losses are shown rounded, but compared in every bit.
"""


def steps_that_differ(expected: Mapping[int, str], actual: Mapping[int, str], first: int, last: int) -> list[int]:
    """Steps from ``first`` to ``last`` whose losses are not equal in every bit, or missing in either run."""
    steps = range(first, last + 1)
    return [step for step in steps if expected.get(step) is None or expected[step] != actual.get(step)]


def tensors_that_differ(expected: nxd_ckpt.Checkpoint, actual: nxd_ckpt.Checkpoint) -> tuple[int, list[str]]:
    """All ranks' model and optimizer state: how many tensors were compared, and which differ in value or dtype."""
    count, different = 0, []
    for rank in range(expected.topology.world_size):
        for part in ("model_state", "optimizer_state"):
            first = dict(iter_tensors(getattr(expected, part)(rank)))
            second = dict(iter_tensors(getattr(actual, part)(rank)))
            for path in [*first, *(path for path in second if path not in first)]:
                count += 1
                if path not in first or path not in second or not _same(first[path], second[path]):
                    different.append(f"rank {rank}: {part}: {'/'.join(map(str, path))}")
    return count, different


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


def table(reference: Job, killed: Job, resumed: Job, steps: int) -> list[str]:
    """One line a step: the losses of the three runs, and what the step's checkpoint cost where one was saved."""
    lines = [
        "                      loss                           checkpoint",
        "step   uninterrupted   killed  resumed   same    stall ms   write s       bytes",
    ]
    runs = [reference.losses(), killed.losses(), resumed.losses()]
    for step in range(1, steps + 1):
        present = [losses[step] for losses in runs if step in losses]
        same = "yes" if len(present) > 1 and len(set(present)) == 1 else "NO"
        whole, killed_, resumed_ = (f"{float.fromhex(run[step]):.4f}" if step in run else "" for run in runs)
        cost = _cost(resumed if resumed_ else killed, step)
        lines.append(f"{step:4}   {whole:>13}  {killed_:>7}  {resumed_:>7}   {same:>4}{cost}")
    return lines


def _cost(job: Job, step: int) -> str:
    stall, timings = job.stalls().get(step), job.saves.get(f"step_{step}")
    if stall is None or timings is None:
        return ""
    return f"    {1000 * stall:8.1f}  {timings['write_seconds']:8.3f}  {int(timings['bytes']):10,}"


def run(work: Path, steps: int, save_every: int, layers: int) -> bool:
    """The three runs and the comparison, told on stdout; whether everything is equal."""
    arguments = ["--steps", str(steps), "--save_every", str(save_every), "--layers", str(layers), "--dropout", "0.1"]
    first, second = work / "checkpoints_uninterrupted", work / "checkpoints_killed"

    print(f"[1/3] {steps} steps without interruption ...", flush=True)
    with Job("uninterrupted", work, first, arguments) as reference:
        reference.must_succeed()
    print(f"      done in {reference.seconds:.0f} s\n")

    print("[2/3] The same again, but rank 2 is killed (SIGKILL) while it writes a checkpoint ...", flush=True)
    with Job("killed", work, second, arguments) as killed:
        kill = kill_during_save(killed, nxd_ckpt.Topology(dp=2, tp=2, rank=2), complete=2)
        killed.wait()
    lost = f"step_{step_of(kill.latest) + save_every}"
    complete = killed.complete_tags()
    if complete[-1] != kill.latest:
        raise RunFailed(f"{complete[-1]} is visible, although rank 2 was killed before it had written its part")
    print(
        f"      It died during the save of {lost} when {kill.finished_ranks} of {RANKS} ranks had finished their part: "
        f"without\n      rank 2's, {lost} never became visible. Complete are {', '.join(complete)}.\n"
    )

    print("[3/3] Started again, with the same command ...", flush=True)
    with Job("resumed", work, second, arguments) as resumed:
        resumed.must_succeed()
    tag = next(resumed.records("start"))["resumed_from"]
    print(f"      It took up {tag} and trained on to step {steps}.\n")
    if tag != kill.latest:
        raise RunFailed(f"the resumed run took up {tag}, expected the latest complete checkpoint, {kill.latest}")

    print(*table(reference, killed, resumed, steps), sep="\n")
    print(LEGEND)
    return report(reference, killed, resumed, step_of(tag), steps)


def report(reference: Job, killed: Job, resumed: Job, resumed_step: int, steps: int) -> bool:
    """Say what was compared and what differs; whether nothing does."""
    expected = reference.losses()
    before = steps_that_differ(expected, killed.losses(), 1, resumed_step)
    after = steps_that_differ(expected, resumed.losses(), resumed_step + 1, steps)
    last = reference.complete_tags()[-1]
    count, tensors = tensors_that_differ(
        nxd_ckpt.open_checkpoint(reference.checkpoints, last), nxd_ckpt.open_checkpoint(resumed.checkpoints, last)
    )
    for name, steps_found in (("before the kill", before), ("after the resume", after)):
        if steps_found:
            print(f"DIFFERENT: the losses {name}, at steps {steps_found}")
    for where in tensors[:10]:
        print(f"DIFFERENT: {last}: {where}")
    if before or after or tensors:
        print("FAILED: the resumed run is not the uninterrupted one.")
        return False
    print(
        f"Rank 2 was killed in the middle of a save; the run resumed from step_{resumed_step}. All "
        f"{steps - resumed_step} losses after that\nequal the uninterrupted run's in every bit, and so do the {count} "
        f"tensors of all ranks in the last checkpoint, {last}."
    )
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save_every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep checkpoints and logs")
    options = parser.parse_args()
    started = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="nxd_ckpt_demo_"))
    print(
        f"nxd_ckpt demo: a {options.layers}-layer Llama learns Python's standard library on {RANKS} processes (data "
        f"parallel 2 x tensor\nparallel 2, ZeRO-1, bf16 with fp32 master weights). A checkpoint every "
        f"{options.save_every} steps, saved in the background.\n"
    )
    equal = False
    try:
        equal = run(work, options.steps, options.save_every, options.layers)
    except RunFailed as error:
        print(f"FAILED: {error}")
    finally:
        if equal and not options.keep:
            shutil.rmtree(work)
        else:
            print(f"Checkpoints and logs: {work}")
    print(f"{time.monotonic() - started:.0f} s")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
