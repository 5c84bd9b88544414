"""Records of runs that never were: what they say is known beforehand."""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchgdu import paper
from torchgdu.config import RunConfig
from torchgdu.paper import Row
from torchgdu.records import GATES, NORMS, Record, Status, write_files

METRIC = {"adding": "mse", "temporal-order": "accuracy", "reber": "both", "pmnist": "accuracy"}
TASK: Mapping[str, Mapping[str, Any]] = {
    "adding": {"primary": "mse", "higher_is_better": False, "chance": {"mse": 1 / 6},
               "goal": {"mse": 0.002}},
    "temporal-order": {"primary": "accuracy", "higher_is_better": True,
                       "chance": {"accuracy": 0.125}, "goal": {"accuracy": 1.0}},
    "reber": {"primary": "both", "higher_is_better": True,
              "chance": {"sc": 0.0, "lc": 0.5, "both": 0.0},
              "goal": {"sc": 1.0, "lc": 1.0, "both": 1.0}},
    "pmnist": {"primary": "accuracy", "higher_is_better": True, "chance": {"accuracy": 0.1},
               "goal": {}},
}  # fmt: skip
ENVIRONMENT = {
    "revision": "0123456789abcdef0123456789abcdef01234567", "torchgdu": "0.1.0", "torch": "2.9.0",
    "backend": "engine", "instructions": "avx2",
}  # fmt: skip
PARAMETERS = {
    "LSTM(100)": 41_301, "GRU(100)": 31_001, "GDU(10x10)": 20_701, "GDU(10x1)": 271,
    "GDU(2x35+10x3)": 22_307, "UGRNN(100)": 20_801,
}  # fmt: skip


def record(
    config: RunConfig,
    solved: float | None = None,
    *,
    status: Status | None = None,
    step: int | None = None,
    metrics: Sequence[Mapping[str, Any]] = (),
    scores: Mapping[str, float] | None = None,
    parameters: int = 0,
    **criteria: float | None,
) -> Record:
    """A record that was solved at a step (None or infinite: never)."""
    config = config.replace(backend="engine")
    known = criteria if config.task == "pmnist" else {**criteria, "solved": solved}
    steps_to = {
        key: None if value is None or math.isinf(value) else int(value)
        for key, value in known.items()
    }
    limit = config.steps or int((config.epochs or 1) * 1000)
    met = steps_to.get("solved")
    return Record(
        config=config,
        status=status
        or ("finished" if config.task == "pmnist" else "limit" if met is None else "solved"),
        step=step or met or limit,
        epoch=config.epochs or 0.0 if config.task == "pmnist" else 0.0,
        steps_to=steps_to,
        scores=scores or {},
        parameters=parameters,
        task=TASK[config.task],
        environment=ENVIRONMENT,
        process={"seconds": 12.5},
        given=metrics,
    )


def learning(config: RunConfig, solved: float, numbers: random.Random) -> list[dict[str, Any]]:
    """Noise about chance, then a fall (or a rise) that ends where the run is solved."""
    end = min(solved, config.steps or 20_000)
    lines = []
    adding = config.task == "adding"
    step = 20.0
    while step <= end:
        share = 1 / (1 + math.exp(-(math.log(step) - math.log(solved) + 0.45) * 11))
        if math.isinf(solved):
            share = 0.02
        noise = math.exp(numbers.gauss(0, 0.18))
        if adding:
            value = max(0.0021, 0.167 * noise * (1 - share) ** 1.2)
        else:
            value = min(0.998, max(0.0, 0.125 * noise + 0.875 * share))
        if step >= solved:
            value = 0.0015 if adding else 1.0
        lines.append({"step": int(step), "epoch": 0.0, "loss": value, METRIC[config.task]: value})
        step += 20 * max(1, round(end / 20 / 300))  # as dense as a drawing can show
    return lines


def gates(config: RunConfig, name: str, steps: int, kept: tuple[float, float]) -> dict[str, Any]:
    """What the gates of a run look like when a known share of its units keeps its state."""
    numbers = random.Random(config.seed)
    units = 100
    latched = round(kept[1] * units)
    beta = [
        [
            numbers.randint(93, 100) if unit < latched else numbers.randint(5, 95)
            for unit in range(units)
        ]
        for _ in range(steps)
    ]
    return {
        "format": 1, "id": name, "string": "B" * steps, "beta": beta,
        "kept": {"start": kept[0], "end": kept[1]},
    }  # fmt: skip


