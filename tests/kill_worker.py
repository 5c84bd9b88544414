"""A run that is killed at random moments and taken up again: `kill_worker.py OUT DATA TASK KILLS`.

Every attempt is a process of its own, forked from this one (which has imported torch already, so
that the moments fall into the run and not into imports) and ended by SIGKILL. A moment is a number
of calls and returns that the attempt makes before it asks for its end: a clock would tell where it
is only on a machine that does nothing else.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import publish_small_images
from torchgdu.config import RunConfig
from torchgdu.observe import Observer, Progress
from torchgdu.train import train

STEPS = 240
RUNS: dict[str, dict[str, object]] = {
    "adding": {"length": 30, "steps": STEPS, "test_every": 7},
    "temporal-order": {"length": 30, "steps": STEPS, "test_every": 7},
    "reber": {"multiple": 1, "steps": STEPS, "test_every": 7},
    "mnist": {"batch_size": 10, "steps": STEPS, "test_every": 2, "patience": 0},
    "pmnist": {"batch_size": 10, "epochs": 48, "keep_epochs": (2, 5), "patience": 0},
}


class Counting(Observer):
    """Counts the calls of its process, from its start and again from the first step on."""

    def __init__(self) -> None:
        self.before, self.count = 0, 0

    def started(self, run: Progress) -> None:
        self.before, self.count = self.count, 0

    def event(self, *_: Any) -> None:
        self.count += 1


class Dying(Counting):
    """Asks for the end of its process at a moment, goes on for a little while, and waits for it."""

    def __init__(self, early: bool, moment: int, onward: int, ask: Callable[[], object]) -> None:
        super().__init__()
        self._training, self._early = False, early
        self._moment, self._last, self._ask = moment, moment + onward, ask

    def started(self, run: Progress) -> None:
        super().started(run)
        self._training = True

    def event(self, *_: Any) -> None:
        self.count += 1
        if self._training or self._early:
            if self.count == self._moment:
                self._ask()
            elif self.count == self._last:
                signal.pause()


def attempt(run: Callable[[Observer], object], observer: Counting, report: int) -> int:
    """Run in a child process, observed from its first call; return its id."""
    child = os.fork()
    if child == 0:
        said = b"?"
        try:
            sys.setprofile(observer.event)
            run(observer)
            sys.setprofile(None)
            said = json.dumps([observer.before, observer.count]).encode()
        finally:
            os.write(report, said)
            os._exit(said == b"?")
    return child


def saved(out: Path) -> int:
    """Return the newest checkpoint's step."""
    return max((int(p.stem[11:]) for p in out.glob("killed/*/checkpoint-*.json")), default=-1)


def main(out: Path, data: Path, task: str, kills: int) -> None:
    """Run once in peace, then again with kills; print the steps at which those came."""
    images = publish_small_images(pytest.MonkeyPatch())
    images.write(data)
    options = {"groups": "3x2", "layers": 2, "dropout": 0.3, "threads": 1, **RUNS[task]}
    config = RunConfig(task=task, **options)  # type: ignore[arg-type]
    train(config.replace(steps=1, keep_epochs=()), out=out / "warm", data=data)  # loads everything

    def whole(observer: Observer) -> None:
        train(config, out=out / "whole", data=data, save_every=0, observer=observer)

    def killed(observer: Observer) -> None:
        train(config, out=out / "killed", data=data, save_every=often, observer=observer)

    hear, say = os.pipe()
    assert os.waitpid(attempt(whole, Counting(), say), 0)[1] == 0
    start, calls = json.loads(os.read(hear, 100))
    a_step = calls // STEPS

    moments = random.Random(0)
    often = 0.0
    steps: list[int] = []
    for _ in range(kills):
        # Saving after every step, most kills fall into it; saving less often, some steps are lost.
        often = moments.choice([0, 0, 0.005])
        # One in four dies before it comes to train, the others up to 15 steps after.
        early = moments.random() < 0.25
        moment = moments.randint(1, start if early else 15 * a_step)
        # How far it comes meanwhile is the machine's to say.
        onward = moments.randint(1, a_step)
        child = attempt(killed, Dying(early, moment, onward, lambda: os.write(say, b"!")), say)
        assert os.read(hear, 1) == b"!", "it ended by itself"
        os.kill(child, signal.SIGKILL)
        state = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(state), f"it ended by itself: {state}"
        steps.append(saved(out))
    often = 0.0
    assert os.waitpid(attempt(killed, Counting(), say), 0)[1] == 0
    print(json.dumps(steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
