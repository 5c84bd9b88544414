"""The description of a run: what it fills in, what it refuses, what counts for its identity."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, fields
from typing import Any

import pytest

from torchgdu.config import CELLS, OWN, RANGES, TASKS, ConfigError, RunConfig

EVERY_TASK_AND_CELL = [(task, cell) for task in TASKS for cell in CELLS]


@pytest.mark.parametrize(("task", "cell"), EVERY_TASK_AND_CELL)
def test_json_round_trip(task: str, cell: str) -> None:
    config = RunConfig(task=task, cell=cell, lr=1e-3, steps=10, test_every=5, seed=7)
    assert RunConfig.from_json(config.to_json()) == config
    assert RunConfig.from_json(config.to_json()).identity() == config.identity()
    assert json.loads(config.to_json())["task"] == task


def test_unknown_key_is_an_error() -> None:
    values = {**asdict(RunConfig(task="adding")), "learning_rate": 0.1}
    with pytest.raises(ConfigError, match="learning_rate: unknown; known are"):
        RunConfig.from_dict(values)


CHANGES: dict[str, Any] = {
    "length": 201, "groups": "5x20", "layers": 2, "init": "joint", "learn_delta": True,
    "checkpoint": "auto", "optimizer": "sgd", "lr": 0.5, "clip": 1.0, "batch_size": 7,
    "test_every": 3, "steps": 11, "epochs": 2.0, "patience": 3.0, "stop": "never",
    "keep_epochs": (5,), "seed": 1, "data_seed": 1, "dtype": "float64", "device": "cuda",
    "backend": "reference", "threads": 3, "semantics": 99, "task": "temporal-order", "cell": "lstm",
}  # fmt: skip
OF_OTHER_CELLS = {
    "hidden": ("lstm", 7), "forget_bias": ("lstm", 0.5), "keep_bias": ("gru", 2.0),
    "reset": ("gru", "after"), "gamma": ("mgu", "beta"), "periods": ("cwrnn", (1, 2)),
}  # fmt: skip
OF_OTHER_TASKS = {
    "symbols": ("temporal-order", 2), "multiple": ("reber", 3),
    "dataset": ("mnist", "fashion-mnist"),
}  # fmt: skip


def test_every_field_counts_for_the_identity() -> None:
    seen = set()
    for name, value in CHANGES.items():
        epochs = name in ("epochs", "patience", "keep_epochs")
        plain = RunConfig(task="mnist" if epochs else "adding")
        changed = {"length": None} if name == "task" else {}
        changed |= {"groups": None, "learn_delta": None} if name == "cell" else {}
        assert plain.replace(**changed, **{name: value}).identity() != plain.identity(), name
        seen.add(name)
    for name, (cell, value) in OF_OTHER_CELLS.items():
        plain = RunConfig(task="adding", cell=cell)
        assert plain.replace(**{name: value}).identity() != plain.identity(), name
        seen.add(name)
    for name, (task, value) in OF_OTHER_TASKS.items():
        plain = RunConfig(task=task)
        assert plain.replace(**{name: value}).identity() != plain.identity(), name
        seen.add(name)
    two = RunConfig(task="adding", layers=2)
    assert two.replace(dropout=0.5).identity() != two.identity()
    own = RunConfig(task="own", cell="own", name="a")
    assert own.replace(name="b").identity() != own.identity()
    assert own.identity({"weight": [2, 3]}) != own.identity({"weight": [3, 2]})
    assert seen | {"dropout", "name"} == {field.name for field in fields(RunConfig)}


@pytest.mark.parametrize(("task", "cell"), EVERY_TASK_AND_CELL)
def test_naming_a_default_is_the_same_run(task: str, cell: str) -> None:
    plain = RunConfig(task=task, cell=cell)
    named = RunConfig(task=task, cell=cell, **TASKS[task], **CELLS[cell])
    assert named == plain
    assert named.identity() == plain.identity()


def test_equal_groups_are_the_same_run() -> None:
    ways = ["10x10", "10x4+10x6", "10x10x1.0", "10x10,10x10"]
    runs = {RunConfig(task="adding", groups=way, layers=2).identity() for way in ways}
    assert len(runs) == 1
    assert RunConfig(task="adding", groups="10x10,5x5", layers=2).groups == "10x10,5x5"


@pytest.mark.parametrize(
    ("option", "values", "says"),
    [
        ("task", {"task": "addition"}, "not one of adding, temporal-order, reber"),
        ("length", {"length": 1}, "whole numbers 2 to 1000000"),
        ("length", {"length": 20.0}, "whole numbers 2 to 1000000"),
        ("length", {"length": True}, "whole numbers"),
        ("length", {"task": "temporal-order", "length": 29}, "30 to 1000000"),
        ("multiple", {"multiple": 3}, "task adding has no such option; only reber does"),
        ("cell", {"cell": "rnn"}, "not one of srn, lstm, gru"),
        ("hidden", {"hidden": 100}, "takes its units from groups"),
        ("groups", {"cell": "gru", "groups": "10x10"}, "cell gru has none; give hidden"),
        ("groups", {"groups": "10x"}, "'10x' in groups '10x'"),
        ("groups", {"groups": "10x10,5x5"}, "names 2 layers, but there are 1"),
        ("forget_bias", {"forget_bias": 1.0}, "cell gdu has no such option; only lstm does"),
        ("learn_delta", {"learn_delta": "yes"}, "neither true nor false"),
        ("keep_bias", {"cell": "gru", "keep_bias": float("nan")}, "-100 to 100"),
        ("periods", {"cell": "cwrnn", "periods": (1, 1)}, "not ascending"),
        ("hidden", {"cell": "cwrnn", "hidden": 10}, "does not divide into 4"),
        ("dropout", {"dropout": 0.5}, "at least 2 layers"),
        ("dropout", {"dropout": 1.0, "layers": 2}, "0 to 0.99"),
        ("checkpoint", {"checkpoint": "often"}, "neither 'auto' nor a whole number"),
        ("lr", {"lr": 0.0}, "1e-12 to 1000"),
        ("lr", {"lr": float("inf")}, "1e-12 to 1000"),
        ("seed", {"seed": -1}, "0 to 4294967295"),
        ("threads", {"threads": 0}, "1 to 1024"),
        ("dtype", {"dtype": "float16"}, "not one of float32, float64"),
        ("epochs", {"epochs": 3}, "no epochs: count in steps, 1 to"),
        ("test_every", {"test_every": 0.5}, "no epochs"),
        ("test_every", {"test_every": 1.5}, "whole numbers"),
        ("keep_epochs", {"keep_epochs": (5,)}, "no epochs"),
        ("patience", {"task": "reber", "patience": 1}, "no validation set"),
        ("batch_size", {"task": "reber", "batch_size": 1001}, "allowed: 1 to 1000"),
        ("batch_size", {"task": "pmnist", "batch_size": 55_001}, "allowed: 1 to 55000"),
        ("steps", {"steps": 0}, "allowed: 1 to"),
        ("steps", {"task": "reber", "steps": 0, "epochs": 0}, "allowed: 1 to"),
        ("device", {"device": "the cpu"}, "none of cpu, cuda, cuda:0"),
        ("name", {"name": "x"}, 'only a run with task "own"'),
        ("name", {"task": "own"}, "needs one"),
        ("name", {"task": "own", "name": "../x"}, "letters, digits"),
        ("layers", {"task": "own", "name": "a", "cell": "own", "layers": 2}, "fixed by the model"),
    ],
)
def test_wrong_values_name_option_and_range(option: str, values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**{"task": "adding", **values})
    assert caught.value.option == option
    assert says in caught.value.message


def test_the_ends_of_every_range() -> None:
    for name in ("lr", "clip", "batch_size", "test_every", "steps", "seed", "threads"):
        plain = RunConfig(task=OWN, name="any")
        for value in RANGES[name]:
            assert getattr(plain.replace(**{name: value}), name) == value
        with pytest.raises(ConfigError):
            plain.replace(**{name: RANGES[name][1] + 1})


def test_never_imports_torch() -> None:
    code = "import sys, torchgdu.config, torchgdu.records; print(*sorted(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "safetensors"} & set(found.stdout.split())


def test_own_is_a_choice_of_neither_table() -> None:
    assert OWN not in TASKS
    assert OWN not in CELLS
