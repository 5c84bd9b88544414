"""What was seen in a run's weights, against other ways to see it."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import conftest
from torchgdu import analysis, examine, records
from torchgdu.config import RunConfig
from torchgdu.groups import Groups
from torchgdu.models import SequenceModel
from torchgdu.records import GATES, NORMS, Record
from torchgdu.tasks import Reber, SequentialMNIST
from torchgdu.train import load, make_task, train


def reber(out: Path, multiple: int = 10, **options: object) -> Record:
    settings = {"groups": "2x4", "steps": 40, **options}
    return train(RunConfig(task="reber", multiple=multiple, **settings), out=out)  # type: ignore[arg-type]


def seen(record: Record, name: str) -> dict[str, object]:
    assert record.path is not None
    found: dict[str, object] = json.loads((record.path / name).read_text("utf-8"))
    return found


@pytest.mark.parametrize("cell", ["gdu", "gru"])
def test_shares_are_those_of_every_test_string_alone(tmp_path: Path, cell: str) -> None:
    options = {"groups": "10x2"} if cell == "gdu" else {"cell": cell, "groups": None, "hidden": 20}
    record = reber(tmp_path, 2, lr=0.05, keep_bias=3.0 if cell == "gru" else None, **options)
    model = load(tmp_path / record.id)
    found = examine.gates(record, model)
    task = Reber(2)
    (batch,) = task.test_batches()
    lengths = [int((batch.input.batch_sizes > b).sum()) for b in range(256)]  # type: ignore[union-attr]
    symbols, _ = torch.nn.utils.rnn.pad_packed_sequence(batch.input)  # type: ignore[arg-type]
    torch.manual_seed(0)
    untrained = SequenceModel(
        cell, 7, 7, groups=options["groups"], hidden=options.get("hidden"),  # type: ignore[arg-type]
        keep_bias=3.0 if cell == "gru" else None, readout="every",
    )  # fmt: skip
    for when, each in (("start", untrained), ("end", model)):
        shares = []
        for b, length in enumerate(lengths):
            beta = analysis.record_gates(each, symbols[:length, b : b + 1]).beta[:, 0]
            # The last input is the symbol before last; the second one is row 1.
            shares.append((beta[1:] > 0.9).all(0).float().mean().item())
        assert found["kept"][when] == pytest.approx(sum(shares) / 256, abs=1e-6)
    assert found["kept"]["end"] > 0


def test_the_string_shown_is_a_test_string_and_the_same_for_every_run(tmp_path: Path) -> None:
    a, b = reber(tmp_path, 3), reber(tmp_path, 3, cell="gru", groups=None, hidden=5, seed=7)
    found = [examine.gates(each, load(tmp_path / each.id)) for each in (a, b)]
    assert found[0]["string"] == found[1]["string"]
    text = found[0]["string"]
    assert text[1] == text[-2]
    batch = Reber(3).test_batches()[0]
    sizes = batch.input.batch_sizes  # type: ignore[union-attr]
    assert len(text) - 1 == int((sizes > 128).sum())
    assert len(found[0]["beta"]) == len(text) - 1
    assert len(found[0]["beta"][0]) == 8
    x = F.one_hot(torch.tensor(["BTPSXVE".index(s) for s in text[:-1]]), 7).float()
    beta = analysis.record_gates(load(tmp_path / a.id), x.unsqueeze(1)).beta[:, 0]
    torch.testing.assert_close(torch.tensor(found[0]["beta"]) / 100, beta, atol=0.0051, rtol=0)


def test_runs_of_figures_are_looked_into_once(tmp_path: Path) -> None:
    ten, two = reber(tmp_path), reber(tmp_path, 2)
    assert examine.fill([ten, two]) == []
    assert ten.path is not None
    assert two.path is not None
    assert not (two.path / GATES).exists()
    first = (ten.path / GATES).read_bytes()
    assert json.loads(first)["id"] == ten.id
    assert len(first) < 60_000
    for weights in ten.path.glob("checkpoint-*"):
        weights.unlink()
    assert examine.fill([ten]) == []  # what was seen stays when the weights are gone
    assert (ten.path / GATES).read_bytes() == first
    (ten.path / GATES).unlink()
    assert examine.fill([ten]) == []  # and no weights are no error: there is nothing to see
    assert not (ten.path / GATES).exists()


def test_a_store_that_cannot_be_written_to_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading is enough for a report, and for drawings that go elsewhere."""
    ten = reber(tmp_path / "store")

    def refuse(path: Path, data: bytes) -> None:
        if path.is_relative_to(tmp_path / "store"):
            raise OSError(errno.EROFS, "Read-only file system")
        records.write_atomically(path, data)

    monkeypatch.setattr(examine, "write_atomically", refuse)
    (problem,) = examine.fill([ten])
    assert problem.endswith(f"{ten.path} cannot be written to: Read-only file system")
    assert len(examine.analyse(ten, tmp_path / "seen")) == 4


def test_what_was_seen_travels_with_the_record(tmp_path: Path) -> None:
    ten = reber(tmp_path / "there")
    examine.fill([ten])
    files = records.load_record(ten.path or "").to_files()
    assert GATES in files
    here = records.write_files(tmp_path / "here", files)
    assert seen(here, GATES) == seen(ten, GATES)


