"""The paper's experiments as data: the runs behind every figure and the table, nothing computed.

Each function of ``FIGURES`` returns the rows of one figure: a model on a task, over its trials.
Its docstring gives the command, what the paper shows, and how long it takes. ``quick`` and
``paper`` are two ways to call them. Reference: Luo & Yu, *Learning Longer-term Dependencies via
Grouped Distributor Unit*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from torchgdu.config import ConfigError, RunConfig

LN9 = math.log(9)
"""sigmoid(ln 9) = 0.9: a gate that keeps as much at the start as GDU's groups of ten do."""


class Start(NamedTuple):
    """Initial values that the paper leaves open."""

    init: str
    forget_bias: float | None = None

    def __str__(self) -> str:
        """Return how tables name it."""
        bias = "" if self.forget_bias is None else f", forget bias {self.forget_bias:g}"
        return self.init + bias


Starts = Mapping[str, Start]

CANDIDATES: Mapping[str, tuple[Start, ...]] = {
    "lstm": tuple(Start(i, b) for i in ("separate", "joint") for b in (1.0, 0.0)),
    "gru": (Start("separate"), Start("joint")),
    "gdu": (Start("separate"), Start("joint")),
}
"""What the table of initial settings compares; the first of each is the default."""

DEFAULT: Starts = {cell: starts[0] for cell, starts in CANDIDATES.items()}
AUTHOR = Start("joint", 0.0)
"""The LSTM's initial values in the framework that the paper's author used."""


@dataclass(frozen=True)
class Row:
    """A model on one task: the trials are ``config`` with the seeds 0, 1, …"""

    figure: str
    panel: str
    """The part of the figure, such as "L = 200"."""
    model: str
    """As the paper writes it: "GDU(10x10)"."""
    config: RunConfig
    trials: int
    variant: str = ""
    """What sets it apart from the model's main row: "author's start"."""
    late: bool = False
    """Among the longest runs: comes after everything else."""

    @property
    def name(self) -> str:
        """The model with its variant."""
        return f"{self.model}, {self.variant}" if self.variant else self.model

    @cached_property
    def runs(self) -> list[RunConfig]:
        """One description a trial."""
        return [self.config.replace(seed=seed) for seed in range(self.trials)]


# The paper's settings, complete, so that a run can be told by them without asking its task.
_COMMON: Mapping[str, Any] = {
    "optimizer": "adam", "clip": 0.0, "steps": 0, "epochs": 0.0, "patience": 0.0, "stop": "solved",
    "test_every": 20, "batch_size": 20, "threads": 1,
}  # fmt: skip
_TASKS: Mapping[str, Mapping[str, Any]] = {
    "adding": {**_COMMON, "lr": 0.01, "steps": 10_000},
    "temporal-order": {**_COMMON, "lr": 0.001, "steps": 50_000},
    "reber": {**_COMMON, "lr": 0.0003, "batch_size": 1, "epochs": 300.0},
    "pmnist": {
        **_COMMON, "lr": 0.001, "batch_size": 100, "test_every": 0.1, "epochs": 100.0,
        "patience": 6.0,
    },
}  # fmt: skip

# Model name → cell and size.
_MODELS: Mapping[str, Mapping[str, Any]] = {
    "LSTM(100)": {"cell": "lstm", "hidden": 100},
    "GRU(100)": {"cell": "gru", "hidden": 100},
    "GDU(10x10)": {"cell": "gdu", "groups": "10x10"},
    "GDU(10x1)": {"cell": "gdu", "groups": "10x1"},
    "GDU(2x35+10x3)": {"cell": "gdu", "groups": "2x35+10x3"},
    "LSTM(128)": {"cell": "lstm", "hidden": 128},
    "GRU(128)": {"cell": "gru", "hidden": 128},
    "GDU(4x32)": {"cell": "gdu", "groups": "4x32"},
    "GDU(5x25)": {"cell": "gdu", "groups": "5x25"},
    "LSTM(256)": {"cell": "lstm", "hidden": 256},
    "GRU(256)": {"cell": "gru", "hidden": 256},
    "GDU(4x64)": {"cell": "gdu", "groups": "4x64"},
    "GDU(5x51)": {"cell": "gdu", "groups": "5x51"},
}

