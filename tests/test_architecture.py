"""The structure of the source: dependencies point one way, names are unique, modules and functions are small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from helpers.source_tree import (
    ROOT,
    area,
    branches,
    cycle,
    dependencies,
    functions,
    imported_names,
    imports_of,
    in_area,
    modules,
    packages_of,
)

ORDER = [
    {"errors", "rng", "fileio", "jsonio", "durations", "registry", "plugins", "compat"},
    {"algorithms"},
    {"planning"},
    {"tasks"},
    {"training"},
    {"config"},
    {"runstore"},
    {"report"},
    {"experiments"},
    {"deploy"},
    {"theory", "paper", "suite"},
    {"adviser"},
    {"cli"},
]
"""From low to high: a module imports from its own area and from lower ones."""

RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
CLOCKS = {"time", "datetime", "socket", "asyncio", "threading"}
GENERATORS = {"Generator", "Philox", "PCG64", "SeedSequence", "BitGenerator"}  # of numpy.random: no hidden state

MAX_MODULE_LINES, MAX_FUNCTION_LINES, MAX_BRANCHES, MAX_TOP_MODULES = 400, 60, 12, 10


def name_of(module: str) -> str:
    """The name of a module in test reports."""
    return module or "defedavg"


# The reader of imports.


def test_imports_are_resolved() -> None:
    text = "import torch.nn\nfrom . import a\nfrom ..b import c\nfrom .d import e\ndef f():\n    from flwr import g\n"
    found = set(imported_names(ast.parse(text), ["defedavg", "training"]))
    assert found == {"torch.nn", "defedavg.training.a", "defedavg.b.c", "defedavg.training.d.e", "flwr.g"}


def test_the_graph_contains_lazy_and_type_only_imports() -> None:
    assert "planning.plan" in dependencies("")  # under TYPE_CHECKING
    assert "tasks" in dependencies("config.build")  # inside a function


def test_a_cycle_is_found() -> None:
    assert cycle({"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"b"})}) == ["b", "c", "b"]
    assert cycle({"a": frozenset({"b", "c"}), "b": frozenset({"c"}), "c": frozenset()}) == []


def test_branches_are_counted() -> None:
    text = "def f(x):\n    if x and x > 1 or x < 0:\n        return [i for i in x if i]\n    return 1 if x else 2\n"
    assert branches(ast.parse(text)) == 6


# Dependencies.


def test_there_is_no_import_cycle() -> None:
    # The package itself exports public names lazily; nothing below depends on what it exports except the version.
    assert cycle({module: dependencies(module) - {""} for module in modules() if module}) == []


@pytest.mark.parametrize("module", [m for m in modules() if m not in ("", "__main__")], ids=name_of)
def test_imports_point_down(module: str) -> None:
    for other in dependencies(module) - {""}:
        assert RANK[area(other)] <= RANK[area(module)], f"{module} imports {other}"


def test_every_area_has_a_rank() -> None:
    assert {area(module) for module in modules()} - {"", "__main__"} == set(RANK)


@pytest.mark.parametrize("module", in_area("algorithms"), ids=name_of)
def test_machines_have_no_clock_no_tensor_and_no_network(module: str) -> None:
    assert packages_of(module) == set()
    assert not {name.split(".")[0] for name in imports_of(module)} & CLOCKS


@pytest.mark.parametrize("module", in_area("planning", "errors", "rng", "jsonio", "registry"), ids=name_of)
def test_planning_needs_numpy_only(module: str) -> None:
    assert packages_of(module) <= {"numpy"}


@pytest.mark.parametrize("module", in_area("training", "tasks"), ids=name_of)
def test_computing_needs_torch_and_numpy_only(module: str) -> None:
    # Triton comes with PyTorch on CUDA machines. datasets, and pandas for flights, are extras that one module each
    # imports where it is used.
    # psutil tells the free memory where it is installed.
    extra = {
        "training.memory": {"psutil"},
        "training.kernels.triton_kernels": {"triton"},
        "training.kernels.triton_deferred": {"triton"},
        "training.kernels.triton_half": {"triton"},
        "training.kernels.triton_linear": {"triton"},
        "training.kernels.triton_norm": {"triton"},
        "tasks.datasets.hub": {"datasets"},
        "tasks.datasets.flights": {"pandas"},
        "tasks.datasets.download": {"filelock"},
    }
    assert packages_of(module) <= {"numpy", "torch"} | extra.get(module, set())


@pytest.mark.parametrize("module", in_area("training"), ids=name_of)
def test_executors_know_no_algorithm_and_no_clock(module: str) -> None:
    assert {other for other in dependencies(module) if area(other) == "algorithms"} <= {"algorithms.protocol"}
    assert not dependencies(module) & {"planning.simulator", "planning.sparse_simulator", "planning.devices"}


@pytest.mark.parametrize("module", in_area("deploy"), ids=name_of)
def test_a_deployment_shares_machines_and_not_the_virtual_clock(module: str) -> None:
    clock = {"planning.simulator", "planning.sparse_simulator", "planning.event_queue", "planning.version_tracker"}
    assert module == "deploy.whatif" or not dependencies(module) & clock
    assert "experiments" not in {area(other) for other in dependencies(module)}


@pytest.mark.parametrize("module", ["deploy.engine.engine", "deploy.engine.events", "deploy.engine.client_tracker"])
def test_the_engine_only_decides(module: str) -> None:
    assert packages_of(module) == set()
    assert not {name.split(".")[0] for name in imports_of(module)} & CLOCKS


@pytest.mark.parametrize("module", list(modules()), ids=name_of)
def test_large_packages_have_their_places(module: str) -> None:
    allowed = {
        "flwr": module.startswith("deploy.flower."),
        "grpc": module.startswith("deploy.grpc."),
        "ray": module.startswith("experiments.ray."),
        "safetensors": module in ("experiments.checkpointing", "experiments.study_run", "deploy.server.state_store"),
        "pyarrow": module == "runstore.export",
        "typer": area(module) == "cli",
    }
    used = packages_of(module) & allowed.keys()
    assert {name for name in used if not allowed[name]} == set()


@pytest.mark.parametrize("module", list(modules()), ids=name_of)
def test_nothing_is_unpickled(module: str) -> None:
    assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & {n.split(".")[0] for n in imports_of(module)}


@pytest.mark.parametrize("module", list(modules()), ids=name_of)
def test_linux_only_interfaces_are_guarded(module: str) -> None:
    """/proc is read in one place, which works without it; fcntl and similar modules do not exist everywhere."""
    text = modules()[module].read_text(encoding="utf-8")
    assert module == "runstore.provenance" or "/proc" not in text
    assert not {"fcntl", "termios", "pwd", "grp", "msvcrt"} & {name.split(".")[0] for name in imports_of(module)}


def loaded(module: str, names: set[str]) -> str:
    code = f"import sys, defedavg.{module}\nprint(sorted({names!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT.parent), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module", ["planning.simulator", "planning.plan", "experiments.simulation", "algorithms", "config.build"]
)
def test_planning_does_not_load_torch(module: str) -> None:
    assert loaded(module, {"torch", "flwr", "ray", "matplotlib", "rich", "typer"}) == "[]"


@pytest.mark.parametrize(
    "module", ["deploy.flower.client_entry", "deploy.client.client_socket", "deploy.replay", "cli.deploy_command"]
)
def test_a_client_does_not_load_torch_before_it_trains(module: str) -> None:
    assert loaded(module, {"torch", "matplotlib"}) == "[]"


# Names and sizes.


def test_module_names_are_unique() -> None:
    names = Counter(path.name for path in modules().values() if not path.name.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_class_names_are_unique() -> None:
    names: Counter[str] = Counter()
    for path in modules().values():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_few_modules_lie_directly_in_the_package() -> None:
    assert len([path for path in ROOT.glob("*.py") if not path.name.startswith("__")]) <= MAX_TOP_MODULES


@pytest.mark.parametrize("module", list(modules()), ids=name_of)
def test_modules_and_functions_are_small(module: str) -> None:
    text = modules()[module].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_MODULE_LINES
    for function in functions(ast.parse(text)):
        lines = (function.end_lineno or 0) - function.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{function.name} has {lines} lines"
        assert branches(function) <= MAX_BRANCHES, f"{function.name} has {branches(function)} branches"


TEST_ROOT = Path(__file__).parent


def test_tests_mirror_the_source() -> None:
    """Every folder of tests, except the helpers, is a package of the source."""
    folders = {path.parent.relative_to(TEST_ROOT).as_posix() for path in TEST_ROOT.rglob("test_*.py")} - {"."}
    packages = {m.replace(".", "/") for m, path in modules().items() if path.name == "__init__.py"}
    assert folders <= packages


def test_no_test_module_imports_another() -> None:
    for path in TEST_ROOT.rglob("test_*.py"):
        names = {name.split(".")[-2] for name in imported_names(ast.parse(path.read_text("utf-8")), []) if "." in name}
        assert not {name for name in names if name.startswith("test_")}, path.name


# Randomness.


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for an attribute of names; empty for anything else."""
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return node.id if isinstance(node, ast.Name) else ""


