"""What does a training step cost beyond its layer? `python benchmarks/loop.py [ROUNDS]`, 2 minutes.

One thread, mERG m = 10 (one string a step) and adding L = 200 (20 sequences a step):

- the parts of a step one by one, and the whole step in `torchgdu.train.train`, against the bare
  layer: forward, backward and its optimizer alone. To reach: at most 1.6 times.
- strings a second against a plain loop with `torch.nn.GRU(100)` and `torch.optim.Adam` as they
  come, which keeps no books at all. To reach: at least 8 times.
- testing 256 mERG strings at once against the layer's forward on them. To reach: at most 1.3 times.

Every number is the best of the rounds, which take turns; every round is the same work. Counted is
processor time, which others at work on the machine disturb least. Before anything is timed,
training and test are compared with the plain loop's numbers.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchgdu import ops
from torchgdu import train as training
from torchgdu.config import OWN, RunConfig
from torchgdu.models import SequenceModel
from torchgdu.observe import Observer, Progress
from torchgdu.tasks import Adding, Batch, Reber, Task, generator

STEPS = 200
"""Steps a round."""


@dataclass(frozen=True)
class UntestedReber(Reber):
    """Tested on one string, so that a round's time is that of training."""

    def test_batches(self, data_seed: int = 0, batch_size: int | None = None) -> list[Batch]:
        """One string."""
        return [self.batch(1, generator("benchmark"))]


@dataclass(frozen=True)
class UntestedAdding(Adding):
    """Tested on one sequence."""

    def test_batches(self, data_seed: int = 0, batch_size: int | None = None) -> list[Batch]:
        """One sequence."""
        return [self.batch(1, generator("benchmark"))]


TASKS: Mapping[str, tuple[Task, str]] = {
    "mERG m = 10": (UntestedReber(10), "2x35+10x3"),
    "adding L = 200": (UntestedAdding(200), "10x10"),
}


class Torch(nn.Module):
    """`nn.GRU` and a read-out."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.rnn = nn.GRU(task.input_size, 100)
        self.readout = nn.Linear(100, task.output_size)

    def forward(self, input: Tensor) -> Tensor:
        """Answer at every step."""
        result: Tensor = self.readout(self.rnn(input)[0])
        return result


class Clock(Observer):
    """Times a run from its first step to its last, in processor seconds."""

    seconds = 0.0

    def started(self, run: Progress) -> None:
        """Start."""
        self._start = time.process_time()

    def tested(self, run: Progress, line: Mapping[str, Any]) -> None:
        """Stop: the only test comes after the last step."""
        self.seconds = time.process_time() - self._start


def whole(task: Task, groups: str) -> tuple[float, dict[str, Tensor]]:
    """Train as a user would; return the seconds and the weights."""
    config = RunConfig(
        task=OWN, name="loop", groups=groups, steps=STEPS, test_every=STEPS, threads=1
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        record = training.train(config, task=task, out=out, observer=clock)
        model = training.load(record.path or "", task=task)
    return clock.seconds, model.state_dict()


def fresh(task: Task, groups: str) -> SequenceModel:
    """Return the model that a run begins with."""
    torch.manual_seed(0)
    return SequenceModel(
        "gdu", task.input_size, task.output_size, groups=groups, readout=task.readout
    )


def plain(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train without any books."""
    source = task.source(0)
    for _ in range(STEPS):
        batch = source.next()
        optimizer.zero_grad()
        task.loss(model(batch.input), batch.target).backward()
        optimizer.step()


def parts(task: Task, groups: str) -> dict[str, float]:
    """Time the parts of a step one by one."""
    model, source = fresh(task, groups), task.source(0)
    optimizer = torch.optim.Adam(model.parameters(), task.settings.learning_rate, fused=True)
    spent = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.0)
    for _ in range(STEPS):
        moments = [time.process_time()]
        batch = source.next()
        moments.append(time.process_time())
        optimizer.zero_grad()
        loss = task.loss(model(batch.input), batch.target)
        moments.append(time.process_time())
        loss.backward()
        moments.append(time.process_time())
        optimizer.step()
        moments.append(time.process_time())
        for name, start, end in zip(spent, moments, moments[1:], strict=False):
            spent[name] += end - start
    return spent


