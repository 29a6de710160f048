"""What the README shows works as shown."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from defedavg.config import study as config

TEXT = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_python_example_runs(tmp_path: Path) -> None:
    (code,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    accuracy, seconds, digest = done.stdout.split()
    assert float(accuracy) > 0.8
    assert float(seconds) > 0
    assert len(digest) == 64


def test_the_study_is_valid() -> None:
    (text,) = blocks("toml")
    assert len(config.study(tomllib.loads(text)).points()) == 6


def test_the_files_of_the_reading_order_are_there() -> None:
    root = Path(__file__).parent.parent
    named = re.findall(r"`(src/defedavg/[a-z_/.]+)`", TEXT)
    assert len(named) >= 8
    assert all((root / name).exists() for name in named)
    assert (root / "docs" / "demo.png").exists()
