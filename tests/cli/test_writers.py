"""What all commands that write have in common: a line of success, JSON, a dry run, and where they refuse to write."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nxd_ckpt import Partition, convert, open_checkpoint, save_checkpoint
from nxd_ckpt.cli.main import COMMANDS
from nxd_ckpt.errors import InvalidArgument
from tests.cli.conftest import Outcome, Run
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import save_job, write_config
from tests.real_disks.server import mounted_disk
from tests.support.mounts import needs_mounts

WRITERS = {
    "cp": ["cp", "{run}/zero1", "{out}"],
    "tag": ["convert", "{run}/zero1", "{out}", "--to", "tag", "--dp", "3"],
    "tag, unsharded": ["convert", "{run}/zero1", "{out}", "--to", "tag", "--optimizer-form", "zero1_full"],
    "tag of a model": ["convert", "{models}/hf", "{out}", "--to", "tag", "--names", "nxd"],
    "tag of DCP": ["convert", "{models}/dcp", "{out}", "--to", "tag"],
    "hf": ["convert", "{models}/run/step_1", "{out}", "--to", "hf", "--config", "{models}/config"],
    "dcp": ["convert", "{run}/zero1", "{out}", "--to", "dcp"],
    "files": ["convert", "{run}/zero1", "{out}", "--to", "files"],
    "tar": ["convert", "{run}/zero1", "{out}.tar"],
    "dcp of a model": ["convert", "{models}/hf", "{out}", "--to", "dcp", "--names", "hf"],
}
"""A command line of each."""

LOOKERS = {"list", "inspect", "verify", "diff", "doctor", "report", "watch", "selftest"}
KEEPERS = {"pin", "unpin", "prune", "rm"}
"""They say which tags of a directory stay, and have no output."""


@pytest.fixture(scope="module")
def models(examples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What conversions from and to other libraries start from."""
    folder, job = tmp_path_factory.mktemp("models"), Job(Model())
    save_job(folder / "run", job, job.model.state())
    write_config(folder / "config", job.model.config)
    save_file(job.model.state(), write_config(folder / "hf", job.model.config).parent / "model.safetensors")
    convert(examples / "zero1", folder / "dcp", to="dcp", durable=False)
    return folder


class Writing:
    """Runs one of :data:`WRITERS` on an output of the test's own."""

    def __init__(self, run: Run, command: str, examples: Path, models: Path, out: Path) -> None:
        self._run, self._command, self.out = run, command, out
        self._places = {"run": examples, "models": models, "out": out}

    def __call__(self, *more: str) -> Outcome:
        arguments = [argument.format(**self._places) for argument in WRITERS[self._command]]
        return self._run(*arguments, *more)

    @property
    def left(self) -> list[str]:
        """What it left where the output belongs, hidden files too."""
        return sorted(path.name for path in self.out.parent.iterdir())


@pytest.fixture(params=WRITERS)
def writing(request: pytest.FixtureRequest, run: Run, examples: Path, models: Path, tmp_path: Path) -> Writing:
    return Writing(run, request.param, examples, models, tmp_path / "made")


def test_every_command_that_writes_is_tried_here() -> None:
    """All commands but those that only look, or keep and remove tags."""
    assert {command.name for command in COMMANDS} == {words[0] for words in WRITERS.values()} | LOOKERS | KEEPERS


def test_a_dry_run_says_what_would_be_and_writes_nothing(writing: Writing) -> None:
    """For people and as JSON; then the command itself does it, and says so, in other words."""
    would, document = writing("--dry-run"), writing("--dry-run", "--json").document
    assert [] == writing.left
    assert (0, "", True) == (would.code, would.err, "would be" in would.out)
    assert document["dry_run"] is True

    done = writing()

    assert (0, "", False) == (done.code, done.err, "would be" in done.out)
    assert str(writing.out) in done.out
    assert all(len(line) < 200 for line in done.out.splitlines())
    assert [] != writing.left


@needs_mounts("/dev/fuse")
@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("more", [[], pytest.param(["--overwrite"], marks=pytest.mark.soak)])
def test_what_was_reported_lasts(
    command: str, more: list[str], run: Run, examples: Path, models: Path, tmp_path: Path
) -> None:
    """Though the power fails just then: in directories that were not there, and in place of what was."""
    with mounted_disk(tmp_path / "disk") as disk:
        writing = Writing(run, command, examples, models, disk.path / "not" / "there" / "made")
        if more:
            writing("--quiet")
        with disk.losing_what_is_not_synced():
            assert Outcome(0, "", "") == writing("--quiet", *more)


def test_an_existing_output_needs_overwrite(writing: Writing) -> None:
    """The message names the option, as the command spells it, and no keyword of Python. With ``--quiet`` nothing is
    said if all is well; the document has the same keys as that of a dry run."""
    planned = writing("--dry-run", "--json").document
    assert Outcome(0, "", "") == writing("--quiet")
    again = writing()
    assert 1 == again.code
    assert "pass --overwrite" in again.err
    assert "overwrite=" not in again.err
    done = writing("--overwrite", "--json").document
    assert (planned.keys(), False) == (done.keys(), done["dry_run"])