def global_draws(text: str) -> list[str]:
    """Uses of generators with a hidden, shared state."""
    tree = ast.parse(text)
    names = list(imported_names(tree, ["defedavg"]))
    found = [name for name in names if name.split(".")[0] in ("random", "secrets")]
    for name in names:
        if name.startswith("numpy.random.") and name.split(".")[2] not in GENERATORS:
            found.append(name)
        if name in ("torch.manual_seed", "torch.seed"):
            found.append(name)
    borrowed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and any(forks(item.context_expr) for item in node.items)
        for inner in ast.walk(node)
        if dotted(inner) == "torch.default_generator.manual_seed"
    }
    for node in ast.walk(tree):
        name = "" if id(node) in borrowed else dotted(node)
        parts = name.split(".")
        if len(parts) >= 3 and parts[:2] in (["np", "random"], ["numpy", "random"]) and parts[2] not in GENERATORS:
            found.append(name)
        if parts[0] == "torch" and parts[-1] in ("manual_seed", "seed", "set_rng_state") and len(parts) >= 2:
            found.append(name)
    return found


def forks(node: ast.AST) -> bool:
    """Whether a block saves and restores the global state: layers can draw from nowhere else."""
    return isinstance(node, ast.Call) and dotted(node.func) == "torch.random.fork_rng"


