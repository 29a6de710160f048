"""``defedavg theory``: the theorems applied to a setting; ``defedavg theory speedup``: the measured speedup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..config import study as config
from ..config.study import Study, SweepPoint
from ..errors import UserError
from ..report.tables import make
from ..theory.formulas import THEOREMS, Constants, probable_staleness, theorem, theorem_report
from .options import Json, Set, out, print_json, print_note, print_notes, reported, working
from .stop_signals import stopped_code

if TYPE_CHECKING:
    from ..theory.estimates import Estimates

app = typer.Typer(help="Apply the convergence theorems to a setting, and measure the linear speedup that they promise.")

SYMBOLS = {"smoothness": "L", "noise": "σ²", "gradient": "G²", "heterogeneity": "ν²", "gap": "ΔF"}
SIZES = {"updates_per_round": "n", "local_steps": "K", "rounds": "T", "max_staleness": "λ", "num_clients": "N"}
NS, ALL_NS = "1,4,16,64", "1,2,4,8,16,32,64"
"""The n of ``theory speedup``: the same range, with fewer values by default."""
TOLERANCE, FULL_TOLERANCE = 0.1, 0.05
PLANNED_ROUNDS = 400  # of the plan from which the staleness is taken


@app.callback(invoke_without_command=True)
def theory(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Option("--config", metavar="CONFIG.toml", help="The study; default: the default settings.")
    ] = None,
    overrides: Set = None,
    rounds: Annotated[int | None, typer.Option(help="T; default: stop.max_rounds of the study.")] = None,
    smoothness: Annotated[
        float | None, typer.Option(help="L; default, as for the next four: an estimate from the task.")
    ] = None,
    noise: Annotated[float | None, typer.Option(help="σ², the variance of a mini-batch gradient.")] = None,
    gradient: Annotated[float | None, typer.Option(help="G², the squared norm of a client's gradient.")] = None,
    heterogeneity: Annotated[
        float | None, typer.Option(help="ν², the squared distance of a client's gradient from the mean gradient.")
    ] = None,
    gap: Annotated[float | None, typer.Option(help="ΔF, the initial value of the objective minus its minimum.")] = None,
    max_staleness: Annotated[
        int | None, typer.Option(help="λ; default: from a plan (IID) or from the probability of a draw (nIID).")
    ] = None,
    epsilon: Annotated[float, typer.Option(help="ε, the target for the mean squared gradient norm.")] = 0.1,
    delta: Annotated[float, typer.Option(help="δ, the probability with which λ may be exceeded.")] = 0.01,
    points: Annotated[
        int, typer.Option(help="Points at which the constants are estimated: w⁰ and points along SGD.")
    ] = 3,
    samples: Annotated[int | None, typer.Option(help="Samples of each client for the estimates; default: all.")] = None,
    as_json: Json = False,
) -> None:
    """Print rates, conditions, bounds and rounds of Theorem 1 (DeFedAvg-nIID) and Theorem 2 (DeFedAvg-IID).

    Theorem 2 needs clients with one distribution (`task.split` iid or sampled); where no theorem applies, one line says
    why. Numbers of rounds above a million are marked: they are no practical guidance.
    """
    if context.invoked_subcommand is not None:
        return
    if not epsilon > 0:
        raise UserError(f"epsilon is {epsilon:g}; it must be a number above zero")
    given = dict(zip(SYMBOLS, (smoothness, noise, gradient, heterogeneity, gap), strict=True))
    study = _study(file, tuple(overrides or ()))
    reports = []
    estimated: dict[Any, Estimates] = {}
    excluded: dict[str, str] = {}
    for point in study.points():
        reason, applies = _choose(point)
        if not applies:
            excluded[point.label] = reason
            continue
        values, note = _constants(point, study.seeds[0], given, estimated, points, samples)
        size, observed = _size(point, study.seeds[0], rounds, max_staleness, delta)
        report = theorem_report(point.settings.algorithm, Constants(**values, **size), epsilon=epsilon, delta=delta)
        reports.append({"label": point.label, "reason": reason, **report, "observed_staleness": observed, "note": note})
    if not reports:
        raise UserError(f"no theorem applies to this study: {_reasons(excluded)}")
    print_notes([f"defedavg: {label}: {reason}" for label, reason in excluded.items()])
    _print(reports, as_json, _theorem_table)


def _reasons(excluded: Mapping[str, str]) -> str:
    """Return every different reason once, with the first setting that it concerns; several are numbered."""
    first: dict[str, str] = {}
    for label, reason in excluded.items():
        first.setdefault(reason, label)
    lines = [f"{label}: {reason}" for reason, label in first.items()]
    return lines[0] if len(lines) == 1 else "; ".join(f"({number}) {line}" for number, line in enumerate(lines, 1))


def _choose(point: SweepPoint) -> tuple[str, bool]:
    """Return which theorem applies to the algorithm and the split of a point, or why none does; True if one does."""
    from ..tasks.partition import is_identical

    name, task = point.settings.algorithm, point.settings.task
    if name not in THEOREMS:
        return f"no theorem is about this algorithm; use {' or '.join(THEOREMS)}", False
    if changed := point.settings.training.beyond_plain_sgd():
        return f"the theorems assume plain SGD with constant rates; remove training.{changed[0]}", False
    kind = THEOREMS[name]
    source = f"task.module = {task.module}" if task.module else f"task.split = {task.split}"
    if not kind.needs_identical_clients:
        return f"Theorem {kind.number} is about {name}, with any split ({source})", True
    if task.module:
        return f"Theorem {kind.number} is about {name}, if all clients of {source} have one distribution", True
    if is_identical(task.split):
        return f"Theorem {kind.number} is about {name}, and with {source} all clients have one distribution", True
    return (
        f"Theorem {kind.number} needs clients with one distribution, but {source} gives them different ones; use "
        "defedavg-niid (Theorem 1), or task.split = iid",
        False,
    )


def _print(results: list[dict[str, Any]], as_json: bool, table: Callable[[Mapping[str, Any]], Table]) -> None:
    if as_json:
        print_json(results)
        return
    for each in results:
        out.print(table(each))
        out.print()


def _study(file: Path | None, overrides: tuple[str, ...]) -> Study:
    if file is not None:
        return reported(config.load(file, overrides))
    default = {"name": "theory", "algorithms": list(THEOREMS), "task": {"model": "mlp"}}
    return reported(config.study(config.override(default, overrides)))


def _constants(
    point: SweepPoint,
    seed: int,
    given: dict[str, float | None],
    estimated: dict[Any, Estimates],
    points: int,
    samples: int | None,
) -> tuple[dict[str, Any], str]:
    """Return the constants that the theorem uses, estimating those that are not given, and a note about them."""
    uses = theorem(point.settings.algorithm).uses
    constants: dict[str, Any] = {name: given[name] for name in uses if given[name] is not None}
    missing = [name for name in uses if name not in constants]
    if not missing:
        return constants, "All constants are given."
    with working("preparing …"):  # shown before PyTorch is loaded
        from ..config.build import build_task
        from ..theory.estimates import EstimateOptions, estimate

    settings = point.settings
    names = ("batch_size", "sampling", "local_steps")
    training = {name: getattr(settings.training, name) for name in names}
    key = (settings.task, settings.clients.num_clients, *training.values())
    if key not in estimated:
        options = EstimateOptions(**training, seed=seed, points=points, samples=samples)
        estimated[key] = estimate(build_task(settings, seed), options, notify=print_note)
    estimates = asdict(estimated[key])
    note = f"Estimated: {', '.join(missing)}, from {estimates['note']}."
    return {**{name: estimates[name] for name in missing}, **constants}, note


def _size(
    point: SweepPoint, seed: int, rounds: int | None, max_staleness: int | None, delta: float
) -> tuple[dict[str, int], int | None]:
    """Return ``SIZES``, and the largest staleness of the plan (None if λ is given)."""
    settings = point.settings
    total = settings.stop.max_rounds if rounds is None else rounds
    clients, n = settings.clients.num_clients, settings.training.updates_per_round
    observed: int | None = None
    if max_staleness is None:
        from ..config.build import make_plan

        plan = make_plan(settings, seed, max(1, min(total, PLANNED_ROUNDS)))
        observed = max((s for record in plan.rounds for s in record.merge.staleness), default=0)
        if settings.algorithm == "defedavg-niid":
            max_staleness = probable_staleness(clients, n, total, delta)
        else:
            max_staleness = max(1, observed)
    sizes = (n, settings.training.local_steps, total, max_staleness, clients)
    return dict(zip(SIZES, sizes, strict=True)), observed


@app.command()
def speedup(
    tasks: Annotated[str, typer.Option("--task", help="least-squares, network, or both, comma-separated.")] = (
        "least-squares,network"
    ),
    algorithms: Annotated[str, typer.Option("--algorithm", help="Algorithms to measure, comma-separated.")] = (
        "defedavg-iid,defedavg-niid"
    ),
    ns: Annotated[
        str | None,
        typer.Option(
            "--n", metavar="N,N,…", help="Updates merged per round.", show_default=f"{NS}; {ALL_NS} with --full"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds for each n.")] = 3,
    epsilon: Annotated[float | None, typer.Option(help="ε; default: the task's value.")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Relative tolerance of the search for the smallest T.",
            show_default=f"{TOLERANCE:g}; {FULL_TOLERANCE:g} with --full",
        ),
    ] = None,
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The folder of the results.")] = Path(
        "runs/speedup"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace existing results.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="More values of n, and T more exactly, as in the documentation.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: one per core.")] = None,
    as_json: Json = False,
) -> None:
    """Measure the rounds to a mean squared gradient norm of ε against n at the theorems' rates.

    The slope has Student's 95 % interval from the spread of the seeds. It takes under two minutes on two idle cores,
    with `--full` up to five.
    """
    with working("preparing …"):  # shown before PyTorch is loaded
        from ..theory.speedup_study import SpeedupScope, run_speedup_study

    scope = SpeedupScope(
        _words("--task", tasks),
        _words("--algorithm", algorithms),
        _numbers((ALL_NS if full else NS) if ns is None else ns),
        seeds,
        epsilon,
        (FULL_TOLERANCE if full else TOLERANCE) if tolerance is None else tolerance,
    )
    finished, results = run_speedup_study(scope, folder, print_note, force=force, jobs=jobs)
    _print(results, as_json, _speedup_table)
    if not finished:
        raise typer.Exit(stopped_code())


def _words(option: str, text: str) -> list[str]:
    if words := [word.strip() for word in text.split(",") if word.strip()]:
        return words
    raise UserError(f"{option} is empty; give at least one")


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise UserError(f"--n {text!r} is not a comma-separated list of numbers; write it as 1,2,4") from None


def _theorem_table(report: Mapping[str, Any]) -> Table:
    constants, uses = report["constants"], theorem(report["algorithm"]).uses
    values = [f"{symbol} = {constants[name]:.4g}" for name, symbol in SYMBOLS.items() if name in uses]
    sizes = [f"{symbol} = {constants[name]}" for name, symbol in SIZES.items()]
    rows = [
        ("theorem", report["reason"]),
        ("constants", ", ".join(values)),
        ("size", ", ".join(sizes)),
        ("η, η̄", f"{report['rates']['global_lr']:.4g}, {report['rates']['local_lr']:.4g}"),
    ]
    for condition in report["conditions"]:
        outcome = "ok" if condition["holds"] else "fails"
        rows.append((condition["name"], f"{outcome}: {condition['left']:.4g} vs {condition['right']:.4g}"))
    proven = "" if all(condition["holds"] for condition in report["conditions"]) else " (not proven: a condition fails)"
    for name, key in (("bound, corrected", "bound"), ("bound, as printed", "printed_bound")):
        bound = report[key]
        rows.append((name, f"{bound['total']:.4g} = {bound['first']:.4g} + {bound['second']:.4g}{proven}"))
    rounds, staleness = report["rounds"], report["staleness"]
    rows += [
        ("T for the conditions", _rounds(report, "to_apply")),
        (f"T for a bound of {report['epsilon']:g}", _rounds(report, "to_reach")),
        ("T for both", _rounds(report, "needed")),
    ]
    if rounds["needed_drawn"] is not None:
        probability = f"(probability {1 - staleness['delta']:g})"
        rows += [
            (f"T for both, λ growing with T {probability}", _rounds(report, "needed_drawn")),
            (f"λ for this T {probability}", f"{staleness['probable']}"),
            ("λ as the paper states it, with constant 1", f"{staleness['stated']:.4g}"),
        ]
    if report["observed_staleness"] is not None:
        rows.append(("λ in a plan of these clients", f"{report['observed_staleness']}"))
    caption = report["note"]
    if report["no_practical_guidance"]:
        caption += (
            f" No practical guidance: more than {report['horizon']:,} rounds would be needed; "
            f"{report['no_practical_guidance']}."
        )
    return make(f"{report['label']}: Theorem {report['theorem']}", ("", ""), rows, caption)


def _rounds(report: Mapping[str, Any], name: str) -> str:
    """Format a number of rounds; one beyond the horizon is marked."""
    rounds = report["rounds"][name]
    return f"{rounds:,}" + (" (no practical guidance)" if rounds > report["horizon"] else "")


def _speedup_table(speedup: Mapping[str, Any]) -> Table:
    rows = [
        (
            str(point["n"]),
            f"{point['mean_rounds']:.0f}",
            ", ".join(map(str, point["rounds"])),
            str(point["max_staleness"]),
            "hold" if point["conditions_hold"] else "fail",
            f"{point['promised_rounds']:,}",
            f"{100 * point['first_share']:.1f} %",
        )
        for point in speedup["points"]
    ]
    columns = ("n", "rounds", "per seed", "λ", "conditions", "rounds by bound", "first term")
    title = (
        f"{speedup['task']}, {speedup['algorithm']}, ε = {speedup['epsilon']:g}: slope {speedup['slope']:.3f} "
        f"[{speedup['slope_low']:.3f}, {speedup['slope_high']:.3f}]"
    )
    caption = (
        "rounds: geometric mean over seeds. λ: largest staleness of the runs. rounds by bound: rounds for which the "
        "corrected bound is ε. first term: share of the bound's first term at the rounds needed."
    )
    return make(title, columns, rows, caption)
