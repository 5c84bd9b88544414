"""The paper's runs as data: complete, as the paper says, and in a sensible order."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from torchgdu import paper
from torchgdu.config import RunConfig
from torchgdu.paper import AUTHOR, DEFAULT, FIGURES, Start
from torchgdu.train import resolve


def names(figure: str, **options: object) -> list[str]:
    rows = FIGURES[figure](**options)
    return list(dict.fromkeys(row.name for row in rows))


@pytest.mark.parametrize("row", paper.rows("paper"), ids=lambda r: f"{r.figure}-{r.panel}-{r.name}")
def test_rows_hold_the_tasks_own_settings(row: paper.Row) -> None:
    """What the figures set is what training fills in by itself, but for what a figure changes."""
    ours = row.config
    left_out = dict.fromkeys(
        (
            "optimizer",
            "lr",
            "clip",
            "batch_size",
            "test_every",
            "steps",
            "epochs",
            "patience",
            "stop",
        )
    )
    changed = {"epochs", "patience", "stop"} if row.figure == "error-norms" else set()
    theirs = resolve(ours.replace(**left_out))
    for key, value in asdict(theirs).items():
        if key not in changed | {"backend"}:
            assert asdict(ours)[key] == value, key
    assert resolve(ours).replace(backend="auto") == ours  # nothing is left open


def test_models_and_lengths_are_the_papers() -> None:
    assert {row.config.length for row in paper.adding()} == {200, 1000, 5000, 10_000}
    assert {row.config.length for row in paper.temporal_order()} == {100, 200, 500, 1000}
    assert {row.config.multiple for row in paper.reber()} == {10, 20, 40}
    author = ["LSTM(100), author's start"]
    assert names("adding") == ["LSTM(100)", "GRU(100)", "GDU(10x10)", "GDU(10x1)", *author]
    assert names("temporal-order") == ["LSTM(100)", "GRU(100)", "GDU(10x10)", *author]
    assert names("reber") == ["LSTM(100)", "GRU(100)", "GDU(2x35+10x3)", *author]
    assert all(row.trials == 10 for row in paper.reber())
    assert all(row.trials >= 5 for row in [*paper.adding(), *paper.temporal_order()])
    table = {row.model for row in paper.pmnist()}
    assert table == set(paper.PMNIST)
    assert all(row.config.keep_epochs == (5, 50) for row in paper.error_norms())


def test_the_lstm_has_its_authors_start_beside_the_strongest() -> None:
    for figure in ("adding", "temporal-order", "reber", "error-norms", "pmnist"):
        rows = FIGURES[figure](DEFAULT)
        starts = {
            (row.variant, row.config.init, row.config.forget_bias)
            for row in rows
            if row.config.cell == "lstm"
        }
        assert starts == {("", "separate", 1.0), ("author's start", "joint", 0.0)}
        same = FIGURES[figure]({**DEFAULT, "lstm": AUTHOR})
        assert not any(row.variant for row in same)


def test_controls_start_with_a_keep_gate_of_nine_tenths() -> None:
    biases = {
        (row.config.cell, row.config.keep_bias, row.config.forget_bias) for row in paper.controls()
    }
    nine = math.log(9)
    assert biases == {("ugrnn", nine, None), ("gru", nine, None), ("lstm", None, nine)}
    assert 1 / (1 + math.exp(-paper.LN9)) == pytest.approx(0.9)
    panels = {row.panel: row.trials for row in paper.controls()}
    assert panels == {
        "10ERG": 10,
        "temporal order, L = 200": 5,
        "temporal order, L = 500": 5,
        "adding, L = 1000": 5,
    }


def test_quick_is_small_and_has_no_variants() -> None:
    rows = paper.rows("quick")
    assert {(r.figure, r.panel, r.config.steps, r.trials) for r in rows} == {
        ("adding", "L = 200", 3000, 2),
        ("temporal-order", "L = 100", 2000, 2),
        ("reber", "m = 10", 15_000, 2),
    }
    assert len(paper.runs(rows)) == 18
    assert not any(row.variant for row in rows)


def test_runs_come_once_late_ones_last_and_every_model_before_second_trials() -> None:
    rows = paper.rows("paper")
    runs = paper.runs(rows)
    assert len(set(runs)) == len(runs) == len({run for row in rows for run in row.runs})
    late = {run for row in rows if row.late for run in row.runs}
    places = [run in late for run in runs]
    assert places == sorted(places)
    few = paper.runs(paper.adding(trials=2, lengths=(200,)))
    assert [run.seed for run in few] == [0] * 5 + [1] * 5
    assert {row.config.length for row in rows if row.figure == "adding" and row.late} == {
        5000,
        10_000,
    }


def test_unknown_figures_are_named() -> None:
    with pytest.raises(ValueError, match="no figure 'rebber'; there are initial, reber"):
        paper.rows("paper", ["rebber"])
    with pytest.raises(
        ValueError, match="the quick profile has adding, temporal-order, reber only"
    ):
        paper.rows("quick", ["pmnist"])
    assert {row.trials for row in paper.rows("paper", ["pmnist"], trials=7)} == {7}


def outcomes(steps: dict[tuple[str, Start], float]) -> dict[RunConfig, float]:
    """A whole table: 100 steps everywhere but where ``steps`` says otherwise."""
    return {
        run: steps.get((run.cell, Start(run.init, run.forget_bias)), 100.0)
        for row in paper.initial()
        for run in row.runs
    }


def test_strongest_is_most_solved_then_the_smaller_median() -> None:
    joint, zero = Start("joint"), Start("separate", 0.0)
    assert paper.strongest(outcomes({})) == DEFAULT  # all equal: the default, listed first
    found = paper.strongest(outcomes({("gdu", joint): 99.0, ("lstm", zero): 50.0}))
    assert found == {"lstm": zero, "gru": Start("separate"), "gdu": joint}
    # Faster, but one run unsolved: solved runs count first.
    table = outcomes({("gdu", joint): 50.0})
    unsolved = next(run for run in table if run.cell == "gdu" and run.init == "joint")
    table[unsolved] = math.inf
    assert paper.strongest(table)["gdu"] == Start("separate")
    table = outcomes({("lstm", start): math.inf for start in paper.CANDIDATES["lstm"]})
    assert paper.strongest(table)["lstm"] == DEFAULT["lstm"]


@pytest.mark.parametrize("unknown", [None, math.nan])
def test_a_table_with_a_hole_decides_nothing(unknown: float | None) -> None:
    table = outcomes({("gru", Start("joint")): 50.0, ("gdu", Start("joint")): 50.0})
    assert paper.strongest(table)["gru"] == Start("joint")
    hole = next(run for run in table if run.cell == "gru")
    if unknown is None:
        del table[hole]
    else:
        table[hole] = unknown
    assert paper.strongest(table)["gru"] == Start("separate")
    assert paper.strongest(table)["gdu"] == Start("joint")  # whose own part is complete
    assert paper.strongest({}) == DEFAULT


def test_every_figure_says_its_command_and_what_to_expect() -> None:
    for name, figure in FIGURES.items():
        assert f"torchgdu reproduce {name} --profile paper" in (figure.__doc__ or "")
    assert set(paper.PROFILES["paper"]) == set(FIGURES)
