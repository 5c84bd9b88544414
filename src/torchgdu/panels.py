"""What each figure draws: from measured rows to the panels of the paper's arrangement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchgdu import evidence
from torchgdu.evidence import Evidence, Measured
from torchgdu.figures import Curve, Panel

CRITERIA = {"SC": "SC", "LC": "LC", "solved": "both"}
GATE_MODELS = ("GRU(100)", "GDU(2x35+10x3)")


def panels(known: Evidence, figure: str) -> list[Panel]:
    """Return the panels of a figure, in the paper's arrangement; none for what has no figure."""
    make = FIGURES.get(figure)
    return make(known.of(figure)) if make else []


def _by_panel(rows: Sequence[Measured]) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {}
    for each in rows:
        found.setdefault(each.row.panel, []).append(each)
    return found


def _curves(rows: Sequence[Measured], score: str, **options: Any) -> list[Panel]:
    return [
        Panel(
            panel,
            "curves",
            {"curves": [c for each in group for c in _trials(each, score)],
             "limit": max(each.row.config.steps or 0 for each in group), **options},
        )
        for panel, group in _by_panel(rows).items()
    ]  # fmt: skip


def _trials(measured: Measured, score: str) -> list[Curve]:
    middle = measured.middle
    found: list[Curve] = []
    for trial in measured.trials:
        if trial.record is None or trial.state == "failed":
            continue
        lines = [line for line in trial.record.metrics if math.isfinite(line[score])]
        solved = trial.record.steps_to.get("solved")
        found.append(
            Curve(
                measured.row.name,
                [line["step"] for line in lines],
                [line[score] for line in lines],
                None if solved is None else float(solved),
                main=trial is middle or (middle is None and not found),
            )
        )
    return [curve for curve in found if curve.steps]


def _adding(rows: Sequence[Measured]) -> list[Panel]:
    return _curves(rows, "mse", metric="test MSE", chance=0.167, goal=0.002, log=True)


def _temporal_order(rows: Sequence[Measured]) -> list[Panel]:
    return _curves(rows, "accuracy", metric="test accuracy", chance=0.125)


def _reber(rows: Sequence[Measured]) -> list[Panel]:
    found = []
    for panel, group in _by_panel(rows).items():
        multiple = group[0].row.config.multiple
        title = f"{panel}: steps to meet each criterion"
        if multiple == 40:
            best, n = {}, 0
            for quantity, shown in CRITERIA.items():
                best[shown], n = evidence.best(group, quantity)
            note = f"best of {n} run{'s' * (n > 1)}" if n else ""
            bars = {
                k: {m: v for m, v in each.items() if not math.isnan(v)} for k, each in best.items()
            }
            found.append(Panel(f"{panel}: best result", "bars", {"groups": bars, "note": note}))
        else:
            boxes = {
                shown: {each.row.name: _known(each.values(quantity)) for each in group}
                for quantity, shown in CRITERIA.items()
            }
            found.append(Panel(title, "boxes", {"groups": boxes}))
        if multiple == 40:
            found.append(
                Panel(
                    "40ERG training set: lengths",
                    "histogram",
                    {"counts": lengths(multiple), "label": "symbols in a string"},
                )
            )
    return found


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def lengths(multiple: int) -> dict[int, int]:
    """Return how often each length occurs in the training set of mERG."""
    from torchgdu.tasks import Reber

    return dict(Counter(Reber(multiple).training_lengths()))


def _gates(rows: Sequence[Measured]) -> list[Panel]:
    found = []
    for each in rows:
        if each.row.name not in GATE_MODELS:
            continue
        beta, title = None, each.row.name
        for trial in each.trials:
            seen = trial.record and evidence.gates(trial.record)
            if seen:
                beta = [[value / 100 for value in unit] for unit in zip(*seen["beta"], strict=True)]
                title = f"{each.row.name}, trial {trial.config.seed + 1}"
                break
        found.append(Panel(title, "gates", {"beta": beta}))
    return found


def _error_norms(rows: Sequence[Measured]) -> list[Panel]:
    found = []
    for epoch in evidence.EPOCHS:
        curves = {}
        for each in rows:
            seen = (evidence.norms(t.record).get(epoch) for t in each.trials if t.record)
            curve = next((values for values in seen if values), None)
            if curve:
                curves[each.row.name] = curve
        found.append(Panel(f"after {epoch} epochs", "norms", {"curves": curves}))
    return found


FIGURES: Mapping[str, Callable[[Sequence[Measured]], list[Panel]]] = {
    "adding": _adding,
    "temporal-order": _temporal_order,
    "reber": _reber,
    "gates": _gates,
    "error-norms": _error_norms,
}
"""The figures that are drawn; the others are tables."""
