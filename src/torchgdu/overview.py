"""What a person sees of a sweep: all runs live on a terminal, or plain lines on a pipe."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from torchgdu.config import RunConfig
from torchgdu.observe import say
from torchgdu.sweep import Job, Watcher

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

SUMMARY_EVERY = 30.0
"""Seconds between two summaries on a pipe."""

Names = Callable[[RunConfig], str]


@contextlib.contextmanager
def watch(names: Names = RunConfig.identity, quiet: bool = False) -> Iterator[Watcher]:
    """Yield what shows a sweep on this terminal or pipe."""
    watcher = Quiet() if quiet else Terminal(names) if sys.stdout.isatty() else Lines(names)
    try:
        yield watcher
    finally:
        watcher.closed()


class Quiet(Watcher):
    """Says only what must be known."""

    def noted(self, message: str) -> None:
        """Write it to stderr."""
        print(f"Warning: {message}", file=sys.stderr, flush=True)


class Lines(Quiet):
    """Plain lines: a start, an end, and now and then how all runs are doing."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._states: dict[int, str] = {}  # by the job's id: cheaper than its description
        self._last = time.monotonic()

    def changed(self, jobs: Collection[Job]) -> None:
        """Say what is new, and now and then where everything is."""
        first = not self._states
        for job in jobs:
            before = self._states.get(id(job))
            if before == job.state:
                continue
            self._states[id(job)] = job.state
            if before and job.state != "waiting":
                say(f"{self._names(job.config)}: {standing(job)}")
        if first or time.monotonic() - self._last >= SUMMARY_EVERY:
            self._last = time.monotonic()
            say(counts(jobs))
            for job in jobs:
                if job.state == "running" and not first:
                    say(f"  {self._names(job.config)}: {standing(job)}")


class Terminal(Quiet):
    """A line a run; where they are too many, the running ones and those beside them."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._live: Live | None = None
        self._drawn = 0.0
        self._began = time.monotonic()
        self._jobs: Collection[Job] = ()

    def changed(self, jobs: Collection[Job]) -> None:
        """Draw anew, not too often."""
        from rich.console import Console
        from rich.live import Live

        self._jobs = jobs
        if self._live is None:
            console = Console(highlight=False)
            self._live = Live(console=console, auto_refresh=False)
            self._live.start()
        if time.monotonic() - self._drawn >= 0.1:
            self._draw()

    def noted(self, message: str) -> None:
        """Write it above the table."""
        if self._live is None:
            super().noted(message)
        else:
            self._live.console.print(f"Warning: {message}", style="bold yellow", markup=False)

    def closed(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._draw()
            self._live.stop()
            self._live = None

    def _draw(self) -> None:
        assert self._live is not None
        self._drawn = time.monotonic()
        size = self._live.console.size
        self._live.update(self._lines(size.width, size.height - 3), refresh=True)

    def _lines(self, width: int, height: int) -> Text:
        """Draw a line a run; what is under way has a second one where the terminal is narrow."""
        from rich.text import Text

        names = {
            job.config: f"{SIGNS[job.state][0]} {self._names(job.config)}" for job in self._jobs
        }
        active = [job for job in self._jobs if job.state in ("running", "failed")]
        tall = [job for job in active if len(names[job.config]) + 2 + len(standing(job)) > width]
        jobs = shown(list(self._jobs), height - len(tall))
        column = max((len(names[job.config]) for job in jobs), default=0)
        if any(column + 2 + len(standing(job)) > width for job in active):
            column = 0  # no room for two columns
        text = Text(f"{counts(self._jobs)}  {clock(time.monotonic() - self._began)}", "bold")
        for job in jobs:
            style = SIGNS[job.state][1]
            line = f"{names[job.config]:<{column}}  {standing(job)}"
            if job in tall:
                line = f"{names[job.config]}\n    {standing(job)}"
            elif len(line) > width:
                line = line[: width - 1] + "…"
            text.append(f"\n{line}", style)
        return text


SIGNS = {
    "waiting": ("·", "dim"),
    "running": ("▶", "cyan"),
    "done": ("✓", "green"),
    "failed": ("✗", "bold red"),
}


def shown(jobs: list[Job], lines: int) -> list[Job]:
    """Return the jobs that fit: what runs and what failed, then what has just ended, then the next.

    In the order of the sweep.
    """
    if len(jobs) <= lines:
        return jobs
    by_state = {state: [job for job in jobs if job.state == state] for state in SIGNS}
    recent = sorted(by_state["done"], key=lambda job: -job.ended)[: max(1, lines // 3)]
    first = [*by_state["running"], *by_state["failed"], *recent, *by_state["waiting"]]
    keep = {job.config for job in first[: max(1, lines)]}
    return [job for job in jobs if job.config in keep]


def counts(jobs: Collection[Job]) -> str:
    """Return how many runs are in which state."""
    number = Counter(job.state for job in jobs)
    states = ", ".join(f"{number[state]} {state}" for state in ("done", "running", "waiting"))
    failed = f", {number['failed']} failed" if number["failed"] else ""
    return f"{len(jobs)} runs: {states}{failed}"


def standing(job: Job) -> str:
    """Return how a run is doing, or what became of it."""
    if job.state == "waiting":
        parts = ["waiting"]
        parts += [f"to go on from step {job.step:,}"] if job.step else []
        parts += [f"failed {job.tries} times so far"] if job.tries else []
        return ", ".join(parts)
    if job.record is not None:
        return outcome(job)
    if not job.last_step:
        return f"going on from step {job.step:,}" if job.step else "starting"
    scores = "".join(f"  {name} {value:.4g}" for name, value in job.scores.items())
    left = job.seconds_left
    time_left = f"  at most {clock(left)} left" if math.isfinite(left) else ""
    return f"{job.step:,}/{job.last_step:,}{scores}{time_left}"


def outcome(job: Job) -> str:
    """Return what became of a run that has ended."""
    record = job.record
    assert record is not None
    said = {
        "solved": f"solved at {record.steps_to.get('solved') or 0:,}",
        "limit": f"stopped at {record.step:,}",
        "finished": f"finished at {record.step:,}",
        "diverged": f"diverged at {record.step:,}",
        "failed": f"failed {job.tries} times: {record.failure}",
    }[record.status]
    if record.status == "failed":
        return said
    seconds = record.process.get("seconds")
    took = f"  in {clock(seconds)}" if seconds is not None else ""
    return said + "".join(f"  {name} {value:.4g}" for name, value in record.scores.items()) + took


def clock(seconds: float) -> str:
    """Return a duration.

    >>> clock(3725.4)
    '1:02:05'
    """
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
