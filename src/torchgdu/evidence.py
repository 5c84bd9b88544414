"""What the records say about the paper's rows: every trial, with what became of it.

A run belongs to a row when their descriptions are equal in all but what computes them. Nothing is
left out: a run that belongs to no row is kept aside, and a trial without a run is missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torchgdu import claims, paper, stats
from torchgdu.config import RunConfig
from torchgdu.paper import Row, Starts
from torchgdu.records import GATES, NORMS, Record, RunCorrupt

State = Literal["solved", "finished", "limit", "diverged", "failed", "unfinished", "missing"]


@dataclass(frozen=True)
class Trial:
    """One trial of a row."""

    config: RunConfig
    record: Record | None = None

    @property
    def state(self) -> State:
        """What became of it."""
        if self.record is None:
            return "missing"
        status = self.record.status
        return "unfinished" if status == "interrupted" or status == "running" else status

    @property
    def done(self) -> bool:
        """Whether it counts: it has an outcome, be it a failure."""
        return self.state not in ("missing", "unfinished")

    def value(self, quantity: str) -> float | None:
        """Return what was measured; None where nothing was yet, NaN where nothing can be.

        Steps are infinite where a run never got there.
        """
        if self.state == "failed":
            return math.nan
        if self.record is None or (quantity not in EPOCHS and not self.record.done):
            return None
        return MEASURES[quantity](self.record)


@dataclass(frozen=True)
class Measured:
    """A row with its trials."""

    row: Row
    trials: tuple[Trial, ...]

    @property
    def done(self) -> list[Trial]:
        """The trials that count."""
        return [trial for trial in self.trials if trial.done]

    def values(self, quantity: str) -> list[float]:
        """Return one value a trial, in the order of the seeds, without those still to come."""
        found = (trial.value(quantity) for trial in self.trials)
        return [value for value in found if value is not None]

    def count(self, state: State) -> int:
        """Return how many trials ended so."""
        return sum(trial.state == state for trial in self.trials)

    @property
    def middle(self) -> Trial | None:
        """The trial that stands for the row: the median of those done, by steps to solve."""
        ranked = sorted(
            (trial for trial in self.done if trial.record is not None),
            key=lambda trial: (trial.value("solved") or 0.0, trial.config.seed),
        )
        return ranked[(len(ranked) - 1) // 2] if ranked else None


@dataclass(frozen=True)
class Evidence:
    """Everything that is known, by the rows of one profile."""

    profile: str
    starts: Starts
    decided: bool
    """Whether the table of initial settings is complete, so that ``starts`` are its result."""
    rows: tuple[Measured, ...]
    others: tuple[Record, ...]
    """The runs that belong to no row."""
    notes: tuple[str, ...] = ()

    @property
    def judges(self) -> bool:
        """Whether there are verdicts: quick runs are for looking at."""
        return self.profile == "paper"

    def of(self, figure: str) -> list[Measured]:
        """Return the rows of a figure."""
        return [each for each in self.rows if each.row.figure == figure]

    @property
    def figures(self) -> list[str]:
        """The figures of the profile, in the paper's order."""
        known = {each.row.figure for each in self.rows}
        return [figure for figure in ORDER if figure in known]

    @cached_property
    def table(self) -> claims.Table:
        """The numbers by which claims are judged."""
        return {
            (each.row.figure, each.row.panel, each.row.name): {
                quantity: each.values(quantity) for quantity in QUANTITIES[each.row.figure]
            }
            for each in self.rows
        }

    @cached_property
    def judged(self) -> list[claims.Judged]:
        """The claims with their verdicts; none of runs that judge nothing."""
        return claims.judge(self.table) if self.judges else []

    def shorter(self, row: Row) -> dict[float, list[Record]]:
        """Return runs like those of a row but with another limit of epochs, by that limit."""
        wanted = {_trajectory(run) for run in row.runs}
        found: dict[float, list[Record]] = {}
        for record in self.others:
            # What one that diverged has is a validation's score, if any.
            sound = record.done and record.status != "diverged"
            if sound and _trajectory(record.config) in wanted:
                found.setdefault(record.config.epochs or 0.0, []).append(record)
        return dict(sorted(found.items()))