@pytest.mark.parametrize("below", [("copy",), ("model", "copy")], ids="/".join)
def test_nothing_is_made_inside_a_tag(
    run: Run, copied: Path, examples: Path, models: Path, below: tuple[str, ...]
) -> None:
    """At any depth: whoever copies or removes the tag would take it along."""
    before = sorted(copied.rglob("*"))
    for command in WRITERS:
        outcome = Writing(run, command, examples, models, copied.joinpath("z_plain", *below))()
        assert (1, command, True) == (outcome.code, command, f"inside the checkpoint {copied}/z_plain" in outcome.err)
    assert before == sorted(copied.rglob("*"))


@pytest.mark.parametrize("below", ["", "deeper/run"])
def test_nothing_is_saved_inside_a_tag(tmp_path: Path, below: str) -> None:
    """A save into a tag, taken for the directory, is refused and leaves nothing there."""
    save_checkpoint(tmp_path / "run", "step_1", {"w": torch.ones(1)})
    before = sorted(tmp_path.rglob("*"))
    complaint = f"inside, the checkpoint {tmp_path}/run/step_1, so .* Pass the directory of the tags"
    with pytest.raises(InvalidArgument, match=complaint):
        save_checkpoint(tmp_path / "run" / "step_1" / below, "step_2", {"w": torch.ones(1)})
    assert before == sorted(tmp_path.rglob("*"))


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_more_tensor_parallel_ranks_for_what_nothing_cuts(run: Run, tmp_path: Path, is_cut: bool) -> None:
    """Each of them holds the whole model then: the command says so, and which option would cut it."""
    cuts = {"w": Partition(0, num_partitions=1)} if is_cut else {}
    save_checkpoint(tmp_path / "run", "step_1", {"w": torch.arange(6.0)}, partitions=cuts)

    outcome = run("convert", "--to", "tag", tmp_path / "run" / "step_1", tmp_path / "out", "--tp", "3")

    assert 0 == outcome.code
    assert is_cut != ("each of the 3 will hold the whole model" in outcome.err)
    assert is_cut != ("pass --partitions" in outcome.err)
    assert [2 if is_cut else 6] == list(open_checkpoint(tmp_path, "out").model_state(rank=2)["w"].shape)


@pytest.mark.parametrize("source", ["hf", "dcp", "plain.pt"])
def test_whole_copies_of_what_another_program_saved(run: Run, models: Path, tmp_path: Path, source: str) -> None:
    """A warning says that nothing was cut, which a tag gets too."""
    if source == "plain.pt":
        torch.save({"w": torch.arange(6.0)}, tmp_path / source)
    place = tmp_path if source == "plain.pt" else models

    outcome = run("convert", "--to", "tag", "--names", "own", place / source, tmp_path / "out", "--tp", "2")

    assert (0, True) == (outcome.code, "each of the 2 will hold the whole model" in outcome.err)


@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_whole_copies_are_exported_as_one(run: Run, models: Path, tmp_path: Path, form: str) -> None:
    """The tag records that its ranks hold whole tensors, and so does the export."""
    assert 0 == run("convert", models / "hf", tmp_path / "copies", "--to", "tag", "--names", "own", "--tp", "2").code

    names = ["--names", "hf"] if form == "dcp" else []
    config = models / "hf" / "config.json"
    assert 0 == run("convert", tmp_path / "copies", tmp_path / "out", "--to", form, *names, "--config", config).code

    assert 0 == run("diff", tmp_path / "out", models / "hf").code


@pytest.mark.parametrize("parts", [{}, {"num_partitions": 2}], ids=["", "num_partitions"])
def test_cuts_of_what_another_program_saved(run: Run, tmp_path: Path, parts: dict[str, int]) -> None:
    """Cuts are written by the help's example: into as many parts as the tag has tensor-parallel ranks, said or not."""
    torch.save({"w": torch.arange(6.0)}, tmp_path / "plain.pt")
    (tmp_path / "cuts.json").write_text(json.dumps({"w": {"partition_dim": 0, **parts}}))
    words = ("convert", "--to", "tag", tmp_path / "plain.pt", tmp_path / "out", "--partitions", tmp_path / "cuts.json")

    assert 0 == run(*words, "--tp", "2").code
    assert [3.0, 4.0, 5.0] == open_checkpoint(tmp_path, "out").model_state(rank=1)["w"].tolist()


def test_more_parts_than_ranks_are_refused(run: Run, tmp_path: Path) -> None:
    """The error says how many there may be; its text is no repr."""
    torch.save({"w": torch.arange(6.0)}, tmp_path / "plain.pt")
    (tmp_path / "cuts.json").write_text('{"w": {"partition_dim": 0, "num_partitions": 2}}')

    words = ("convert", "--to", "tag", tmp_path / "plain.pt", tmp_path / "out", "--partitions", tmp_path / "cuts.json")
    outcome = run(*words, "--tp", "3")

    assert (1, True) == (outcome.code, "w is cut into 2 partitions, but of 1 tensor-parallel ranks" in outcome.err)
    assert "Partition(" not in outcome.err
