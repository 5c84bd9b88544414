"""A run that is killed at random moments and taken up again: `kill_worker.py OUT DATA TASK KILLS`.

Every attempt is a process of its own, forked from this one (which has imported torch already, so
that the moments fall into the run and not into imports) and ended by SIGKILL.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from conftest import publish_small_images
from torchgdu.config import RunConfig
from torchgdu.observe import Observer
from torchgdu.train import train

RUNS: dict[str, dict[str, object]] = {
    "adding": {"length": 30, "steps": 240, "test_every": 7},
    "temporal-order": {"length": 30, "steps": 240, "test_every": 7},
    "reber": {"multiple": 1, "steps": 240, "test_every": 7},
    "mnist": {"batch_size": 10, "steps": 240, "test_every": 2, "patience": 0},
    "pmnist": {"batch_size": 10, "epochs": 48, "keep_epochs": (2, 5), "patience": 0},
}


def attempt(config: RunConfig, out: Path, data: Path, often: float) -> int:
    """Train in a child process; return its id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(config, out=out, data=data, save_every=often, observer=Observer())
            code = 0
        finally:
            os._exit(code)
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
    start = time.monotonic()
    assert os.waitpid(attempt(config, out / "whole", data, 0.0), 0)[1] == 0
    a_step = (time.monotonic() - start) / 240

    moments = random.Random(0)
    steps: list[int] = []
    for turn in range(kills):
        # Saving after every step, most kills fall into it; saving less often, some steps are lost.
        often = moments.choice([0.0, 0.0, 3 * a_step])
        child = attempt(config, out / "killed", data, often)
        # One in four dies before it comes to train, the others spread over the run.
        early = moments.random() < 0.25
        wanted = -1 if early else 200 * turn // kills + moments.randint(1, 5)
        while saved(out) < wanted:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended by itself"
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 3 * a_step))
        os.kill(child, signal.SIGKILL)
        state = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(state), f"it ended by itself: {state}"
        steps.append(saved(out))
    assert os.waitpid(attempt(config, out / "killed", data, 0.0), 0)[1] == 0
    print(json.dumps(steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
