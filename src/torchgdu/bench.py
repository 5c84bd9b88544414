"""What `torchgdu bench` does: check the layers' values, then time them beside those of torch.nn.

All that is compared is timed in one run, in turn, again and again; the medians are compared. A
turn's first step is not counted: in a training loop, each step finds memory as its like left it. A
training step is forward and backward with the gradient at the last output (`h_n`, which every layer
returns); time is in µs for each time step of the sequence.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchgdu import cells, environment, layers, ops
from torchgdu.shapes import SHAPES, Shape, check

STEP = Callable[[], object]


# How each contender is made, and how many gates and candidates it has.
KINDS: dict[str, tuple[Callable[[Shape], nn.Module], int]] = {
    "GDU": (lambda s: layers.GDU(s.inputs, s.groups), 2),
    "LSTM": (lambda s: layers.LSTM(s.inputs, s.hidden), 4),
    "GRU": (lambda s: layers.GRU(s.inputs, s.hidden, reset="after"), 3),
    "nn.GRU": (lambda s: nn.GRU(s.inputs, s.hidden), 3),
    "nn.LSTM": (lambda s: nn.LSTM(s.inputs, s.hidden), 4),
}
LOOP = "GDU loop"
"""The same GDU, step by step in plain torch."""

PAIRS = (
    ("GDU", "nn.GRU"),
    ("GDU", "nn.LSTM"),
    ("GDU", LOOP),
    ("LSTM", "nn.LSTM"),
    ("GRU", "nn.GRU"),
)
"""Which ratios are of interest: how many times as fast the first is as the second."""


@dataclass
class Result:
    """What was measured of one shape."""

    shape: Shape
    forward: dict[str, float]
    """µs a time step, without gradients."""
    training: dict[str, float]
    peak: float
    """10^9 operations a second that the processor reached in registers alone."""
    memory: dict[str, float] = field(default_factory=dict)
    """MiB by which a process grows in one training step."""

    def ratio(self, ours: str, theirs: str, training: bool = True) -> float:
        """Return how many times as fast ``ours`` is."""
        times = self.training if training else self.forward
        return times[theirs] / times[ours]

    def share(self, name: str, training: bool = True) -> float:
        """Return which share of the peak was reached."""
        times = self.training if training else self.forward
        done = self.shape.operations(2 if name == LOOP else KINDS[name][1], training)
        return done / times[name] / 1e3 / self.peak


@dataclass
class Report:
    """One run of the benchmark."""

    machine: dict[str, str]
    disturbed: list[str]
    """Why the numbers may be wrong: what else ran meanwhile."""
    results: list[Result]
    lengths: dict[int, float]
    """µs a time step of training a GDU with 100 units and 20 sequences, by length."""
    checkpoints: dict[str, float]
    """The same on 10,000 steps, with all kept for backward, and with ``checkpoint="auto"``."""
    latency: dict[str, float]
    """µs of one step of a cell, one sequence, without gradients, in one thread."""

    def data(self) -> dict[str, Any]:
        """Return all of it, and the ratios and shares, as JSON has it."""
        data = asdict(self)
        for result, own in zip(self.results, data["results"], strict=True):
            own["ratios"] = {
                f"{a} / {b}": {"forward": result.ratio(a, b, False), "training": result.ratio(a, b)}
                for a, b in PAIRS
            }
            own["shares"] = {
                name: {"forward": result.share(name, False), "training": result.share(name)}
                for name in result.training
            }
        return data


def run(
    shapes: Sequence[str] = tuple(SHAPES), threads: int | None = None, seconds: float = 10.0,
    say: Callable[[str], object] = lambda line: None,
) -> Report:  # fmt: skip
    """Measure the shapes of these names, each for about so many ``seconds``."""
    check(shapes)
    before = torch.get_num_threads()
    meter = Meter()
    disturbed = [*programs()]
    torch.set_num_threads(threads or before)
    try:
        with ops.use_backend("engine"):
            say("checking values")
            verify()
            results = []
            for name in shapes:
                say(f"timing {name}")
                results.append(measure(SHAPES[name], seconds))
                for kind in KINDS if sys.platform == "linux" else ():
                    used = memory(SHAPES[name], kind, torch.get_num_threads())
                    results[-1].memory[kind] = used
            say("timing lengths and single steps")
            report = Report(
                machine(), disturbed, results, lengths(seconds), checkpoints(seconds),
                latency(seconds),
            )  # fmt: skip
        report.disturbed += [why for why in programs() if why not in disturbed]
        report.disturbed += meter.disturbances()
        return report
    finally:
        torch.set_num_threads(before)


# Values first ------------------------------------------------------------------------------------


def verify() -> None:
    """Compare what is timed: the engine with the reference, our layers with torch's."""
    torch.manual_seed(0)
    x = torch.randn(20, 3, 4)
    for ours, theirs in (
        (layers.LSTM.from_torch(lstm := nn.LSTM(4, 33)), lstm),
        (layers.GRU.from_torch(gru := nn.GRU(4, 33)), gru),
    ):
        _same(_trained(ours, x), _trained(theirs, x)[:1])
    for kind in ("GDU", "LSTM", "GRU"):
        for shape in SHAPES.values():
            layer = KINDS[kind][0](shape)
            x = torch.randn(min(shape.steps, 10), shape.batch, shape.inputs)
            found = _trained(layer, x)
            with ops.use_backend("reference"):
                _same(found, _trained(layer, x))


