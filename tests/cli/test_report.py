"""``nxd-ckpt report``: problems first, all that manifests and tensors tell, and nothing that a name could do."""

import base64
import hashlib
import html
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology, save_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.core.manifest import dump_manifest, load_manifest
from nxd_ckpt.core.units import size
from nxd_ckpt.examine import report_document, stored_statistics
from nxd_ckpt.tag import listing
from nxd_ckpt.tag.opened import OpenTag
from tests.examine.mutants import not_a_number, rank_a_step_behind
from tests.examine.runs import Run, ranks_of, save_ranks
from tests.interop.saving import save_as_every_rank
from tests.support.browser import content, printed, screenshot

STATE = {"layers.0.weight": torch.ones(4, 4)}
EVIL = "</script><script>document.title=1</script><img src=x onerror='document.title=2'>\" style=\"a\u202e&{{ 7*1111 }}"


class Elements(HTMLParser):
    """The names of all elements of a page, and of their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {tag, *(f"{name}=" for name, _ in attrs)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tags with a frozen weight, and a NaN in the last."""
    directory = tmp_path_factory.mktemp("run")
    for step in range(3):
        model = {"layers.0.weight": torch.full((4, 4), 1.0 + step), "layers.0.frozen": torch.ones(3)}
        if step == 2:
            model["layers.0.weight"][0, 0] = float("nan")
        save_checkpoint(directory, f"step_{step}", model)
    return directory


def test_the_numbers_are_a_document(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["report", str(run), "--json", "--count", "3"])
    document = json.loads(capsys.readouterr().out)
    assert ["step_0", "step_1", "step_2"] == [tag["tag"] for tag in document["tags"]]
    assert all(tag["timings"]["write_seconds"] >= 0 for tag in document["tags"])
    assert [] == document["ranks"], "a single rank is compared with none"
    first = document["health"]["tensors"][0]
    assert ("model/layers.0.weight", 1, 4.0) == (first["name"], first["nans"], first["norms"][0])


def test_names_are_text(tmp_path: Path) -> None:
    """Names of tags, tensors and metrics that are markup add no element and no attribute to the page. Nothing is
    loaded, links stay on the page, and a browser runs the page's own script alone."""
    names = {"plain": ("tag", "w", "loss"), "evil": ("<img src=x onerror=alert(1)>", EVIL, EVIL)}
    pages = {}
    for name, (tag, tensor, metric) in names.items():
        for step in range(2):
            state = {f"{tensor}.weight": torch.full((2,), float(step)), f"{tensor}.0.weight": torch.ones(2)}
            save_checkpoint(tmp_path / name, f"{tag}{step}", state, metrics={metric: float(step)})
        output = tmp_path / f"{name}.html"
        assert 0 == main(["report", str(tmp_path / name), "-o", str(output), "--quiet", "--count", "2"])
        pages[name] = output.read_text()
    found = {name: Elements() for name in pages}
    for name, page in pages.items():
        found[name].feed(page)
    assert found["plain"].found == found["evil"].found
    assert not {"img", "link", "iframe", "src=", "onerror="} & found["evil"].found
    assert re.findall("href=\"(.)", pages["evil"])
    assert {"#"} == set(re.findall("href=\"(.)", pages["evil"]))
    assert "\u202e" not in pages["evil"]
    assert not re.search("https?:|url\\(|7777", pages["evil"].split("<style>")[0] + pages["evil"].split("</style>")[1])
    shown = content(tmp_path / "evil.html")
    assert f"<title>{tmp_path / 'evil'}</title>" in shown
    assert '<div class="tools" data-script="">' in shown


def test_only_the_pages_own_script_may_run(run: Path, tmp_path: Path) -> None:
    """Its digest is in the page's policy, which allows nothing to be loaded."""
    assert 0 == main(["report", str(run), "-o", str(tmp_path / "page.html"), "--quiet"])
    page = (tmp_path / "page.html").read_text()
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert {"default-src": "'none'", "script-src": f"'sha256-{digest}'"}.items() <= {
        name: value for name, _, value in (part.strip().partition(" ") for part in html.unescape(policy).split(";"))
    }.items()


