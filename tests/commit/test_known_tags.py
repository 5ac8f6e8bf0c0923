"""Retention does not look again at tags that an earlier judgement knew, unless they count or may go."""

from pathlib import Path

import torch

from nxd_ckpt import save_checkpoint
from nxd_ckpt.commit.retention import judge_tags
from nxd_ckpt.core.retention_rules import Every, Last
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.testing.storage import HookedStorage, Operation, recording


def test_a_known_tag_is_looked_at_before_it_may_go(tmp_path: Path) -> None:
    """One that is no checkpoint any more stays; one that a rule keeps without counting it is not read."""
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, f"step_{step}", {"weight": torch.ones(1)}, durable=False)
    log: list[Operation] = []
    storage = HookedStorage(LocalStorage(tmp_path), recording(log))
    tags = list_tags(storage)
    ours = judge_tags(storage, tags, [Last(1), Every(2)]).ours
    assert list(tags) == list(ours)
    earlier = {info.tag: info for info in ours}
    storage.write("step_1/manifest.json", b"{}")
    log.clear()
    judged = judge_tags(storage, tags, [Last(1), Every(2)], judged=earlier)
    assert (("step_3",), ["step_2", "step_4"]) == (judged.retention.surplus, list(judged.retention.kept))
    manifests = {key for _, key, _ in log if key.endswith("/manifest.json")}
    assert {f"step_{step}/manifest.json" for step in (1, 3, 4)} == manifests