PMNIST: Mapping[str, tuple[float, float]] = {
    "LSTM(128)": (67.9, 91.2),
    "GRU(128)": (51.2, 90.6),
    "GDU(4x32)": (34.6, 93.5),
    "GDU(5x25)": (33.0, 93.0),
    "LSTM(256)": (266.8, 91.8),
    "GRU(256)": (200.7, 92.6),
    "GDU(4x64)": (134.7, 94.7),
    "GDU(5x51)": (133.6, 94.8),
}
"""The paper's table: thousands of parameters and test accuracy in %. It prints GDU(4x62) beside
134.7K; that count, and the 256 units its text speaks of, belong to 4x64."""


def _config(task: str, model: str, start: Start, **options: Any) -> RunConfig:
    settings = {**_TASKS[task], **_MODELS[model], "init": start.init, **options}
    if start.forget_bias is not None:
        settings["forget_bias"] = start.forget_bias
    return RunConfig(task=task, **settings)


def _rows(
    figure: str, panel: str, task: str, models: Sequence[str], starts: Starts, trials: int,
    *, late: bool = False, author: bool = True, **options: Any,
) -> list[Row]:  # fmt: skip
    """Return one row a model at its own start, then the LSTM's at the author's start."""
    rows = []
    for model in models:
        cell = _MODELS[model]["cell"]
        config = _config(task, model, starts[cell], **options)
        rows.append(Row(figure, panel, model, config, trials, late=late))
    if author and starts["lstm"] != AUTHOR:
        for model in models:
            if _MODELS[model]["cell"] == "lstm":
                config = _config(task, model, AUTHOR, **options)
                rows.append(Row(figure, panel, model, config, trials, "author's start", late))
    return rows


def initial(starts: Starts = DEFAULT, trials: int = 5) -> list[Row]:
    """Initial settings: which start suits each model.

    ``torchgdu reproduce initial --profile paper``

    The paper leaves open whether input and recurrent weights are drawn together, and the LSTM's
    forget bias; both decide results. Expected: GDU solves all three either way; an LSTM without
    forget bias is slow on temporal order 100. About four hours on two cores, nearly all of it
    LSTMs and GRUs that come to their limit on temporal order 200.
    """
    tasks = (("temporal-order", 100), ("temporal-order", 200), ("adding", 200))
    return [
        Row(
            "initial",
            f"{task.replace('-', ' ')}, L = {length}",
            model,
            _config(task, model, start, length=length),
            trials,
            str(start),
        )
        for task, length in tasks
        for model in ("LSTM(100)", "GRU(100)", "GDU(10x10)")
        for start in CANDIDATES[_MODELS[model]["cell"]]
    ]


def adding(
    starts: Starts = DEFAULT,
    trials: int = 5,
    *,
    lengths: Sequence[int] = (200, 1000, 5000, 10_000),
    models: Sequence[str] = ("LSTM(100)", "GRU(100)", "GDU(10x10)", "GDU(10x1)"),
    author: bool = True,
    **limit: int,
) -> list[Row]:
    """Adding problem: test error against training step, one panel a length.

    ``torchgdu reproduce adding --profile paper``

    The paper: GRU beats LSTM, which fails at L = 1000; GDU needs no more steps than GRU, the less
    the longer L, even as one group of ten. Minutes a run at L = 200, hours at 5000 and 10,000.
    """
    return [
        row
        for length in lengths
        for row in _rows(
            "adding", f"L = {length}", "adding", models, starts, trials,
            late=length > 1000, author=author, length=length, **limit,
        )
    ]  # fmt: skip


