"""DeFedAvg-IID over Flower against Flower's own FedAvg: eight nodes on this machine, two of them five times slower.

Both train the paper's CNN (2.3 MB) on mnist5k to the same accuracy, with the same nodes, client processes, local
training and slowness. They run alternately, and the benchmark prints the ratio of the times to the target. The clock
starts when every node has answered a first message, which starts its client process, and the server sends the first
model. Run ``python benchmarks/deploy.py --turns 3``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from defedavg.deploy.deploy_config import default_settings
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.flower.app_template import write_app
from defedavg.deploy.flower.local_deployment import wait_until_finished
from defedavg.deploy.flower.processes import FlowerCluster
from defedavg.deploy.replay import replay
from defedavg.runstore.deployment_status import LogTail
from defedavg.runstore.layout import EVENT_LOG as LOG

NODES = 8
SLOW = (2, 5)

PLAIN_SERVER = '''"""Flower's own FedAvg, all nodes in every round; writes its accuracies to a file."""

import json
import time
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from defedavg.deploy.deploy_config import read_deploy_config
from defedavg.config.build import make_executor

from .task import make

app = ServerApp()


class DoneError(Exception):
    pass


@app.main()
def main(grid, context):
    config = dict(context.run_config)
    config = read_deploy_config(config)
    executor = make_executor(config.settings, config.seed, make(config, None))
    total = config.settings.clients.num_clients
    while len(list(grid.get_node_ids())) < total:
        time.sleep(0.2)
    hello = [
        Message(RecordDict(), dst_node_id=node, message_type="query", ttl=300.0) for node in grid.get_node_ids()
    ]
    list(grid.send_and_receive(hello))
    began = time.monotonic()
    rows = []
    place = Path(config.deploy.folder) / "plain.json"

    def evaluate(number, arrays):
        _, accuracy = executor.measure(torch.from_numpy(arrays["weights"].numpy()), executor.task.test)
        rows.append({"round": number, "seconds": time.monotonic() - began, "accuracy": accuracy})
        done = accuracy >= config.settings.stop.target_accuracy
        place.with_suffix(".part").write_text(json.dumps({"done": done, "rows": rows}))
        place.with_suffix(".part").replace(place)
        if done:
            raise DoneError
        return MetricRecord({"accuracy": accuracy})

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=total, min_available_nodes=total)
    first = ArrayRecord({"weights": Array(executor.versions[0].numpy())})
    local = executor.local_training
    training = ConfigRecord(
        {"seed": local.seed, "batch_size": local.batch_size, "local_lr": local.local_lr, "sampling": local.sampling,
         "steps": config.settings.training.local_steps}
    )
    try:
        strategy.start(grid, first, num_rounds=100, train_config=training, evaluate_fn=evaluate)
    except DoneError:
        pass
'''

PLAIN_CLIENT = '''"""A client of Flower's FedAvg that trains in the same kind of client process."""

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from defedavg.deploy.client.client_socket import ProcessAddress, request

app = ClientApp()


def answer(context, kind, fields, weights):
    node, known = context.node_config, context.state.get("worker")
    address = ProcessAddress(known["path"], known["secret"]) if known is not None else None
    launch = {"task": "{package}.task:make", "config": dict(context.run_config), "client": node["client"],
             "step_seconds": node["step_seconds"]}
    address, _, update = request(address, f"{context.node_id:x}", launch, kind, fields, weights)
    context.state["worker"] = ConfigRecord({"path": address.path, "secret": address.secret})
    return update


@app.query()
def query(message, context):
    answer(context, "hello", {}, None)
    return Message(RecordDict(), reply_to=message)


@app.train()
def train(message, context):
    training = dict(message.content["config"])
    fields = {**training, "index": int(training["server-round"]) - 1, "version": int(training["server-round"]) - 1}
    weights = message.content["arrays"]["weights"].numpy()
    update = answer(context, "train", fields, weights)
    reply = {"arrays": ArrayRecord({"weights": Array(weights - update)}), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(reply), reply_to=message)
