"""The walls between the rooms, read from the source: who imports whom, and who draws from where."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import defedavg

ROOT = Path(defedavg.__file__).parent
PLANNING = {
    "keyed",
    "profiles",
    "traces",
    "versions",
    "timeline",
    "lean",
    "sleepers",
    "plan",
    "planfile",
    "invariants",
    "errors",
    "protocol",
    "algorithms",
}
COMPUTING = {"execute", "tasks"}
OUTER = {"execute", "tasks", "report", "cli", "deploy", "config", "simulation", "runs", "stats", "theory", "cluster"}
GENERATORS = {"Generator", "Philox", "PCG64", "SeedSequence", "BitGenerator"}  # of numpy.random: no hidden state


def files(*rooms: str) -> list[Path]:
    """The files of some rooms; of all, if none is named."""
    found = sorted(ROOT.rglob("*.py"))
    return [path for path in found if not rooms or path.relative_to(ROOT).parts[0].removesuffix(".py") in rooms]


def imports(tree: ast.AST, module: str) -> Iterator[str]:
    """The absolute names of everything imported, wherever in the file it stands; relative imports are resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{whole}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> set[str]:
    module = ".".join(["defedavg", *path.relative_to(ROOT).with_suffix("").parts])
    return set(imports(ast.parse(path.read_text(encoding="utf-8")), module))


def rooms_of(path: Path) -> set[str]:
    """The rooms of this package that a file imports from."""
    return {name.split(".")[1] for name in imports_of(path) if name.startswith("defedavg.")}


def packages_of(path: Path) -> set[str]:
    """Everything else that it imports, without the standard library."""
    return {name.split(".")[0] for name in imports_of(path)} - {"defedavg"} - set(sys.stdlib_module_names)


def reachable(rooms: set[str]) -> set[str]:
    """These rooms and all that they import from, directly or not."""
    found: set[str] = set()
    while rooms - found:
        found |= rooms
        rooms = {other for path in files(*found) for other in rooms_of(path)}
    return found


def test_relative_imports_are_resolved() -> None:
    """The reader of imports itself: a wall that sees nothing is no wall."""
    text = "import torch.nn\nfrom . import a\nfrom ..b import c\nfrom .d import e\ndef f():\n    from flwr import g\n"
    found = set(imports(ast.parse(text), "defedavg.training.x"))
    assert found == {"torch.nn", "defedavg.training.a", "defedavg.b.c", "defedavg.training.d.e", "flwr.g"}


def test_every_room_is_there() -> None:
    for room in PLANNING | COMPUTING:
        assert files(room), room


@pytest.mark.parametrize("path", files(*reachable(PLANNING)), ids=lambda path: str(path.relative_to(ROOT)))
def test_planning_knows_no_tensor_and_no_network(path: Path) -> None:
    assert packages_of(path) <= {"numpy"}
    assert not rooms_of(path) & OUTER


@pytest.mark.parametrize("path", files("protocol", "algorithms"), ids=lambda path: str(path.relative_to(ROOT)))
def test_machines_know_no_clock(path: Path) -> None:
    assert not rooms_of(path) & {"timeline", "plan", "planfile", "versions", "profiles", "traces", "invariants"}
    assert not {name.split(".")[0] for name in imports_of(path)} & {
        "time",
        "datetime",
        "socket",
        "asyncio",
        "threading",
    }


@pytest.mark.parametrize("path", files(*COMPUTING), ids=lambda path: str(path.relative_to(ROOT)))
def test_computing_knows_no_algorithm_and_no_clock(path: Path) -> None:
    # Triton comes with PyTorch where there is CUDA; the one file that needs it is imported only if it is there.
    # Hugging Face's datasets is an extra; the one file that needs it imports it where it is used.
    extra = {"kernels.py": {"triton"}, "hub.py": {"datasets"}}
    assert packages_of(path) <= {"numpy", "torch"} | extra.get(path.name, set())
    assert not rooms_of(path) & {
        "algorithms",
        "timeline",
        "config",
        "simulation",
        "report",
        "cli",
        "profiles",
        "traces",
    }


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_flower_is_known_where_it_is_spoken(path: Path) -> None:
    speaks = path.relative_to(ROOT).as_posix() in ("deploy/flower.py", "deploy/flower_client.py")
    assert ("flwr" in packages_of(path)) is speaks


@pytest.mark.parametrize("path", files("deploy"), ids=lambda path: path.name)
def test_a_deployment_shares_the_machines_with_the_timeline_and_nothing_else(path: Path) -> None:
    assert path.name == "whatif.py" or not rooms_of(path) & {"timeline", "agenda", "versions"}
    if path.name in ("engine.py", "events.py", "follow.py"):  # they decide: no network, no tensor, no clock
        assert packages_of(path) == set()
        assert rooms_of(path) <= {"algorithms", "protocol", "deploy"}
        assert not {name.split(".")[0] for name in imports_of(path)} & {"time", "datetime", "socket", "threading"}


@pytest.mark.parametrize("module", ["flower_client", "workers", "replay", "command"])
def test_a_client_loads_no_torch_before_it_trains(module: str) -> None:
    code = f"import sys, defedavg.deploy.{module}\nprint(sorted({{'torch', 'matplotlib'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_ray_and_safetensors_have_their_places(path: Path) -> None:
    allowed = {"ray"} if path.parent.name == "cluster" else set()
    name = path.relative_to(ROOT).as_posix()
    allowed |= {"safetensors"} if name in ("checkpoints.py", "runs.py", "deploy/store.py") else set()
    assert packages_of(path) & {"ray", "safetensors"} <= allowed
    assert not {"pickle", "cloudpickle", "dill"} & {name.split(".")[0] for name in imports_of(path)}


@pytest.mark.parametrize("module", ["timeline", "plan", "simulation", "algorithms", "config"])
def test_planning_does_not_load_torch(module: str) -> None:
    code = (
        f"import sys, defedavg.{module}\n"
        "print(sorted({'torch', 'flwr', 'ray', 'matplotlib', 'rich', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT.parent), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for an attribute of names; empty for anything else."""
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return node.id if isinstance(node, ast.Name) else ""


def global_draws(text: str) -> list[str]:
    """Uses of generators with a hidden, shared state."""
    tree = ast.parse(text)
    found = [name for name in imports(tree, "defedavg.x") if name.split(".")[0] in ("random", "secrets")]
    for name in imports(tree, "defedavg.x"):
        if name.startswith("numpy.random.") and name.split(".")[2] not in GENERATORS:
            found.append(name)
        if name in ("torch.manual_seed", "torch.seed"):
            found.append(name)
    borrowed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and any(_forks(item.context_expr) for item in node.items)
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


def _forks(node: ast.AST) -> bool:
    """Whether the global state is kept and put back around a block: layers can draw from nowhere else."""
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
def test_the_reader_sees_global_draws(text: str) -> None:
    assert global_draws(text)


def test_the_reader_lets_keyed_draws_pass() -> None:
    assert not global_draws("import numpy as np\ng = np.random.Generator(np.random.Philox(key=3))\ng.random()")
    assert not global_draws("with torch.random.fork_rng(devices=[]):\n    torch.default_generator.manual_seed(3)")


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_draws_from_a_global_generator(path: Path) -> None:
    assert global_draws(path.read_text(encoding="utf-8")) == []
