"""A training run is killed in the middle of a save, resumes, and ends with the same model, bit for bit; then the sizes
change, and then the way in which it is parallel.

Runs ``train_llama.py`` on this machine, in CPU-XLA emulation with four processes: three times on data parallel 2 x
tensor parallel 2 (without interruption; with one process killed while it writes a checkpoint; and with the same command
again), then on data parallel 4 x tensor parallel 1, from a checkpoint of the last run. From the same checkpoint
``train_llama_fsdp2.py`` goes on, with FSDP2 x tensor parallelism and without torch-xla, and ``train_llama.py`` from one
of its checkpoints. The exit code is 0 only if the resumed run equals the uninterrupted one in every bit, and each run
that another one continues starts from its tensors, bit for bit, and has the same losses up to rounding.

With ``--store s3`` checkpoints go to an S3 server on this machine, which is started for the demo.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from demo_compare import (
    LOSS_TOLERANCE,
    fsdp2_tensors_that_differ,
    global_tensors_that_differ,
    relative_differences,
    steps_that_differ,
    tensors_that_differ,
)
from demo_job import FSDP2, NXD, RANKS, Job, RunFailed, kill_during_save, step_of
from global_tensors import ReplicasDiffer

import nxd_ckpt
from nxd_ckpt import copy_checkpoint

SIZES = nxd_ckpt.Topology(dp=2, tp=2)
OTHER_SIZES = nxd_ckpt.Topology(dp=4, tp=1)
GLOBAL_BATCH = 8  # sequences of all data-parallel ranks
KEPT = 3  # checkpoints
# Of the MLPs' 346 features, a tensor-parallel rank has 173: ZeRO-1 pads them for two replicas, and 346 for four.
INNER = 346

LEGEND = """
stall: how long save_checkpoint held the training loop, to copy the state into host memory (at the first save of
       a run also to claim the directory and reserve that memory).
write: seconds that the slowest rank took to bring its files to disk, in the background.
bytes: of all ranks' files. Losses are shown rounded, but compared in every bit.
"""


@dataclass(frozen=True)
class Plan:
    """What is trained, and when it is saved."""

    steps: int
    save_every: int
    layers: int

    @property
    def crossing(self) -> int:
        """The step that the run on other sizes starts from: the oldest checkpoint that is kept to the end."""
        return (self.steps // self.save_every - (KEPT - 1)) * self.save_every

    def arguments(self, sizes: nxd_ckpt.Topology) -> list[str]:
        """For train_llama.py. Dropout ends at the crossing: ranks draw their own, so other sizes drop other values."""
        options = {
            "steps": self.steps,
            "save_every": self.save_every,
            "num_kept_ckpts": KEPT,
            "layers": self.layers,
            "inner": INNER,
            "dropout": 0.1,
            "dropout_steps": self.crossing,
            "tensor_parallel_size": sizes.tp,
            "batch_size": GLOBAL_BATCH // sizes.dp,
        }
        return [word for name, value in options.items() for word in (f"--{name}", str(value))]


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


def run(work: Path, place: str, plan: Plan) -> bool:
    """The runs and their comparisons, told on stdout; whether everything is equal.

    Checkpoints go below ``place``, a directory or URL.
    """
    first, second = f"{place}/checkpoints_uninterrupted", f"{place}/checkpoints_killed"
    arguments = plan.arguments(SIZES)

    print(f"[1/5] {plan.steps} steps without interruption, beside the next two runs ...\n", flush=True)
    with Job("uninterrupted", work, first, arguments) as reference:
        print("[2/5] The same again, but rank 2 is killed (SIGKILL) while it writes a checkpoint ...", flush=True)
        with Job("killed", work, second, arguments) as killed:
            kill = kill_during_save(killed, nxd_ckpt.Topology(dp=2, tp=2, rank=2), complete=2)
            killed.wait()
        lost = f"step_{step_of(kill.latest) + plan.save_every}"
        complete = killed.complete_tags()
        if complete[-1] != kill.latest:
            raise RunFailed(f"{complete[-1]} is visible, although rank 2 was killed before it had written its part")
        print(
            f"      It died during the save of {lost} when {kill.finished_ranks} of {RANKS} ranks had finished their "
            f"part: without\n      rank 2's, {lost} never became visible. Complete are {', '.join(complete)}.\n"
        )

        print("[3/5] Started again, with the same command ...", flush=True)
        with Job("resumed", work, second, arguments) as resumed:
            resumed.must_succeed()
        tag = next(resumed.records("start"))["resumed_from"]
        print(f"      It resumed from {tag} and trained on to step {plan.steps}.\n")
        reference.must_succeed()
    if tag != kill.latest:
        raise RunFailed(f"the resumed run began with {tag}, expected the latest complete checkpoint, {kill.latest}")

    print(*table(reference, killed, resumed, plan.steps), sep="\n")
    print(LEGEND)
    same = report(reference, killed, resumed, step_of(tag), plan.steps)
    return same and go_elsewhere(work, place, plan, reference, resumed)


def go_elsewhere(work: Path, place: str, plan: Plan, reference: Job, resumed: Job) -> bool:
    """A checkpoint of ``resumed`` on other sizes, and under FSDP2, whose next one goes back to its own sizes. Told on
    stdout; whether all of it is the same training."""
    start, back = plan.crossing, plan.crossing + plan.save_every
    fsdp2_sizes = f"FSDP{SIZES.dp} x TP{SIZES.tp}"

    def going_on(name: str, before: Job, step: int, sizes: nxd_ckpt.Topology, module: Sequence[str] = NXD) -> Job:
        arguments = [*plan.arguments(sizes), "--resume_from", before.checkpoints, "--loading_step", str(step)]
        return Job(name, work, f"{place}/checkpoints_{name}", arguments, module)

    print(f"\n[4/5] step_{start}, saved on {_short(SIZES)}, is resumed on {_short(OTHER_SIZES)} ...", flush=True)
    with going_on("crossed", resumed, start, OTHER_SIZES) as crossed:
        print("[5/5] Beside that it is taken up by FSDP2 x tensor parallelism, without torch-xla ...", flush=True)
        with going_on("fsdp2", resumed, start, SIZES, module=FSDP2) as fsdp2:
            fsdp2.must_succeed()
        # FSDP2's one fp32 parameter becomes the master weight, and its rounding the bf16 weight beside that.
        print(f"      Its step_{back} is resumed on {_short(SIZES)} again ...", flush=True)
        with going_on("returned", fsdp2, back, SIZES) as returned:
            returned.must_succeed()
        crossed.must_succeed()

    # What a run saved at once, under the same tag, is what it had loaded.
    given, live = _local(work, resumed, f"step_{start}"), _local(work, returned, f"step_{back}")
    found = global_tensors_that_differ(given, SIZES, _local(work, crossed, f"step_{start}"), OTHER_SIZES)
    same = [report_crossing(_short(OTHER_SIZES), plan.steps, start, *found, reference.losses(), crossed.losses())]
    for where, step, directory, job in ((fsdp2_sizes, start, given, fsdp2), (_short(SIZES), back, live, returned)):
        found = fsdp2_tensors_that_differ(directory, SIZES, nxd_ckpt.open_checkpoint(fsdp2.checkpoints, f"step_{step}"))
        same.append(report_crossing(where, plan.steps, step, *found, reference.losses(), job.losses()))
    print(ELSEWHERE)
    return all(same)


def _local(work: Path, job: Job, tag: str) -> Path:
    """The tag's directory; a copy of what lies in a store, whose files are to be read without nxd_ckpt."""
    if job.storage.renames:
        return Path(job.checkpoints) / tag
    copy_checkpoint(f"{job.checkpoints}/{tag}", work / "copies" / job.name / tag)
    return work / "copies" / job.name / tag