ORDER = (
    "adding", "temporal-order", "reber", "gates", "pmnist", "error-norms", "controls", "initial",
)  # fmt: skip
"""The figures as the paper has them, then what it does not have."""


def gather(records: Iterable[Record], profile: str | None = None) -> Evidence:
    """Sort records into the rows of a profile, by default the one that has any of them.

    Runs with further seeds are trials like the others.
    """
    known, notes = _unique(records)
    outcomes = {key: _steps(record, "solved") for key, record in known.items() if record.done}
    starts = paper.strongest(outcomes)
    if profile is None:
        quick, whole = (
            {_key(run) for row in paper.rows(name, starts=starts) for run in row.runs}
            for name in ("quick", "paper")
        )
        profile = "quick" if quick & set(known) and not whole & set(known) else "paper"
    if profile == "quick":
        starts = paper.DEFAULT
    seen = _seen(known.values())
    more: dict[RunConfig, list[int]] = {}
    for key in known:
        more.setdefault(key.replace(seed=0), []).append(key.seed)
    rows = []
    for row in paper.rows(profile, starts=starts):
        trials = []
        for seed in sorted({*range(row.trials), *more.get(row.config, ())}):
            run = row.config.replace(seed=seed)
            record = known.get(run)
            if row.figure == "error-norms":  # only the weights after some epochs count
                record = seen.get(_trajectory(run), record)
            trials.append(Trial(run, record))
        rows.append(Measured(row, tuple(trials)))
    shown = {_key(trial.config) for each in rows for trial in each.trials}
    others = tuple(record for key, record in known.items() if key not in shown)
    table = {_key(run) for row in paper.initial() for run in row.runs}
    return Evidence(profile, starts, table <= set(outcomes), tuple(rows), others, tuple(notes))


def _seen(records: Iterable[Record]) -> dict[RunConfig, Record]:
    """Return, by trajectory, the run whose error norms were taken after most epochs."""
    found: dict[RunConfig, Record] = {}
    for record in records:
        if record.config.task == "pmnist":
            best = found.setdefault(_trajectory(record.config), record)
            if len(norms(record)) > len(norms(best)):
                found[_trajectory(record.config)] = record
    return found


def _key(config: RunConfig) -> RunConfig:
    """Return what a run is but for what computes it."""
    return config if config.backend == "auto" else config.replace(backend="auto")


def _trajectory(config: RunConfig) -> RunConfig:
    """Return what decides a run's weights after each step, whenever it ends."""
    return _key(config).replace(epochs=None, steps=None, patience=None, stop=None, keep_epochs=())


def _unique(records: Iterable[Record]) -> tuple[dict[RunConfig, Record], list[str]]:
    """Return one record a run, one with an outcome if there is any; tell where two disagree."""
    known: dict[RunConfig, Record] = {}
    notes = []
    for record in records:
        key = _key(record.config)
        first = known.setdefault(key, record)
        if first is record:
            continue
        if first.done and record.done and dict(first.steps_to) != dict(record.steps_to):
            notes.append(f"two records of {record.id} disagree; the first one found counts")
        if record.done and not first.done:
            known[key] = record
    return known, notes


# --- What is measured --------------------------------------------------------------------------


def _steps(record: Record, criterion: str) -> float:
    step = record.steps_to.get(criterion)
    return math.inf if step is None else float(step)


def _start(record: Record) -> float:
    """Return the first test at which accuracy was twice that of chance."""
    level = 2 * record.task["chance"]["accuracy"]
    for line in record.metrics:
        if line["accuracy"] >= level:
            return float(line["step"])
    return math.inf


