"""The benchmark of many ranks commits a tag as a save does, so it follows what a commit requires."""

from pathlib import Path

from tools.bench.scale import many_ranks, mesh_ranks


def test_a_commit_of_a_few_ranks_is_measured(tmp_path: Path) -> None:
    """The tag is opened at the end, of plain ranks and of a mesh."""
    assert "open" in many_ranks(tmp_path / "plain", 2)
    assert "open" in mesh_ranks(tmp_path / "mesh", 16)
