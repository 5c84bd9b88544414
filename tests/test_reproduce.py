"""The command that makes the paper's runs: which, in which order, and what it says of them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from torchgdu import paper, records
from torchgdu import reproduce as module
from torchgdu import sweep as sweeping
from torchgdu.config import ConfigError, RunConfig
from torchgdu.paper import DEFAULT, Start
from torchgdu.records import Record
from torchgdu.reproduce import command, default_workers, outcomes, reproduce, starts
from torchgdu.sweep import Job, Watcher


def outcome(config: RunConfig, step: int | None = 40) -> Record:
    """A made-up record, complete enough for a report."""
    return Record(
        config=config.replace(backend="reference"),
        status="limit" if step is None else "solved",
        step=step or 50,
        steps_to={"solved": step, "sc": step, "lc": step},
        task={"chance": {"accuracy": 0.125}, "goal": {}, "primary": "mse"},
        scores={"mse": 0.001, "accuracy": 1.0, "sc": 1.0, "lc": 1.0},
        parameters=10,
    )


class Trained:
    """Stands for training: notes what is asked, and answers at once."""

    def __init__(self, step: Callable[[RunConfig], int | None] = lambda _: 40) -> None:
        self.runs: list[RunConfig] = []
        self._step = step

    def __call__(self, config: RunConfig, *, out: Path, **_: Any) -> Record:
        self.runs.append(config.replace(backend="auto"))
        return records.write_files(out, outcome(config, self._step(config)).to_files())


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    fake = Trained()
    monkeypatch.setattr(sweeping, "train", fake)
    return fake


def run(out: Path, *figures: str, profile: str = "quick", **options: Any) -> int:
    whole: dict[str, Any] = {
        "trials": None, "workers": 1, "cluster": None, "data": None, "scratch": None,
        "quiet": False, "accept_drift": False, "report": out / "report",
    }  # fmt: skip
    return command(figures or ["all"], profile, out=out / "runs", **(whole | options))


def test_quick_makes_its_runs_and_a_report_without_verdicts(
    tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 0
    assert trained.runs == paper.runs(paper.rows("quick"))
    text = capsys.readouterr().out
    assert text.splitlines()[0] == f"The quick profile, 1 at a time; records in {tmp_path / 'runs'}"
    assert text.splitlines()[-1] == f"The report: {tmp_path / 'report' / 'index.html'}"
    page = (tmp_path / "report" / "index.html").read_text()
    for verdict in ("not reproduced", "not enough runs", "mixed"):
        assert verdict not in text
        assert verdict not in page
    assert run(tmp_path) == 0
    assert len(trained.runs) == 18  # none again


def test_the_order_is_that_of_the_figures_and_the_strongest_start_follows_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joint start solves where no other does: every later run of the GRU takes it."""

    def step(config: RunConfig) -> int | None:
        return 40 if config.cell != "gru" or config.init == "joint" else None

    fake = Trained(step)
    monkeypatch.setattr(sweeping, "train", fake)
    figures = ["initial", "reber", "controls"]
    jobs = reproduce(figures, "paper", out=tmp_path)
    table = {run for row in paper.initial() for run in row.runs}
    assert set(fake.runs[: len(table)]) == table
    rest = fake.runs[len(table) :]
    assert rest
    assert {run.init for run in rest if run.cell == "gru"} == {"joint"}
    assert {run.init for run in rest if run.cell in ("gdu", "ugrnn")} == {"separate"}
    expected = paper.rows("paper", figures, {**DEFAULT, "gru": Start("joint")})
    assert {job.config for job in jobs} == set(paper.runs(expected))
    grammar = {run for row in expected if row.figure == "reber" for run in row.runs}
    multiples = [run.multiple for run in rest if run in grammar and run.multiple]
    assert multiples == [10] * 40 + [20] * 40 + [40] * 40
    kept = [run for run in rest if run not in grammar]
    assert rest.index(kept[-1]) < rest.index(next(run for run in rest if run.multiple == 40))
    assert all(job.state == "done" for job in jobs)
    lines = starts(tmp_path)
    assert "GRU starts with joint: the strongest in the table of initial settings" in lines


def test_a_model_goes_on_as_soon_as_its_own_part_of_the_table_is_there() -> None:
    plan = paper.plan("paper", ["initial", "adding", "controls"])
    table = {run: 100.0 for row in paper.initial() for run in row.runs}
    others = [run for run in plan({}) if run not in table]
    assert others == []
    gdu = {run: steps for run, steps in table.items() if run.cell == "gdu"}
    assert {run.cell for run in plan(gdu) if run not in table} == {"gdu", "ugrnn"}
    assert {run.cell for run in plan(table)} == {"gdu", "gru", "lstm", "ugrnn"}
    # A failed run ends the wait, too; the model keeps its default start.
    failed = {**table, next(run for run in table if run.cell == "gdu"): math.nan}
    assert set(plan(failed)) == set(plan(table))


