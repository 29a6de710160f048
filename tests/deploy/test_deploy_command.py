"""``defedavg deploy`` and ``defedavg replay``: bad input yields one line, runs resume, replays, and stop signals."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from typer.testing import CliRunner

from defedavg.adviser.log_advice import study_of_log
from defedavg.cli.main import app
from defedavg.config.build import make_fleet
from defedavg.config.study import study
from defedavg.deploy.deploy_config import default_settings, read_deploy_config
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.flower import server_entry
from defedavg.deploy.flower.app_template import write_app
from defedavg.deploy.flower.processes import FlowerCluster
from defedavg.deploy.flower.server_entry import serve
from defedavg.deploy.replay import replay
from defedavg.deploy.server import deployment_folder as runfolder
from defedavg.deploy.tls_keys import make_keys
from defedavg.deploy.whatif import whatif_plans
from defedavg.errors import UserError
from defedavg.fileio import FolderLock
from defedavg.runstore.reader import read_run
from defedavg.training import Reference
from helpers.background_clients import RealClock
from helpers.command_line import refused
from helpers.deployments import World, tiny_task

FLOWER = ("--transport", "flower")


def test_bad_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_app(tmp_path / "taken", default_settings())
    assert "already exists" in refused("deploy", "init", "taken")
    assert "lower-case letters" in refused("deploy", "init", "My-App")
    assert "fedbuff" in refused("deploy", "init", "x", "--algorithm", "fedbuf")
    assert "training.local_steps" in refused("deploy", "init", "x", "--set", "training.local_step=3")
    assert "whole number" in refused("deploy", "init", "x", "--set", "training.local_steps=many")
    assert "min_clients is 9" in refused("deploy", "init", "x", "--set", "deploy.min_clients=9")
    assert "no run to resume" in refused("deploy", "local", "--resume")
    assert "omit the study, --set" in refused("deploy", "local", "--resume", "--set", "stop.max_rounds=3")
    assert "omit the study, --set" in refused("deploy", "local", "study.toml", "--resume")
    assert "no configuration file study.toml" in refused("deploy", "local", "study.toml")
    assert "give a study or --app" in refused("deploy", "local", "study.toml", "--app", "taken")
    assert "stop.max_rounds" in refused("deploy", "local", "--app", "taken", "--set", "stop.max_round=3")
    assert "not a Flower app" in refused("deploy", "local", "--app", "nowhere")
    assert "cannot be read" in refused("replay", "nowhere.jsonl")
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        assert f"port {port} cannot be used" in refused("deploy", "local", "--port", port)
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs" / "deployment").mkdir(parents=True)
    (tmp_path / "runs" / "deployment" / "mine.txt").write_text("mine")
    assert "already exists" in refused("deploy", "local")
    make_keys(tmp_path / "keys", 1, ("localhost",))
    assert "already exists" in refused("deploy", "keys", "keys")


@pytest.mark.parametrize(
    ("missing", "extra", "commands"),
    [
        ("flwr", "flower", ("init x", "local --transport flower")),
        ("grpc", "deploy", ("local", "keys y", "serve study.toml", "join 127.0.0.1:9092")),
    ],
)
def test_without_a_transport_the_error_says_what_to_install(
    missing: str, extra: str, commands: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == missing else find(name, *rest)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", without)
    for command in commands:
        line = refused("deploy", *command.split())
        assert f"pip install 'defedavg[{extra}]'" in line
        assert f"make {extra}" in line
    makefile = Path(__file__).parents[2] / "Makefile"
    assert f"\n{extra}: .venv/user\n\t$(PIP) -e .[{extra}]\n" in makefile.read_text()


def test_the_help_of_set_names_the_table_of_a_deployment() -> None:
    for command in ("local", "init", "serve"):
        text = " ".join(CliRunner().invoke(app, ["deploy", command, "--help"], env={"COLUMNS": "200"}).stdout.split())
        assert "of the table deploy, such as deploy.job_seconds=60" in text


def test_the_summary_records_the_users_command_and_the_process_of_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def made() -> dict[str, Any]:
        return dict(json.loads((tmp_path / "run" / "summary.json").read_text())["provenance"])

    config = read_deploy_config({**default_settings("fedavg", 2), "name": "x"})
    monkeypatch.setattr("sys.argv", ["defedavg", "deploy", "local", "--name", "run"])
    with runfolder.new_run_folder(config, tmp_path / "run", force=False):
        first = made()
        assert first["command"] == "defedavg deploy local --name run"
        monkeypatch.setattr("sys.argv", ["flower-serverapp"])
        monkeypatch.setattr("os.getpid", lambda: first["pid"] + 1)
        runfolder.open_run(config, tmp_path / "run", resume=False)
    assert made() == {**first, "pid": first["pid"] + 1}


def test_replay_prints_the_deployment_and_the_what_if_plans(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    world.coordinator.run()
    World.close_all()
    words = ["replay", str(tmp_path / "run"), "--what-if", "updates_per_round=1,2,6", "--what-if", "algorithm=fedavg"]
    result = CliRunner().invoke(app, [*words, "--save", str(tmp_path / "plan.jsonl.gz")])
    assert result.exit_code == 0, result.output
    assert "every invariant holds; 8 merges as logged; 0 updates refused, 0 clients quarantined" in result.output
    titles = [line for line in result.output.splitlines() if " rounds, mean over 1 seed" in line]
    assert [title.split()[0] for title in titles] == ["8", "100"]  # the deployment, and what the plans simulate
    found = replay(logs.read(tmp_path / "run" / "events.jsonl"))
    measured = found.plan.rounds[-1].time / 8
    predicted = whatif_plans(found, ("updates_per_round=3",), 8)[0][0][1].rounds[-1].time / 8  # the logged setting
    assert f"predicts {predicted:.3g} s a round, the deployment took {measured:.3g} s" in " ".join(
        result.output.split()
    )
    as_json = CliRunner().invoke(app, [*words, "--json"])
    both = json.loads(as_json.stdout)["seconds_per_round"]
    assert both == pytest.approx({"predicted": predicted, "measured": measured})
    assert "model error" not in CliRunner().invoke(app, words[:2]).output
    assert result.output.count("algorithm=fedavg") == 3
    assert (tmp_path / "plan.jsonl.gz").exists()
    log = tmp_path / "run" / "events.jsonl"
    assert "cannot be read" in refused("replay", log, "--what-if", "updates_per_round")
    assert "did you mean" in refused("replay", log, "--what-if", "update_per_round=3")
    (tmp_path / "simulated").mkdir()
    without = refused("replay", tmp_path / "simulated")
    assert "has no events.jsonl; replay needs a folder that `defedavg deploy` wrote" in without
    assert "whole number" in refused("replay", log, "--what-if", "local_steps=few")
    assert "lower it" in refused("replay", log, "--what-if", "updates_per_round=7")
    partly = CliRunner().invoke(app, ["replay", str(log), "--what-if", "updates_per_round=2,7"])
    assert partly.exit_code == 0
    assert "updates_per_round=2" in partly.stdout
    assert "no plan for updates_per_round=7" in partly.stderr


def test_the_measured_clients_of_a_log_are_the_fleet_of_an_advice(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    world.coordinator.run()
    World.close_all()
    found = replay(logs.read(tmp_path / "run" / "events.jsonl"))
    advised = study_of_log(found, study({"clients": {"jitter": 0.3}, "stop": {"target_accuracy": 0.5}}), tmp_path)
    (point,) = study(tomllib.loads(advised.to_toml())).points()
    fleet = make_fleet(point.settings, found.config.seed)
    assert fleet.num_clients == found.fleet.num_clients
    assert fleet.jitter == 0.0
    for name in ("step_times", "up_times", "down_times"):
        np.testing.assert_array_equal(getattr(fleet, name), getattr(found.fleet, name))
    (tmp_path / "my.toml").write_text('name = "my"\n[task]\nmodel = "softmax"\n')
    words = ("replay", tmp_path / "run", "--advise", tmp_path / "my.toml", "--out", tmp_path)
    assert "set stop.target_accuracy" in refused(*words)
    assert "leave out --json" in refused(*words, "--json")
    for option in (("--budget", "10m"), ("--force",)):
        assert "name the study to advise with --advise" in refused("replay", tmp_path / "run", *option)


def test_keys_are_private_and_certify_the_server(tmp_path: Path) -> None:
    made = make_keys(tmp_path / "keys", 2, ("127.0.0.1", "superlink.example.org"))
    # CA and server: a certificate and a key each. A client: a key pair for Flower, and a folder of three files.
    assert len(made) == 4 + 2 * (2 + 3)
    for path in made:
        assert bool(path.stat().st_mode & 0o077) is (path.suffix != ".key")
    ca, server = (
        x509.load_pem_x509_certificate((tmp_path / "keys" / f"{n}.crt").read_bytes()) for n in ("ca", "server")
    )
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["superlink.example.org"]
    assert (tmp_path / "keys" / "client-1.pub").read_text().startswith("ecdsa-sha2-nistp384 ")
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0


def test_keys_are_kept_on_request_and_an_interrupted_command_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["deploy", "keys", str(tmp_path / "keys"), "--clients", "1"]
    with monkeypatch.context() as patch:
        patch.setattr("defedavg.deploy.tls_keys._write_pair", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make_keys(tmp_path / "keys", 1, ("127.0.0.1",))
    assert not list(tmp_path.iterdir())
    for expected in ("wrote 9 files", "kept the keys"):
        result = CliRunner().invoke(app, [*words, "--keep"])
        assert result.exit_code == 0
        assert expected in result.output
    before = (tmp_path / "keys" / "ca.key").read_bytes()
    assert "already exists" in refused(*words)
    assert (tmp_path / "keys" / "ca.key").read_bytes() == before


def interrupted(*_given: Any) -> list[Path]:
    raise KeyboardInterrupt


def test_a_run_has_one_server_and_a_restarted_server_resumes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_entry, "LOCK_SECONDS", 0.0)
    world = World(tmp_path / "unused")
    folder = tmp_path / "run"
    flat = {**world.flat, "deploy.folder": str(folder), "deploy.poll_seconds": 0.001}
    for node in world.transport.members.values():
        node.delay = 0.0

    class CrashError(Exception):
        pass

    def until_crash(self: Any, record: Any, deltas: Any) -> Any:
        if record.merge.version == 3:
            raise CrashError
        return merge(self, record, deltas)

    merge = Reference.merge
    monkeypatch.setattr(world.clock, "sleep", lambda seconds: None)
    world.transport.clock = RealClock()
    with monkeypatch.context() as patch:
        patch.setattr(Reference, "merge", until_crash)
        with pytest.raises(CrashError):
            serve(world.transport, flat, tiny_task, "17")
    world.transport.pending.clear()
    with FolderLock(folder), pytest.raises(SystemExit):
        serve(world.transport, flat, tiny_task, "17")
    assert not (folder / "error.txt").exists()
    with pytest.raises(SystemExit):
        serve(world.transport, flat, tiny_task, "18")  # another run must ask to resume
    assert "already contains a run" in (folder / "error.txt").read_text()
    serve(world.transport, flat, tiny_task, "17")
    assert read_run(folder).finished
    assert "is finished" in refused("deploy", "local", "--out", tmp_path, "--name", "run", "--resume")
    found = replay(logs.read(folder / "events.jsonl"))
    found.plan.check()
    assert len(found.plan.rounds) == 8
    serve(world.transport, flat, tiny_task, "17")  # the run is finished
    World.close_all()


ENDLESS = """
import signal, sys, time
from pathlib import Path
from defedavg.deploy.flower.processes import FlowerCluster
from defedavg.deploy.flower.signals import signals_as_interrupts

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # nohup and background jobs ignore some of them
    signal.signal(number, signal.default_int_handler)
