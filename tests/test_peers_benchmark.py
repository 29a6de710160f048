"""``benchmarks/peers.py`` refuses what it cannot measure in one line, before it measures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.command_line import refuse

PEERS = Path(__file__).resolve().parents[1] / "benchmarks" / "peers.py"


def peers(folder: Path, *words: str, environments: str = "peers") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PEERS), "--environments", environments, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with environments that are never started, and with data."""
    for name in ("flower", "pfl", "flgo"):
        python = tmp_path / "peers" / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
    images, labels = np.zeros((30, 28, 28), np.uint8), np.zeros(30, np.int64)
    np.savez(tmp_path / "few.npz", images=images, labels=labels)
    np.savez(tmp_path / "unnamed.npz", images, labels)
    np.savez(tmp_path / "words.npz", images=np.array(["one", "two"]), labels=labels)
    np.save(tmp_path / "one.npy", images)
    (tmp_path / "text.npz").write_text("no array")
    (tmp_path / "empty.npz").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--rounds", "0"), "--rounds is 0; it must be at least 1"),
        (("--repeats", "-1"), "--repeats is -1; it must be at least 1"),
        (("--threads", "1", "0"), "--threads is 0; it must be at least 1"),
        (("--json", "missing/found.json"), "there is no folder missing for --json"),
        (("--json", "peers"), "--json peers is a folder; name a file"),
        (("--data", "missing.npz"), "there is no file missing.npz; give another --data, or leave it out"),
        (("--data", "peers"), "peers cannot be read; give an npz file with the arrays images and labels"),
        (("--data", "text.npz"), "text.npz cannot be read; give an npz file"),
        (("--data", "empty.npz"), "empty.npz cannot be read; give an npz file"),
        (("--data", "one.npy"), "one.npy cannot be read; give an npz file"),
        (("--data", "unnamed.npz"), "unnamed.npz cannot be read; give an npz file"),
        (("--data", "words.npz"), "words.npz cannot be read; give an npz file"),
        (("--data", "few.npz"), "few.npz has 30 images and 30 labels; give 50,000 of each"),
    ],
)
def test_what_cannot_be_measured_is_one_line(place: Path, words: tuple[str, ...], expected: str) -> None:
    refuse(peers(place, *words), f"peers.py: {expected}")


def test_missing_environments_are_named_with_the_option_that_creates_them(place: Path) -> None:
    for name in ("pfl", "flgo"):
        (place / "peers" / name / "bin" / "python").unlink()
        refuse(peers(place), f"peers has no environment for {'pfl' if name == 'pfl' else 'pfl, flgo'}", "--install")


def test_environments_that_cannot_be_created_are_one_line(place: Path) -> None:
    done = peers(place, "--install", environments="few.npz/peers")
    refuse(done, "peers.py: few.npz/peers/flower cannot be created: ", "; give another --environments")
