"""Ctrl-C in the first moment of a command, while its modules are loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_ctrl_c_while_modules_are_loaded_has_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2] / "src")])
    words = [sys.executable, "-c", "from defedavg.cli.main import main; main()", "settings"]
    result = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")
