"""Saving the model alone, and tags that are filled from values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_ckpt
from nxd_ckpt import load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.core.tags import filled_tag
from nxd_ckpt.errors import InvalidArgument, InvalidTag, PartNotFound, SaveFailed

pytestmark = [pytest.mark.plain, pytest.mark.once]


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    yield
    nxd_ckpt.close_checkpointers()


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
        filled_tag(template, values)


def test_formats_may_have_fields() -> None:
    """As str.format has it."""
    assert "ep0003" == filled_tag("ep{epoch:0{width}d}", {"epoch": 3, "width": 4})
