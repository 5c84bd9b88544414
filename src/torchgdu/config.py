"""The frozen description of one training run: checked when made, JSON both ways, never torch.

    >>> config = RunConfig(task="adding", length=1000, groups="10x5+10x5")
    >>> config.groups, config.cell, config.seed
    ('10x10', 'gdu', 0)
    >>> RunConfig.from_json(config.to_json()) == config
    True

What a task or a cell fixes by itself is filled in at once, so that naming a default and leaving it
out describe the same run. The paper's settings of a task (optimizer, learning rate, limits …) stay
None here and are filled in by `torchgdu.train`, which asks the task; a finished run's record
holds the complete description.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

from torchgdu.groups import Groups

SEMANTICS = 1
"""Raised whenever the same description would no longer give the same numbers."""

OWN = "own"
"""The task or cell of a run whose task or model is the user's own object."""

TASKS: Mapping[str, Mapping[str, Any]] = {
    "adding": {"length": 200},
    "temporal-order": {"length": 100, "symbols": 3},
    "reber": {"multiple": 10},
    "mnist": {"dataset": "mnist"},
    "pmnist": {"dataset": "mnist"},
}
"""Each task's own options with their defaults."""

ENDLESS = ("adding", "temporal-order")
"""The tasks without a training set: every batch is fresh, and there are no epochs."""

TRAINING_SETS: Mapping[str, int] = {"reber": 1_000, "mnist": 55_000, "pmnist": 55_000}
"""How many examples the other tasks' training sets have."""