def report_crossing(
    where: str,
    steps: int,
    start: int,
    count: int,
    tensors: list[str],
    expected: Mapping[int, str],
    actual: Mapping[int, str],
) -> bool:
    """Say what was compared of a run that went on elsewhere from the step ``start``, and what differs; whether nothing
    does, but for rounding."""
    differences = relative_differences(expected, actual, start + 1, steps)
    print(f"\nstep   {_short(SIZES):>13}  {where:>11}   relative difference")
    for step, difference in differences.items():
        losses = [float.fromhex(run.get(step, "nan")) for run in (expected, actual)]
        print(f"{step:4}   {losses[0]:13.4f}  {losses[1]:11.4f}   {difference:19.1e}")
    print()
    wrong = [step for step, difference in differences.items() if difference > LOSS_TOLERANCE]
    for name in tensors[:10]:
        print(f"DIFFERENT: step_{start}: {name}")
    if wrong:
        print(f"DIFFERENT: the losses on {where}, by more than {LOSS_TOLERANCE:.0e}, at steps {wrong}")
    if tensors or wrong:
        print(f"FAILED: the run on {where} is not the same training.")
        return False
    print(
        f"On {where} it started from the same {count} global tensors, in every bit, and its losses equal the "
        f"uninterrupted\nrun's to {LOSS_TOLERANCE:.0e} of their value."
    )
    return True


ELSEWHERE = """
The global tensors (weights, moments, fp32 master weights, steps) are put together by hand from the ranks' files;
FSDP2's parameters are the master weights. Elsewhere sums are taken in another order, and each is rounded to bf16, by up
to 4e-03 of its value, or not at all.
"""


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


def _short(sizes: nxd_ckpt.Topology) -> str:
    return f"dp{sizes.dp} x tp{sizes.tp}"


@contextmanager
def store(kind: str) -> Iterator[str]:
    """A URL in an S3 server on this machine; training finds it, and the credentials, as it would find AWS's."""
    sys.path.append(str(Path(__file__).parents[1]))  # the server is the tests', and no part of the package
    from tests.support.s3_server import S3Server

    with S3Server() as server:
        server.make_bucket("demo")
        given = server.options
        os.environ |= {
            "AWS_ACCESS_KEY_ID": given["key"],
            "AWS_SECRET_ACCESS_KEY": given["secret"],
            "AWS_ENDPOINT_URL": given["endpoint_url"],
            "AWS_DEFAULT_REGION": given["client_kwargs"]["region_name"],
        }
        print(f"Checkpoints go to {kind}://demo, on a server at {given['endpoint_url']}.\n")
        yield f"{kind}://demo"
        received, sent = (sum(counted.values()) / 2**20 for counted in (server.received, server.sent))
        print(
            f"The server answered {sum(server.requests.values()):,} requests: {received:,.0f} MiB came, "
            f"{sent:,.0f} MiB went, the looks of this demo included."
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save_every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--store", choices=["s3"], help="save to a store rather than to a directory")
    parser.add_argument("--keep", action="store_true", help="keep checkpoints and logs")
    options = parser.parse_args()
    plan = Plan(options.steps, options.save_every, options.layers)
    started = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="nxd_ckpt_demo_"))
    print(
        f"nxd_ckpt demo: a {plan.layers}-layer Llama learns Python's standard library on {RANKS} processes (data "
        f"parallel 2 x tensor\nparallel 2, ZeRO-1, bf16 with fp32 master weights). A checkpoint every "
        f"{plan.save_every} steps, saved in the background.\n"
    )
    equal = False
    try:
        with store(options.store) if options.store else nullcontext(str(work)) as place:
            equal = run(work, place, plan)
    except (RunFailed, ReplicasDiffer) as error:
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
