"""What a person sees of a sweep."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from torchgdu import overview
from torchgdu.config import RunConfig
from torchgdu.overview import Lines, Terminal, counts, shown, standing
from torchgdu.records import Record
from torchgdu.sweep import Job

RUN = RunConfig(task="adding", length=20, groups="4x2")


def job(seed: int, state: str, **values: Any) -> Job:
    config = RUN.replace(seed=seed)
    return Job(config, config, state, **values)  # type: ignore[arg-type]


def ended(seed: int, status: str, ended: float = 0.0, tries: int = 0, **values: Any) -> Job:
    state = "failed" if status == "failed" else "done"
    record = Record(config=RUN.replace(seed=seed), status=status, **values)  # type: ignore[arg-type]
    return job(seed, state, record=record, ended=ended, tries=tries)


@pytest.mark.parametrize(
    ("each", "text"),
    [
        (job(0, "waiting"), "waiting"),
        (job(0, "waiting", step=1200), "waiting, to go on from step 1,200"),
        (job(0, "waiting", tries=2), "waiting, failed 2 times so far"),
        (job(0, "running"), "starting"),
        (job(0, "running", step=1200), "going on from step 1,200"),
        (
            ended(0, "limit", step=3000, scores={"mse": 0.0123}, process={"seconds": 75.2}),
            "stopped at 3,000  mse 0.0123  in 0:01:15",
        ),
        (ended(0, "solved", step=3000, steps_to={"solved": 1240}), "solved at 1,240"),
        (ended(0, "finished", step=3000), "finished at 3,000"),
        (ended(0, "diverged", step=17), "diverged at 17"),
        (ended(0, "failed", tries=3, failure="disk full"), "failed 3 times: disk full"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_every_state_has_its_words(each: Job, text: str) -> None:
    assert standing(each) == text


def test_a_running_job_tells_metric_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 5000.0)
    began = (4900.0, 1000)  # 500 steps in 100 s, 2000 more: 400 s
    each = job(0, "running", step=1500, last_step=3500, scores={"mse": 0.2}, began=began)
    assert standing(each) == "1,500/3,500  mse 0.2  at most 0:06:40 left"
    fresh = job(0, "running", step=1000, last_step=3500, began=began)
    assert standing(fresh) == "1,000/3,500"  # nothing is known of its pace


def mixed() -> list[Job]:
    done = [ended(seed, "limit", ended=float(seed)) for seed in range(10)]
    waiting = [job(seed, "waiting") for seed in range(13, 40)]
    return [*done, job(10, "running"), job(11, "running"), ended(12, "failed"), *waiting]


def test_a_small_screen_shows_what_matters_most() -> None:
    jobs = mixed()
    assert shown(jobs, 40) == jobs
    seeds = [each.config.seed for each in shown(jobs, 9)]
    assert seeds == [7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert [each.config.seed for each in shown(jobs, 3)] == [10, 11, 12]
    assert len(shown(jobs, 0)) == 1
    assert counts(jobs) == "40 runs: 10 done, 2 running, 27 waiting, 1 failed"


def test_lines_say_every_start_and_end_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(lambda config: f"seed {config.seed}")
    before = ended(3, "limit", step=5)
    jobs = [job(0, "waiting"), job(1, "waiting"), before]
    lines.changed(jobs)
    jobs[0].state = "running"
    lines.changed(jobs)
    lines.changed(jobs)
    jobs[0].state = "done"
    jobs[0].record = ended(0, "solved", step=60, steps_to={"solved": 60}).record
    jobs[1].state = "running"
    lines.changed(jobs)
    assert capsys.readouterr().out.splitlines() == [
        "3 runs: 1 done, 0 running, 2 waiting",
        "seed 0: starting",
        "seed 0: solved at 60",
        "seed 1: starting",
    ]
    lines.noted("seed 1: disk full; trying again")
    assert capsys.readouterr().err == "Warning: seed 1: disk full; trying again\n"


def test_lines_sum_up_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Lines(lambda config: f"seed {config.seed}")
    jobs = [job(0, "running", step=20, last_step=60, began=(0.0, 20)), job(1, "waiting")]
    lines.changed(jobs)
    monkeypatch.setattr(overview, "SUMMARY_EVERY", 0.0)
    lines.changed(jobs)
    assert capsys.readouterr().out.splitlines() == [
        "2 runs: 0 done, 1 running, 1 waiting",
        "2 runs: 0 done, 1 running, 1 waiting",
        "  seed 0: 20/60",
    ]


def screen(
    jobs: Sequence[Job], height: int, monkeypatch: pytest.MonkeyPatch, width: int = 100,
    name: str = "",
) -> str:  # fmt: skip
    """What the terminal holds at the end, with notes above."""
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, width=width, height=height, highlight=False,
        color_system=None,
    )  # fmt: skip
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    terminal = Terminal(lambda config: f"{name}{', ' if name else ''}seed {config.seed}")
    terminal.changed(jobs)
    terminal.noted("[b]careful[/b]")
    terminal.closed()
    return file.getvalue()


def test_a_terminal_shows_all_runs_with_their_states(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [
        ended(0, "limit", step=3000),
        job(1, "running", step=20, last_step=60, scores={"mse": 0.25}),
        job(2, "waiting"),
        ended(3, "failed", tries=3, failure="[disk] full"),
    ]
    text = screen(jobs, 40, monkeypatch)
    last = text[text.rindex("4 runs:") :]
    assert "✓ seed 0  stopped at 3,000" in last
    assert "▶ seed 1  20/60  mse 0.25" in last
    assert "· seed 2  waiting" in last
    assert "✗ seed 3  failed 3 times: [disk] full" in last
    assert "Warning: [b]careful[/b]" in text


def test_a_narrow_terminal_tells_runs_apart_and_shows_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 5000.0)
    began = (4900.0, 1000)
    running = {"step": 1500, "last_step": 50_000, "scores": {"accuracy": 0.125}, "began": began}
    jobs = [
        ended(0, "solved", step=3000, steps_to={"solved": 1240}, process={"seconds": 75.2}),
        job(1, "running", **running),
        job(2, "waiting"),
        ended(3, "failed", tries=3, failure="disk full"),
    ]
    long = "temporal order, L = 200, LSTM(100), separate, forget bias 0"
    text = screen(jobs, 40, monkeypatch, width=80, name=long)
    last = text[text.rindex("4 runs:") :].splitlines()
    assert [line.rstrip() for line in last[1:7]] == [
        f"✓ {long}, seed 0  solved a…",
        f"▶ {long}, seed 1",
        "    1,500/50,000  accuracy 0.125  at most 2:41:40 left",
        f"· {long}, seed 2  waiting",
        f"✗ {long}, seed 3",
        "    failed 3 times: disk full",
    ]
    many = [*jobs, *(job(seed, "waiting") for seed in range(4, 30))]
    text = screen(many, 12, monkeypatch, width=80, name=long)
    last = text[text.rindex("30 runs:") :].strip().splitlines()
    assert len(last) <= 11
    assert "seed 1" in "".join(last)


def test_a_terminal_never_draws_more_than_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    text = screen(mixed(), 12, monkeypatch)
    last = text[text.rindex("40 runs:") :]
    assert len(last.strip().splitlines()) <= 11
    assert "▶ seed 11" in last