def _trained(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the last output and the gradients of a training step."""
    layer.zero_grad()
    _train(layer, x)()
    with torch.no_grad():
        return [
            _last(layer, x),
            *(p.grad.clone() for p in layer.parameters() if p.grad is not None),
        ]


def _same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for a, b in zip(found, expected, strict=False):
        error = float((a - b).abs().max() / b.abs().max())
        if not error < 1e-4:
            raise ArithmeticError(f"not measured, because the values differ by {error:.1e}")


# Time --------------------------------------------------------------------------------------------


def _last(layer: nn.Module, x: Tensor) -> Tensor:
    hidden = layer(x)[1]
    return hidden if isinstance(hidden, Tensor) else hidden[0]


def _train(layer: nn.Module, x: Tensor) -> STEP:
    def step() -> None:
        layer.zero_grad()
        _last(layer, x).sum().backward()

    return step


def _infer(layer: nn.Module, x: Tensor) -> STEP:
    def step() -> Tensor:
        with torch.no_grad():
            return _last(layer, x)

    return step


def _by_hand(step: STEP) -> STEP:
    def slowly() -> object:
        with ops.use_backend("reference"):
            return step()

    return slowly


def measure(shape: Shape, seconds: float) -> Result:
    """Time all contenders in turn."""
    torch.manual_seed(0)
    x = torch.randn(shape.steps, shape.batch, shape.inputs)
    made = {kind: make(shape) for kind, (make, _) in KINDS.items()}
    steps: dict[tuple[str, bool], STEP] = {}
    for training, wrap in ((False, _infer), (True, _train)):
        for kind, layer in made.items():
            steps[kind, training] = wrap(layer, x)
        steps[LOOP, training] = _by_hand(wrap(made["GDU"], x))
    slow = {key for key in steps if key[0] == LOOP}
    peaks = [peak()]
    times = in_turn(steps, seconds, slow)
    peaks.append(peak())
    each = {key: value / shape.steps for key, value in times.items()}
    return Result(
        shape,
        {name: value for (name, training), value in each.items() if not training},
        {name: value for (name, training), value in each.items() if training},
        max(peaks),
    )


def in_turn(
    steps: dict[Any, STEP], seconds: float, slow: Iterable[Any] = ()
) -> dict[Any, float]:  # fmt: skip
    """Return the median µs of each step; those that are ``slow`` run 3 times only."""
    for step in steps.values():  # what is loaded or set up once
        step()
    first = {key: _microseconds(step, 1) for key, step in steps.items()}
    repeats = {key: max(1, round(TURN / value)) for key, value in first.items()}
    slow = set(slow)
    one_round = sum(first[key] * repeats[key] for key in steps if key not in slow) / 1e6
    rounds = max(5, min(500, int(seconds / one_round)))
    times: dict[Any, list[float]] = {key: [] for key in steps}
    keys = list(steps)
    for k in range(rounds):
        for key in keys[k % len(keys) :] + keys[: k % len(keys)]:  # each is first in its turn
            if key not in slow or k % ((rounds + 2) // 3) == 0:
                steps[key]()  # not counted: finds memory and caches as another one left them
                times[key].append(_microseconds(steps[key], repeats[key]))
    return {key: statistics.median(value) for key, value in times.items()}


TURN = 10_000
"""µs that a turn takes at least: short steps are repeated, as they are in training."""


def _microseconds(step: STEP, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) * 1e6 / repeats


def peak() -> float:
    """Return the processor's multiply-adds in float32, at torch's number of threads."""
    return max(ops.library().peak(torch.float32, torch.get_num_threads(), 50) for _ in range(3))


def lengths(seconds: float, of: Sequence[int] = (1000, 10_000, 100_000)) -> dict[int, float]:
    """Return the time of a time step in training, which should not depend on the length."""
    layer = layers.GDU(2, "10x10")
    inputs = {steps: torch.randn(steps, 20, 2) for steps in of}
    times = in_turn({steps: _train(layer, x) for steps, x in inputs.items()}, seconds)
    return {steps: value / steps for steps, value in times.items()}


def checkpoints(seconds: float, steps: int = 10_000) -> dict[str, float]:
    """Return the time of a time step in training, by what is kept for backward."""
    x = torch.randn(steps, 20, 2)
    kept = {"all": layers.GDU(2, "10x10"), "auto": layers.GDU(2, "10x10", checkpoint="auto")}
    times = in_turn({name: _train(layer, x) for name, layer in kept.items()}, seconds / 4)
    return {name: value / steps for name, value in times.items()}


def latency(seconds: float, units: int = 100) -> dict[str, float]:
    """Return the time of one step of a cell, one sequence, in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x, h = torch.randn(1, 2), torch.zeros(1, units)
    made: dict[str, nn.Module] = {
        "GDUCell": cells.GDUCell(2, f"10x{units // 10}"),
        "GRUCell": cells.GRUCell(2, units),
        "LSTMCell": cells.LSTMCell(2, units),
        "nn.GRUCell": nn.GRUCell(2, units),
        "nn.LSTMCell": nn.LSTMCell(2, units),
    }
    try:
        with torch.no_grad():
            return in_turn(
                {name: partial(cell, x, (h, h) if "LSTM" in name else h)
                 for name, cell in made.items()},
                seconds / 10,
            )  # fmt: skip
    finally:
        torch.set_num_threads(threads)


# Memory ------------------------------------------------------------------------------------------


def memory(shape: Shape, kind: str, threads: int) -> float:
    """Return by how many MiB a process of its own grows in a training step."""
    code = (
        "from torchgdu import bench, ops\n"
        "with ops.use_backend('engine'):\n"
        f"    print(bench.growth({shape.name!r}, {kind!r}, {threads}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )  # fmt: skip
    return float(done.stdout)


def growth(name: str, kind: str, threads: int) -> float:
    """Return how far this process grows at most in its first large training step, in MiB."""
    torch.set_num_threads(threads)
    shape = SHAPES[name]
    layer = KINDS[kind][0](shape)
    x = torch.randn(shape.steps, shape.batch, shape.inputs)
    _train(layer, x[:2])()  # what is loaded once
    return grown(_train(layer, x))


def grown(step: STEP) -> float:
    """Return how far this process grows at most in ``step``, in MiB; on Linux alone."""
    Path("/proc/self/clear_refs").write_text("5")  # its largest size so far is that of now
    before = _kibibytes("VmRSS")
    step()
    return (_kibibytes("VmHWM") - before) / 1024


def _kibibytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# The machine -------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """Return what the numbers depend on."""
    return {
        "processor": environment.processor(),
        "processors": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "instructions": ops.library().instructions,
        "system": f"{platform.system()} {platform.machine()}",
        "torch": str(torch.__version__),
        "torch instructions": torch.backends.cpu.get_cpu_capability(),
        "dtype": "float32",
    }


class Meter:
    """Tells how much of the processors' time others had since it was made, on Linux.

    What a virtual machine's host gave to others counts, too. The load average, which is all that
    other systems tell, is taken at the start: it would count this process itself at the end.
    """

    ALLOWED = 0.05

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._start = self._now()
        self._load = os.getloadavg()[0] if self._start is None and hasattr(os, "getloadavg") else 0

    def _now(self) -> tuple[float, float] | None:
        """Return the seconds that others had, and all there were."""
        try:
            words = self._stat.read_text().split()[1:9]
        except OSError:
            return None
        user, nice, system, idle, waiting, *interrupts = (
            int(word) / os.sysconf("SC_CLK_TCK") for word in words
        )
        busy = user + nice + system + sum(interrupts)
        return busy - sum(os.times()[:4]), busy + idle + waiting

    def disturbances(self) -> Iterable[str]:
        """Say how busy others were, if they were."""
        now = self._now()
        if self._start is None or now is None:
            if self._load > 0.5:
                yield f"the load was {self._load:.1f} already"
            return
        others, all_of_it = (b - a for a, b in zip(self._start, now, strict=True))
        if others > self.ALLOWED * all_of_it:
            yield f"other programs had {others / all_of_it:.0%} of the processors' time"


def programs(processes: Path = Path("/proc")) -> Iterable[str]:
    """Name the runs of torchgdu that are under way, but for this one."""
    for command in sorted(processes.glob("[0-9]*/cmdline")):
        if command.parent.name in (str(os.getpid()), str(os.getppid())):
            continue
        try:
            words = command.read_text(errors="replace").split("\0")
        except OSError:
            continue  # it has ended
        names = [Path(word).name for word in words[:3]]
        for verb in ("train", "reproduce", "sweep"):
            if "torchgdu" in names and verb in words[1:5]:
                yield f"torchgdu {verb} runs (process {command.parent.name})"


# What people read --------------------------------------------------------------------------------


def markdown(report: Report) -> str:
    """Return the report as tables in Markdown, which are read as they are, too."""
    lines = [", ".join(f"{name}: {value}" for name, value in report.machine.items()), ""]
    lines += [
        f"**Disturbed: {why}. The numbers are not to be relied on.**" for why in report.disturbed
    ]
    for title, training in (("Training step", True), ("Forward, without gradients", False)):
        rows = []
        for result in report.results:
            times = result.training if training else result.forward
            rows.append([
                f"{result.shape.name}: {_sizes(result.shape)}",
                *(f"{times[name]:.2f}" for name in (*KINDS, LOOP)),
                *(f"{result.ratio(*pair, training):.1f}×" for pair in PAIRS),
                f"{result.share('GDU', training):.0%}",
            ])  # fmt: skip
        heads = ["shape", *KINDS, LOOP, *(f"{a} : {b}" for a, b in PAIRS), "GDU, of peak"]
        lines += [f"{title}, µs a time step:", "", *_table(heads, rows), ""]
    rows = [
        [result.shape.name, *(f"{result.memory.get(kind, nan):.0f}" for kind in KINDS),
         f"{result.peak:.0f}"]
        for result in report.results
    ]  # fmt: skip
    heads = ["shape", *KINDS, "peak, 10⁹ operations a second"]
    lines += ["Memory of a training step, MiB:", "", *_table(heads, rows), ""]
    rows = [[f"{value:.2f}" for value in report.lengths.values()]]
    lines += ["GDU 10x10, batch 20, training, µs a time step, by length:", ""]
    lines += [*_table([f"{steps:,}" for steps in report.lengths], rows), ""]
    rows = [[f"{value:.2f}" for value in report.checkpoints.values()]]
    lines += ["The same on 10,000 steps, by what is kept for backward (`checkpoint`):", ""]
    lines += [*_table(list(report.checkpoints), rows), ""]
    rows = [[f"{value:.1f}" for value in report.latency.values()]]
    lines += ["One step of a cell, one sequence, 100 units, one thread, µs:", ""]
    lines += _table(list(report.latency), rows)
    return "\n".join(lines)


def _sizes(shape: Shape) -> str:
    return f"B{shape.batch} H{shape.hidden} I{shape.inputs} T{shape.steps}, {shape.groups}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rows = [list(heads), *map(list, rows)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(heads))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