def _accuracy(record: Record) -> float:
    """Return the test accuracy of the best validation; a run that diverged has none."""
    return math.nan if record.status == "diverged" else record.scores.get("accuracy", math.nan)


_PARTS: Mapping[str, Sequence[tuple[str, ...]]] = {
    GATES: [("beta",), ("kept", "start"), ("kept", "end")],
    NORMS: [("epochs",)],
}
"""What must be in a file, as the keys that lead there."""


def beside(record: Record, name: str) -> dict[str, Any] | None:
    """Return what was seen in a run's weights, if it was looked at."""
    if record.path is None or not (record.path / name).exists():
        return None
    try:
        seen: dict[str, Any] = json.loads((record.path / name).read_text("utf-8"))
        if seen["id"] != record.id:
            raise ValueError(f"it belongs to run {seen['id']}")
        for place in _PARTS[name]:
            part = seen
            for key in place:
                part = part[key]
    except (ValueError, KeyError, TypeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise RunCorrupt(f"{record.path / name} cannot be read: {why}") from None
    return seen


def gates(record: Record) -> dict[str, Any] | None:
    """Return what was seen of the gates, if LC was met by then."""
    seen = beside(record, GATES)
    return seen if seen and record.scores.get("lc") == 1.0 else None


def _kept(record: Record, when: str) -> float | None:
    seen = gates(record)
    return None if seen is None else float(seen["kept"][when])


def norms(record: Record) -> dict[str, list[float]]:
    """Return error norms by the epoch after which they were taken."""
    seen = beside(record, NORMS)
    return {} if seen is None else dict(seen["epochs"])


def _reach(record: Record, epoch: str) -> float | None:
    """Return the mean of the curve divided by its maximum: how far back the error reaches."""
    curve = norms(record).get(epoch)
    if not curve:
        return None
    return sum(curve) / len(curve) / max(curve) if max(curve) > 0 else 0.0


EPOCHS = ("5", "50")
STEPS = ("solved", "SC", "LC", "start")
"""The measures that are steps: infinite where never met."""
MEASURES: Mapping[str, Callable[[Record], float | None]] = {
    "solved": lambda record: _steps(record, "solved"),
    "SC": lambda record: _steps(record, "sc"),
    "LC": lambda record: _steps(record, "lc"),
    "start": _start,
    "accuracy": _accuracy,
    "kept": lambda record: _kept(record, "end"),
    "kept at the start": lambda record: _kept(record, "start"),
    "5": lambda record: _reach(record, "5"),
    "50": lambda record: _reach(record, "50"),
}
"""From a record to a number; None where the run was not looked at."""

QUANTITIES: Mapping[str, tuple[str, ...]] = {
    "adding": ("solved",),
    "temporal-order": ("solved", "start"),
    "reber": ("SC", "LC", "solved"),
    "gates": ("kept", "kept at the start"),
    "pmnist": ("accuracy",),
    "error-norms": EPOCHS,
    "controls": ("solved",),
    "initial": ("solved",),
}


def quantities(row: Row) -> tuple[str, ...]:
    """Return what is measured of a row."""
    if row.figure == "controls" and row.config.task == "reber":
        return ("SC", "LC", "solved", "kept", "kept at the start")
    return QUANTITIES[row.figure]


def best(measured: Sequence[Measured], quantity: str) -> tuple[dict[str, float], int]:
    """Return each model's best of n trials, and n: as many for all as the one with the fewest."""
    done = {each.row.name: each.values(quantity) for each in measured}
    n = min((len(values) for values in done.values() if values), default=0)
    return {
        name: min((v for v in values[:n] if not math.isnan(v)), default=math.nan)
        for name, values in done.items()
        if values
    }, n


def median(values: Sequence[float]) -> float:
    """Return the median, a trial that failed ranking last."""
    return stats.quantile([math.inf if math.isnan(v) else v for v in values], 0.5)
