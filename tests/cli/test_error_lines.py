"""Errors of the command line: one line each, whatever is read, written or named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from defedavg.errors import printable
from helpers.command_line import call, refuse
from helpers.run_folders import make_folder, metrics_line

ODD = os.fsdecode(b"odd\xff")
"""The name of a folder that is not UTF-8."""

COMMAND = (sys.executable, "-m", "defedavg")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with one run."""
    make_folder(tmp_path / "runs", "one", seeds=(0,), rounds=3)
    return tmp_path


# Output that cannot be written.


@pytest.mark.parametrize("words", [("runs", "list"), ("runs", "list", "--json"), ("--help",), ("settings",)])
def test_a_full_standard_output_is_one_line(place: Path, words: tuple[str, ...]) -> None:
    refuse(call(*words, cwd=place, stdout="/dev/full"), "standard output cannot be written: No space left on device")


def test_a_closed_pipe_ends_the_command_silently(place: Path) -> None:
    (place / "stdout").symlink_to("/dev/stdout")
    for words in (("runs", "list"), ("runs", "list", "--json"), ("report", "runs", "-o", "stdout"), ("settings",)):
        with subprocess.Popen([*COMMAND, *words], cwd=place, stdout=PIPE, stderr=PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            child.stdout.close()
            assert child.stderr.read() == ""
        assert child.returncode == 1


def test_a_closed_standard_output_is_no_error(place: Path) -> None:
    shell = f"{sys.executable} -m defedavg runs list >&-"
    done = subprocess.run(["/bin/sh", "-c", shell], cwd=place, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Input that never ends or is not there.


def test_endless_and_silent_inputs_are_one_line(place: Path) -> None:
    refuse(call("run", "/dev/zero", cwd=place), "/dev/zero cannot be read: it has more than 64 MiB")
    refuse(call("plan", "--plugin", "/dev/zero", cwd=place), "/dev/zero cannot be read: it has more than 64 MiB")
    refuse(call("replay", "/dev/zero", cwd=place), "/dev/zero cannot be read: it is not a regular file")
    os.mkfifo(place / "pipe.toml")
    refuse(call("plan", "pipe.toml", cwd=place), "pipe.toml cannot be read: the pipe sent nothing for 10 seconds")
    refuse(call("plan", "runs", cwd=place), "runs cannot be read: it is a folder")


def test_a_configuration_may_come_through_a_pipe(place: Path) -> None:
    pipe = place / "pipe.toml"
    os.mkfifo(pipe)

    def write() -> None:
        with pipe.open("w") as file:
            file.write('name = "x"\n')
            file.flush()
            time.sleep(0.5)
            file.write('algorithms = ["fedavg"]\n')

    threading.Thread(target=write, daemon=True).start()
    done = call("plan", "pipe.toml", "--rounds", "3", cwd=place)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.toml", "summary.json", "split.json", "plans/fedavg_seed=0.jsonl.gz", "folder"]
)
def test_special_files_in_a_run_are_named_and_not_opened(place: Path, name: str) -> None:
    path = place / "runs" / "one" / name.replace("folder", "metrics.jsonl")
    path.unlink()
    if name == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    for words in (("runs", "list"), ("report", "runs", "-o", "page.html"), ("runs", "export", "x.parquet")):
        done = call(*words, cwd=place)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    # A plan that is not a file counts as missing.
    assert ("is not a regular file" in (place / "page.html").read_text()) == (not name.startswith("plans"))


def test_special_files_are_refused_when_a_run_is_resumed(place: Path) -> None:
    folder = place / "runs" / "one"
    for name in ("metrics.jsonl", "plots", "summary.json"):
        path, backup = folder / name, folder / "backup"
        if path.exists():
            path.rename(backup)
        for make in (lambda path=path: os.mkfifo(path), lambda path=path: path.symlink_to(place / "outside")):
            make()
            refuse(call("run", folder / "config.toml", "--resume", cwd=place), f"{name} is a link or a special file")
            path.unlink()
        if backup.exists():
            backup.rename(path)
    assert not (place / "outside").exists()


# Names that are not UTF-8.


def test_folders_with_odd_names_are_listed_reported_and_removed(place: Path) -> None:
    (place / "runs" / "one").rename(place / "runs" / ODD)
    listed = call("runs", "list", cwd=place)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "odd\\xff" in listed.stdout
    assert call("runs", "list", "--json", cwd=place).stdout.count('"name": "odd\\udcff"') == 2
    make_folder(place / "runs", "two", seeds=(0,), rounds=3)
    for words in (
        ("runs", "compare", ODD, "two"),
        ("report", f"runs/{ODD}", "-o", f"{ODD}.html", "--title", ODD),
        ("runs", "export", "x.parquet"),
        ("runs", "export", f"{ODD}.parquet"),
        ("runs", "remove", ODD, "--yes"),
    ):
        done = call(*words, cwd=place)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert not (place / "runs" / ODD).exists()


@pytest.mark.parametrize("words", [("run", "study.toml", "--out", ODD), ("plan", "study.toml", "--save", ODD)])
def test_folders_with_odd_names_are_written(place: Path, words: tuple[str, ...]) -> None:
    text = 'algorithms = ["fedavg"]\n[task]\nmodel = "softmax"\n[clients]\nnum_clients = 8\n[stop]\nmax_rounds = 2\n'
    (place / "study.toml").write_text(text)
    done = call(*words, cwd=place)
    assert done.returncode == 0, done.stderr
    assert list((place / ODD).iterdir())


# Errors that were not foreseen, and too little memory.


def test_what_was_not_foreseen_is_one_line_and_a_file_with_the_details(place: Path) -> None:
    plugin = place / "faulty.py"
    plugin.write_text(
        "from defedavg.report import tables\n"
        "from defedavg.tasks import register_model\n"
        "register_model('faulty', lambda image, classes: None)\n"
        "def faulty(*args, **options):\n    raise LookupError('first\\nsecond \\x1b[31m')\n"
        "tables.make = faulty\n"
    )
    words = ("plan", "--plugin", "faulty.py", "--rounds", "2")
    done = call(*words, cwd=place, TMPDIR=str(place))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "unexpected LookupError: first" in line
    (details,) = place.glob("defedavg-error-*.txt")
    assert line.endswith(f"the details are in {details}")
    text = details.read_text()
    for word in ("Traceback", "second", "defedavg: ", "torch: ", "command: defedavg plan --plugin faulty.py"):
        assert word in text
    assert details.stat().st_mode & 0o077 == 0
    shown = call(*words, cwd=place, TMPDIR=str(place), DEFEDAVG_DEBUG="1")
    assert shown.returncode == 1
    assert "Traceback" in shown.stderr


def test_too_little_memory_is_one_line(place: Path) -> None:
    (place / "study.toml").write_text(
        'name = "new"\nalgorithms = ["fedavg"]\n[task]\nmodel = "softmax"\n[clients]\nnum_clients = 8\n'
    )
    large = ("--set", "training.local_steps=1000000", "--set", "training.batch_size=100")
    done = call("run", "study.toml", *large, cwd=place, megabytes=4000)
    refuse(done, "there is not enough memory", "Unable to allocate", "reduce", "training.local_steps")


# Text that is a command to the terminal.


SIGNS = "\x1b[31m\x07\x9b31m\u202e\u2066\x7f\r\u2028"


def test_commands_to_the_terminal_are_shown_as_escapes(place: Path) -> None:
    name = f"a{SIGNS}b"
    (place / "runs" / "one").rename(place / "runs" / name)
    make_folder(place / "runs", "two", seeds=(0,), rounds=3)
    summary = place / "runs" / name / "summary.json"
    summary.write_text(summary.read_text().replace('"label": "fedavg', f'"label": {json.dumps(name)[:-1]}'))
    for words in (
        ("runs", "list"),
        ("runs", "list", "--json"),
        ("runs", "compare", name, "two"),
        ("runs", "compare", name, "two", "--json"),
        ("runs", "remove", f"no{name}", "--yes"),
        ("report", f"runs/{name}", "-o", f"{name}.html"),
        ("report", name),
        ("plan", f"{name}.toml"),
        ("plan", "--set", f"training.{name}=1"),
        ("plan", "--set", f"{name}=1"),
        ("plan", "--example", name),
        (name,),
        (f"--{name}",),
        ("plan", f"--{name}"),
        ("plan", "--rounds", name),
        ("runs", "remove", name, "--yes"),
    ):
        done = call(*words, cwd=place)
        text = done.stdout + done.stderr
        assert text
        assert "Traceback" not in text
        assert printable(text, keep="\n") == text, words


def test_names_are_not_read_as_markup(place: Path) -> None:
    (place / "runs" / "one").rename(place / "runs" / "[red]a[")
    make_folder(place / "runs", "two", seeds=(0,), rounds=3).rename(place / "runs" / "[|red]")
    assert "[red]a[" in call("runs", "list", cwd=place).stdout
    assert "[red]a[" in call("runs", "compare", "[red]a[", "[|red]", cwd=place).stdout


# Lines that cannot be read, and folders that are not complete.


def test_damaged_lines_are_counted_on_standard_error(place: Path) -> None:
    make_folder(place / "runs", "two", seeds=(0,), rounds=3)
    with (place / "runs" / "one" / "metrics.jsonl").open("a") as file:
        file.write("{\nnull\n" + metrics_line("fedavg", "fedavg", 0, 9, 1.0, 0.5)[:-20])
    line = "metrics.jsonl: 2 damaged lines left out\n"
    assert call("runs", "list", cwd=place).stderr == f"one: {line}"
    assert call("runs", "list", "--json", cwd=place).stderr == f"one: {line}"
    assert call("runs", "compare", "one", "two", cwd=place).stderr == f"one: {line}"
    assert call("report", "runs", cwd=place).stderr == f"runs/one: {line}"


def test_the_live_view_says_how_many_lines_are_damaged(place: Path) -> None:
    with (place / "runs" / "one" / "metrics.jsonl").open("a") as file:
        file.write("{\n")
    words = [*COMMAND, "view", "--port", "0"]
    with subprocess.Popen(words, cwd=place, stdout=PIPE, stderr=PIPE, text=True) as child:
        assert child.stdout is not None
        assert "open in a browser" in child.stdout.readline()
        child.kill()
        assert child.communicate()[1] == "one: metrics.jsonl: 1 damaged line left out\n"


def test_a_folder_without_results_has_a_page(place: Path) -> None:
    folder = place / "runs" / "one"
    for path in (folder / "summary.json", folder / "metrics.jsonl"):
        path.unlink()
    assert "damaged" in call("runs", "list", cwd=place).stdout
    done = call("report", "runs/one", "-o", "page.html", cwd=place)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "runs/one: summary.json is missing\n"
    page = (place / "page.html").read_text()
    assert "summary.json is missing" in page
    assert "No run reached any accuracy" in page


# Names of commands and settings.


@pytest.mark.parametrize(("word", "hint"), [("compare", "'runs compare'"), ("fetch", "'data fetch'"), ("rnu", "'run'")])
def test_an_unknown_command_is_answered_with_the_one_that_was_meant(tmp_path: Path, word: str, hint: str) -> None:
    refuse(call(word, "a", "b", cwd=tmp_path), f"no such command '{word}'; did you mean {hint}?", "`defedavg --help`")


@pytest.mark.parametrize(("clients", "unheld"), [(3, "4 of the 10 classes"), (5, "")])
def test_classes_that_no_client_holds_are_named(tmp_path: Path, clients: int, unheld: str) -> None:
    (tmp_path / "few.toml").write_text(
        f'name = "few"\nalgorithms = ["fedavg"]\n[task]\nmodel = "softmax"\nsplit = "classes"\n[clients]\n'
        f"num_clients = {clients}\n[training]\nupdates_per_round = 2\nlocal_steps = 1\n[stop]\nmax_rounds = 1\n"
    )
    done = call("run", "few.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    counts = json.loads((tmp_path / "runs" / "few" / "split.json").read_text())["counts"]
    missing = [str(label) for label, column in enumerate(zip(*counts, strict=True)) if not sum(column)]
    expected = f"no client holds a sample of {unheld} ({', '.join(missing)}), which limits the accuracy"
    assert (expected in done.stderr) == bool(unheld)
    assert bool(missing) == bool(unheld)
