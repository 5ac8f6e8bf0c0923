"""Saving the model alone, and tags that are filled from values."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.core.tags import filled_tag
from nxd_ckpt.errors import CheckpointNotFound, InvalidArgument, InvalidTag, PartNotFound, SaveFailed
from nxd_ckpt.saving.options import understood


def test_weights_only_saves_the_model_and_nothing_else(tmp_path: Path) -> None:
    """The tag says so by its parts; loading more than that is refused by name."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    others: dict[str, Any] = {"scheduler": {"epoch": 1}, "user_content": {"steps": 1}, "rank_content": {"own": 1}}
    save_checkpoint(tmp_path, "t", model, optimizer, weights_only=True, durable=False, **others)
    parts = open_checkpoint(tmp_path).parts
    assert (True, None) == (parts.model, parts.optimizer)
    assert [False] * 3 == [parts.scheduler, parts.user_content, parts.rank_content]
    with pytest.raises(PartNotFound, match="saved without optimizer"):
        load_checkpoint(tmp_path, "t", model, optimizer)
    load_checkpoint(tmp_path, "t", model, optimizer, load_weights_only=True)
    nothing_left = {"model": model, "use_xser": True, "avoid_saving_lower_precision_weights": True}
    refused: list[dict[str, Any]] = [{}, nothing_left]
    for options in refused:
        with pytest.raises(InvalidArgument, match="weights_only=True"):
            save_checkpoint(tmp_path, "u", weights_only=True, durable=False, **options)


def test_save_overwrite_is_another_name_for_overwrite(tmp_path: Path) -> None:
    """OLMo-core's: False refuses a tag that is there. Both names at once say nothing clear."""
    save_checkpoint(tmp_path, "t", {"w": torch.zeros(2)}, durable=False)
    with pytest.raises(SaveFailed, match="exists"):
        save_checkpoint(tmp_path, "t", {"w": torch.ones(2)}, save_overwrite=False)
    with pytest.raises(InvalidArgument, match="not both"):
        save_checkpoint(tmp_path, "t", {"w": torch.ones(2)}, save_overwrite=True, overwrite=True)
    assert torch.equal(torch.zeros(2), open_checkpoint(tmp_path).read("model/w"))
    save_checkpoint(tmp_path, "t", {"w": torch.ones(2)}, save_overwrite=True)
    assert torch.equal(torch.ones(2), open_checkpoint(tmp_path).read("model/w"))


def test_a_template_is_filled_or_refused_before_anything_is_written(tmp_path: Path) -> None:
    """A name with a field and no value too, and an archive's; braces that are no field are plain characters."""
    model = torch.nn.Linear(1, 1)
    values = {"epoch": 3, "batch": 400}
    with pytest.raises(InvalidArgument, match=r"value for 'batches' \(did you mean 'batch'\?\); no field for 'batch'"):
        save_checkpoint(tmp_path, "ep{epoch}-ba{batches}", model, durable=False, tag_values=values)
    assert [] == list(tmp_path.iterdir())
    save_checkpoint(tmp_path, "ep{epoch}-ba{batch:06d}", model, durable=False, tag_values=values)
    with pytest.raises(InvalidArgument, match=r"field for .*epoch.*each save would replace the one before"):
        save_checkpoint(tmp_path, "ep{epoch}", model, durable=False)
    save_checkpoint(tmp_path, "ep{3}", model, durable=False)  # no field: plain characters
    with pytest.raises(InvalidTag, match="would be a directory"):
        save_checkpoint(tmp_path, "ep3.tar", model, durable=False)
    assert ["ep3-ba000400", "ep{3}"] == sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".")