def test_tensors_are_sorted_and_filtered(run: Path, tmp_path: Path) -> None:
    """In a browser: the largest first after a click, all in their places after two more; a word hides the others. For
    this a second script acts as a person would, in a copy of the page without its policy."""
    assert 0 == main(["report", str(run), "-o", str(tmp_path / "page.html"), "--quiet", "--count", "3"])
    page = re.sub("<meta http-equiv[^>]*>", "", (tmp_path / "page.html").read_text())
    acts = """<script>
      const names = (place) => [...document.querySelectorAll(place)].map((row) => row.cells[0].textContent);
      const norm = document.querySelectorAll(".top button")[1], told = [];
      norm.click(); told.push(names("#flat tbody tr"));
      norm.click(); told.push(names("#flat tbody tr"));
      norm.click(); told.push(names("#flat tbody tr"), names("#tree tbody tr"));
      const box = document.getElementById("filter");
      box.value = "FROZEN"; box.dispatchEvent(new Event("input"));
      told.push(names("#tree tbody tr:not([hidden])"), [document.getElementById("count").textContent]);
      document.title = JSON.stringify(told);
    </script>"""
    (tmp_path / "acted.html").write_text(page.replace("</body>", f"{acts}</body>"))
    (title,) = re.findall("<title>(.*?)</title>", content(tmp_path / "acted.html"))
    weight, frozen = "layers.0.weight", "layers.0.frozen"
    down, up, none, tree, filtered, count = json.loads(title)
    assert ([weight, frozen], [frozen, weight]) == (down, up)
    assert ([], [weight, frozen]) == (none, tree)
    assert ([frozen], ["1 of 2 tensors"]) == (filtered, count)


def _slowed(tag: Path, rank: int) -> None:
    """The tag, as if that rank had taken a minute to write."""
    manifest = load_manifest((tag / "manifest.json").read_bytes(), "manifest.json")
    phases = list(manifest.phases)
    phases[rank] = replace(phases[rank], write_seconds=60.0)
    (tag / "manifest.json").write_bytes(dump_manifest(replace(manifest, phases=tuple(phases))))


def test_what_is_wrong_is_marked_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A NaN, a straggler, a frozen layer, a rank that is a step behind and a save that died, of a job of four ranks:
    above all else."""
    trained = Run()
    for step in (10, 13, 16):
        ranks = ranks_of(trained.train(step - trained.step))
        if step == 16:
            rank_a_step_behind([], ranks)
            not_a_number([], ranks)
        save_ranks(tmp_path, f"step_{step}", ranks)
        _slowed(tmp_path / f"step_{step}", rank=2)
    (tmp_path / ".nxd_ckpt" / "staging" / "gone-3" / "model").mkdir(parents=True)
    assert 0 == main(["report", str(tmp_path), "--count", "3", "--doctor", "-o", str(tmp_path / "page.html")])
    problems, _, tags = (tmp_path / "page.html").read_text().partition("<h2>Saves</h2>")
    assert 1 == tags.count('<div class="bar late">')
    assert "is the straggler: 60.0 s</h2>" in tags
    assert "always waited for rank 2" in problems
    assert re.search(r"2 weights never changed: model/4.bias, model/4.weight<", problems)
    assert re.search(r"rank 3</b><span>the optimizer state of rank 3 is of step 15, that of other ranks of", problems)
    assert re.search(r"optim/3.weight/exp_avg</b><span>1 NaN and 0 infinite", problems)
    assert "attempt gone-3</b><span>its save failed: the process is gone" in problems
    assert "<b>Resume from step_13<" in problems
    assert 'class="pill bad">not finite</span><span class="pill good">latest</span>' in tags


def test_a_browser_shows_the_page(run: Path, tmp_path: Path) -> None:
    """A real one, at the width of a phone, light and dark: more than a blank page, and not the same; and on paper."""
    page = tmp_path / "page.html"
    assert 0 == main(["report", str(run), "-o", str(page), "--quiet"])
    light, dark = (screenshot(page, tmp_path / f"{dark}.png", 390, 2400, dark=dark) for dark in (False, True))
    assert light != dark
    assert min(len(light), len(dark)) > 20_000
    paper = printed(page, tmp_path / "page.pdf")
    assert paper.startswith(b"%PDF-")
    assert b"/Font" in paper


def test_ranks_are_shown_in_their_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By dp, tp and, where there are experts, ep."""
    places = [Topology(dp=2, ep=2, rank=rank) for rank in range(2)]
    save_as_every_rank(tmp_path, "t", places, lambda rank: {"model": STATE})
    assert 0 == main(["report", str(tmp_path), "--json", "--count", "0"])
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [{"dp": 0, "tp": 0, "ep": 0}, {"dp": 1, "tp": 0, "ep": 1}] == [rank["place"] for rank in ranks]


