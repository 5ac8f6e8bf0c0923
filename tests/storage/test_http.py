"""Reading from a web server: the directory that it shows, and what it cannot do, is said by name."""

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_ckpt
from nxd_ckpt.cli.main import main
from nxd_ckpt.errors import CheckpointError, CheckpointNotFound
from nxd_ckpt.storage import fsspec_storage
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.verify import verify_checkpoint

STATE = {"w": torch.arange(300, dtype=torch.float32), "x": torch.ones(7)}


class Server(SimpleHTTPRequestHandler):
    """python's own; it answers no range requests."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""


class Untimed(Server):
    """Tells no times."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Last-Modified":
            super().send_header(keyword, value)


class Unlisted(Server):
    """Shows no index pages."""

    def list_directory(self, path: Any) -> None:
        self.send_error(404)


class Ranges(Server):
    """Answers range requests, and counts them."""

    ranges = 0

    def do_GET(self) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = self.translate_path(self.path)
        if found is None or not os.path.isfile(path):
            super().do_GET()
            return
        type(self).ranges += 1
        data = Path(path).read_bytes()[int(found[1]) : int(found[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Busy(Server):
    """Answers 503 for the manifest."""

    def send_head(self) -> Any:
        if not self.path.endswith("manifest.json"):
            return super().send_head()
        self.send_error(503)
        return None


@contextlib.contextmanager
def serving(directory: Path, handler: type[Server] = Server) -> Iterator[str]:
    """The URL of ``run`` in a directory, on 127.0.0.1."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(directory))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/run"
        finally:
            server.shutdown()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With two tags of ours: the later one has the lesser name."""
    for tag, value in (("b", 1), ("a", 2)):
        state = {name: tensor * value for name, tensor in STATE.items()}
        nxd_ckpt.save_checkpoint(tmp_path / "run", tag, state, user_content={"value": value}, use_xser=value == 1)
    return tmp_path


@pytest.mark.parametrize("handler", [Server, Untimed, Ranges])
@pytest.mark.one_in(3)
def test_what_reads_a_directory_reads_what_a_server_shows_of_it(
    directory: Path, handler: type[Server], tmp_path: Path
) -> None:
    """The latest tag too, where the server tells no times: the manifests do."""
    with serving(directory, handler) as url:
        for tag, value in ((None, 2), ("a", 2), ("b", 1)):
            loaded: dict[str, torch.Tensor] = {}
            assert {"value": value} == nxd_ckpt.load_checkpoint(url, tag, loaded)
            assert all(torch.equal(tensor * value, loaded[name]) for name, tensor in STATE.items())
            assert () == verify_checkpoint(url, tag).problems
        assert nxd_ckpt.has_checkpoint(url)
        assert torch.equal(STATE["w"][5:9] * 2, nxd_ckpt.open_checkpoint(url).read("model/w", slice(5, 9)))
        nxd_ckpt.copy_checkpoint(f"{url}/b", tmp_path / "copy" / "b")
        nxd_ckpt.unshard_checkpoint(f"{url}/a", tmp_path / "unsharded")
        assert 0 == main(["list", url])
        assert 0 == main(["inspect", f"{url}/b"])
    assert () == verify_checkpoint(tmp_path / "copy", "b").problems
    assert handler is not Ranges or Ranges.ranges > 0


def test_a_tag_without_a_time_is_to_be_named(tmp_path: Path) -> None:
    """Of neuronx_distributed's nothing else tells which is the latest: then one is to be named."""
    for tag in ("one", "two"):
        (tmp_path / "run" / tag / "model").mkdir(parents=True)
        torch.save(STATE, tmp_path / "run" / tag / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
        for marker in ("checkpoint", "done"):
            (tmp_path / "run" / tag / marker).write_text("1")
    with serving(tmp_path, Untimed) as url:
        loaded: dict[str, torch.Tensor] = {}
        with pytest.raises(CheckpointNotFound, match=r"does not report when.*one, two.*name"):
            nxd_ckpt.load_checkpoint(url, None, loaded)
        nxd_ckpt.load_checkpoint(url, "two", loaded)
    assert torch.equal(STATE["w"], loaded["w"])


def test_a_server_without_index_pages_serves_archives_only(directory: Path, tmp_path: Path) -> None:
    """Nothing tells what is there, but for an archive, which has its own list."""
    nxd_ckpt.convert(directory / "run" / "a", tmp_path / "a.tar", to="tar")
    with serving(tmp_path, Unlisted) as url:
        with pytest.raises(CheckpointNotFound, match=r"no index page.*archive"):
            nxd_ckpt.load_checkpoint(url, None, {})
        loaded: dict[str, torch.Tensor] = {}
        assert {"value": 2} == nxd_ckpt.load_checkpoint(f"{url.removesuffix('run')}a.tar", None, loaded)
    assert torch.equal(STATE["x"] * 2, loaded["x"])


def test_a_server_is_read_only(directory: Path) -> None:
    with serving(directory) as url:
        with pytest.raises(CheckpointError, match="read-only"):
            nxd_ckpt.save_checkpoint(url, "c", STATE)
        with pytest.raises(CheckpointError, match="read-only"):
            nxd_ckpt.copy_checkpoint(directory / "run" / "a", f"{url}/c")


def test_a_busy_server_is_no_missing_file(directory: Path) -> None:
    """A manifest that cannot be read now is not one that the tag lost."""
    with serving(directory, Busy) as url, pytest.raises(CheckpointError, match="503"):
        nxd_ckpt.load_checkpoint(url, "a", {}, storage_options={"retries": 0})


def test_a_large_file_without_ranges_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be sent anew for each piece: said by name."""
    monkeypatch.setattr("nxd_ckpt.storage.fsspec_storage._WITHOUT_RANGES", 999)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_bytes(b"." * 1000)
    with serving(tmp_path) as url, pytest.raises(OSError, match="no range requests"):
        open_storage(url).read_into("file", 5, memoryview(bytearray(3)))


class Redirecting(Server):
    """Sends who asks for a manifest to another server, or to another path of its own."""

    target = ""

    def do_GET(self) -> None:
        if not self.path.endswith("manifest.json"):
            super().do_GET()
            return
        self.send_response(302)
        self.send_header("Location", self.target)
        self.end_headers()

    do_HEAD = do_GET


def test_a_redirect_to_another_server_is_refused(directory: Path) -> None:
    """It is named, and not asked for anything. One to another path of the same server is followed."""
    asked: list[str] = []

    class Other(Server):
        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

        do_HEAD = do_GET

    with serving(directory, Other) as other, serving(directory, Redirecting) as url:
        Redirecting.target = other.replace("127.0.0.1", "localhost") + "/a/manifest.json"
        with pytest.raises((CheckpointError, OSError), match="redirects to another one, localhost"):
            nxd_ckpt.open_checkpoint(url, "a")
        Redirecting.target = other + "/a/manifest.json"  # of the same host, on another port
        place = other.removesuffix("/run")
        with pytest.raises((CheckpointError, OSError), match=f"redirects to another one, {place};"):
            nxd_ckpt.open_checkpoint(url, "a")
    assert [] == asked


def test_an_answer_that_drips_ends(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not tried again: the next one would drip too."""
    monkeypatch.setattr(fsspec_storage, "_LONGEST", 0.5)
    over = threading.Event()
    asked: list[str] = []

    class Dripping(Server):
        def do_GET(self) -> None:
            if not self.path.endswith("manifest.json"):
                super().do_GET()
                return
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            with contextlib.suppress(OSError):
                while not over.wait(0.05):
                    self.wfile.write(b" ")

    with serving(directory, Dripping) as url:
        with pytest.raises((CheckpointError, OSError), match="took more than"):
            nxd_ckpt.open_checkpoint(url, "a", storage_options={"skip_instance_cache": True})
        over.set()
    assert 1 == len(asked)