def norms(name: str, decay: Mapping[str, float]) -> dict[str, Any]:
    """Error norms that fall by a known factor over the sequence."""
    curves = {
        epoch: [math.exp(-(784 - t) / 784 * rate) for t in range(1, 785)]
        for epoch, rate in decay.items()
    }
    return {"format": 1, "id": name, "samples": 200, "epochs": curves}


def store(out: Path, made: Record, **beside: Mapping[str, Any]) -> Record:
    """Write a record as a run would have; ``gates`` and ``norms`` go beside it."""
    names = {"gates": GATES, "norms": NORMS}
    files = {names[key]: json.dumps(value).encode() for key, value in beside.items()}
    # What a record says of its metrics must be true.
    text = made.to_files()
    lines = text["metrics.jsonl"]
    whole = {"lines": lines.count(b"\n"), "bytes": len(lines), "crc32": zlib.crc32(lines)}
    body = json.loads(text["record.json"])
    body["metric_lines"] = whole
    return write_files(out, {**text, "record.json": json.dumps(body).encode(), **files})


def story(out: Path, rows: Sequence[Row], missing: Callable[[Row, int], bool]) -> list[Record]:
    """A whole profile as it might go, with a plausible spread; some runs are missing."""
    made: dict[str, Record] = {}
    for row in rows:
        for config in row.runs:
            numbers = random.Random(config.identity())
            name = config.replace(backend="engine").identity()
            if name in made or missing(row, config.seed):
                continue
            made[name] = _episode(out, row, config, numbers)
    return list(made.values())


MEDIAN: Mapping[tuple[str, str], Callable[[float], float]] = {
    ("adding", "lstm"): lambda n: 900 * n / 200 if n < 1000 else math.inf,
    ("adding", "gru"): lambda n: 380 * (n / 200) ** 0.31,
    ("adding", "gdu"): lambda n: 340 * (n / 200) ** 0.2,
    ("adding", "ugrnn"): lambda n: 500 * (n / 200) ** 0.3,
    ("temporal-order", "lstm"): lambda n: 2600 * n / 100 if n < 500 else math.inf,
    ("temporal-order", "gru"): lambda n: 4100 * n / 100 if n < 500 else math.inf,
    ("temporal-order", "gdu"): lambda n: 700 * n / 100,
    ("temporal-order", "ugrnn"): lambda n: 2000 * n / 100,
    ("reber", "lstm"): lambda m: 42_000 * m / 10,
    ("reber", "gru"): lambda m: 28_000 * m / 10,
    ("reber", "gdu"): lambda m: 12_000 * m / 10,
    ("reber", "ugrnn"): lambda m: 16_000 * m / 10,
}


def _episode(out: Path, row: Row, config: RunConfig, numbers: random.Random) -> Record:
    parameters = PARAMETERS.get(row.model, int(1000 * paper.PMNIST.get(row.model, (20.0,))[0]))
    if config.task == "pmnist":
        accuracy = paper.PMNIST[row.model][1] / 100 + numbers.gauss(0, 0.004)
        made = record(config, scores={"accuracy": accuracy}, parameters=parameters)
        rates = {"lstm": (14.0, 4.0), "gru": (11.0, 3.0), "gdu": (2.5, 1.5)}[config.cell]
        return store(out, made, norms=norms(made.id, dict(zip(("5", "50"), rates, strict=True))))
    solved = MEDIAN[config.task, config.cell](config.length or config.multiple or 0)
    if config.init == "joint":
        solved *= 1.7
    if config.task == "temporal-order" and config.forget_bias == 0:
        solved = math.inf
    solved = max(20, round(solved * math.exp(numbers.gauss(0, 0.22)) / 20) * 20) if math.isfinite(
        solved
    ) else math.inf  # fmt: skip
    if solved > (config.steps or 300_000):
        solved = math.inf
    if config.task == "reber":
        sc = round(0.3 * min(solved, 60_000) / 20) * 20 * (1.2 if config.cell == "gdu" else 1)
        done = math.isfinite(solved)
        made = record(
            config, solved, sc=sc, lc=solved, parameters=parameters,
            scores={"sc": 1.0, "lc": 1.0 if done else 0.5},
        )  # fmt: skip
        kept = {"gdu": (0.18, 0.34), "gru": (0.0, 0.04)}.get(config.cell, (0.1, 0.15))
        if (config.multiple or 0) > 10:
            return store(out, made)
        return store(out, made, gates=gates(config, made.id, 84, kept))
    return store(
        out,
        record(config, solved, parameters=parameters, metrics=learning(config, solved, numbers)),
    )
