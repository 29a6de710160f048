"""Plugin files: loaded once per content, in every process, with one line for every failure."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from defedavg import registry
from defedavg.algorithms import ALGORITHMS
from defedavg.config import study as config
from defedavg.plugins import _loaded, _texts, load_plugin, load_plugins, load_sources, plugin_hashes, plugin_sources
from defedavg.tasks import DATASETS, MODELS, PARTITIONS, load, split
from helpers.user_errors import line_of

ALGORITHM = '''
from dataclasses import dataclass, field

from defedavg.algorithms import BufferedRound, register
from defedavg.algorithms.protocol import Broadcast, ClientPolicy


@dataclass(frozen=True, slots=True)
class OwnSettings:
    power: int = field(default=2, metadata={"help": "an exponent"})


@register
class Own(BufferedRound):
    """A plugin."""

    name = "own-plugin"
    summary = "a plugin"
    citation = "none"
    equation = "w"
    policy = ClientPolicy()
    settings_type = OwnSettings
    broadcasts = True

    def start(self):
        return [Broadcast(self.version)]

    def after_merge(self):
        return [Broadcast(self.version)]
'''

PARTS = """
import numpy as np
from torch import nn

from defedavg.tasks import DataSet, register_dataset, register_model, register_partition


def tiny(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, classes))


def halves(labels, num_clients, seed, alpha):
    return tuple(np.array_split(np.arange(int(len(labels) * alpha)), num_clients))


def read(paths):
    assert paths == ()
    part = np.arange(320, dtype=np.uint8).reshape(20, 1, 4, 4), np.arange(20) % 2
    return part, part


