"""Looking into a run's weights: its gates on a test string, how far back its errors reach.

What figures need of them is written beside the record as small JSON, so that the weights need
not be kept:

    gates.json          mERG: β along one test string, and the share of units that keep throughout
    error-norms.json    pMNIST: ‖∂L/∂s_t‖ for every step t, after each epoch whose weights are kept
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from torchgdu import analysis, figures
from torchgdu.config import OWN, RunConfig
from torchgdu.evidence import beside
from torchgdu.records import GATES, NORMS, NotThere, Record, RunCorrupt, write_atomically
from torchgdu.tasks import Batch, DataError, Task
from torchgdu.tasks.reber import SYMBOLS
from torchgdu.train import load, make_task, untrained

SAMPLES = 200
"""Test sequences over which error norms are averaged."""
MOST = 40_000
"""Steps times sequences that are looked at in one go; more would fill the memory."""


class Sample(NamedTuple):
    """Test sequences of equal length."""

    input: Tensor
    """[T, B, I]."""
    target: Tensor
    """[B, …], or [T, B] for strings."""
    loss: analysis.Loss | None = None
    """None: that of each sequence's last output."""
    text: str | None = None
    """What the first sequence reads, where it is a string."""

    def part(self, begin: int, end: int) -> Sample:
        """Return some of the sequences."""
        target = self.target[begin:end] if self.text is None else self.target[:, begin:end]
        return self._replace(input=self.input[:, begin:end], target=target)


def wanted(config: RunConfig) -> bool:
    """Whether a figure looks into the run's weights."""
    return (config.task == "reber" and config.multiple == 10) or bool(config.keep_epochs)


def fill(records: Iterable[Record], data: str | os.PathLike[str] | None = None) -> list[str]:
    """Look into the weights of every run that a figure asks for and nobody has looked into.

    Returns why some could not be: image files that are not there, weights that are damaged. A run
    without weights has been looked into where it was made, or counts as not looked into.
    """
    problems: dict[str, None] = {}
    for record in records:
        if record.path is None or not wanted(record.config):
            continue
        try:
            if record.config.task == "reber":
                _fill_gates(record)
            else:
                _fill_norms(record, data)
        except DataError as error:
            problems[f"Error norms were not taken: {error}"] = None
        except RunCorrupt as error:
            problems[f"Weights were not looked into: {error}"] = None
        except OSError as error:
            what = f"{record.path} cannot be written to: {error.strerror}"
            problems[f"What was seen in weights is not kept: {what}"] = None
    return list(problems)


def _fill_gates(record: Record) -> None:
    if not record.done or beside(record, GATES) is not None:
        return
    try:
        model = _model(record)
    except LookupError:
        return
    _write(record, GATES, gates(record, model))


def _fill_norms(record: Record, data: str | os.PathLike[str] | None) -> None:
    kept = _kept(record)
    known = (beside(record, NORMS) or {"epochs": {}})["epochs"]
    if set(map(str, kept)) <= set(known):
        return
    fresh = {str(n): norms(record, _model(record, n), data) for n in kept if str(n) not in known}
    _write(record, NORMS, {"samples": SAMPLES, "epochs": {**known, **fresh}})


def _kept(record: Record) -> list[int]:
    """Return the epochs after which weights are kept."""
    assert record.path is not None
    names = record.path.glob("epoch-*.safetensors")
    return sorted(int(name.stem.removeprefix("epoch-")) for name in names)


def _write(record: Record, name: str, seen: dict[str, Any]) -> None:
    assert record.path is not None
    text = json.dumps({"format": 1, "id": record.id, **seen}, separators=(",", ":"))
    write_atomically(record.path / name, text.encode() + b"\n")


def _model(record: Record, epoch: int | None = None) -> nn.Module:
    assert record.path is not None
    return load(record.path, epoch=epoch)