CELLS: Mapping[str, Mapping[str, Any]] = {
    "srn": {},
    "lstm": {"forget_bias": 1.0},
    "gru": {"reset": "before", "keep_bias": None},
    "ugrnn": {"keep_bias": None},
    "mgu": {"gamma": "alpha", "keep_bias": None},
    "cwrnn": {"periods": (1, 2, 4, 8)},
    "gdu": {"learn_delta": False},
}
"""Each cell's own options with their defaults."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "task": (*TASKS, OWN),
    "dataset": ("mnist", "fashion-mnist"),
    "cell": (*CELLS, OWN),
    "init": ("separate", "joint"),
    "reset": ("before", "after"),
    "gamma": ("alpha", "beta"),
    "optimizer": ("adam", "adamw", "rmsprop", "sgd"),
    "stop": ("solved", "never"),
    "dtype": ("float32", "float64"),
    "backend": ("auto", "engine", "reference"),
}

RANGES: Mapping[str, tuple[float, float]] = {
    "length": (2, 1_000_000),
    "symbols": (1, 16),
    "multiple": (1, 1_000),
    "hidden": (1, 2**20),
    "layers": (1, 64),
    "dropout": (0.0, 0.99),
    "forget_bias": (-100.0, 100.0),
    "keep_bias": (-100.0, 100.0),
    "lr": (1e-12, 1e3),
    "clip": (0.0, 1e9),
    "batch_size": (1, 100_000),
    "test_every": (0.001, 10**9),
    "steps": (0, 10**9),
    "epochs": (0, 10**6),
    "patience": (0, 10**6),
    "seed": (0, 2**32 - 1),
    "data_seed": (0, 2**32 - 1),
    "threads": (1, 1024),
}
"""The smallest and largest value of each number."""


REAL = (
    "dropout", "forget_bias", "keep_bias", "lr", "clip", "test_every", "epochs", "patience",
)  # fmt: skip
"""The numbers that need not be whole."""


class ConfigError(ValueError):
    """A description that names no possible run; `option` is the field at fault."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option
        self.message = message


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run: what is learnt, by which model, how, and with which seeds.

    Every field counts for the run's identity. None means: the task's own setting, as in the paper.
    """

    task: str
    length: int | None = None
    """Adding and temporal order: the sequences' length L."""
    symbols: int | None = None
    """Temporal order: how many symbols are to be remembered."""
    multiple: int | None = None
    """Reber: how many strings m are embedded."""
    dataset: str | None = None
    """mnist and pmnist: which images."""

    cell: str = "gdu"
    groups: str | None = None
    """GDU: the groups, such as "2x35+10x3"; several layers may differ: "10x10,4x25"."""
    hidden: int | None = None
    """All other cells: the number of units of each layer."""
    layers: int = 1
    dropout: float = 0.0
    init: str = "separate"
    forget_bias: float | None = None
    keep_bias: float | None = None
    learn_delta: bool | None = None
    reset: str | None = None
    gamma: str | None = None
    periods: tuple[int, ...] | None = None
    checkpoint: int | str | None = None
    """Recompute states in the backward pass to save memory: "auto", or every so many steps."""

    optimizer: str | None = None
    lr: float | None = None
    clip: float | None = None
    """The largest norm of the gradient; 0: never clipped."""
    batch_size: int | None = None
    test_every: float | None = None
    """Steps between two tests; below 1: a share of an epoch."""
    steps: int | None = None
    """The last step; 0: no limit."""
    epochs: float | None = None
    """The last pass through the training set; 0: no limit."""
    patience: float | None = None
    """Stop after so many epochs without a better validation; 0: never."""
    stop: str | None = None
    """Whether the run ends when the task is solved."""
    keep_epochs: tuple[int, ...] = ()
    """The epochs after which the weights are kept for good."""

    seed: int = 0
    """Initial weights, fresh batches, order, dropout."""
    data_seed: int = 0
    """Training, validation and test sets and the permutation: the same over trials."""
    dtype: str = "float32"
    device: str = "cpu"
    backend: str = "auto"
    threads: int | None = None
    name: str | None = None
    """What a user's own model or task is called."""
    semantics: int = field(default=SEMANTICS)

    def __post_init__(self) -> None:
        """Check every value, then fill in what task and cell fix."""
        for each in fields(self):
            object.__setattr__(self, each.name, _check(each.name, getattr(self, each.name)))
        self._fill("task", self.task, TASKS)
        self._fill("cell", self.cell, CELLS)
        self._check_task()
        self._check_model()
        if (self.task == OWN or self.cell == OWN) and self.name is None:
            raise ConfigError("name", "a task or model of your own needs one, in Python")
        if self.name is not None and OWN not in (self.task, self.cell):
            raise ConfigError("name", 'only a run with task "own" or cell "own" has a name')

    def _fill(self, kind: str, chosen: str, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Fill in the options of the chosen task or cell; those of the others must be None."""
        for option in {option for each in options.values() for option in each}:
            value = getattr(self, option)
            if option in options.get(chosen, {}):
                if value is None:
                    object.__setattr__(self, option, options[chosen][option])
            elif value is not None:
                owners = ", ".join(name for name, has in options.items() if option in has)
                raise ConfigError(option, f"{kind} {chosen} has no such option; only {owners} does")

    def _check_task(self) -> None:
        if self.task in ENDLESS:
            share = self.test_every is not None and self.test_every < 1
            of_epochs = {"epochs": self.epochs, "patience": self.patience, "test_every": share}
            for option, value in {**of_epochs, "keep_epochs": self.keep_epochs}.items():
                if value:
                    raise ConfigError(
                        option, f"task {self.task} has no epochs: count in steps, 1 to 1000000000"
                    )
        whole = TRAINING_SETS.get(self.task)
        if whole and self.batch_size is not None and self.batch_size > whole:
            raise ConfigError(
                "batch_size",
                f"{self.batch_size} is more than the training set of task {self.task} holds; "
                f"allowed: 1 to {whole}",
            )
        if self.task == "reber" and self.patience:
            raise ConfigError("patience", "task reber has no validation set to wait for")
        if self.epochs == 0 and self.steps is None and self.task in TRAINING_SETS:
            raise ConfigError(
                "epochs", "0 would never end, as there is no other limit; give --steps, or epochs "
                "above 0 to 1000000",
            )  # fmt: skip
        if self.steps == 0 and (self.task in ENDLESS or self.epochs == 0):
            raise ConfigError("steps", "0 would never end; allowed: 1 to 1000000000")
        if self.task == "temporal-order" and self.length is not None and self.symbols is not None:
            shortest = 10 * self.symbols
            if self.length < shortest:
                raise ConfigError(
                    "length",
                    f"{self.length} is too short for {self.symbols} symbols; "
                    f"allowed: {shortest} to {_show(RANGES['length'][1])}",
                )

    def _check_model(self) -> None:
        if self.cell == OWN:
            given: dict[str, Any] = {"groups": self.groups, "hidden": self.hidden}
            given |= {"layers": self.layers - 1 or None, "dropout": self.dropout or None}
            given |= {"checkpoint": self.checkpoint}
            for option, value in given.items():
                if value is not None:
                    raise ConfigError(option, "is fixed by the model of your own")
            return
        image = self.task in ("mnist", "pmnist")
        if self.cell == "gdu":
            if self.hidden is not None:
                raise ConfigError("hidden", 'cell gdu takes its units from groups, such as "10x10"')
            default = {"reber": "2x35+10x3", "mnist": "4x32", "pmnist": "4x32"}
            object.__setattr__(
                self, "groups", _groups(self.groups or default.get(self.task, "10x10"), self.layers)
            )
        else:
            if self.groups is not None:
                raise ConfigError("groups", f"cell {self.cell} has none; give hidden instead")
            if self.hidden is None:
                object.__setattr__(self, "hidden", 128 if image else 100)
        if self.periods is not None and self.hidden is not None and self.hidden % len(self.periods):
            raise ConfigError(
                "hidden", f"{self.hidden} does not divide into {len(self.periods)} equal groups"
            )
        if self.dropout and self.layers == 1:
            raise ConfigError("dropout", "acts between layers: needs at least 2 layers, or 0")

    def to_json(self) -> str:
        """Return the description as one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Read what `to_json` wrote; an unknown key is an error."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Make a description of the values of a JSON object; an unknown key is an error."""
        known = {each.name for each in fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(key, f"unknown; known are {', '.join(sorted(known))}")
        return cls(**values)

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all fields."""
        return [each.name for each in fields(cls)]

    def replace(self, **changes: Any) -> RunConfig:
        """Return this description with some fields changed."""
        return replace(self, **changes)

    def identity(self, own: Mapping[str, Any] | None = None) -> str:
        """Return the run's name: readable, then a hash of everything that can change its numbers.

        `own` identifies a task or model of the user's own: its fields, the shapes of its weights.

        >>> RunConfig(task="reber", groups="2x35+10x3", seed=3).identity()[:23]
        'reber-10_gdu-2x35+10x3_'
        """
        whole = json.dumps([asdict(self), own or None], sort_keys=True, ensure_ascii=False)
        digest = hashlib.sha256(whole.encode()).hexdigest()[:10]
        size = self.length or self.multiple or (self.dataset if self.dataset != "mnist" else None)
        task = self.name if self.task == OWN else f"{self.task}-{size}" if size else self.task
        units = self.groups or self.hidden
        model = self.name if self.cell == OWN else f"{self.cell}-{units}"
        readable = f"{task}_{model}"[:60]
        return f"{readable}_s{self.seed}_{digest}"

    def arguments(self) -> list[str]:
        """Return the arguments of `torchgdu` that describe this run.

        >>> RunConfig(task="adding", length=1000, cell="lstm", seed=4).arguments()
        ['train', 'adding', '--length', '1000', '--cell', 'lstm', '--hidden', '100', '--seed', '4']
        """
        default = asdict(RunConfig(task=self.task, cell=self.cell, name=self.name))
        said = ["length", "multiple", "cell", "groups", "hidden", "seed"]
        names = said + [each.name for each in fields(self) if each.name not in said]
        line = ["train", self.task]
        for key in names:
            value = getattr(self, key)
            if key in ("task", "semantics") or value is None:
                continue
            if value == default[key] and key not in said:
                continue
            option = "--" + key.replace("_", "-")
            if isinstance(value, bool):
                line.append(option if value else f"--no-{option[2:]}")
            elif isinstance(value, tuple):
                line += [option, ",".join(map(str, value))]
            else:
                line += [option, str(value)]
        return line


def _check(name: str, value: Any) -> Any:
    """Return the value in its one form, or say what is allowed."""
    if value is None:
        if name in ("task", "cell", "layers", "dropout", "init", "keep_epochs", "seed", "data_seed",
                    "dtype", "device", "backend", "semantics"):  # fmt: skip
            raise ConfigError(name, "is missing")
        return None
    if name in CHOICES:
        if value not in CHOICES[name]:
            raise ConfigError(name, f"{value!r} is not one of {', '.join(CHOICES[name])}")
        return value
    if name in RANGES:
        return _number(name, value, *RANGES[name])
    if name in ("periods", "keep_epochs"):
        return _ascending(name, value)
    if name == "checkpoint":
        if value == "auto":
            return value
        if isinstance(value, str):
            raise ConfigError(name, f"{value!r} is neither 'auto' nor a whole number from 1")
        return _number(name, value, 1, 10**9)
    if name == "learn_delta" and not isinstance(value, bool):
        raise ConfigError(name, f"{value!r} is neither true nor false")
    if name == "device" and not (
        isinstance(value, str) and re.fullmatch(r"cpu|cuda(:[0-9]+)?", value)
    ):
        raise ConfigError(name, f"{value!r} is none of cpu, cuda, cuda:0, cuda:1, …")
    if name == "name" and not (isinstance(value, str) and re.fullmatch(r"[\w.+-]{1,40}", value)):
        raise ConfigError(name, f"{value!r} is not 1 to 40 letters, digits or any of ._+-")
    if name == "semantics" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(name, f"{value!r} is not a whole number from 1")
    return value


def _number(name: str, value: Any, low: float, high: float) -> float:
    whole = name not in REAL
    number = (int,) if whole else (int, float)
    good = isinstance(value, number) and not isinstance(value, bool) and math.isfinite(value)
    if name == "test_every" and good and value >= 1:
        whole, good = True, value == int(value)
    if not good or not low <= value <= high:
        kind = "whole numbers " if whole else ""
        raise ConfigError(name, f"{value!r} is not allowed: {kind}{_show(low)} to {_show(high)}")
    return int(value) if whole else float(value)


def _ascending(name: str, value: Any) -> tuple[int, ...]:
    value = (value,) if isinstance(value, int) else value
    good = isinstance(value, (tuple, list)) and all(
        isinstance(v, int) and not isinstance(v, bool) and 1 <= v <= 10**6 for v in value
    )
    if not good or any(a >= b for a, b in pairwise(value)):
        raise ConfigError(name, f"{value!r} is not ascending whole numbers 1 to 1000000")
    if name == "periods" and not value:
        raise ConfigError(name, "is empty; write for example 1,2,4,8")
    return tuple(value)


def _groups(text: Any, layers: int) -> str:
    """Return the canonical form, one entry a layer only where they differ."""
    if not isinstance(text, str):
        raise ConfigError("groups", f"{text!r} is not a string such as '2x35+10x3'")
    try:
        each = [str(Groups(part)) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError("groups", str(error)) from None
    if len(each) not in (1, layers):
        raise ConfigError("groups", f"{text!r} names {len(each)} layers, but there are {layers}")
    return each[0] if len(set(each)) == 1 else ",".join(each)


def _show(number: float) -> str:
    return str(int(number)) if float(number).is_integer() and abs(number) < 1e12 else repr(number)