@pytest.mark.parametrize(
    ("template", "values"),
    [
        ("ep{epoch.real}", {"epoch": 3}),
        ("ep{epoch[0]}", {"epoch": [3]}),
        ("ep{}", {"epoch": 3}),
        ("ep{0}", {"0": 3}),
        ("ep{epoch", {"epoch": 3}),
        ("ep{epoch:d}", {"epoch": "three"}),
        ("ep{epoch}{epoch.first}", {"epoch": 3, "epoch.first": 4}),
        ("ep{epoch:{width.real}}", {"epoch": 3, "width": 4}),
        ("ep", {"epoch": 3}),
        ("ep{epoch}", {}),
        (300, {"epoch": 3}),
        ("ep{epoch}", [3]),
    ],
)
def test_templates_are_plain_names_with_values(template: Any, values: Any) -> None:
    """Attributes, items, positions, and what does not fit, are refused."""
    with pytest.raises(InvalidArgument):
        filled_tag(template, values, {"rank": 0})


def test_formats_may_have_fields() -> None:
    """As str.format has it."""
    assert "ep0003" == filled_tag("ep{epoch:0{width}d}", {"epoch": 3, "width": 4}, {})


def test_variables_of_the_job_fill_themselves_alike_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composer's. All ranks save one tag, so those of a rank are rank 0's. A value that is passed comes first."""
    template = "ep{epoch}-r{rank}-l{local_rank}-n{node_rank}-of{world_size}-{local_world_size:02d}"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for rank in (0, 9):
        monkeypatch.setenv("RANK", str(rank))
        assert "ep3-r0-l0-n0-of16-08" == understood(template, {"epoch": 3}, {}, 16)[0]
    assert "of16" == understood("of{world_size}", None, {}, 16)[0]
    assert "of2" == understood("of{world_size}", {"world_size": 2}, {}, 16)[0]
    _, _, refused = understood("{run_name}-rank{rank}", None, {}, 16)
    assert "field for 'run_name' and no value" in str(refused)


def test_a_template_at_a_load_is_the_newest_tag_that_fits(tmp_path: Path) -> None:
    """Fields stand for numbers; those with a value for that value. A tag of that very name comes first."""
    for number, tag in enumerate(["ep1-ba10", "ep2-ba000020", "ep1-ba30", "ep2-ba20-best", "epx-ba40"]):
        save_checkpoint(tmp_path, tag, {"w": torch.tensor([number])}, durable=False)

    def loaded(tag: str | None, values: Any = None) -> int:
        state: dict[str, Any] = {}
        load_checkpoint(tmp_path, tag, state, tag_values=values)
        return int(state["w"])

    assert 2 == loaded("ep{epoch}-ba{batch:06d}") == loaded("ep{epoch}-ba{batch}", {})
    assert 1 == loaded("ep{epoch}-ba{batch}", {"epoch": 2})
    assert 1 == loaded("ep{epoch}-ba{batch:06d}", {"epoch": 2, "batch": 20})
    assert 0 == loaded("ep{epoch}-ba{batch}", {"epoch": 1, "batch": 10})
    assert 3 == loaded("ep{epoch}-ba{batch}-{kind}", {"kind": "best"})
    assert 2 == int(open_checkpoint(tmp_path, "ep{epoch}-ba{batch}").read("model/w"))
    with pytest.raises(CheckpointNotFound, match=r"ep\{epoch\}"):
        loaded("ep{epoch}")
    wrong: list[tuple[str | None, Any]] = [(None, {"epoch": 1}), ("ep1-ba10", {"epoch": 1}), ("ep{epoch}", [1])]
    for template, values in wrong:
        with pytest.raises(InvalidArgument, match="tag_values"):
            loaded(template, values)
    (tmp_path / "epx-ba40").rename(tmp_path / "ep{epoch}")  # as an older version took it
    assert 4 == loaded("ep{epoch}")


def test_a_path_for_a_tag_and_a_prefix_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """At a load too. ColossalAI's prefix begins the names of files, which are fixed here."""
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(InvalidTag, match="end the directory with 'a/b', and pass 'step_1'"):
            call(tmp_path, "a/b/step_1", {"w": torch.zeros(2)})
    with pytest.raises(TypeError, match=r"'prefix' \(the names of a tag's files are fixed"):
        save_checkpoint(tmp_path, "t", {"w": torch.zeros(2)}, prefix="a.")  # type: ignore[call-arg]