def test_error_norms_after_each_kept_epoch(
    tmp_path: Path, small_images: conftest.SmallImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "MOST", 784 * 8)  # several parts, the last one smaller
    data = small_images.write(tmp_path / "data")
    config = RunConfig(
        task="pmnist", cell="lstm", hidden=4, epochs=2, batch_size=25, keep_epochs=(1,)
    )
    record = train(config, out=tmp_path / "runs", data=data)
    assert examine.fill([record]) != []  # no image files where they are looked for
    assert not list(tmp_path.glob("runs/*/error-norms.json"))
    assert examine.fill([record], data) == []
    found = seen(record, NORMS)
    assert list(found["epochs"]) == ["1"]  # type: ignore[call-overload]
    model = load(tmp_path / "runs" / record.id, epoch=1)
    (batch,) = SequentialMNIST(permuted=True, directory=str(data)).test_batches()
    whole = analysis.error_norms(model, batch.input, batch.target)
    shown = torch.tensor(found["epochs"]["1"])  # type: ignore[index]
    torch.testing.assert_close(shown, whole, rtol=1e-3, atol=0)
    assert shown.numel() == 784


def test_error_norms_of_strings_are_those_of_the_symbol_before_last(tmp_path: Path) -> None:
    record = reber(tmp_path, 2)
    model = load(tmp_path / record.id)
    found = torch.tensor(examine.norms(record, model))
    assert found[-1] == 0  # what comes after the symbol before last has no part in it
    assert (found[:-2] > 0).all()
    sample = examine.take(Reber(2), record.config, 200)
    count = sample.input.size(1)
    assert count > 1
    total = torch.zeros(len(sample.input))
    for b in range(count):
        total += analysis.error_norms(
            model, sample.input[:, b : b + 1], sample.target[:, b],
            loss=lambda out, target: F.cross_entropy(out[-2], target[-2:-1], reduction="none"),
        )  # fmt: skip
    torch.testing.assert_close(found, total / count, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(task="adding", length=12, groups="4x2", steps=20),
        RunConfig(task="temporal-order", length=40, cell="lstm", hidden=5, steps=20),
        RunConfig(task="reber", multiple=1, cell="gru", hidden=5, steps=20),
    ],
    ids=lambda c: c.task,
)
def test_analyse_names_the_files_it_wrote(tmp_path: Path, config: RunConfig) -> None:
    pytest.importorskip("matplotlib")
    record = train(config, out=tmp_path / "runs")
    written = examine.analyse(record, tmp_path / "seen")
    assert [path.name for path in written] == [
        "gates.svg", "gates.pdf", "error-norms.svg", "error-norms.pdf",
    ]  # fmt: skip
    for path in written:
        assert path.parent == tmp_path / "seen"
        assert path.read_bytes()[:5] in (b"<?xml", b"%PDF-")
    (first, *_) = examine.analyse(record)
    assert first.parent == record.path


def test_the_command_prints_the_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record = reber(tmp_path, 1)
    code = "from torchgdu.cli import main; main()"
    line = [sys.executable, "-c", code, "analyse", record.id[:8], "--out", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    names = [Path(name) for name in done.stdout.split()]
    assert [name.name for name in names] == [
        "gates.svg", "gates.pdf", "error-norms.svg", "error-norms.pdf",
    ]  # fmt: skip
    assert all(name.is_file() and name.parent == record.path for name in names)
    wrong = subprocess.run([*line[:-3], "adding", *line[-2:]], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr == f"Error: no run 'adding' in {tmp_path}\n"


def test_damaged_weights_are_told(tmp_path: Path) -> None:
    record = reber(tmp_path)
    assert record.path is not None
    for weights in record.path.glob("checkpoint-*.safetensors"):
        weights.write_bytes(b"nothing")
    (problem,) = examine.fill([record])
    assert "is damaged: its checksum differs" in problem
    assert not (record.path / GATES).exists()


def test_analyse_without_weights_says_so(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record = reber(tmp_path, 1)
    assert record.path is not None
    for weights in record.path.glob("checkpoint-*"):
        weights.unlink()
    with pytest.raises(LookupError, match="without weights"):
        examine.analyse(record)


def test_overwrite_proportions_stay_constant_along_trained_sequences(tmp_path: Path) -> None:
    """P_α of a GDU that was trained on each task, over its real test sequences."""
    for config in (
        RunConfig(task="adding", length=100, groups="10x2+5x3x2.5", steps=200),
        RunConfig(task="reber", multiple=4, steps=200),
    ):
        record = train(config, out=tmp_path)
        model = load(tmp_path / record.id)
        sample = examine.take(make_task(config), config, 20)
        share = analysis.overwrite_proportion(model, sample.input)
        constant = Groups(str(config.groups)).overwrite_proportion
        torch.testing.assert_close(share, torch.full_like(share, constant), atol=1e-6, rtol=0)
        alpha = analysis.record_gates(model, sample.input).alpha
        assert alpha.std(0).max() > 0.01