def temporal_order(
    starts: Starts = DEFAULT,
    trials: int = 5,
    *,
    lengths: Sequence[int] = (100, 200, 500, 1000),
    models: Sequence[str] = ("LSTM(100)", "GRU(100)", "GDU(10x10)"),
    author: bool = True,
    **limit: int,
) -> list[Row]:
    """3-bit temporal order: test accuracy against training step, one panel a length.

    ``torchgdu reproduce temporal-order --profile paper``

    The paper: LSTM beats GRU, both fail from L = 500, GDU learns at every length and starts
    first. Minutes a run at L = 100; hours for the runs that reach 50,000 steps.
    """
    return [
        row
        for length in lengths
        for row in _rows(
            "temporal-order", f"L = {length}", "temporal-order", models, starts, trials,
            late=length > 500, author=author, length=length, **limit,
        )
    ]  # fmt: skip


def reber(
    starts: Starts = DEFAULT,
    trials: int = 10,
    *,
    multiples: Sequence[int] = (10, 20, 40),
    models: Sequence[str] = ("LSTM(100)", "GRU(100)", "GDU(2x35+10x3)"),
    author: bool = True,
    **limit: int,
) -> list[Row]:
    """Multi-embedded Reber grammar: steps to the short-term and long-term criteria.

    ``torchgdu reproduce reber --profile paper``

    The paper: every model meets SC before LC, GRU beats LSTM, and GDU is slightly slower on SC
    but clearly faster on LC. Best of the trials for m = 40. Seconds a run at m = 10, up to two
    minutes at m = 20, minutes at m = 40.
    """
    return [
        row
        for multiple in multiples
        for row in _rows(
            "reber", f"m = {multiple}", "reber", models, starts, trials,
            late=multiple > 20, author=author, multiple=multiple, **limit,
        )
    ]  # fmt: skip


def gates(starts: Starts = DEFAULT, trials: int = 10) -> list[Row]:
    """Gates on 10ERG: β over time on one test string, once LC is met.

    ``torchgdu reproduce gates --profile paper``

    The paper: far more of GDU's β stay near 1 over the whole string than of GRU's. The runs are
    those of ``reber`` at m = 10.
    """
    models = ("GRU(100)", "GDU(2x35+10x3)")
    return _rows("gates", "m = 10", "reber", models, starts, trials, multiple=10)


def error_norms(starts: Starts = DEFAULT, trials: int = 3) -> list[Row]:
    """Error norms on pMNIST: how far back the error reaches after 5 and after 50 epochs.

    ``torchgdu reproduce error-norms --profile paper``

    The paper: early on, the error of LSTM and GRU decays on its way back and GDU's much less;
    the gap has shrunk by epoch 50. No stop rule. Needs the MNIST files; most of a day a run.
    """
    models = ("LSTM(128)", "GRU(128)", "GDU(4x32)")
    return _rows(
        "error-norms", "pMNIST", "pmnist", models, starts, trials,
        late=True, epochs=50.0, patience=0.0, stop="never", keep_epochs=(5, 50),
    )  # fmt: skip


def pmnist(starts: Starts = DEFAULT, trials: int = 3) -> list[Row]:
    """Permuted sequential MNIST: the table of test accuracies.

    ``torchgdu reproduce pmnist --profile paper``

    The paper: GDU wins with about half the parameters (see ``PMNIST``). Needs the MNIST files;
    a day or more a run.
    """
    small = [model for model in PMNIST if PMNIST[model][0] < 100]
    large = [model for model in PMNIST if model not in small]
    return [
        *_rows("pmnist", "128 units", "pmnist", small, starts, trials, late=True),
        *_rows("pmnist", "256 units", "pmnist", large, starts, trials, late=True),
    ]


