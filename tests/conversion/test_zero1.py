"""``convert`` with optimizer_form: shards cut anew, bit for bit, in a tag that is as good as one that was saved."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology, convert, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.errors import PartNotFound
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.conversion.tags import contents, model, optimizers, plainly, save_example, sharded, whole
from tests.tag.equality import difference


@pytest.mark.parametrize("use_xser", [False, True], ids=["pt", "xser"])
@pytest.mark.parametrize("full_between", [False, True], ids=["directly", "over_full"])
@pytest.mark.parametrize(("dp", "new_dp"), [(2, 3), (4, 1), (1, 16)])
def test_shards_are_those_of_the_new_size(
    tmp_path: Path, dp: int, new_dp: int, full_between: bool, use_xser: bool
) -> None:
    """Master weights of all ranks, padding, more ranks than rows, a parameter that never had a gradient."""
    source = save_example(tmp_path, dp, use_xser=use_xser)
    before = contents(source)

    if full_between:
        convert(source, tmp_path / "full", to="tag", optimizer_form="zero1_full", durable=False)
        assert None is difference(plainly(whole()), plainly(optimizers(tmp_path / "full")[0]))
        source = tmp_path / "full"
    convert(source, tmp_path / "new", to="tag", optimizer_form="zero1", dp=new_dp, durable=False)

    cut = [sharded(whole(), new_dp, rank) for rank in range(new_dp)]
    assert None is difference(plainly(cut), plainly(optimizers(tmp_path / "new")))
    assert before == contents(tmp_path / "step_3")


def test_the_result_is_a_tag_as_if_saved(tmp_path: Path) -> None:
    """Complete, the newest, with the manifest's parts and parameters; any rank loads everything from it."""
    source = save_example(tmp_path, 2)

    convert(source, tmp_path / "dp3", to="tag", optimizer_form="zero1", dp=3)

    saved, made = open_checkpoint(tmp_path, "step_3"), open_checkpoint(tmp_path)
    assert saved.manifest is not None
    assert made.manifest is not None
    assert ("dp3", Topology(dp=3)) == (made.tag, made.topology)
    assert saved.manifest.parameters == made.manifest.parameters
    assert saved.parts == made.parts or not made.parts.rank_content
    loaded: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    scheduler: dict[str, Any] = {}
    content = load_checkpoint(tmp_path, "dp3", loaded, optimizer, scheduler, topology=Topology(dp=3, rank=2))
    assert {"steps": 3} == content
    assert {"last_epoch": 3} == scheduler
    assert None is difference(plainly(model()), plainly(loaded))
    assert None is difference(plainly(sharded(whole(), 3, 2)), plainly(optimizer))


@pytest.mark.parametrize("use_xser", [False, True], ids=["pt", "xser"])
def test_unchanged_files_are_linked(tmp_path: Path, use_xser: bool) -> None:
    """The model, the scheduler and the user content take no space twice."""
    source = save_example(tmp_path, 2, use_xser=use_xser)

    convert(source, tmp_path / "dp3", to="tag", optimizer_form="zero1", dp=3)

    taken = [path for path in source.rglob("*.pt") if path.is_file() and path.parts[len(source.parts)][0] in "msu"]
    assert taken
    for path in taken:
        assert path.stat().st_ino == (tmp_path / "dp3" / path.relative_to(source)).stat().st_ino


def test_where_links_do_not_work_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two file systems: the result is the same."""

    link = os.link

    def refuse(source: Any, target: Any) -> None:
        if str(target).endswith(".pt"):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        link(source, target)

    source = save_example(tmp_path, 2, use_xser=True)
    monkeypatch.setattr(os, "link", refuse)

    convert(source, tmp_path / "elsewhere" / "dp3", to="tag", optimizer_form="zero1", dp=3, durable=False)

    assert () == verify_checkpoint(tmp_path / "elsewhere").problems
    assert contents(source / "model") == contents(tmp_path / "elsewhere" / "dp3" / "model")


def test_the_optimizer_is_converted_alone_on_request(tmp_path: Path) -> None:
    """With ``optim_only`` the result is a tag that holds nothing else, and says so."""
    source = save_example(tmp_path, 2)

    convert(source, tmp_path / "optim", to="tag", optimizer_form="zero1_full", optim_only=True)

    made = open_checkpoint(tmp_path, "optim")
    assert None is difference(plainly(whole()), plainly(optimizers(tmp_path / "optim")[0]))
    assert (False, "zero1_full", False, False) == (
        made.parts.model,
        made.parts.optimizer,
        made.parts.scheduler,
        made.parts.user_content,
    )
    assert {"checkpoint", "done", "index", "manifest.json", "optim"} == {
        path.name for path in (tmp_path / "optim").iterdir()
    }
    with pytest.raises(PartNotFound):
        load_checkpoint(tmp_path, "optim", model={}, topology=Topology())


def test_what_ranks_saved_for_themselves_stays_with_their_number(tmp_path: Path) -> None:
    """Random state belongs to no rank of a job of another size; on the same size it is kept."""
    source = save_example(tmp_path, 2)

    convert(source, tmp_path / "same", to="tag", optimizer_form="zero1", dp=2)
    convert(source, tmp_path / "dp3", to="tag", optimizer_form="zero1", dp=3)

    assert {"rank": 1} == open_checkpoint(tmp_path, "same").rank_content(1)
    assert not open_checkpoint(tmp_path, "dp3").parts.rank_content
    assert not (tmp_path / "dp3" / "rank_content").exists()


def test_a_plain_optimizer_is_sharded_on_request(tmp_path: Path) -> None:
    """With dp alone, as with all sizes: the shards of a job of that size, put together, are the plain optimizer."""
    trained = torch.nn.Linear(3, 5)
    plain = torch.optim.AdamW(trained.parameters())
    trained(torch.ones(2, 3)).sum().backward()
    plain.step()
    save_checkpoint(tmp_path / "saved", "plain", trained, plain)

    convert(tmp_path / "saved" / "plain", tmp_path / "dp2", to="tag", optimizer_form="zero1", dp=2)

    assert "zero1" == open_checkpoint(tmp_path, "dp2").parts.optimizer
    resumed = torch.optim.AdamW(trained.parameters())
    load_checkpoint(tmp_path, "dp2", trained, resumed)
    assert None is difference(plain.state_dict(), resumed.state_dict())
