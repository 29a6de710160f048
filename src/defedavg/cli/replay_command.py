"""``defedavg replay``: the plan of a deployment from its event log, and what-if plans of its clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UserError, counted
from ..report import tables
from ..runstore.layout import RunFiles
from .advise_command import Budget, advise_from_log
from .options import Json, Out, out, print_json, print_line, print_notes

if TYPE_CHECKING:
    from ..deploy.replay import Replay
    from ..planning.plan_stats import PlanStats


def _log_of(file: Path) -> Path:
    """Return a log, or that of a run folder; a folder without one is not of a deployment."""
    if not file.is_dir():
        return file
    log = RunFiles(file).event_log
    if not log.exists():
        raise UserError(f"{file} has no {log.name}; replay needs a folder that `defedavg deploy` wrote")
    return log


def replay(
    file: Annotated[Path, typer.Argument(metavar="LOG", help="events.jsonl of a deployment, or its run folder.")],
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,…",
            help="Also simulate the measured clients with other settings: updates_per_round=5,10, local_steps=… or "
            "algorithm=…; several options are combined.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="The number of rounds that a what-if simulates.")] = 100,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the plan of the deployment (.jsonl or .jsonl.gz).")
    ] = None,
    advise: Annotated[
        Path | None,
        typer.Option(
            metavar="STUDY.toml",
            help="Also advise for the measured clients, as `defedavg advise` does: the study names the task and the "
            "target, and the log replaces its [clients].",
        ),
    ] = None,
    budget: Budget = None,
    folder: Out = Path("runs"),
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier advice.")] = False,
    as_json: Json = False,
) -> None:
    """Rebuild the plan of a deployment from its event log and check it; then ask what other settings would do.

    Example: `defedavg replay runs/deployment --what-if updates_per_round=1,3,6 --advise my.toml --budget 10m`
    """
    from ..deploy.engine import event_log as logs
    from ..deploy.replay import replay as rebuild
    from ..deploy.whatif import model_error, whatif_plans
    from ..planning.plan_stats import summarise

    _check_options(advise, budget, force=force, as_json=as_json)
    found = rebuild(logs.read(_log_of(file)))
    found.plan.check()
    if save is not None:
        found.plan.save(save)
    plans, impossible = whatif_plans(found, tuple(what_if or ()), rounds)
    deployed = summarise(found.plan, found.fleet)
    planned = [(label, summarise(plan, found.fleet)) for label, plan in plans]
    print_notes(impossible)
    wanted = bool(plans) or advise is not None
    errors = model_error(found) if wanted else None
    if as_json:
        _print_replay_json(found, [("as deployed", deployed), *planned], errors)
        return
    _print_tables(deployed, planned, rounds)
    _print_checked(found)
    _print_model_error(errors, wanted=wanted)
    if advise is not None:
        advise_from_log(found, advise, budget, folder, force=force)


def _check_options(advise: Path | None, budget: str | None, *, force: bool, as_json: bool) -> None:
    if advise is not None and as_json:
        raise UserError("replay --advise prints a ranking; leave out --json, and read advice.json")
    if advise is None and (budget is not None or force):
        raise UserError("--budget and --force are for --advise; name the study to advise with --advise STUDY.toml")


def _print_tables(deployed: PlanStats, planned: Sequence[tuple[str, PlanStats]], rounds: int) -> None:
    """Print the deployment and the what-if plans: two tables, since totals of different rounds do not compare."""
    found = tables.plan_table(["as deployed"], [[deployed]], deployed.rounds)
    if planned:
        found.caption = None  # that of the second table explains the same columns
    out.print(found)
    if planned:
        labels, stats = zip(*planned, strict=True)
        print_line("")
        out.print(tables.plan_table(labels, [[each] for each in stats], rounds))


def _print_replay_json(
    found: Replay, rows: Sequence[tuple[str, PlanStats]], errors: tuple[float, float] | None
) -> None:
    named = [{"setting": label, **tables.stats_json([stats], [{}])[0]} for label, stats in rows]
    error = {"seconds_per_round": dict(zip(("predicted", "measured"), errors, strict=True))} if errors else {}
    print_json({"refused": len(found.refused), "quarantined": list(found.quarantined), "plans": named} | error)


def _print_checked(found: Replay) -> None:
    merges, refused = counted(len(found.plan.rounds), "merge"), counted(len(found.refused), "update")
    print_line(
        f"\nevery invariant holds; {merges} as logged; {refused} refused, "
        f"{counted(len(found.quarantined), 'client')} quarantined; speeds of {len(found.measured_clients)} of "
        f"{counted(found.plan.header.num_clients, 'client')} measured"
    )


def _print_model_error(errors: tuple[float, float] | None, *, wanted: bool) -> None:
    """Print how far the simulation with the logged setting is from the logged run."""
    if errors is not None:
        predicted, measured = errors
        print_line(
            f"model error: with the logged setting the simulation predicts {predicted:.3g} s a round, the deployment "
            f"took {measured:.3g} s ({predicted / measured - 1:+.0%}); the plans above may be wrong by as much"
        )
    elif wanted:
        print_line("model error: unknown, since the simulation cannot repeat the logged run")
