"""``defedavg theory``: what the theorems say of a setting; ``defedavg theory speedup``: whether it comes true."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ..config import study as config
from ..config.study import Study, SweepPoint
from ..errors import UserError
from ..theory.formulas import THEOREMS, Constants, probable_staleness, theorem
from .options import Json, Set, err, out, print_json

if TYPE_CHECKING:
    from ..theory.estimates import Estimates

app = typer.Typer(help="What the convergence theorems say of a setting, and whether their speedup comes true.")

PLANNED = 400  # rounds of the plan in which staleness is looked up


def _say(line: str) -> None:
    err.print(escape(line), soft_wrap=True)


@app.callback(invoke_without_command=True)
def theory(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Option("--config", metavar="CONFIG.toml", help="The study; without one, the defaults.")
    ] = None,
    overrides: Set = None,
    rounds: Annotated[int | None, typer.Option(help="T; stop.max_rounds of the study if not given.")] = None,
    smoothness: Annotated[
        float | None, typer.Option(help="L, by hand; like the next four estimated from the task if not given.")
    ] = None,
    noise: Annotated[float | None, typer.Option(help="σ², variance of a mini-batch gradient.")] = None,
    gradient: Annotated[float | None, typer.Option(help="G², squared norm of a client's gradient.")] = None,
    heterogeneity: Annotated[
        float | None, typer.Option(help="ν², squared distance of a client's gradient from that of all.")
    ] = None,
    gap: Annotated[float | None, typer.Option(help="ΔF, the first value of the objective less its least.")] = None,
    max_staleness: Annotated[
        int | None, typer.Option(help="λ; from a plan (IID) or from the chance of a draw (nIID) if not given.")
    ] = None,
    epsilon: Annotated[float, typer.Option(help="The mean squared gradient norm that is wanted.")] = 0.1,
    delta: Annotated[float, typer.Option(help="The probability with which λ may be exceeded.")] = 0.01,
    points: Annotated[int, typer.Option(help="Points at which constants are estimated: w⁰ and along SGD.")] = 3,
    samples: Annotated[
        int | None, typer.Option(help="Samples of each client to estimate from; all if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Rates, conditions, bounds and rounds of Theorem 1 (DeFedAvg-nIID) and Theorem 2 (DeFedAvg-IID)."""
    if context.invoked_subcommand is not None:
        return
    from ..theory.theorem_report import sheet, sheet_table

    if not epsilon > 0:
        raise UserError(f"epsilon is {epsilon:g}; it must be a number above zero")
    by_hand = {
        "smoothness": smoothness, "noise": noise, "gradient": gradient, "heterogeneity": heterogeneity, "gap": gap
    }  # fmt: skip
    study = _study(file, tuple(overrides or ()))
    made = []
    estimated: dict[Any, Estimates] = {}
    for point in study.points():
        if point.settings.algorithm not in THEOREMS:
            continue
        values, note = _constants(point, study.seeds[0], by_hand, estimated, points, samples)
        size, observed = _size(point, study.seeds[0], rounds, max_staleness, delta)
        found = sheet(point.settings.algorithm, Constants(**values, **size), epsilon=epsilon, delta=delta)
        made.append({"label": point.label, **found, "observed_staleness": observed, "note": note})
    if not made:
        raise UserError(f"the study has no algorithm that a theorem speaks of; add {' or '.join(THEOREMS)}")
    if as_json:
        print_json(made)
        return
    for each in made:
        out.print(sheet_table(each))
        out.print()


def _study(file: Path | None, overrides: tuple[str, ...]) -> Study:
    if file is not None:
        return config.load(file, overrides)
    default = {"name": "theory", "algorithms": list(THEOREMS), "task": {"model": "mlp"}}
    return config.study(config.override(default, overrides))


def _constants(
    point: SweepPoint,
    seed: int,
    by_hand: dict[str, float | None],
    estimated: dict[Any, Estimates],
    points: int,
    samples: int | None,
) -> tuple[dict[str, Any], str]:
    """The constants that the theorem uses: those given, and for the rest what is estimated."""
    uses = theorem(point.settings.algorithm).uses
    given = {name: value for name, value in by_hand.items() if value is not None and name in uses}
    missing = [name for name in uses if name not in given]
    if not missing:
        return given, "Constants by hand."
    from ..config.build import build_task
    from ..theory.estimates import Probe, estimate

    how = point.settings
    batch = how.training.batch_size
    known = (how.task, how.clients.num_clients, batch)
    if known not in estimated:
        probe = Probe(batch_size=batch, seed=seed, points=points, samples=samples)
        estimated[known] = estimate(build_task(how, seed), probe, say=_say)
    found = asdict(estimated[known])
    note = f"Estimated: {', '.join(missing)}, from {found['note']}."
    return {**{name: found[name] for name in missing}, **given}, note


def _size(
    point: SweepPoint, seed: int, rounds: int | None, max_staleness: int | None, delta: float
) -> tuple[dict[str, int], int | None]:
    """n, K, T, λ and N, and the largest staleness in a plan where one was made."""
    how = point.settings
    total = how.stop.max_rounds if rounds is None else rounds
    clients, n = how.clients.num_clients, how.training.updates_per_round
    observed: int | None = None
    if max_staleness is None:
        from ..config.build import make_plan

        plan = make_plan(how, seed, max(1, min(total, PLANNED)))
        observed = max((s for record in plan.rounds for s in record.merge.staleness), default=0)
        if how.algorithm == "defedavg-niid":
            max_staleness = probable_staleness(clients, n, total, delta)
        else:
            max_staleness = max(1, observed)
    size = {
        "updates_per_round": n,
        "local_steps": how.training.local_steps,
        "rounds": total,
        "max_staleness": max_staleness,
        "num_clients": clients,
    }
    return size, observed


@app.command()
def speedup(
    tasks: Annotated[str, typer.Option("--task", help="least-squares, network, or both with a comma.")] = (
        "least-squares,network"
    ),
    algorithms: Annotated[str, typer.Option("--algorithm", help="Those to measure, with commas.")] = (
        "defedavg-iid,defedavg-niid"
    ),
    ns: Annotated[str, typer.Option("--n", metavar="N,N,…", help="Updates merged per round.")] = "1,2,4,8,16,32,64",
    seeds: Annotated[int, typer.Option(help="Runs for each n.")] = 3,
    epsilon: Annotated[float | None, typer.Option(help="Instead of the task's own.")] = None,
    tolerance: Annotated[float, typer.Option(help="How closely the smallest T is found, as a share of it.")] = 0.05,
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where results are written.")] = Path(
        "runs/speedup"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace results that are there.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; as many as there are cores if not given.")] = None,
    as_json: Json = False,
) -> None:
    """Measure rounds to a mean squared gradient norm of ε against n, with the theorems' rates; a few minutes."""
    from ..theory.speedup_study import Scope, carry_out, speedup_table

    scope = Scope(_words("--task", tasks), _words("--algorithm", algorithms), _numbers(ns), seeds, epsilon, tolerance)
    finished, found = carry_out(scope, folder, err, force=force, jobs=jobs)
    if as_json:
        print_json(found)
    else:
        for each in found:
            out.print(speedup_table(each))
            out.print()
    if not finished:
        raise typer.Exit(130)


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UserError(f"{option} is empty; give at least one")
    return words


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise UserError(f"--n {text!r} cannot be read; write it as 1,2,4") from None
