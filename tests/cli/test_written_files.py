"""Files that users name: devices, pipes and links are written through, and never replaced."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from helpers.command_line import call, refuse
from helpers.run_folders import make_folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with one run."""
    make_folder(tmp_path / "runs", "one", seeds=(0,), rounds=3)
    return tmp_path


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


ENDINGS = {"report": ".html", "export": ".csv", "gantt": ".png"}


def words_that_write(target: Path) -> dict[str, tuple[str, ...]]:
    return {
        "report": ("report", "runs", "-o", str(target)),
        "export": ("runs", "export", str(target)),
        "gantt": ("plan", "--example", "figure1", "--rounds", "5", "--gantt", str(target)),
    }


@pytest.mark.parametrize("command", ["report", "export", "gantt"])
def test_a_pipe_receives_the_content_and_stays_a_pipe(place: Path, command: str) -> None:
    target = fifo(place / f"pipe{ENDINGS[command]}")
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(target.read_bytes()), daemon=True)
    reader.start()
    done = call(*words_that_write(target)[command], cwd=place)
    assert done.returncode == 0, done.stderr
    reader.join(20)
    assert len(received[0]) > 1000
    assert stat.S_ISFIFO(target.lstat().st_mode)
    assert not list(place.glob("*.part"))


@pytest.mark.parametrize("command", ["report", "export", "gantt"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_stays_a_link_and_its_target_is_written(place: Path, command: str, dangling: bool) -> None:
    target, link = place / "elsewhere" / f"target{ENDINGS[command]}", place / f"link{ENDINGS[command]}"
    target.parent.mkdir()
    if not dangling:
        target.write_bytes(b"old")
    link.symlink_to(f"elsewhere/{target.name}")
    done = call(*words_that_write(link)[command], cwd=place)
    assert done.returncode == 0, done.stderr
    assert link.is_symlink()
    assert target.stat().st_size > 1000
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize("command", ["report", "export"])
def test_a_full_device_is_one_line_and_stays_a_device(place: Path, command: str) -> None:
    device = place / f"full{ENDINGS[command]}"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, Path("/dev/full").stat().st_rdev)
        device.open("wb").close()
    except OSError:
        pytest.skip("devices cannot be created here")
    refuse(call(*words_that_write(device)[command], cwd=place), "cannot be written: No space left on device")
    assert stat.S_ISCHR(device.lstat().st_mode)


def test_standard_output_receives_the_page_and_nothing_else(place: Path) -> None:
    (place / "stdout").symlink_to("/dev/stdout")  # so that an error cannot replace the device itself
    done = call("report", "runs", "-o", "stdout", cwd=place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<!doctype html>")
    assert done.stdout.rstrip().endswith("</html>")
    assert "open in a browser" in done.stderr


@pytest.mark.parametrize("name", ["page.htm", "PAGE.HTML", "page"])
def test_a_page_has_an_ending_of_html_or_none(place: Path, name: str) -> None:
    done = call("report", "runs", "-o", name, cwd=place)
    assert done.returncode == 0, done.stderr
    assert (place / name).read_text().startswith("<!doctype html>")


def test_links_in_a_circle_are_one_line(place: Path) -> None:
    for command, ending in (("report", "html"), ("export", "csv")):
        one, other = place / f"a.{ending}", place / f"b.{ending}"
        one.symlink_to(other)
        other.symlink_to(one)
        refuse(call(*words_that_write(one)[command], cwd=place), f"a.{ending} cannot be written")
        assert one.is_symlink()


def test_folders_that_cannot_be_written_are_one_line(place: Path) -> None:
    shutil.copy(place / "runs" / "one" / "config.toml", place / "file")
    for path, words in {
        "file/x.parquet": ("runs", "export", "file/x.parquet"),
        "file/k": ("deploy", "keys", "file/k"),
        "file/deep/k": ("deploy", "keys", "file/deep/k"),
        "file/app": ("deploy", "init", "file/app"),
    }.items():
        refuse(
            call(*words, cwd=place),
            f"{path} cannot be written: file is a file, not a folder; choose another folder, or rename the file",
        )
    refuse(
        call("plan", "--rounds", "2", "--save", "file", cwd=place),
        "file cannot be written: it is a file that already exists; choose another name, or rename the file",
    )
    refuse(call("runs", "export", "/proc/missing/x.parquet", cwd=place), "cannot be written")
    refuse(
        call("report", "runs", "-o", "missing/x.html", cwd=place),
        "x.html cannot be written: the folder missing does not exist",
    )


def test_what_a_killed_process_left_is_replaced_even_if_it_is_a_link(place: Path) -> None:
    (place / "precious").write_text("x")
    (place / "page.html.part").symlink_to("precious")
    assert call("report", "runs", "-o", "page.html", cwd=place).returncode == 0
    assert (place / "precious").read_text() == "x"
    assert not (place / "page.html").is_symlink()