def test_the_page_is_written_beside_tags_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never inside one, which is said before anything is read; as a whole or not at all; its size is in bytes."""
    page = tmp_path / "page.html"
    assert 0 == main(["report", str(run), "-o", str(page)])
    assert f"; {size(page.stat().st_size)}" in capsys.readouterr().out
    assert [page] == list(tmp_path.iterdir())

    with monkeypatch.context() as patched:
        patched.setattr(report_document, "locate", None)
        assert 0 != main(["report", str(run), "-o", str(run / "step_0" / "model" / "page.html")])
    assert "is inside the checkpoint" in capsys.readouterr().err
    assert ["dp_rank_00_tp_rank_00_pp_rank_00.pt"] == [path.name for path in (run / "step_0" / "model").iterdir()]


@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a FIFO"), (os.mkdir, "a directory")])
def test_only_a_file_is_replaced(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
    kind: str,
) -> None:
    """What else is there stays, through a link too: said before anything is read."""
    there, link = tmp_path / "there", tmp_path / "link"
    make(there)
    link.symlink_to(there)
    before = there.stat()
    monkeypatch.setattr(report_document, "locate", None)
    for path in (there, link):
        assert 1 == main(["report", str(run), "-o", str(path)])
        assert f"output {there} is {kind}, expected a file; choose another path" in capsys.readouterr().err
    assert (before.st_ino, before.st_mode) == (there.stat().st_ino, there.stat().st_mode)
    assert {there, link} == set(tmp_path.iterdir())


def test_a_damaged_tag_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page is made without what cannot be read, and says once why; a lost file is damage too."""
    for step in range(2):
        save_checkpoint(tmp_path / "run", f"step_{step}", {"w": torch.ones(4)})
    (index,) = (tmp_path / "run" / "step_1" / "index").iterdir()
    for damage in (lambda: index.write_text("{}"), index.unlink):
        damage()
        assert 0 == main(["report", str(tmp_path / "run"), "--json", "--doctor", "-o", str(tmp_path / "page.html")])
        document = json.loads(capsys.readouterr().out)
        told = [one for one in document["problems"] + document["findings"] if index.name in json.dumps(one)]
        assert told
        assert len({json.dumps(one) for one in told}) == len(told)
        page = (tmp_path / "page.html").read_text()
        assert 1 == len(told), told
        assert '<td>step_1</td>\n<td class="text"><span class="pill bad">damaged</span>' in page
        assert "<b>Resume from step_0<" in page