register_model("tiny-model", tiny)
register_partition("halves", halves)
register_dataset(DataSet("tiny-data", "a test", "nobody", (1, 4, 4), 20, 20, 2, read))
"""


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    """Restore all registries and forget all plugins after a test."""
    kept = [(own, dict(own._known), dict(own._sources)) for own in (ALGORITHMS, MODELS, PARTITIONS, DATASETS)]
    yield
    for own, known, sources in kept:
        own._known, own._sources = known, sources  # type: ignore[assignment]
    _loaded.clear()
    _texts.clear()


def write(folder: Path, text: str, name: str = "own.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_plugin_is_loaded_once_per_content(tmp_path: Path) -> None:
    path = write(tmp_path, ALGORITHM)
    module = load_plugin(path)
    assert module.__file__ == str(path)
    assert sys.modules[module.__name__] is module
    assert ALGORITHMS["own-plugin"] is module.Own
    assert load_plugin(path) is module
    path.write_text(ALGORITHM.replace("default=2", "default=5"))
    again = load_plugin(path)
    assert again is not module
    assert ALGORITHMS["own-plugin"] is again.Own
    assert ALGORITHMS["own-plugin"].settings_type().power == 5


def test_a_study_loads_its_plugins(tmp_path: Path) -> None:
    write(tmp_path, ALGORITHM)
    path = write(
        tmp_path, "algorithms = ['own-plugin']\nplugins = ['own.py']\n[own-plugin]\npower = [1, 2]\n", "s.toml"
    )
    study = config.load(path)
    assert study.plugins == (str(tmp_path / "own.py"),)
    assert [point.settings.algorithm_settings.power for point in study.points()] == [1, 2]
    assert f'plugins = [\n    "{tmp_path}/own.py",\n]' in study.to_toml()
    path.write_text("algorithms = ['own-plugin']\n")
    assert config.load(path, plugins=[tmp_path / "own.py"]).plugins == (str(tmp_path / "own.py"),)


def test_models_partitions_and_data_sets(tmp_path: Path) -> None:
    load_plugin(write(tmp_path, PARTS))
    settings = {"data": "tiny-data", "model": "tiny-model", "split": "halves", "alpha": 0.5}
    study = config.study({"task": settings, "clients": {"num_clients": 5}})
    from defedavg.config.build import build_task

    task = build_task(study.points()[0].settings, 0)
    assert task.num_clients == 5
    assert [part.tolist() for part in task.clients] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert load("tiny-data")[2] == 2
    assert len(split("halves", load("tiny-data")[0].targets.numpy(), 2, 0, alpha=1.0)[0]) == 10


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\n", "plugin {path} registers nothing; call defedavg.algorithms.register"),
        ("import defedavg.tasks\n", "plugin {path} registers nothing"),
        ("x = 1\ny = (\n", "{path}, line 2: SyntaxError: '(' was never closed"),
        ("import no_such_module_xyz\n", "{path}, line 1: ModuleNotFoundError: No module named 'no_such_module_xyz'"),
        ("def f():\n    raise KeyError('a')\n\nf()\n", "{path}, line 2: KeyError: 'a'"),
        ("import json\njson.loads('{')\n", "{path}, line 2: JSONDecodeError: "),
        ("raise ValueError('two\\nlines')\n", "{path}, line 1: ValueError: two"),
        ("import sys\nsys.exit(3)\n", "{path}, line 2: SystemExit: 3"),
        ("from defedavg.algorithms import register\nregister(3)\n", "{path}, line 2: algorithm "),
        (
            ALGORITHM.replace('"own-plugin"', '"fedavg"'),
            "{path}, line 14: algorithm 'fedavg' already exists; give yours another name",
        ),
        (
            ALGORITHM.replace("after_merge", "_opened"),
            "{path}, line 14: Own uses old names of hooks; rename _opened to after_merge",
        ),
        (
            "from defedavg.tasks import register_partition\nregister_partition('x', lambda a, b, c, d: 0)\n",
            "{path}, line 2: split 'x' needs 'd', which is not a task setting",
        ),
    ],
)
def test_every_failure_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    path = write(tmp_path, text)
    modules = {name for name in sys.modules if name.startswith("defedavg_plugin")}
    found = line_of(lambda: load_plugin(path))
    if "line 14" in line:  # the line of the decorator or of the class, by Python version
        found = found.replace("line 13:", "line 14:")
    assert found.startswith(line.format(path=path))
    left = {name for name in sys.modules if name.startswith("defedavg_plugin")} - modules
    assert not left or "registers nothing" in line


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"x = 1\x00"])
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "own.py"
    if content is not None:
        path.write_bytes(content)
    assert str(path) in line_of(lambda: load_plugin(path))
    assert "cannot be read" in line_of(lambda: load_plugin(tmp_path))


def test_a_plugin_that_fails_leaves_no_entry(tmp_path: Path) -> None:
    path = write(tmp_path, PARTS + "\nraise RuntimeError('late')\n")
    assert "line 26: RuntimeError: late" in line_of(lambda: load_plugin(path))
    assert "tiny-model" not in MODELS
    assert "cnn" in MODELS
    path.write_text(PARTS)
    load_plugin(path)
    path.write_text(PARTS + "\nraise RuntimeError('late')\n")
    line_of(lambda: load_plugin(path))
    assert "tiny-model" in MODELS  # as the earlier version of the file registered it


def test_a_plugin_that_imports_the_package_does_not_own_what_the_package_registers(tmp_path: Path) -> None:
    failing = write(tmp_path, "from defedavg.tasks import MODELS\nraise KeyError('x')\n")
    code = (
        "import sys\n"
        "from defedavg.errors import UserError\n"
        "from defedavg.plugins import load_plugin\n"
        "try:\n    load_plugin(sys.argv[1])\nexcept UserError as error:\n    print(error)\n"
        "from defedavg.tasks import MODELS\n"
        "print('cnn' in MODELS)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(failing)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{failing}, line 2: KeyError: 'x'", "True"]


def test_two_plugins_with_one_name(tmp_path: Path) -> None:
    first, second = write(tmp_path, ALGORITHM), write(tmp_path, ALGORITHM, "other.py")
    assert "'own-plugin' already exists" in line_of(lambda: load_plugins([first, second]))


def test_sources_and_hashes(tmp_path: Path) -> None:
    path = write(tmp_path, ALGORITHM)
    assert plugin_sources([path]) == {str(path): ALGORITHM}
    assert plugin_hashes([path]) == {str(path): hashlib.sha256(ALGORITHM.encode()).hexdigest()}
    path.write_text("# changed")
    assert plugin_hashes([path]) != {str(path): hashlib.sha256(ALGORITHM.encode()).hexdigest()}


def test_another_process_loads_sources_without_the_files(tmp_path: Path) -> None:
    away = str(tmp_path / "not" / "here.py")
    load_sources({away: ALGORITHM, str(tmp_path / "task.py"): "def make(config, client): return config['x']\n"})
    assert ALGORITHMS["own-plugin"].__name__ == "Own"
    study = config.study({"algorithms": ["own-plugin"], "plugins": [away]})
    assert study.plugins == (away,)
    line = line_of(lambda: config.study({"task": {"module": f"{tmp_path}/task.py:make"}}))
    assert line == f"{tmp_path}/task.py, line 1: KeyError: 'x'"


def test_a_script_that_is_also_a_plugin_is_not_loaded_twice(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        ALGORITHM + "\nif __name__ == '__main__':\n    from defedavg.config import study as config\n"
        "    print(config.study({'algorithms': ['own-plugin'], 'plugins': [__file__]}).algorithms)\n",
    )
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "('own-plugin',)\n"


def test_registrations_outside_a_registry_count(tmp_path: Path) -> None:
    table: list[int] = []

    def add(value: int) -> None:
        table.append(value)
        registry.note_registration(table.clear)

    registry.add_for_test = add  # type: ignore[attr-defined]
    try:
        load_plugin(write(tmp_path, "from defedavg import registry\nregistry.add_for_test(3)\n"))
        assert table == [3]
        path = write(tmp_path, "from defedavg import registry\nregistry.add_for_test(4)\n1 / 0\n", "other.py")
        assert "ZeroDivisionError" in line_of(lambda: load_plugin(path))
        assert table == []
    finally:
        del registry.add_for_test  # type: ignore[attr-defined]


def test_the_example_is_a_plugin() -> None:
    example = Path(__file__).parents[1] / "examples" / "own_task.toml"
    study = config.load(example)
    assert [point.settings.clients.num_clients for point in study.points()] == [30, 30]
    assert [Path(path).name for path in study.python_files()] == ["own_algorithm.py", "own_task.py"]
    assert ALGORITHMS["async-mixing"].uses_global_lr is False
