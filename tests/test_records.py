"""What a run leaves on disk: complete or as before, verified when read, one writer at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchgdu import records
from torchgdu.config import RunConfig
from torchgdu.records import Record, RunBusy, RunCorrupt, RunDirectory, RunError

CONFIG = RunConfig(task="adding", threads=1)


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"model/weight": torch.full((3, 2), float(step)), "rng": torch.arange(5)}


def three_checkpoints(out: Path) -> Path:
    """Checkpoints 0, 10, 20 (of which 10 and 20 stay), a metric line every 5 steps up to 25."""
    with RunDirectory.open(out, CONFIG) as run:
        run.save(0, tensors(0), {"step": 0})
        for step in (5, 10, 15, 20, 25):
            run.append({"step": step, "loss": 1 / step})
            if step % 10 == 0:
                run.save(step, tensors(step), {"step": step, "epoch": 0.5})
        return run.path


def test_round_trip(tmp_path: Path) -> None:
    path = three_checkpoints(tmp_path)
    with RunDirectory.open(tmp_path, CONFIG) as run:
        found = run.resume()
        assert found is not None
        weights, state, notes = found
        assert state == {"step": 20, "epoch": 0.5}
        assert notes == []
        assert {k: v.tolist() for k, v in weights.items()} == {
            k: v.tolist() for k, v in tensors(20).items()
        }
        assert [line["step"] for line in records.read_metrics(path)] == [5, 10, 15, 20]
        assert not (path / "checkpoint-0.json").exists()
        lines = run.metric_lines
        record = run.finish(Record(config=CONFIG, status="solved", step=20, metric_lines=lines))
    assert record.metrics[-1] == {"step": 20, "loss": 0.05}
    assert records.load_records(tmp_path) == [record]


def damage_tear(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def damage_flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    file.write_bytes(data)


def damage_empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_tear, damage_flip, damage_empty, Path.unlink])
@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_damaged_checkpoint_falls_back_loudly(
    tmp_path: Path, damage: Callable[[Path], None], suffix: str
) -> None:
    path = three_checkpoints(tmp_path)
    damage(path / f"checkpoint-20.{suffix}")
    with RunDirectory.open(tmp_path, CONFIG) as run:
        found = run.resume()
        assert found is not None
        weights, state, notes = found
        assert state["step"] == 10
        assert weights["model/weight"].unique().tolist() == [10.0]
        # Without its JSON half a checkpoint is one that never came to its end: nothing to say.
        whole = (suffix, damage) == ("json", Path.unlink)
        assert [("checkpoint-20" in n and "falling back" in n) for n in notes] == [True] * (
            not whole
        )
        assert [line["step"] for line in records.read_metrics(path)] == [5, 10]
        # The bad one does not count as one of the two newest ever after.
        run.save(12, tensors(12), {"step": 12})
        assert sorted(p.name for p in path.glob("*.json")) == [
            "checkpoint-10.json",
            "checkpoint-12.json",
            "config.json",
        ]


def test_nothing_good_left_is_an_error(tmp_path: Path) -> None:
    path = three_checkpoints(tmp_path)
    damage_tear(path / "checkpoint-20.safetensors")
    damage_tear(path / "checkpoint-10.json")
    with (
        RunDirectory.open(tmp_path, CONFIG) as run,
        pytest.raises(RunCorrupt, match=r"no good checkpoint is left.*to start anew"),
    ):
        run.resume()


def test_damaged_metrics_are_noticed(tmp_path: Path) -> None:
    path = three_checkpoints(tmp_path)
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text.replace('"step": 15', '"step": 16'))
    with RunDirectory.open(tmp_path, CONFIG) as run:
        found = run.resume()
        assert found is not None
        assert found[1]["step"] == 10
    (path / "metrics.jsonl").write_text("")
    with RunDirectory.open(tmp_path, CONFIG) as run, pytest.raises(RunCorrupt, match="no good"):
        run.resume()


def test_results_without_a_checkpoint_are_not_made_again_in_silence(tmp_path: Path) -> None:
    """The first checkpoint comes before the first result: somebody has removed it."""
    path = three_checkpoints(tmp_path)
    before = (path / "metrics.jsonl").read_bytes()
    for checkpoint in path.glob("checkpoint-*"):
        checkpoint.unlink()
    with (
        RunDirectory.open(tmp_path, CONFIG) as run,
        pytest.raises(RunCorrupt, match=r"has results, but there is no checkpoint.*to start anew"),
    ):
        run.resume()
    assert (path / "metrics.jsonl").read_bytes() == before
    (path / "metrics.jsonl").write_bytes(b"")
    with RunDirectory.open(tmp_path, CONFIG) as run:
        assert run.resume() is None


def test_half_a_metric_line_is_cut_and_not_shown(tmp_path: Path) -> None:
    path = three_checkpoints(tmp_path)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3')
    assert [line["step"] for line in records.load_record(path).metrics] == [5, 10, 15, 20, 25]


def test_finished_metrics_are_verified(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, CONFIG) as run:
        run.append({"step": 1})
        record = run.finish(
            Record(config=CONFIG, status="limit", step=1, metric_lines=run.metric_lines)
        )
    (run.path / "metrics.jsonl").write_text('{"step": 2}\n')
    with pytest.raises(RunCorrupt, match="checksum differs"):
        print(record.metrics)


def test_second_writer_is_refused_and_told_who(tmp_path: Path) -> None:
    code = (
        "import sys; from torchgdu.config import RunConfig; from torchgdu.records import *\n"
        "try: RunDirectory.open(sys.argv[1], RunConfig(task='adding', threads=1))\n"
        "except RunBusy as error: print(error)"
    )
    with RunDirectory.open(tmp_path, CONFIG):
        assert records.load_records(tmp_path)[0].status == "running"
        said = subprocess.run(
            [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
        )
        assert f"is in use by process {os.getpid()} on " in said.stdout
        with pytest.raises(RunBusy):
            RunDirectory.open(tmp_path, CONFIG)
    assert records.load_records(tmp_path)[0].status == "interrupted"
    RunDirectory.open(tmp_path, CONFIG).close()


def test_lock_is_free_after_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, sys; from torchgdu.config import RunConfig; from torchgdu.records import *\n"
        "run = RunDirectory.open(sys.argv[1], RunConfig(task='adding', threads=1))\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
    RunDirectory.open(tmp_path, CONFIG).close()


def test_a_foreign_description_is_refused(tmp_path: Path) -> None:
    path = three_checkpoints(tmp_path)
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(RunCorrupt, match="describes another run"):
        RunDirectory.open(tmp_path, CONFIG)
    (path / "config.json").write_text(text[:-20])
    with pytest.raises(RunCorrupt, match="cannot be read"):
        RunDirectory.open(tmp_path, CONFIG)


def test_failed_writes_leave_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = three_checkpoints(tmp_path)
    before = {p.name: p.read_bytes() for p in path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with RunDirectory.open(tmp_path, CONFIG) as run:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"No space left on device.*last checkpoint"):
            run.save(30, tensors(30), {"step": 30})
        monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before


def test_leftovers_of_a_kill_are_removed(tmp_path: Path) -> None:
    path = three_checkpoints(tmp_path)
    (path / ".checkpoint-30.safetensors.tmp").write_bytes(b"half")
    RunDirectory.open(tmp_path, CONFIG).close()
    assert not list(path.glob(".*"))


def test_no_directory_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="choose another --out"):
        RunDirectory.open(tmp_path / "file", CONFIG)


def finished(seed: int = 0, **values: object) -> Record:
    config = RunConfig(task="adding", threads=1, seed=seed)
    lines = [{"step": 20, "mse": 0.1}, {"step": 40, "mse": 0.001}]
    return Record(config=config, status="solved", step=40, steps_to={"solved": 40}, given=lines)


def test_records_travel_as_files(tmp_path: Path) -> None:
    sent = finished()
    got = records.write_files(tmp_path, sent.to_files())
    assert got == sent
    assert got.metrics == sent.metrics
    assert got.path == tmp_path / sent.id
    assert records.load_record(got.path) == sent
    with pytest.raises(ValueError, match="plain file name"):
        records.write_files(tmp_path, {**sent.to_files(), "../x": b""})


def test_finding_a_run_by_the_beginning_of_its_name(tmp_path: Path) -> None:
    runs = [records.write_files(tmp_path, finished(seed).to_files()) for seed in (0, 1)]
    assert records.find_record(tmp_path, runs[0].id) == runs[0]
    assert records.find_record(tmp_path, str(runs[1].path)) == runs[1]
    assert records.find_record(tmp_path, "adding-200_gdu-10x10_s1") == runs[1]
    assert records.find_record(tmp_path, runs[0].id[-10:-4]) == runs[0]
    with pytest.raises(LookupError, match="is the beginning of 2 runs: adding-200"):
        records.find_record(tmp_path, "adding")
    with pytest.raises(LookupError, match="no run 'reber'"):
        records.find_record(tmp_path, "reber")
    assert records.load_records(tmp_path / runs[0].id, tmp_path / runs[1].id) == runs


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 1}', '{"format": 2}', "null"],
)
def test_unreadable_records_are_one_clear_error(tmp_path: Path, text: str) -> None:
    good = records.write_files(tmp_path, finished(0).to_files())
    bad = records.write_files(tmp_path, finished(1).to_files())
    assert bad.path is not None
    (bad.path / "record.json").write_text(text)
    with pytest.raises(RunCorrupt, match=bad.id):
        records.load_records(tmp_path)
    errors: list[RunCorrupt] = []
    assert records.load_records(tmp_path, errors=errors) == [good]
    assert len(errors) == 1


def test_a_run_given_up_counts_as_failed_until_it_is_tried_again(tmp_path: Path) -> None:
    failed = records.write_failure(tmp_path, CONFIG, "its worker died 3 times")
    assert records.load_records(tmp_path) == [failed]
    assert (failed.status, failed.done) == ("failed", False)
    assert failed.failure == "its worker died 3 times"
    with RunDirectory.open(tmp_path, CONFIG):
        assert records.finished(tmp_path, CONFIG) is None
    assert records.load_records(tmp_path)[0].status == "interrupted"
    records.write_failure(tmp_path, CONFIG, "again")
    done = records.write_files(tmp_path, Record(config=CONFIG, status="solved").to_files())
    assert records.load_records(tmp_path) == [done]
    assert not (tmp_path / done.id / "failure.json").exists()


def test_a_record_under_anothers_name_is_refused(tmp_path: Path) -> None:
    values = json.loads(finished().to_json())
    values["config"]["seed"] = 5
    with pytest.raises(ValueError, match="belongs to run"):
        Record.from_json(json.dumps(values))


def test_listing_thousands_of_runs_is_cheap(tmp_path: Path) -> None:
    """Reading 1,000 records costs at most what parsing their JSON and config costs, times four."""
    import time

    for seed in range(1000):
        path = tmp_path / str(seed)
        path.mkdir()
        (path / "record.json").write_text(finished(seed).to_json())
    start = time.perf_counter()
    text = finished().to_json()
    for _ in range(1000):
        Record.from_json(text)
    parsed = time.perf_counter()
    assert len(records.load_records(tmp_path)) == 1000
    assert time.perf_counter() - parsed < 4 * (parsed - start)
