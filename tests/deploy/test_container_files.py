"""docker/compose.yaml: its commands make a deployment. They run here without containers, in one folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from defedavg.deploy.ports import free_port
from defedavg.runstore.reader import read_run

DOCKER = Path(__file__).parents[2] / "docker"


def services() -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"])


def test_every_client_sees_its_own_keys_alone() -> None:
    clients = {name: service for name, service in services().items() if name.startswith("client-")}
    study = tomllib.loads((DOCKER / "study.toml").read_text(encoding="utf-8"))
    assert len(clients) == study["clients"]["num_clients"] == 4
    for name, service in clients.items():
        (volume,) = service["volumes"]
        assert (volume["target"], volume["read_only"]) == ("/client", True)
        assert volume["volume"]["subpath"] == f"made/{name}"


@pytest.mark.deploy
def test_the_commands_of_the_containers_make_a_deployment(tmp_path: Path) -> None:
    port, study = free_port(), (DOCKER / "study.toml").read_text(encoding="utf-8")
    assert "max_rounds = 40" in study
    (tmp_path / "study.toml").write_text(study.replace("max_rounds = 40", "max_rounds = 6"), encoding="utf-8")

    def start(name: str, service: dict[str, Any]) -> subprocess.Popen[bytes]:
        places = {
            "/keys/": f"{tmp_path}/", "/client": f"{tmp_path}/made/{name}", "/study.toml": f"{tmp_path}/study.toml",
            "/runs": str(tmp_path / "runs"), "server:9092": f"127.0.0.1:{port}", "0.0.0.0:9092": f"127.0.0.1:{port}",
        }  # fmt: skip
        words = [str(word) for word in service["command"]]
        for before, after in places.items():
            words = [word.replace(before, after, 1) if word.startswith(before) else word for word in words]
        words = ["127.0.0.1" if word == "server" else word for word in words]
        with (tmp_path / f"{name}.txt").open("wb") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "defedavg", *words],
                stdout=out, stderr=out, stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    found = services()
    assert start("keys", found.pop("keys")).wait(120) == 0
    started = {name: start(name, service) for name, service in found.items()}
    try:
        codes = {name: process.wait(300) for name, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    assert codes == dict.fromkeys(started, 0), "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.txt")))
    run = read_run(tmp_path / "runs" / "containers")
    assert run.finished
    assert len(run.entries) == 1