'''


def settings(job_seconds: float, target: float) -> dict[str, Any]:
    """Return the settings of both."""
    return {
        **default_settings("defedavg-iid", NODES),
        "training.updates_per_round": 4,
        "training.local_steps": 50,
        "training.local_lr": 0.1,
        "stop.target_accuracy": target,
        "stop.max_seconds": 1200.0,
        "clients.step_seconds": job_seconds / 50,
    }


def cluster_of(folder: Path, job_seconds: float) -> FlowerCluster:
    """Start eight nodes, two of them slow, and a SuperLink."""
    cluster = FlowerCluster(folder / "flower")
    cluster.start_superlink()
    for client in range(NODES):
        factor = 5.0 if client in SLOW else 1.0
        cluster.start_supernode(str(client), client=client, step_seconds=factor * job_seconds / 50, warm=True)
    return cluster


def ours(folder: Path, job_seconds: float, target: float) -> dict[str, float]:
    """Run DeFedAvg-IID; return seconds to the target, updates per second, and the overhead of a message."""
    write_app(folder / "app", settings(job_seconds, target))
    run = folder / "run"
    run.mkdir()
    with cluster_of(folder, job_seconds) as cluster:
        cluster.submit(folder / "app", **{"deploy.folder": str(run)})
        wait_until_finished(cluster, run, lambda _: None, LogTail(run))
    [entry] = json.loads((run / "summary.json").read_text())["runs"]
    log = logs.read(run / LOG)
    found = replay(log)
    found.plan.check()
    trace, size = found.fleet.trace, found.fleet.model_megabytes * 8
    assert trace is not None
    return {
        "seconds": entry["first_hit_seconds"] or float("nan"),
        "rounds": entry["rounds"],
        "updates_per_second": len(found.plan.uploads) / log.seconds,
        "overhead_seconds": 2 * float(statistics.median(size / trace.up_mbps)),
    }


def plain(folder: Path, job_seconds: float, target: float) -> dict[str, float]:
    """Run Flower's FedAvg; return seconds to the target."""
    app = folder / "app"
    write_app(app, settings(job_seconds, target))
    (app / "app" / "server.py").write_text(PLAIN_SERVER)
    (app / "app" / "client.py").write_text(PLAIN_CLIENT.replace("{package}", "app"))
    run = folder / "run"
    run.mkdir()
    deadline = time.monotonic() + 1200.0
    with cluster_of(folder, job_seconds) as cluster:
        cluster.submit(app, **{"deploy.folder": str(run)})
        while not ((run / "plain.json").exists() and json.loads((run / "plain.json").read_text())["done"]):
            if time.monotonic() > deadline:
                raise SystemExit("Flower's FedAvg did not reach the target")
            time.sleep(0.3)
    last = json.loads((run / "plain.json").read_text())["rows"][-1]
    return {"seconds": last["seconds"], "rounds": last["round"]}


def main() -> None:
    """Run both alternately and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--job-seconds", type=float, default=8.0, help="of a fast client; slow ones take five times as long"
    )
    parser.add_argument("--target", type=float, default=0.9)
    options = parser.parse_args()
    ratios = []
    for turn in range(options.turns):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            flower = plain(Path(one), options.job_seconds, options.target)
            mine = ours(Path(other), options.job_seconds, options.target)
        ratios.append(flower["seconds"] / mine["seconds"])
        print(
            f"turn {turn + 1}: Flower FedAvg {flower['seconds']:.0f} s ({flower['rounds']} rounds), "
            f"DeFedAvg-IID {mine['seconds']:.0f} s ({mine['rounds']} rounds), ratio {ratios[-1]:.2f}; "
            f"{mine['updates_per_second']:.2f} updates/s, {mine['overhead_seconds']:.1f} s overhead per message",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f} over {len(ratios)} turn(s)")


if __name__ == "__main__":
    main()
