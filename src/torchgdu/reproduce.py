"""The paper's runs, made by a sweep, and the report on them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from torchgdu import observe, paper
from torchgdu.config import RunConfig
from torchgdu.overview import watch
from torchgdu.records import Record
from torchgdu.report import write
from torchgdu.sweep import Job, Stopped, Watcher, asked, stored, sweep
from torchgdu.train import make_task

UNUSABLE = 5
"""The exit code where a run failed."""


def reproduce(
    figures: Iterable[str] | None = None,
    profile: str = "quick",
    *,
    out: Path,
    trials: int | None = None,
    workers: int = 1,
    cluster: str | None = None,
    data: Path | None = None,
    scratch: Path | None = None,
    accept_drift: bool = False,
    watcher: Watcher | None = None,
) -> list[Job]:
    """Make the runs of some figures, all of a profile's when none is named, and return the jobs.

    In the paper profile a model's runs use its strongest start as soon as the table of initial
    settings in `out` is complete, and its default start before that.
    """
    wanted = paper.plan(profile, figures, trials)
    first = wanted({})
    if cluster is None:
        _check_data(first, data)
    return sweep(
        lambda ended: wanted(outcomes(ended)),
        out,
        workers=workers,
        cluster=cluster,
        data=None if data is None else data if cluster else data.resolve(),
        scratch=scratch,
        accept_drift=accept_drift,
        watcher=watcher,
    )


def command(
    figures: Sequence[str],
    profile: str,
    *,
    out: Path,
    report: Path,
    trials: int | None,
    workers: int | None,
    cluster: str | None,
    data: Path | None,
    scratch: Path | None,
    quiet: bool,
    accept_drift: bool,
) -> int:
    """Do what `torchgdu reproduce` does, tell how it goes, and return the exit code."""
    chosen = None if "all" in figures else list(figures)
    first = paper.plan(profile, chosen, trials)({})
    if cluster is None:
        _check_data(first, data)

    def say(line: str) -> None:
        if not quiet:
            observe.say(line)

    if workers is None:
        workers = default_workers(len(first))
        if cluster is None and find_spec("distributed") is None:
            say("One run at a time; one a core needs: pip install 'torchgdu[cluster]'")
    where = f"on {cluster}" if cluster else f"{workers} at a time"
    say(f"The {profile} profile, {where}; records in {out}")
    tabled = profile == "paper" and (chosen is None or "initial" in chosen)
    if profile == "paper" and not tabled:
        for line in starts(out):
            say(line)
    try:
        with watch(paper.label, quiet) as watcher:
            jobs = reproduce(
                chosen, profile, out=out, trials=trials, workers=workers, cluster=cluster,
                data=data, scratch=scratch, accept_drift=accept_drift, watcher=watcher,
            )  # fmt: skip
    except Stopped as stopped:
        how = "Interrupted, and saved. The same command goes on from here."
        print(how, file=sys.stderr, flush=True)
        return 128 + stopped.number
    for line in starts(out) if tabled else ():
        say(line)
    failed = [job for job in jobs if job.state == "failed"]
    for job in failed:
        why = job.record.failure if job.record else None
        print(f"Error: {paper.label(job.config)}: {why}", file=sys.stderr, flush=True)
    try:
        page = write(stored(out).values(), report, profile=profile, data=data)
    except ImportError as error:
        print(f"No report: {error}; then: torchgdu report {out}", file=sys.stderr, flush=True)
    else:
        say(f"The report: {page}")
    return UNUSABLE if failed else 0


def default_workers(runs: int) -> int:
    """Return one a core, but no more than there are runs; one where Dask is not installed."""
    if find_spec("distributed") is None:
        return 1
    return max(1, min(len(os.sched_getaffinity(0)), runs))


def outcomes(ended: Mapping[RunConfig, Record]) -> dict[RunConfig, float]:
    """Return the steps to the solution: infinity where there was none, NaN where a run failed."""
    return {asked(config): _steps(record) for config, record in ended.items()}


def _steps(record: Record) -> float:
    if record.status == "failed":
        return math.nan
    step = record.steps_to.get("solved")
    return math.inf if step is None else float(step)


def starts(out: Path) -> list[str]:
    """Return a line a model: which start the paper profile takes, and why."""
    known = outcomes({key: record for key, record in stored(out).items() if record.done})
    chosen = paper.strongest(known)
    open_cells = {
        row.config.cell for row in paper.initial() for run in row.runs if run not in known
    }
    return [
        f"{cell.upper()} starts with {start}: "
        + (
            "the default, as the table of initial settings is not complete"
            if cell in open_cells
            else "the strongest in the table of initial settings"
        )
        for cell, start in chosen.items()
    ]


def _check_data(runs: Iterable[RunConfig], data: Path | None) -> None:
    """Miss the image files now, not after hours."""
    for run in {run.dataset: run for run in runs if run.dataset}.values():
        make_task(run, None, data).provenance(run.data_seed)
