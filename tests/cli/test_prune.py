"""``nxd-ckpt pin``, ``unpin``, ``prune`` and ``rm``: which tags stay."""

from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer, list_checkpoints, prune
from nxd_ckpt.core.retention_rules import Every, Last
from nxd_ckpt.errors import DirectoryInUse, UnsafePickle
from nxd_ckpt.prune import pin_checkpoint, prune_checkpoints
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.verify import Reading, read_whole
from tests.cli.conftest import Run
from tests.protocol.states import visible_tags
from tests.support.damage import flip


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """A directory with four tags, of step 1 to 4, and a loss that rises and falls."""
    with Checkpointer(tmp_path, durable=False) as saver:
        for step, loss in enumerate((3.0, 1.0, float("nan"), 2.0), 1):
            saver.save(f"step_{step}", {"weight": torch.ones(2)}, metrics={"loss": loss})
    return tmp_path


def test_pinned_tags_stay(four: Path, run: Run) -> None:
    """The listing shows them, and what metrics there are; unpinned they go."""
    assert (0, "step_3 is pinned\n") == (run("pin", four, "step_3").code, run("pin", four, "step_3").out)
    listed = run("list", four, "--json").document["tags"]
    assert ["step_3"] == [tag["tag"] for tag in listed if tag["pinned"]]
    assert [{"loss": 3.0}, {"loss": 1.0}, {"loss": None}, {"loss": 2.0}] == [tag["metrics"] for tag in listed]
    shown = run("list", four).out
    assert ("complete, pinned" in shown, "loss 3 " in shown, "loss not finite " in shown) == (True, True, True)
    assert [3.0, 1.0, None, 2.0] == [tag.metrics["loss"] for tag in list_checkpoints(four)]

    assert 0 == run("prune", four, "--last", "1").code
    assert ["step_3", "step_4"] == visible_tags(four)
    assert "step_3 is no longer pinned\n" == run("unpin", four, "step_3").out
    assert "step_3 was not pinned\n" == run("unpin", four, "step_3").out
    assert "1 tag is removed" in run("prune", four, "--last", "1").out
    assert ["step_4"] == visible_tags(four)


def test_rules_are_needed(four: Path, run: Run) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("prune", four)
    assert 4 == len(visible_tags(four))


def test_the_newest_tag_is_read_first(four: Path, run: Run) -> None:
    """And the next one if its bytes changed: it stays then. Not with ``--no-verify``; a line says what was read."""
    for number, rules in enumerate((["--last", "2", "--dry-run"], ["--last", "1", "--dry-run"])):
        said = run("prune", four, *rules).out
        assert "every digest matches in step_4\n" in said
        assert bool(number) == ("not read" not in said)
    every = run("prune", four, "--last", "2", "--verify", "--dry-run", "--json").document
    assert ["step_3", "step_4"] == every["verified"]
    file = next((four / "step_4" / "model").iterdir())
    flip(file)
    unread = run("prune", four, *rules, "--no-verify")
    assert (0, True) == (unread.code, "step_4 stays last 1 not read, and may be" in " ".join(unread.out.split()))
    run("pin", four, "step_1")
    done = run("prune", four, "--last", "1", "--json")
    assert (1, ["step_2"]) == (done.code, done.document["removed"])
    assert (["step_3"], ["step_4"]) == (done.document["verified"], [*done.document["damaged"]])
    assert ["step_1", "step_3", "step_4"] == visible_tags(four)


