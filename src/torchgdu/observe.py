"""What looks at a run from outside: its state, and the displays and trackers that show it."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torchgdu.config import RunConfig
from torchgdu.records import Record


def say(line: str) -> None:
    """Print a line; where whoever read has gone, be silent from then on: the work matters."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@dataclass
class Progress:
    """How far a run has come."""

    config: RunConfig
    path: Path
    parameters: int
    task: Mapping[str, Any]
    """The task's primary metric, direction, chance level and goal."""
    data: Mapping[str, Any]
    """What the task says of its data."""
    last_step: int
    """Where the step or epoch limit is."""
    test_every: int
    patience: int
    """In steps; 0: none."""

    step: int = 0
    epoch: float = 0.0
    loss_sum: float = 0.0
    """Over the steps since the last test."""
    loss: float = math.nan
    """Of the last step."""
    tested: int = 0
    """The step of the last test."""
    steps_to: dict[str, int | None] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    """Of the last complete test."""
    best: dict[str, Any] | None = None
    diverged: str | None = None
    drift: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    process: dict[str, Any] = field(default_factory=dict)
    stop: int | None = None
    """Set by an observer to end the training after a checkpoint, as this signal would."""

    SAVED: ClassVar = (
        "step", "epoch", "loss_sum", "tested", "steps_to", "scores", "best", "diverged", "drift",
        "environment", "process",
    )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Return what changes, for a checkpoint."""
        return {name: getattr(self, name) for name in self.SAVED}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned."""
        for name in self.SAVED:
            setattr(self, name, state[name])


class Observer:
    """Sees a run and does next to nothing; displays and trackers override what they need."""

    def started(self, run: Progress) -> None:
        """Training begins, or goes on."""

    def stepped(self, run: Progress) -> None:
        """Some steps were taken; called a few times a second."""

    def tested(self, run: Progress, line: Mapping[str, Any]) -> None:
        """A test was made; `line` is what metrics.jsonl got."""

    def noted(self, message: str) -> None:
        """Something went otherwise than planned, and the user must know: by default a warning."""
        warnings.warn(message, stacklevel=2)

    def finished(self, record: Record) -> None:
        """The run has an outcome."""

    def closed(self) -> None:
        """Nothing more will come, whatever the reason."""
