"""The benchmark: what it counts, what it refuses to time, and what it says."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import torchgdu
from torchgdu import bench, ops
from torchgdu.ops import engine
from torchgdu.shapes import SHAPES, Shape

SMALL = Shape("small", 3, 5, 8, "2x4", 8)


def test_the_shapes_fit_their_groups() -> None:
    for shape in SHAPES.values():
        assert torchgdu.Groups(shape.groups).units == shape.hidden


@pytest.mark.parametrize("training", [False, True])
def test_operations_are_those_of_the_matrix_products(training: bool) -> None:
    """As torch itself counts them in the reference, but for the first step's known state."""
    layer = torchgdu.GDU(SMALL.inputs, SMALL.groups)
    x = torch.randn(SMALL.steps, SMALL.batch, SMALL.inputs)
    counter = FlopCounterMode(display=False)
    with torchgdu.use_backend("reference"), counter, torch.set_grad_enabled(training):
        h_n = layer(x)[1]
        if training:
            h_n.sum().backward()
    expected = SMALL.steps * SMALL.operations(2, training)
    start = 2 * SMALL.batch * SMALL.hidden * 2 * SMALL.hidden  # no gradient of the state given
    assert counter.get_total_flops() == expected - (start if training else 0)


def test_ratios_and_shares() -> None:
    result = bench.Result(
        SMALL, {"GDU": 2.0, "nn.GRU": 9.0}, {"GDU": 4.0, "nn.GRU": 12.0}, peak=100.0
    )
    assert result.ratio("GDU", "nn.GRU") == 3.0
    assert result.ratio("GDU", "nn.GRU", training=False) == 4.5
    done = SMALL.operations(2, True)
    assert result.share("GDU") == pytest.approx(done / 4e-6 / 100e9)


def test_rounds_alternate_and_medians_count(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now = iter(range(0, 10**9, 4000))
    monkeypatch.setattr("time.perf_counter", lambda: next(now) / 1e6)  # 4 ms whatever is done
    steps: dict[str, bench.STEP] = {name: partial(order.append, name) for name in "abc"}
    times = bench.in_turn(steps, 0, slow=["c"])
    assert times == dict.fromkeys("abc", pytest.approx(4000 / 2))
    # Set up, measured once, then in turn: two steps that count after one that does not.
    turns = ["abc", "abc", "aaabbbccc", "bbbaaa", "cccaaabbb", "aaabbb", "bbbcccaaa"]
    assert "".join(order) == "".join(turns)


def test_wrong_values_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench.verify()
    usual = ops.library().forward

    def wrong(given: bytes) -> int:
        status = int(usual(given))
        h_n = engine.PROBLEM.unpack(given[: engine.PROBLEM.size])[28]
        ctypes.c_float.from_address(h_n).value += 1e-3
        return status

    monkeypatch.setattr(ops.library(), "forward", wrong)
    with pytest.raises(ArithmeticError, match="not measured, because the values differ"):
        bench.verify()


def test_other_programs_are_named(tmp_path: Path) -> None:
    for number, words in (
        ("71", ["/usr/bin/python3", "/venv/bin/torchgdu", "train", "adding"]),
        ("72", ["/venv/bin/torchgdu", "reproduce", "--paper"]),
        ("73", ["/usr/bin/python3", "-c", "torchgdu train"]),
        ("74", ["/venv/bin/torchgdu", "bench"]),
        (str(os.getpid()), ["/venv/bin/torchgdu", "train"]),
    ):
        (tmp_path / number).mkdir()
        (tmp_path / number / "cmdline").write_text("\0".join([*words, ""]))
    assert list(bench.programs(tmp_path)) == [
        "torchgdu train runs (process 71)",
        "torchgdu reproduce runs (process 72)",
    ]


def test_what_others_had_of_the_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"

    def said(own: float, user: int, idle: int, stolen: int = 0) -> list[str]:
        """What is said after so many seconds of each, this process having had some of them."""
        monkeypatch.setattr(os, "times", lambda: (5.0, 0.0, 0.0, 0.0, 0.0))
        stat.write_text(f"cpu {7 * second} 0 0 {3 * second} 0 0 0 0 0 0\ncpu0 9 9\n")
        meter = bench.Meter(stat)
        monkeypatch.setattr(os, "times", lambda: (5.0 + own / 2, 0.0, own / 2, 0.0, 0.0))
        words = (7 + user) * second, 0, 0, (3 + idle) * second, 0, 0, 0, stolen * second
        stat.write_text(f"cpu {' '.join(map(str, words))} 0 0\n")
        return list(meter.disturbances())

    assert said(own=100, user=100, idle=100) == []
    assert said(own=91, user=100, idle=100) == []
    assert said(own=80, user=120, idle=80) == ["other programs had 20% of the processors' time"]
    assert said(own=100, user=100, idle=70, stolen=30) == [
        "other programs had 15% of the processors' time"
    ]


def test_where_only_the_load_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.7, 0.0, 0.0))
    assert list(bench.Meter(tmp_path / "none").disturbances()) == ["the load was 0.7 already"]
    monkeypatch.setattr(os, "getloadavg", lambda: (0.4, 0.0, 0.0))
    assert list(bench.Meter(tmp_path / "none").disturbances()) == []


def test_a_run_from_the_command_line() -> None:
    """All of it on a small shape, as JSON and as Markdown."""
    code = (
        "import sys; from torchgdu import bench, cli; from torchgdu.shapes import SHAPES, Shape\n"
        "small = Shape('small', 3, 5, 8, '2x4', 8)\n"
        "SHAPES.clear(); SHAPES['small'] = small\n"
        "bench.memory = lambda shape, kind, threads: bench.growth('small', kind, threads)\n"
        "bench.lengths.__defaults__ = ((10, 20),)\n"
        "bench.checkpoints.__defaults__ = (30,)\n"
        "cli.main()"
    )

    def call(*arguments: str) -> Any:
        return subprocess.run(
            [sys.executable, "-c", code, "bench", "--seconds", "0", *arguments],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    done = call("--json", "--threads", "1", "--shapes", "small")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (result,) = found["results"]
    assert set(result["training"]) == {*bench.KINDS, bench.LOOP}
    assert all(0 < value < 1e6 for value in result["training"].values())
    times = result["training"]
    assert result["ratios"]["GDU / nn.LSTM"]["training"] == pytest.approx(
        times["nn.LSTM"] / times["GDU"]
    )
    assert 0 < result["shares"]["GDU"]["training"] < 1
    assert found["machine"]["threads"] == "1"
    assert set(found["lengths"]) == {"10", "20"}
    assert set(found["checkpoints"]) == {"all", "auto"}
    assert found["latency"]["GDUCell"] > 0
    done = call("--markdown")
    assert done.returncode == 0, done.stderr
    table = next(line for line in done.stdout.splitlines() if line.startswith("| small:"))
    assert re.search(r"\| +\d+\.\d\d .*\| +\d+\.\d× .*\d+% +\|$", table)
    done = call("--shapes", "huge")
    assert done.returncode == 2
    assert "--shapes: no 'huge'; there are small" in done.stderr