def test_a_tag_to_resume_from_is_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the newest back until the values of one are finite, however few tags were asked for; with 0, none is read.
    """
    for step in range(4):
        value = torch.tensor(float("nan") if step else 1.0)
        save_checkpoint(tmp_path, f"step_{step}", {f"{number}.w": value.clone() for number in range(9)})
    for count, title, text in (
        ("0", "Last complete tag: step_3", "the latest tag; its bytes and values were not looked at"),
        ("1", "Resume from step_0", "step_3 has values that are not finite in 9 tensors: load 'step_0' by name"),
    ):
        assert 0 == main(["report", str(tmp_path), "--json", "--count", count])
        line = json.loads(capsys.readouterr().out)["head"][1]
        assert (title, text) == (line["title"], line["text"])


@pytest.mark.parametrize("count", [1, 2])
def test_damage_is_that_of_its_tag(tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    """If the tag before the latest one is damaged, the latest one is not, and can be resumed from: whether the tensors
    of both are counted, or the doctor finds the damage."""
    for step in range(3):
        save_checkpoint(tmp_path, f"step_{step}", {"w": torch.full((4,), float(step))})
    (index,) = (tmp_path / "step_1" / "index").iterdir()
    index.write_text("{}")
    assert 0 == main(["report", str(tmp_path), "--json", "--doctor", "--count", str(count)])
    document = json.loads(capsys.readouterr().out)
    assert ["step_1"] == [problem["where"] for problem in document["problems"]]
    assert [0, 1, 0] == [len(tag["problems"]) for tag in document["tags"]]
    assert ("Resume from step_2", []) == (document["head"][1]["title"], document["findings"])


@pytest.mark.parametrize(
    ("module", "at"), [(listing, "open_complete_tag"), (report_document, "read_statistics")]
)
def test_a_tag_that_retention_removes_is_no_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, module: ModuleType, at: str
) -> None:
    """Removed before it is opened, or before its tensors are read: the report begins anew, without it."""
    for step in range(2):
        save_checkpoint(tmp_path, f"step_{step}", {"w": torch.ones(4)})
    original = getattr(module, at)

    def removed_first(*args: Any, **keywords: Any) -> Any:
        shutil.rmtree(tmp_path / "step_0", ignore_errors=True)
        return original(*args, **keywords)

    monkeypatch.setattr(module, at, removed_first)
    assert 0 == main(["report", str(tmp_path), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (["step_1"], []) == ([tag["tag"] for tag in document["tags"]], document["problems"])


def test_a_tag_with_a_file_of_hugging_faces_is_a_tag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it is named itself, and somebody has put a safetensors file into it."""
    from safetensors.torch import save_file

    save_checkpoint(tmp_path, "t", {"w": torch.ones(4)})
    save_file({"w": torch.ones(4)}, tmp_path / "t" / "model.safetensors")
    assert 0 == main(["report", str(tmp_path / "t"), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert ["t"] == [tag["tag"] for tag in document["tags"]]


def test_what_a_converter_wrote_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Without markers, where it is named itself. What is kept and of no use is warned of once."""
    save_checkpoint(tmp_path, "t", STATE)
    (tmp_path / "u").mkdir()
    (tmp_path / "t" / "model").rename(tmp_path / "u" / "model")
    assert 0 == main(["report", str(tmp_path / "u"), "--json"])
    (tag,) = json.loads(capsys.readouterr().out)["tags"]
    assert ("u", None, False, []) == (tag["tag"], tag["order_time"], tag["latest"], tag["problems"])

    save_checkpoint(tmp_path, "v", STATE)
    kept = tmp_path / ".nxd_ckpt" / "statistics" / "v.json"
    kept.mkdir(parents=True)
    caplog.clear()
    assert 0 == main(["report", str(tmp_path / "v"), "--json"])
    assert 1 == sum("its tensors are read" in record.message for record in caplog.records)


def test_what_is_stored_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each tag, also where nothing is stored yet."""
    for tag in ("a", "b"):
        save_checkpoint(tmp_path, tag, STATE)
    read, looked = stored_statistics._read_file, list[str]()

    def look(opened: OpenTag) -> Any:
        looked.append(opened.tag)
        return read(opened)

    monkeypatch.setattr(stored_statistics, "_read_file", look)
    for _ in range(2):
        looked.clear()
        assert 0 == main(["report", str(tmp_path), "--json"])
        assert ["b", "a"] == looked


@pytest.mark.parametrize(
    "command", [["report", "--json"], ["watch", "--once"], ["doctor"], ["list"], ["inspect"], ["verify", "--json"]]
)
def test_what_is_no_directory_of_checkpoints_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """A file, and by those that need a tag a directory that has none, with what it holds instead."""
    (tmp_path / "notes").write_text("1")
    assert 1 == main([*command, str(tmp_path / "notes")])
    said = "is a file, expected a directory" if command[0] in ("watch", "list") else "is a text, without tensors"
    assert f"{tmp_path / 'notes'} {said}" in capsys.readouterr().err
    if command[0] not in ("watch", "list"):
        assert 1 == main([*command, str(tmp_path)])
        out, err = capsys.readouterr()
        assert out == "" or command[0] == "report"
        assert err.startswith("nxd-ckpt: error: ")
        assert "it holds 'notes' (not a checkpoint)" in err
    if command[0] == "report":
        page = tmp_path / "page.html"
        assert 1 == main(["report", str(tmp_path), "-o", str(page)])
        assert "<b>Nothing to resume from<" in page.read_text()