def gates(record: Record, model: nn.Module) -> dict[str, Any]:
    """Return β in hundredths along one test string of mERG, and the shares that keep throughout.

    The string is one of middle length, the same for every run on the same data. The share is that
    of units with β > 0.9 at every step from the second symbol to the one before last, mean over
    all test strings, before training and at the end.
    """
    config = record.config
    task = make_task(config)
    (whole,) = task.test_batches(config.data_seed)
    whole = whole.to(dtype=getattr(torch, config.dtype))

    def share(model: nn.Module) -> float:
        kept = analysis.always_latched_share(analysis.record_gates(model, whole.input))
        return round(kept.mean().item(), 6)

    sample = take(task, config, 1)
    beta = analysis.record_gates(model, sample.input).beta[:, 0]
    return {
        "string": sample.text,
        "beta": (100 * beta).round().int().tolist(),
        "kept": {"start": share(untrained(config)), "end": share(model)},
    }


def norms(
    record: Record, model: nn.Module, data: str | os.PathLike[str] | None = None
) -> list[float]:
    """Return ‖∂L/∂s_t‖ for every step t, mean over test sequences, to four digits."""
    sample = take(make_task(record.config, data=data), record.config, SAMPLES)
    size = max(1, MOST // len(sample.input))
    count = sample.input.size(1)
    total = torch.zeros(len(sample.input), dtype=torch.float64)
    for begin in range(0, count, size):
        some = sample.part(begin, min(begin + size, count))
        found = analysis.error_norms(model, some.input, some.target, loss=some.loss)
        total += found.double() * some.input.size(1) / count
    return [float(f"{value:.4g}") for value in total.tolist()]


def take(task: Task, config: RunConfig, count: int) -> Sample:
    """Return some test sequences of equal length; of strings, those of the middle length."""
    batch = task.test_batches(config.data_seed)[0].to(dtype=getattr(torch, config.dtype))
    if task.readout == "every":
        return _strings(batch, count)
    assert isinstance(batch.input, Tensor)
    return Sample(batch.input, batch.target).part(0, count)


def _strings(batch: Batch, count: int) -> Sample:
    """Return strings of the middle length; their loss is that of the symbol before last."""
    assert isinstance(batch.input, PackedSequence)
    symbols, lengths = pad_packed_sequence(batch.input)
    targets, _ = pad_packed_sequence(batch.input._replace(data=batch.target))
    length = int(lengths[len(lengths) // 2])
    chosen = (lengths == length).nonzero().flatten()[:count]
    input, target = symbols[:length, chosen], targets[:length, chosen]
    first = [*input[:, 0].argmax(-1).tolist(), int(target[-1, 0])]
    text = "".join(SYMBOLS[symbol] for symbol in first)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output[-2], target[-2], reduction="none")

    return Sample(input, target, loss, text)


def analyse(
    record: Record, to: Path | None = None, data: str | os.PathLike[str] | None = None
) -> list[Path]:
    """Draw the gates and the error norms of a run's first layer; return the files, as SVG and PDF.

    They are written into ``to``, by default the run's directory. Gates are those of one test
    sequence; error norms are those after each epoch whose weights are kept and at the end.
    """
    figures.check()
    if OWN in (record.config.task, record.config.cell):
        raise NotThere(
            f"{record.id} has a task or model of your own: use torchgdu.analysis.record_gates and "
            "error_norms in Python"
        )
    if record.path is None:
        raise NotThere(f"{record.id} has no directory, and so no weights")
    model = _model(record)
    sample = take(make_task(record.config, data=data), record.config, 1)
    beta = analysis.record_gates(model, sample.input).beta[:, 0].T.tolist()
    curves = {f"after {n} epochs": norms(record, _model(record, n), data) for n in _kept(record)}
    curves[f"after step {record.step:,}"] = norms(record, model, data)
    if to is None:
        fill([record], data)
    name = figures.title(record.config.cell, record.config.groups or record.config.hidden)
    if record.config.layers > 1:
        name += f", layer 1 of {record.config.layers}"
    drawn = {
        "gates": [figures.Panel(f"{name}: β on a test sequence", "gates", {"beta": beta})],
        "error-norms": [
            figures.Panel(f"{name}, {when}", "norms", {"curves": {name: curve}})
            for when, curve in curves.items()
        ],
    }
    folder = record.path if to is None else to
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for what, panels in drawn.items():
        whole = figures.arrange(panels, min(2, len(panels)), legend=False)
        for kind in ("svg", "pdf"):
            written.append(folder / f"{what}.{kind}")
            write_atomically(written[-1], figures.render(whole, kind))
    return written