@pytest.mark.parametrize(
    "text",
    [
        "import random",
        "from random import shuffle",
        "import numpy as np\nx = np.random.rand(3)",
        "import numpy as np\nnp.random.seed(0)",
        "import numpy as np\nx = np.random.default_rng()",
        "from numpy.random import randint",
        "import torch\ntorch.manual_seed(0)",
        "import torch\ntorch.cuda.manual_seed(0)",
        "from torch import manual_seed",
        "import torch\ntorch.default_generator.manual_seed(0)",
        "import torch\nwith torch.random.fork_rng():\n    torch.manual_seed(0)",
        "import torch\nwith torch.no_grad():\n    torch.default_generator.manual_seed(0)",
    ],
)
def test_global_draws_are_found(text: str) -> None:
    assert global_draws(text)


def test_keyed_draws_are_allowed() -> None:
    assert not global_draws("import numpy as np\ng = np.random.Generator(np.random.Philox(key=3))\ng.random()")
    assert not global_draws("with torch.random.fork_rng(devices=[]):\n    torch.default_generator.manual_seed(3)")


@pytest.mark.parametrize("module", list(modules()), ids=name_of)
def test_no_module_draws_from_a_global_generator(module: str) -> None:
    assert global_draws(modules()[module].read_text(encoding="utf-8")) == []


# Prose.

TRANSLATED = re.compile(
    r"\b(anew|broken off|the way gone|the way back|is there already|in one stroke|turned weights|waits run out"
    r"|nobody|everybody|whoever|but for|taken up|so many (rounds|bytes|seconds|clients|jobs))\b",
    re.IGNORECASE,
)
"""Phrases that a reader of English documentation does not expect."""


@pytest.mark.parametrize("module", list(modules()), ids=name_of)
def test_source_has_no_translated_phrases(module: str) -> None:
    assert TRANSLATED.findall(modules()[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", sorted(TEST_ROOT.parent.glob("docs/*.md")) + sorted(TEST_ROOT.parent.glob("*.md")))
def test_documents_have_no_translated_phrases(page: Path) -> None:
    assert TRANSLATED.findall(page.read_text(encoding="utf-8")) == []
