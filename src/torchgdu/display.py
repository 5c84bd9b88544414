"""What a person sees of a run: live on a terminal, in lines on a pipe, and looking back at it."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchgdu.config import OWN, ConfigError
from torchgdu.observe import Observer, Progress, say
from torchgdu.records import Record, RunCorrupt, load_records

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text
    from torch.utils.tensorboard import SummaryWriter

LINE_EVERY = 5.0
"""Seconds between lines on a pipe; what is news comes at once."""


@contextlib.contextmanager
def watch(quiet: bool = False, tensorboard: bool = False) -> Iterator[Observer]:
    """Yield what shows a run on this terminal or pipe."""
    shown: Observer = Quiet() if quiet else Terminal() if sys.stdout.isatty() else Lines()
    observer = Together(shown, TensorBoard()) if tensorboard else shown
    try:
        yield observer
    finally:
        observer.closed()


class Together(Observer):
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._all = observers

    def started(self, run: Progress) -> None:
        """Tell all."""
        for observer in self._all:
            observer.started(run)

    def stepped(self, run: Progress) -> None:
        """Tell all."""
        for observer in self._all:
            observer.stepped(run)

    def tested(self, run: Progress, line: Mapping[str, Any]) -> None:
        """Tell all."""
        for observer in self._all:
            observer.tested(run, line)

    def noted(self, message: str) -> None:
        """Tell the first, which is what shows."""
        self._all[0].noted(message)

    def finished(self, record: Record) -> None:
        """Tell all."""
        for observer in self._all:
            observer.finished(record)

    def closed(self) -> None:
        """Tell all."""
        for observer in self._all:
            observer.closed()


class Quiet(Observer):
    """Says only what must be known."""

    def noted(self, message: str) -> None:
        """Write it to stderr."""
        print(f"Warning: {message}", file=sys.stderr, flush=True)


class Lines(Quiet):
    """Plain lines: the start, a test now and then, every criterion met, the outcome."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._last = -math.inf
        self._met = 0
        self._began = False

    def started(self, run: Progress) -> None:
        """Say what is trained, and where it stands."""
        self._began = True
        self._pace.start(run)
        self._met = _met(run)
        say(headline(run))

    def tested(self, run: Progress, line: Mapping[str, Any]) -> None:
        """Say how it does, if there is news or some time has passed."""
        now = time.monotonic()
        if _met(run) == self._met and now - self._last < LINE_EVERY:
            return
        self._last, self._met = now, _met(run)
        loss = f"loss {line['loss']:.4g}"
        say(f"{self._pace.where(run)}  {loss}  {standing(run)}")

    def finished(self, record: Record) -> None:
        """Say what became of it."""
        say(outcome(record, self._began))


class Terminal(Quiet):
    """A progress bar, and below it the loss and the scores against chance and goal."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._live: Live | None = None
        self._loss = math.nan
        self._began = False

    def started(self, run: Progress) -> None:
        """Begin to draw."""
        from rich.console import Console
        from rich.live import Live

        self._began = True
        self._pace.start(run)
        console = Console(highlight=False)
        console.print(headline(run), markup=False)
        self._live = Live(self._draw(run), console=console, auto_refresh=False, transient=True)
        self._live.start()

    def stepped(self, run: Progress) -> None:
        """Draw anew."""
        if self._live is not None:
            self._live.update(self._draw(run), refresh=True)

    def tested(self, run: Progress, line: Mapping[str, Any]) -> None:
        """Remember the mean loss; it is drawn with the next steps."""
        self._loss = line["loss"]

    def noted(self, message: str) -> None:
        """Write it above the bar."""
        if self._live is None:
            super().noted(message)
        else:
            self._live.console.print(f"Warning: {message}", style="bold yellow", markup=False)

    def finished(self, record: Record) -> None:
        """Take the bar away and say what became of the run."""
        self.closed()
        say(outcome(record, self._began))

    def closed(self) -> None:
        """Take the bar away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, run: Progress) -> Text:
        from rich.text import Text

        self._pace.step(run)
        assert self._live is None or self._live.console is not None
        width = self._live.console.width if self._live is not None else 80
        where = f" {self._pace.where(run)}"
        size = max(10, width - len(where) - 1)
        done = round(size * min(1.0, run.step / run.last_step))
        text = Text()
        text.append("━" * done, "green").append("━" * (size - done), "dim").append(where)
        loss = run.loss if math.isnan(self._loss) else self._loss
        return text.append(f"\nloss {loss:.4g}  ", "cyan").append(standing(run))