def test_without_the_table_the_defaults_are_used_and_said(
    tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "reber", profile="paper", trials=1) == 0
    assert trained.runs == paper.runs(paper.rows("paper", ["reber"], DEFAULT, 1))
    text = capsys.readouterr().out
    why = "the default, as the table of initial settings is not complete"
    assert f"GDU starts with separate: {why}" in text
    assert f"LSTM starts with separate, forget bias 1: {why}" in text


def test_failed_runs_give_code_5_and_the_report_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Trained()

    def some(config: RunConfig, **options: Any) -> Record:
        if config.cell == "lstm" and config.seed == 1:
            raise OSError("disk full")
        return good(config, **options)

    monkeypatch.setattr(sweeping, "train", some)
    assert run(tmp_path, "adding") == 5
    errors = capsys.readouterr().err
    assert "Error: adding, L = 200, LSTM(100), seed 1: disk full" in errors
    assert (tmp_path / "report" / "index.html").exists()
    assert len(good.runs) == 5
    found = records.load_records(tmp_path / "runs")
    assert sorted(record.status for record in found) == ["failed", *["solved"] * 5]


def test_outcomes_are_steps_infinity_or_nan() -> None:
    config = paper.initial()[0].config
    solved, unsolved = outcome(config), outcome(config.replace(seed=1), None)
    failed = Record(config=config.replace(seed=2), status="failed", failure="no")
    known = outcomes({record.config: record for record in (solved, unsolved, failed)})
    assert next(iter(known)) == config
    assert list(known.values())[:2] == [40.0, math.inf]
    assert math.isnan(known[config.replace(seed=2)])


def test_what_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("TORCHGDU_DATA", raising=False)
    bad: list[tuple[list[str], Mapping[str, Any], str]] = [
        (["rebber"], {}, "figure: no figure 'rebber'; there are initial, reber"),
        (["pmnist"], {}, "figure: the quick profile has"),
        ([], {"profile": "slow"}, "profile: 'slow' is not one of quick, paper"),
    ]
    for figures, options, message in bad:
        with pytest.raises(ConfigError, match=message):
            run(tmp_path, *figures, **options)
    with pytest.raises(OSError, match="mnist"):
        run(tmp_path, "pmnist", profile="paper")
    assert trained.runs == []
    assert not (tmp_path / "runs").exists()


def test_workers_are_the_cores_where_dask_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert [default_workers(runs) for runs in (0, 1, 3, 18)] == [1, 1, 3, 4]
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    assert default_workers(18) == 1


def test_without_matplotlib_the_runs_are_made_and_the_report_is_put_off(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(tmp_path, "adding") == 0
    assert len(trained.runs) == 6
    errors = capsys.readouterr().err
    assert "torchgdu[plot]" in errors
    assert f"torchgdu report {tmp_path / 'runs'}" in errors


def test_labels_are_in_the_papers_words() -> None:
    rows = paper.rows("paper")
    labels = [paper.label(run) for run in paper.runs(rows)]
    assert len(set(labels)) == len(labels)
    assert "40ERG, GDU(2x35+10x3), seed 0" in labels
    assert "adding, L = 10000, GDU(10x1), seed 4" in labels
    assert "temporal order, L = 500, UGRNN(100), keep bias 2.2, seed 0" in labels
    assert "pMNIST, LSTM(128), joint, forget bias 0, 50 epochs, seed 2" in labels


def test_an_interrupt_says_how_to_go_on(tmp_path: Path) -> None:
    line = [
        sys.executable,
        "-c",
        "from torchgdu.cli import main; main()",
        "reproduce",
        "temporal-order",
        "--workers",
        "1",
    ]
    line += ["--out", str(tmp_path / "runs"), "--report", str(tmp_path / "report")]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        end = time.monotonic() + 100
        while not list((tmp_path / "runs").glob("*/metrics.jsonl")):
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 143, text
    assert "The same command goes on from here." in text
    assert "Traceback" not in text
    (record,) = records.load_records(tmp_path / "runs")
    assert record.status == "interrupted"
    assert record.step > 0


def test_the_watcher_sees_every_job(tmp_path: Path, trained: Trained) -> None:
    class Seen(Watcher):
        def __init__(self) -> None:
            self.states: list[list[str]] = []

        def changed(self, jobs: Any) -> None:
            self.states.append([job.state for job in jobs])

    seen = Seen()
    jobs: list[Job] = reproduce(["adding"], out=tmp_path, watcher=seen)
    assert seen.states[0] == ["waiting"] * 6
    assert seen.states[1] == ["running", *["waiting"] * 5]
    assert seen.states[-1] == ["done"] * 6 == [job.state for job in jobs]