def controls(starts: Starts = DEFAULT, trials: int | None = None) -> list[Row]:
    """Controls the paper does not have: is it the distributor, or only a slow start?

    ``torchgdu reproduce controls --profile paper``

    Models whose keep gate starts at 0.9, as that of groups of ten does: UGRNN, GRU and LSTM with
    a gate bias of ln 9. Compared with the main rows of the same tasks. Hours a run.
    """
    tasks: tuple[tuple[str, str, dict[str, Any], int], ...] = (
        ("reber", "10ERG", {"multiple": 10}, 10),
        ("temporal-order", "temporal order, L = 200", {"length": 200}, 5),
        ("temporal-order", "temporal order, L = 500", {"length": 500}, 5),
        ("adding", "adding, L = 1000", {"length": 1000}, 5),
    )
    models: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("UGRNN(100)", "α bias −ln 9", {"cell": "ugrnn", "init": starts["gdu"].init}),
        ("GRU(100)", "z bias ln 9", {"cell": "gru", "init": starts["gru"].init}),
        ("LSTM(100)", "forget bias ln 9", {"cell": "lstm", "init": starts["lstm"].init}),
    )
    rows = []
    for task, panel, size, count in tasks:
        for model, variant, options in models:
            bias: dict[str, Any] = {
                "forget_bias" if options["cell"] == "lstm" else "keep_bias": LN9
            }
            config = RunConfig(task=task, hidden=100, **_TASKS[task], **size, **options, **bias)
            rows.append(Row("controls", panel, model, config, trials or count, variant))
    return rows


FIGURES: Mapping[str, Callable[..., list[Row]]] = {
    "initial": initial,
    "reber": reber,
    "gates": gates,
    "temporal-order": temporal_order,
    "adding": adding,
    "controls": controls,
    "error-norms": error_norms,
    "pmnist": pmnist,
}
"""Every figure, in the order in which its runs are made."""

_QUICK_MODELS = ("LSTM(100)", "GRU(100)", "GDU(10x10)")
PROFILES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "quick": {
        "adding": {"lengths": (200,), "models": _QUICK_MODELS, "steps": 3000},
        "temporal-order": {"lengths": (100,), "models": _QUICK_MODELS, "steps": 2000},
        "reber": {"multiples": (10,), "steps": 15_000},
    },
    "paper": {figure: {} for figure in FIGURES},
}
"""What each profile asks of its figures; quick shows that things work and judges nothing."""


def check(profile: str, figures: Iterable[str] | None = None) -> None:
    """Say what is wrong with a profile and the names of its figures; "all" is one, too."""
    if profile not in PROFILES:
        raise ConfigError("profile", f"{profile!r} is not one of {', '.join(PROFILES)}")
    for figure in figures or ():
        if figure not in (*FIGURES, "all"):
            raise ConfigError("figure", f"no figure {figure!r}; there are {', '.join(FIGURES)}")
        if figure not in (*PROFILES[profile], "all"):
            has = ", ".join(PROFILES[profile])
            raise ConfigError("figure", f"the {profile} profile has {has} only, no {figure!r}")


def rows(
    profile: str,
    figures: Iterable[str] | None = None,
    starts: Starts = DEFAULT,
    trials: int | None = None,
) -> list[Row]:
    """Return the rows of some figures of a profile, all of them when none is named.

    >>> [(row.panel, row.name, row.trials) for row in rows("quick", ["adding"])]
    [('L = 200', 'LSTM(100)', 2), ('L = 200', 'GRU(100)', 2), ('L = 200', 'GDU(10x10)', 2)]
    """
    figures = None if figures is None else list(figures)
    check(profile, figures)
    asked = PROFILES[profile]
    found = []
    for figure in asked if figures is None else figures:
        options: dict[str, Any] = dict(asked[figure])
        if profile == "quick":
            options |= {"trials": 2, "author": False}
        if trials is not None:
            options["trials"] = trials
        found += FIGURES[figure](starts, **options)
    return found


_SIZES: Mapping[str, str] = {
    "adding": "adding, L = {0.length}",
    "temporal-order": "temporal order, L = {0.length}",
    "reber": "{0.multiple}ERG",
    "pmnist": "pMNIST",
}