def test_every_tag_that_stays_is_read_on_demand(tmp_path: Path, run: Run) -> None:
    """Also one that stays by a pin or another rule than the newest; the oldest comes first, not the first by name."""
    with Checkpointer(tmp_path, durable=False) as saver:
        for step in (8, 9, 10, 11, 12):
            saver.save(f"step_{step}", {"weight": torch.ones(2)})
    pin_checkpoint(tmp_path, "step_8")
    whole = prune_checkpoints(tmp_path, [Last(2), Every(9)], verify=True, dry_run=True)
    assert (("step_8", "step_9", "step_11", "step_12"), ("step_10",)) == (whole.verified, whole.removed)
    assert ("step_12",) == prune_checkpoints(tmp_path, [Last(2), Every(9)], dry_run=True).verified
    for step in (8, 9):
        file = next((tmp_path / f"step_{step}" / "model").iterdir())
        flip(file)
    done = prune_checkpoints(tmp_path, [Last(2), Every(9)], verify=True)
    assert (["step_8", "step_9"], ("step_11", "step_12")) == ([*done.damaged], done.verified)
    assert ("step_10",) == done.removed
    said = run("prune", tmp_path, "--last", "9", "--verify").out
    assert "not read, and may be damaged: step_8, step_9, step_11, step_12; no tag goes\n" in said