with signals_as_interrupts(), FlowerCluster(Path(sys.argv[1])) as cluster:
    for name in ("one", "two"):
        cluster.spawn(name, "sh", "-c", sys.argv[2] + "while true; do sleep 0.1; done")
    print(cluster.cluster_id, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "first"), [(signal.SIGINT, "trap '' TERM; "), (signal.SIGTERM, ""), (signal.SIGHUP, "")]
)
def test_repeated_stop_signals_leave_no_process_of_a_cluster(tmp_path: Path, number: int, first: str) -> None:
    cluster = FlowerCluster(tmp_path)
    words = [sys.executable, "-c", ENDLESS, str(tmp_path), first]
    with subprocess.Popen(words, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        cluster.cluster_id = process.stdout.readline().strip()
        assert len(cluster.processes()) >= 2
        for _ in range(3):
            process.send_signal(number)
            time.sleep(0.2)
        _, stderr = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in stderr
    assert cluster.processes() == {}


def test_a_deployment_that_never_started_is_replaced_and_removed_like_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def never(*words: Any, **more: Any) -> None:
        raise UserError("no cluster today")

    monkeypatch.setattr("defedavg.deploy.flower.local_deployment.run_local", never)
    for words in ((), ("--force",)):
        assert refused("deploy", "local", *FLOWER, *words) == "no cluster today"
    (tmp_path / "runs" / "deployment" / "flower").mkdir()
    assert "no run to resume" in refused("deploy", "local", "--resume")
    result = CliRunner().invoke(app, ["runs", "remove", "deployment", "--yes"])
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "runs" / "deployment").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("deploy", "local", *FLOWER, "--force"), "wait for it"),
        (("deploy", "local", *FLOWER, "--resume"), "wait for it"),
        (("runs", "remove", "deployment", "--yes"), "stop it before you remove the run"),
    ],
)
def test_a_local_deployment_locks_its_folder_until_it_ends(
    words: tuple[str, ...], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("runs") / "deployment"

    def other_command(*_: Any, **more: Any) -> None:
        monkeypatch.setattr("defedavg.deploy.flower.local_deployment.run_local", lambda *_, **more: None)
        found = refused(*words)
        assert found.startswith(f"{folder} is in use by another process; ")
        assert line in found
        FolderLock(folder, launched=True).release()  # the server of this deployment may write
        raise UserError("enough")

    monkeypatch.setattr("defedavg.deploy.flower.local_deployment.run_local", other_command)
    assert refused("deploy", "local", *FLOWER) == "enough"
    assert not list(folder.glob(".*lock"))


@pytest.mark.parametrize(
    ("option", "warm", "lines"), [("--cold", False, 1), ("--no-warm-workers", False, 0), (None, True, 0)]
)
def test_the_old_name_of_no_warm_workers_works_and_names_the_new_one(
    option: str | None, warm: bool, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[bool] = []

    def stop(*arguments: Any, **more: Any) -> None:
        seen.append(more["warm"])
        raise UserError("enough")

    monkeypatch.setattr("defedavg.deploy.flower.local_deployment.run_local", stop)
    result = CliRunner().invoke(app, ["deploy", "local", *FLOWER, *([option] if option else [])])
    assert seen == [warm]
    assert result.stderr.count("--cold is now --no-warm-workers") == lines
    assert "--cold" not in CliRunner().invoke(app, ["deploy", "local", "--help"]).stdout