def label(config: RunConfig) -> str:
    """Return a run in the paper's words.

    >>> label(_config("reber", "LSTM(100)", AUTHOR, multiple=20))
    '20ERG, LSTM(100), joint, forget bias 0, seed 0'
    """
    parts = [_SIZES[config.task].format(config)]
    parts.append(f"{config.cell.upper()}({config.groups or config.hidden})")
    start = Start(config.init, config.forget_bias)
    if start != DEFAULT.get(config.cell, Start("separate")):
        parts.append(str(start))
    if config.keep_bias is not None:
        parts.append(f"keep bias {config.keep_bias:.3g}")
    if config.keep_epochs:
        parts.append(f"{config.epochs:g} epochs")
    return ", ".join([*parts, f"seed {config.seed}"])


def runs(chosen: Iterable[Row]) -> list[RunConfig]:
    """Return every run of some rows once: what is late last, and first trials before second ones.

    A sweep that is cut short has then tried every model, not one model ten times.
    """
    chosen = list(chosen)
    panels = dict.fromkeys((row.late, row.figure, row.panel) for row in chosen)
    ordered: dict[RunConfig, None] = {}
    for late, figure, panel in sorted(panels, key=lambda key: key[0]):
        group = [r for r in chosen if (r.late, r.figure, r.panel) == (late, figure, panel)]
        for seed in range(max(row.trials for row in group)):
            ordered |= dict.fromkeys(row.runs[seed] for row in group if seed < row.trials)
    return list(ordered)


def plan(
    profile: str,
    figures: Iterable[str] | None = None,
    trials: int | None = None,
) -> Callable[[Mapping[RunConfig, float]], list[RunConfig]]:
    """Return what names the runs wanted, given how those that have ended did.

    It maps ``outcomes``, as for `strongest`, to the runs in order. Where the table of initial
    settings is asked for, a model's other runs are named once its part of the table has ended.
    """

    chosen_figures = None if figures is None else tuple(figures)

    @cache
    def rows_from(starts: tuple[tuple[str, Start], ...]) -> list[Row]:
        return rows(profile, chosen_figures, dict(starts), trials)

    def wanted(outcomes: Mapping[RunConfig, float]) -> list[RunConfig]:
        chosen = rows_from(tuple(strongest(outcomes).items()))
        first = [row for row in chosen if row.figure == "initial"]
        undecided = {row.config.cell for row in first for run in row.runs if run not in outcomes}
        rest = [
            row
            for row in chosen
            if row.figure != "initial" and _deciding(row.config.cell) not in undecided
        ]
        return runs([*first, *rest])

    return wanted


def _deciding(cell: str) -> str:
    """Return the model whose start a cell takes."""
    return "gdu" if cell == "ugrnn" else cell


def strongest(outcomes: Mapping[RunConfig, float]) -> Starts:
    """Return each model's strongest start by the table of initial settings.

    The start with the most solved runs, ties broken by the smaller median of steps (spec: the
    rule was fixed before the runs). ``outcomes`` maps runs to their steps, ``inf`` where unsolved;
    a model whose part of the table is not complete keeps its default.
    """
    table: dict[str, dict[Start, list[float]]] = {cell: {} for cell in CANDIDATES}
    for row in _table():
        start = Start(row.config.init, row.config.forget_bias)
        steps = [outcomes.get(run, math.nan) for run in row.runs]
        table[row.config.cell].setdefault(start, []).extend(steps)
    return {
        cell: DEFAULT[cell]
        if any(math.isnan(step) for steps in by_start.values() for step in steps)
        else min(by_start, key=lambda start: _rank(by_start[start]))
        for cell, by_start in table.items()
    }


@cache
def _table() -> list[Row]:
    return initial()


def _rank(steps: Sequence[float]) -> tuple[int, float]:
    """Return what the better start has less of: unsolved runs, then the median of steps."""
    unsolved = sum(math.isinf(step) for step in steps)
    return unsolved, sorted(steps)[len(steps) // 2]  # 15 runs: the middle one