def bare(task: Task, groups: str) -> Callable[[], None]:
    """Return a round of the layer alone: forward, backward and optimizer, on the same data."""
    layer, source = fresh(task, groups).rnn, task.source(0)
    optimizer = torch.optim.Adam(layer.parameters(), task.settings.learning_rate, fused=True)
    inputs = [source.next().input for _ in range(STEPS)]
    first = layer(inputs[0])
    gradient = torch.full_like(first[0] if task.readout == "every" else first[1], 0.01)

    def run() -> None:
        for input in inputs:
            optimizer.zero_grad()
            output, state = layer(input)
            if task.readout == "every":
                output.backward(gradient[:1].expand_as(output))
            else:
                state.backward(gradient)
            optimizer.step()

    return run


def seconds(function: Callable[[], object]) -> float:
    """Time one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def verify() -> None:
    """Compare training and testing with the plain loop's numbers, bit for bit."""
    for task, groups in TASKS.values():
        model = fresh(task, groups)
        lr = task.settings.learning_rate
        plain(task, model, torch.optim.Adam(model.parameters(), lr, fused=True))
        _, trained = whole(task, groups)
        for name, value in model.state_dict().items():
            assert torch.equal(value, trained[name]), f"{task.name}: {name} differs"
    task = Reber(10)
    model = fresh(task, "2x35+10x3")
    one_by_one = task.test_batches(batch_size=1)
    assert scores(task, model, task.test_batches()) == scores(task, model, one_by_one)


@torch.no_grad()
def scores(task: Task, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    """Test as training does."""
    return task.score((model(batch.input), batch) for batch in batches)


def least(rounds: int, functions: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Call the functions in turns, and return the least that each returned."""
    found = [{name: function() for name, function in functions.items()} for _ in range(rounds)]
    return {name: min(each[name] for each in found) for name in functions}


def main(rounds: int) -> None:
    """Verify, time, print."""
    torch.set_num_threads(1)
    verify()
    print(f"backend {ops.available()}, torch {torch.__version__}, best of {rounds} rounds")
    for title, (task, groups) in TASKS.items():
        step(title, task, groups, rounds)
    strings(rounds)
    test(rounds)


def step(title: str, task: Task, groups: str, rounds: int) -> None:
    """Print the parts of a step, and the whole against the bare layer."""
    alone = bare(task, groups)
    split: list[dict[str, float]] = []

    def split_up() -> float:
        split.append(parts(task, groups))
        return sum(split[-1].values())

    best = least(
        rounds,
        {
            "step": lambda: whole(task, groups)[0],
            "bare": lambda: seconds(alone),
            "parts": split_up,
        },
    )
    print(f"\n{title}, GDU {groups}, µs a step")
    scale = 1e6 / STEPS
    for name in split[0]:
        print(f"  {name:<12}{min(each[name] for each in split) * scale:9.1f}")
    print(f"  {'books':<12}{(best['step'] - best['parts']) * scale:9.1f}")
    print(f"  {'whole step':<12}{best['step'] * scale:9.1f}")
    print(f"  {'bare layer':<12}{best['bare'] * scale:9.1f}")
    print(f"  whole / bare: {best['step'] / best['bare']:.2f} (at most 1.6)")


def strings(rounds: int) -> None:
    """Print mERG strings a second, against those of torch alone."""
    task, groups = TASKS["mERG m = 10"]
    baseline = Torch(task)
    adam = torch.optim.Adam(baseline.parameters(), task.settings.learning_rate)
    best = least(
        rounds,
        {
            "ours": lambda: whole(task, groups)[0],
            "theirs": lambda: seconds(lambda: plain(task, baseline, adam)),
        },
    )
    print(f"\nmERG strings a second: {STEPS / best['ours']:.0f}", end="")
    print(f" against {STEPS / best['theirs']:.0f} with nn.GRU(100) and torch's Adam", end="")
    print(f": {best['theirs'] / best['ours']:.1f} times (at least 8)")


def test(rounds: int) -> None:
    """Print what a test of 256 strings costs beyond the layer."""
    task, groups = Reber(10), TASKS["mERG m = 10"][1]
    model = fresh(task, groups).eval()
    batches = task.test_batches()
    (batch,) = batches
    assert isinstance(batch.input, PackedSequence)
    with torch.no_grad():
        best = least(
            5 * rounds,
            {
                "test": lambda: seconds(lambda: scores(task, model, batches)),
                "forward": lambda: seconds(lambda: model.rnn(batch.input)),
            },
        )
    print(f"\ntest of 256 strings: {best['test'] * 1e3:.2f} ms, forward alone", end="")
    print(f" {best['forward'] * 1e3:.2f} ms: {best['test'] / best['forward']:.2f} (at most 1.3)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 10)
