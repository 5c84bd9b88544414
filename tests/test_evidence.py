"""What records say about the paper's rows, with every way a run can end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import made_up
from torchgdu import evidence, paper
from torchgdu.evidence import Evidence, Measured, gather
from torchgdu.paper import AUTHOR, DEFAULT, Row, Start
from torchgdu.records import GATES, Record, RunCorrupt, load_records, write_failure


def row(figure: str, panel: str, name: str) -> Row:
    return next(
        r for r in paper.rows("paper") if (r.figure, r.panel, r.name) == (figure, panel, name)
    )


def measured(known: Evidence, wanted: Row) -> Measured:
    (found,) = (each for each in known.rows if each.row == wanted)
    return found


def test_every_outcome_counts_as_it_should(tmp_path: Path) -> None:
    gru = row("adding", "L = 200", "GRU(100)")
    runs = gru.runs
    made = [
        made_up.record(runs[0], 420),
        made_up.record(runs[1], None),
        made_up.record(runs[2], None, status="diverged"),
        write_failure(tmp_path, runs[3], "its worker died 3 times"),
        made_up.record(runs[4], None, status="interrupted", step=900),
    ]
    found = measured(gather(made), gru)
    states = [trial.state for trial in found.trials]
    assert states == ["solved", "limit", "diverged", "failed", "unfinished"]
    values = found.values("solved")
    assert values[:3] == [420, math.inf, math.inf]
    assert math.isnan(values[3])
    assert len(values) == 4  # what is under way is not known yet
    assert [trial.done for trial in found.trials] == [True] * 4 + [False]


def test_a_run_counts_whatever_computed_it_but_not_under_other_settings() -> None:
    gdu = row("adding", "L = 200", "GDU(10x10)")
    engine = made_up.record(gdu.runs[0], 400)
    assert engine.config.backend == "engine"
    other = Record(config=gdu.runs[1].replace(lr=0.02), status="solved", steps_to={"solved": 20})
    older = Record(config=gdu.runs[2].replace(semantics=99), status="solved")
    known = gather([engine, other, older])
    assert measured(known, gdu).values("solved") == [400]
    assert known.others == (other, older)


def test_further_seeds_are_trials_too() -> None:
    gdu = row("adding", "L = 200", "GDU(10x10)")
    further = made_up.record(gdu.config.replace(seed=12), 700)
    found = measured(gather([further, made_up.record(gdu.runs[2], 400)]), gdu)
    assert found.values("solved") == [400, 700]
    assert [trial.config.seed for trial in found.trials] == [0, 1, 2, 3, 4, 12]
    assert found.count("missing") == 4


def test_a_better_record_of_the_same_run_counts_and_disagreement_is_told() -> None:
    run = row("adding", "L = 200", "GDU(10x10)").runs[0]
    under_way = made_up.record(run, None, status="interrupted")
    done, again = made_up.record(run, 400), made_up.record(run, 420)
    wanted = row("adding", "L = 200", "GDU(10x10)")
    assert measured(gather([under_way, done]), wanted).values("solved") == [400]
    assert not gather([done, done]).notes
    known = gather([done, again])
    assert measured(known, wanted).values("solved") == [400]
    assert "disagree" in known.notes[0]


def test_the_profile_is_that_of_the_runs() -> None:
    quick = made_up.record(paper.rows("quick")[0].runs[0], 400)
    whole = made_up.record(paper.rows("paper")[0].runs[0], 400)
    assert gather([quick]).profile == "quick"
    assert not gather([quick]).judges
    assert not gather([quick]).judged
    known = gather([quick, whole])
    assert known.profile == "paper"
    assert known.others == (quick,)
    assert gather([]).profile == "paper"
    assert gather([quick, whole], "quick").others == (whole,)


def test_the_strongest_start_of_the_table_is_that_of_all_rows() -> None:
    table = [
        made_up.record(run, 100 if run.init == "joint" else 200)
        for each in paper.initial()
        for run in each.runs
    ]
    known = gather(table)
    assert known.decided
    assert known.starts == {
        "lstm": Start("joint", 1.0),
        "gru": Start("joint"),
        "gdu": Start("joint"),
    }
    gdu = next(e.row for e in known.of("reber") if e.row.model.startswith("GDU"))
    assert gdu.config.init == "joint"
    part = gather(table[1:])
    assert not part.decided
    assert part.starts["gru"] == Start("joint")
    assert part.starts["lstm"] == DEFAULT["lstm"]
    names = [e.row.name for e in known.of("temporal-order") if e.row.panel == "L = 100"]
    assert names == ["LSTM(100)", "GRU(100)", "GDU(10x10)", "LSTM(100), author's start"]
    assert Start("joint", 0.0) == AUTHOR


def test_steps_to_each_criterion_and_the_start_of_learning() -> None:
    gdu = row("reber", "m = 10", "GDU(2x35+10x3)")
    known = gather([made_up.record(gdu.runs[0], 900, sc=300, lc=700)])
    found = measured(known, gdu)
    assert [found.values(q) for q in ("SC", "LC", "solved")] == [[300], [700], [900]]
    order = row("temporal-order", "L = 100", "GDU(10x10)")
    lines = [{"step": s, "accuracy": a} for s, a in ((20, 0.1), (40, 0.2499), (60, 0.25), (80, 1))]
    known = gather([made_up.record(order.runs[0], 80, metrics=lines)])
    assert measured(known, order).values("start") == [60]
    known = gather([made_up.record(order.runs[0], None, metrics=lines[:2])])
    assert measured(known, order).values("start") == [math.inf]


def test_the_middle_trial_stands_for_its_row() -> None:
    gdu = row("adding", "L = 200", "GDU(10x10)")
    steps = [500, 300, None, 400, 350]
    known = gather(made_up.record(r, s) for r, s in zip(gdu.runs, steps, strict=True))
    middle = measured(known, gdu).middle
    assert middle is not None
    assert middle.config.seed == 3


def test_best_of_as_many_runs_for_every_model() -> None:
    rows = [r for r in paper.reber() if r.panel == "m = 40" and not r.variant]
    steps = {"LSTM(100)": [900, 800, 100], "GRU(100)": [700, 600], "GDU(2x35+10x3)": []}
    known = gather(
        made_up.record(run, value, sc=value, lc=value)
        for each in rows
        for run, value in zip(each.runs, steps[each.model], strict=False)
    )
    best, n = evidence.best([e for e in known.of("reber") if e.row.panel == "m = 40"], "LC")
    assert (best, n) == ({"LSTM(100)": 800, "GRU(100)": 600}, 2)


def test_gates_count_where_lc_was_met_at_the_end(tmp_path: Path) -> None:
    gru = row("gates", "m = 10", "GRU(100)")
    for seed, lc in enumerate((1.0, 0.75, 1.0)):
        made = made_up.record(gru.runs[seed], 500, lc=400, scores={"lc": lc})
        beside = {"gates": made_up.gates(made.config, made.id, 30, (0.0, 0.1))} if seed < 2 else {}
        made_up.store(tmp_path, made, **beside)
    known = gather(load_records(tmp_path))
    assert measured(known, gru).values("kept") == [0.1]
    assert measured(known, gru).values("kept at the start") == [0.0]


def test_what_was_seen_in_another_runs_weights_is_refused(tmp_path: Path) -> None:
    gru = row("gates", "m = 10", "GRU(100)")
    made = made_up.record(gru.runs[0], 500, scores={"lc": 1.0})
    stored = made_up.store(tmp_path, made, gates=made_up.gates(made.config, "x", 30, (0, 0.1)))
    with pytest.raises(RunCorrupt, match="belongs to run x"):
        evidence.gates(stored)
    assert stored.path is not None
    seen = made_up.gates(made.config, made.id, 30, (0, 0.1))
    (stored.path / GATES).write_text(json.dumps({**seen, "kept": {"start": 0.1}}))
    with pytest.raises(RunCorrupt, match=r"gates.json cannot be read: 'end' is missing"):
        evidence.gates(stored)
    (stored.path / GATES).write_text("{")
    with pytest.raises(RunCorrupt, match="cannot be read"):
        evidence.gates(stored)


def test_error_norms_are_those_of_any_run_on_the_same_way(tmp_path: Path) -> None:
    """After 5 epochs the weights are the same, whenever the run is to end."""
    wanted = row("error-norms", "pMNIST", "GRU(128)")
    short = wanted.runs[0].replace(epochs=7.0, keep_epochs=(5,))
    made = made_up.record(short, scores={"accuracy": 0.8})
    made_up.store(tmp_path, made, norms=made_up.norms(made.id, {"5": 2.0}))
    other = made_up.record(wanted.runs[1].replace(lr=0.01, epochs=7.0, keep_epochs=(5,)))
    made_up.store(tmp_path, other, norms=made_up.norms(other.id, {"5": 9.0}))
    known = gather(load_records(tmp_path))
    (mean,) = measured(known, wanted).values("5")
    curve = made_up.norms("", {"5": 2.0})["epochs"]["5"]
    assert mean == pytest.approx(sum(curve) / 784 / max(curve))
    assert mean == pytest.approx((1 - math.exp(-2)) / 2, abs=1e-3)  # what an exponential has
    assert measured(known, wanted).values("50") == []
    table = row("pmnist", "128 units", "GRU(128)")
    assert measured(known, table).values("accuracy") == []
    (record,) = known.shorter(table)[7.0]
    assert record.scores["accuracy"] == 0.8


def test_a_diverged_run_has_no_accuracy() -> None:
    gru = row("pmnist", "128 units", "GRU(128)")
    known = gather(
        [
            made_up.record(gru.runs[0], scores={"accuracy": 0.9}),
            made_up.record(gru.runs[1], status="diverged", scores={"accuracy": 0.1}),
        ]
    )
    values = measured(known, gru).values("accuracy")
    assert values[0] == 0.9
    assert math.isnan(values[1])


def test_the_table_of_claims_holds_each_row_once(tmp_path: Path) -> None:
    rows = paper.rows("paper")
    assert len({(r.figure, r.panel, r.name) for r in rows}) == len(rows)
    gru = row("adding", "L = 200", "GRU(100)")
    table = gather([made_up.record(gru.runs[3], 300)]).table
    assert table["adding", "L = 200", "GRU(100)"]["solved"] == [300]
    assert json.dumps(sorted({key[0] for key in table})) == json.dumps(sorted(paper.FIGURES))
