"""The page in a browser that paints no frame, as when a command makes a screenshot or a PDF of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from defedavg.report.page import write
from helpers.run_folders import make_folder

CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")
def test_a_browser_without_frames_draws_the_whole_page(tmp_path: Path) -> None:
    make_folder(tmp_path, "study", seeds=(0,), rounds=4)
    write([tmp_path / "study"], tmp_path / "page.html", "The page")
    assert CHROMIUM is not None
    words = ["--headless", "--disable-gpu", "--virtual-time-budget=60000", f"--user-data-dir={tmp_path / 'profile'}"]
    words += ["--no-sandbox"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [CHROMIUM, *words, "--dump-dom", (tmp_path / "page.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert re.search(r"<html[^>]* data-ready=\"yes\"", done.stdout)
    folders = re.search(r'id="folders">(.*?)</section>', done.stdout, re.DOTALL)
    assert folders is not None
    assert "To repeat it with the saved configuration" in folders[1], "the last section is drawn"