def test_contents_without_a_digest_are_not_called_right(four: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """NxD's tag without CRCs, and one that could not be opened, count; a line says that they may be damaged.

    It does with ``--quiet`` too, which says nothing of tags that were compared.
    """
    assert "" == run("prune", four, "--last", "2", "--dry-run", "--quiet").out
    for step in (5, 6):
        folder = four / f"step_{step}" / "model"
        folder.mkdir(parents=True)
        (folder.parent / "checkpoint").write_text("1")
        torch.serialization.set_crc32_options(False)
        try:
            torch.save({"w": torch.ones(4096)}, folder / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
        finally:
            torch.serialization.set_crc32_options(True)
        (folder.parent / "done").write_text("1")
    file = next((four / "step_6" / "model").iterdir())
    flip(file)
    for more in (["--dry-run", "--quiet"], []):
        out = run("prune", four, "--last", "2", *more).out
        assert (False, True) == ("matches" in out, "bytes of step_6 carry no digest, and" in out)
    assert ["step_5", "step_6"] == visible_tags(four)

    def refused(storage: Storage, tag: str) -> None:
        raise UnsafePickle(f"{tag} names os.system")

    monkeypatch.setattr("nxd_ckpt.tag.verify.open_complete_tag", refused)
    assert "step_6 could not be opened" in read_whole(LocalStorage(four), "step_6", False).doubt  # type: ignore[operator]


def test_a_dry_run_follows_a_live_job(four: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its retention removes the tag that is read: then the next one is read."""

    def read(storage: Storage, tag: str, progress: bool) -> Reading:
        if tag == "step_4":
            with Checkpointer(four, durable=False, num_kept_ckpts=1) as saver:
                saver.save("step_5", {"weight": torch.ones(2)})
        return read_whole(storage, tag, progress)

    monkeypatch.setattr(prune, "read_whole", read)
    done = prune_checkpoints(four, [Last(1)], dry_run=True)
    assert ({"step_5": ("last 1",)}, ()) == (done.kept, done.removed)


def test_a_job_may_start_while_tags_are_read(four: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease is taken afterwards, and what was saved meanwhile is read then. Beside a live job nothing is read."""
    tags = list[str]()

    def read(storage: Storage, tag: str, progress: bool) -> Reading:
        tags.append(tag)
        if tag == "step_4":
            with Checkpointer(four, durable=False) as saver:
                saver.save("step_5", {"weight": torch.ones(2)})
        return read_whole(storage, tag, progress)

    monkeypatch.setattr(prune, "read_whole", read)
    with Checkpointer(four) as saver:
        saver.save("step_4", {"weight": torch.ones(2)}, overwrite=True)
        with pytest.raises(DirectoryInUse):
            prune_checkpoints(four, [Last(2)], timeout=0.2)
    assert [] == tags
    done = prune_checkpoints(four, [Last(2)])
    assert tags == [*done.verified] == visible_tags(four) == ["step_4", "step_5"]
    tags.clear()
    prune_checkpoints(four, [Last(1)])
    assert ["step_5"] == tags


def test_each_rule_has_a_flag(four: Path, run: Run) -> None:
    """All together keep what each keeps; a dry run says which, and removes nothing."""
    rules = ["--last", "1", "--every", "4", "--best", "loss:1:max", "--best", "loss:4"]
    would = run("prune", four, *rules, "--dry-run", "--json").document
    assert ([], True) == (would["removed"], would["dry_run"])
    assert {"tag": "step_1", "because": ["best 1 by loss (max)", "best 4 by loss (min)"]} == would["kept"][0]
    assert {"tag": "step_3", "because": ["it has no loss"]} == would["kept"][2]
    assert {"tag": "step_4", "because": ["last 1", "every 4", "best 4 by loss (min)"]} == would["kept"][-1]
    assert "0 tags would be removed" in run("prune", four, *rules, "--within", "1d", "--dry-run").out
    assert "2 tags would be removed" in run("prune", four, *rules[:2], "--every", "3", "--dry-run").out
    assert 4 == len(visible_tags(four))


@pytest.mark.parametrize(
    "rules", [[], ["--last", "0"], ["--every", "x"], ["--best", "loss:0"], ["--within", "2 weeks"]], ids=str
)
def test_what_is_no_rule_is_a_wrong_command_line(four: Path, run: Run, rules: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("prune", four, *rules)
    assert 4 == len(visible_tags(four))


def test_metrics_are_shown_and_kept(four: Path, run: Run) -> None:
    """``inspect`` shows what the save was told; so it does of a tag on other sizes, which is made of this one."""
    assert 0 == run("convert", "--to", "tag", four / "step_3", four / "wider" / "step_3", "--dp", "2").code
    shown = [run("inspect", path, "step_3") for path in (four, four / "wider")]
    lines = [line.split() for inspected in shown for line in inspected.out.splitlines()]
    assert 2 == lines.count(["metrics", "loss", "not", "finite"])
    assert {"loss": 2.0} == run("inspect", four, "--json").document["metrics"]


def test_named_tags_are_removed(four: Path, run: Run) -> None:
    """All of them or none: a pinned one is refused unless asked for; an incomplete or damaged one goes too."""
    assert 0 == run("pin", four / "step_4").code
    refused = run("rm", four, "2", "4")
    assert (1, True) == (refused.code, "step_4 is pinned: unpin it, or pass --pinned" in refused.err)
    assert "no tag 'step_9' (did you mean 'step_4'?); it holds" in run("rm", four, "step_2", "step_9").err
    would = run("rm", four, "2", "--pinned", "--dry-run", "4")  # options may stand between
    assert (0, True) == (would.code, "step_2, step_4 would be removed\n  step_3 would be the latest" in would.out)
    assert 4 == len(visible_tags(four))
    (four / "step_2" / "done").unlink()
    (four / "step_3" / "manifest.json").write_text("{}")
    done = run("rm", four, "2", "step_3", "4", "--pinned", "--json").document
    assert {"removed": ["step_2", "step_3", "step_4"], "latest": "step_1"}.items() <= done.items()
    assert ["step_1"] == [path.name for path in four.iterdir()]
    assert "no complete tag is left" in run("rm", four / "step_1").out


def test_a_job_that_saves_keeps_its_tags(four: Path, run: Run) -> None:
    """The command is refused, and says why; a directory without a tag's name is a wrong command line."""
    with Checkpointer(four) as saver:
        saver.save("step_5", {"weight": torch.ones(2)})
        assert 1 == run("rm", four, "step_1").code
    assert 5 == len(visible_tags(four))
    for words in ([four], [four / "step_1", four]):
        with pytest.raises(SystemExit, match="2"):
            run("rm", *words)


def test_a_step_names_its_tag(four: Path, run: Run) -> None:
    """Wherever a command takes a tag or its path; refused where several tags are of that step."""
    assert "step_2 is pinned" in run("pin", four, "2").out
    assert 0 == run("verify", four / "2", "--quiet").code
    assert "step_2" == run("inspect", four, "2", "--json").document["tag"]
    assert str(four / "step_3") == run("cp", four / "3", four / "ep1-step_2", "--json").document["source"]
    refused = run("diff", four / "2", four / "1")
    assert (2, True) == (refused.code, "'ep1-step_2', 'step_2' are of step 2: name one" in refused.err)
