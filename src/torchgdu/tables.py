"""The numbers behind the page as CSV: every run, what rows come to, the table, the claims.

``inf`` is a criterion never met, ``nan`` a trial that failed, and an empty field not known yet.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchgdu import evidence, paper, stats
from torchgdu.evidence import STEPS, Evidence, Measured


def tables(known: Evidence) -> dict[str, str]:
    """Return the tables as CSV text, by name."""
    found = {"runs": _csv(_every_run(known)), "summary": _csv(_summary(known))}
    if known.judges:
        found["pmnist"] = _csv(_pmnist_rows(known))
        found["claims"] = _csv(_claim_rows(known))
    return found


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _place(each: Measured) -> dict[str, Any]:
    row = each.row
    return {"figure": row.figure, "panel": row.panel, "model": row.model, "variant": row.variant}


def _every_run(known: Evidence) -> list[dict[str, Any]]:
    rows = []
    for each in known.rows:
        for trial in each.trials:
            record = trial.record
            values = {name: trial.value(name) for name in evidence.quantities(each.row)}
            found = record.environment if record else {}
            rows.append(
                {
                    **_place(each), "seed": trial.config.seed, "state": trial.state,
                    **{name: values.get(name) for name in evidence.MEASURES},
                    "steps": record and record.step, "epochs": record and record.epoch,
                    "parameters": record and record.parameters, "run": record and record.id,
                    "revision": found.get("revision"), "semantics": trial.config.semantics,
                    "backend": found.get("backend"),
                    "seconds": record and record.process.get("seconds"),
                    "failure": record and (record.failure or record.diverged),
                }
            )  # fmt: skip
    return rows


def _summary(known: Evidence) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for each in known.rows:
        for quantity in evidence.quantities(each.row):
            values = each.values(quantity)
            ranked = values
            if quantity in STEPS:  # a trial that failed ranks last
                ranked = [math.inf if math.isnan(v) else v for v in values]
            ranked = [v for v in ranked if not math.isnan(v)]
            low, middle, high = (
                stats.quantile(ranked, q) if ranked else None for q in (0.25, 0.5, 0.75)
            )
            rows.append(
                {
                    **_place(each), "quantity": quantity, "trials wanted": len(each.trials),
                    "trials": len(values), "met": sum(map(math.isfinite, values)),
                    "median": middle, "lower quartile": low, "upper quartile": high,
                    "best": min(ranked, default=None) if quantity in STEPS else None,
                    **{state: each.count(state) for state in COUNTED},
                }
            )  # fmt: skip
    return rows


COUNTED: tuple[evidence.State, ...] = (
    "solved", "finished", "limit", "diverged", "failed", "unfinished", "missing",
)  # fmt: skip


def _pmnist_rows(known: Evidence) -> list[dict[str, Any]]:
    rows = []
    for each in known.of("pmnist"):
        values = [v for v in each.values("accuracy") if not math.isnan(v)]
        thousands, accuracy = paper.PMNIST[each.row.model]
        rows.append(
            {
                "model": each.row.model, "variant": each.row.variant,
                "thousand parameters": thousands,
                "paper accuracy": None if each.row.variant else accuracy / 100,
                "trials": len(values),
                "mean accuracy": sum(values) / len(values) if values else None,
                "median accuracy": stats.quantile(values, 0.5) if values else None,
            }
        )  # fmt: skip
    return rows


def _claim_rows(known: Evidence) -> list[dict[str, Any]]:
    return [
        {
            "figure": judged.claim.figure, "claim": judged.claim.statement,
            "rule": judged.claim.rule, "LSTM start": judged.variant, "verdict": judged.verdict,
            "length": check.panel,
            "holds": {True: "yes", False: "no", None: "not enough runs"}[check.holds],
            "evidence": check.evidence,
        }
        for judged in known.judged
        for check in judged.checks
    ]  # fmt: skip