class TensorBoard(Observer):
    """Writes loss and scores to `tensorboard/` in the run's directory."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("tensorboard", "needs: pip install 'torchgdu[tensorboard]'") from None
        self._make = SummaryWriter
        self._writer: SummaryWriter | None = None

    def started(self, run: Progress) -> None:
        """Open the log; what was logged after the checkpoint is purged."""
        self._writer = self._make(str(run.path / "tensorboard"), purge_step=run.step + 1)

    def tested(self, run: Progress, line: Mapping[str, Any]) -> None:
        """Log the line."""
        assert self._writer is not None
        for name, value in line.items():
            if name not in ("step", "partial"):
                self._writer.add_scalar(name, value, run.step)

    def closed(self) -> None:
        """Close the log."""
        if self._writer is not None:
            self._writer.close()


class Pace:
    """How fast a run goes, from its steps of the last seconds."""

    def __init__(self) -> None:
        self._from = (0, 0.0)
        self._speed = 0.0

    def start(self, run: Progress) -> None:
        """Begin to count."""
        self._from = (run.step, time.monotonic())

    def step(self, run: Progress) -> None:
        """Count; every two seconds the past fades by half."""
        now = time.monotonic()
        step, since = self._from
        if now - since >= 0.5:
            speed = (run.step - step) / (now - since)
            fade = 0.5 ** ((now - since) / 2) if self._speed else 0.0
            self._speed = fade * self._speed + (1 - fade) * speed
            self._from = (run.step, now)

    def where(self, run: Progress) -> str:
        """Return step, limit, speed, and the time to the limit."""
        self.step(run)
        text = f"{run.step:,}/{run.last_step:,}"
        if run.epoch:
            text += f"  epoch {run.epoch:.2f}"
        if self._speed:
            left = round((run.last_step - run.step) / self._speed)
            clock = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
            text += f"  {self._speed:.3g} steps/s  at most {clock} left"
        return text


def headline(run: Progress) -> str:
    """Return what is trained and where it is stored."""
    start = f", going on from step {run.step:,}" if run.step else ""
    return f"{run.path.name}: {run.parameters:,} parameters, in {run.path.parent}{start}"


def standing(run: Progress) -> str:
    """Return the scores against chance and goal, and the criteria met."""
    chance, goal = run.task["chance"], run.task["goal"]
    parts = []
    for name in run.scores or chance:
        now = f"{run.scores[name]:.4g}" if run.scores else "–"
        sides = [f"chance {chance[name]:.3g}"] if name in chance else []
        sides += [f"goal {goal[name]:.3g}"] if name in goal else []
        parts.append(f"{name} {now}" + (f" ({', '.join(sides)})" if sides else ""))
    parts += [f"{name} at {step:,}" for name, step in run.steps_to.items() if step is not None]
    return "  ".join(parts)


def _met(run: Progress) -> int:
    return sum(step is not None for step in run.steps_to.values())


def outcome(record: Record, now: bool = True) -> str:
    """Return one line: what became of the run, now or before, and where its record is."""
    scores = ", ".join(f"{name} {value:.4g}" for name, value in record.scores.items())
    said = {
        "solved": f"solved at step {record.steps_to.get('solved') or 0:,}",
        "finished": f"finished at step {record.step:,}",
        "limit": f"stopped at its limit, {record.step:,} steps, unsolved",
        "diverged": f"diverged: {record.diverged}",
        "interrupted": f"interrupted at step {record.step:,}",
        "running": f"running, at step {record.step:,}",
        "failed": f"given up: {record.failure}",
    }[record.status]
    seconds = record.process.get("seconds")
    took = f" in {seconds:,.1f} s" if seconds is not None else ""
    when = "" if now else "done before: "
    return f"{when}{said}{took}{': ' if scores else ''}{scores}  [{record.path or record.id}]"


def command(record: Record) -> str:
    """Return what makes this run again."""
    config = record.config
    if OWN in (config.task, config.cell):
        missing = [kind for kind in ("task", "model") if record.own and kind in record.own]
        given = "".join(f", {kind}=…" for kind in missing)
        return f"train(RunConfig.from_json({config.to_json()!r}){given})"
    return shlex.join(["torchgdu", *config.arguments()])


def how_to_go_on(run: Progress, data: Path | None = None, tensorboard: bool = False) -> str:
    """Return the command that continues an interrupted run in the same way."""
    line = ["torchgdu", "runs", "resume", run.path.name, "--out", str(run.path.parent)]
    line += ["--data", str(data)] if data else []
    line += ["--tensorboard"] if tensorboard else []
    return f"Interrupted at step {run.step:,} and saved. Go on with:\n  {shlex.join(line)}"


def show_runs(out: Path) -> None:
    """Print a line a run."""
    errors: list[RunCorrupt] = []
    records = load_records(out, errors=errors)
    width = max((len(record.id) for record in records), default=0)
    for record in records:
        scores = "  ".join(f"{name} {value:.4g}" for name, value in record.scores.items())
        print(f"{record.id:<{width}}  {record.status:<11}  {record.step:>9,}  {scores}".rstrip())
    if not records and not errors:
        print(f"no runs in {out}")
    if errors:
        raise RunCorrupt("\n".join(map(str, errors)))


def show_run(record: Record) -> None:
    """Print everything a person asks of a run."""
    print(record.id)
    print(f"  {outcome(record)}")
    print(f"  made by  {command(record)}")
    facts: dict[str, Any] = {
        "parameters": f"{record.parameters:,}",
        "steps to": record.steps_to,
        "best": record.best,
        "drift": list(record.drift),
        **record.environment,
        **record.process,
    }
    for name, value in facts.items():
        if value:
            if isinstance(value, Mapping):
                value = ", ".join(f"{k} {v}" for k, v in value.items())
            print(f"  {name:<19}{value}")
