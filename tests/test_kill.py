"""Whatever ends a run or keeps it from writing, the same call goes on to the very same end."""

from __future__ import annotations

import builtins
import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kill_worker import RUNS
from torchgdu import records
from torchgdu.config import RunConfig
from torchgdu.records import Record, RunError
from torchgdu.train import train

HERE = Path(__file__).parent
CONFIG = RunConfig(task="adding", length=10, groups="4x2", threads=1, steps=6, test_every=2)


def same(record: Record) -> tuple[dict[str, Any], bytes, dict[str, Any]]:
    """What must be equal, bit for bit, however often a run was interrupted."""
    values = record.to_dict()
    for name in records.VOLATILE:
        del values[name]
    assert record.path is not None
    weights = records.read_weights(record.path)
    weights |= {p.name: load_file(p) for p in record.path.glob("epoch-*")}  # type: ignore[misc]
    return (
        values,
        (record.path / "metrics.jsonl").read_bytes(),
        {name: exact(value) for name, value in sorted(weights.items())},
    )


def exact(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: exact(part) for name, part in sorted(value.items())}
    return value.numpy().tobytes()


def killed(tmp_path: Path, task: str, kills: int) -> None:
    words = (HERE / "kill_worker.py", tmp_path, tmp_path / "data", task, kills)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout)
    assert len(steps) == kills
    assert len(set(steps)) > kills / 2, f"too few moments: {steps}"
    (whole,), (ended,) = (records.load_records(tmp_path / part) for part in ("whole", "killed"))
    assert ended.done
    assert same(ended) == same(whole)
    assert not list((tmp_path / "killed").glob("*/.*"))


def test_killed_at_random_moments(tmp_path: Path) -> None:
    killed(tmp_path, "adding", 8)


@pytest.mark.slow
@pytest.mark.parametrize("task", RUNS)
def test_every_task_killed_at_twenty_random_moments(tmp_path: Path, task: str) -> None:
    killed(tmp_path, task, 20)


# --- Signals, on the command line --------------------------------------------------------------

PROGRAM = [sys.executable, "-c", "from torchgdu.cli import main; main()"]
LONG = [
    "train", "temporal-order", "--length", "30", "--groups", "5x2", "--threads", "1",
    "--steps", "1500", "--test-every", "50", "--lr", "1e-6",
]  # fmt: skip


def torchgdu(*words: object, **options: Any) -> subprocess.Popen[str]:
    command = [*PROGRAM, *map(str, words)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, **options)


def wait_for_metrics(out: Path, run: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if any(path.stat().st_size for path in out.glob("*/metrics.jsonl")):
            return
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    raise AssertionError("no test within a minute")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_prints_the_command_that_goes_on(
    tmp_path: Path, number: int, code: int
) -> None:
    with torchgdu(*LONG, "--out", "my runs", cwd=tmp_path) as run:
        wait_for_metrics(tmp_path / "my runs", run)
        run.send_signal(signal.SIGSTOP)  # meanwhile nobody else may write there
        with torchgdu(*LONG, "--out", "my runs", cwd=tmp_path) as second:
            _, complaint = second.communicate()
        assert second.returncode == 5
        assert f"is in use by process {run.pid} on " in complaint
        run.send_signal(signal.SIGCONT)
        run.send_signal(number)
        _, said = run.communicate()
    assert run.returncode == code
    (left,) = records.load_records(tmp_path / "my runs")
    assert (left.status, f"at step {left.step:,} and saved" in said) == ("interrupted", True)
    assert 0 < left.step < 1500
    program, *words = shlex.split(said.splitlines()[-1])
    assert program == "torchgdu"
    with torchgdu(*words, cwd=tmp_path) as again:
        shown, complaint = again.communicate()
    assert again.returncode == 3, complaint
    assert f"going on from step {left.step:,}" in shown
    with torchgdu(*LONG, "--out", tmp_path / "whole", "--quiet") as whole:
        assert whole.communicate() == ("", "")
    assert whole.returncode == 3
    (first,), (other,) = (records.load_records(tmp_path / p) for p in ("my runs", "whole"))
    assert same(first) == same(other)


# --- Faults of the disk ------------------------------------------------------------------------


class Disk:
    """Counts what is done to the disk, and fails from the `full`th time on until repaired."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, full: int, number: int) -> None:
        self.count, self._full, self._number = 0, full, number
        for name in ("fsync", "replace", "truncate", "unlink"):
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))
        monkeypatch.setattr(records, "open", self._open, raising=False)

    def check(self) -> None:
        self.count += 1
        if self.count >= self._full:
            raise OSError(self._number, os.strerror(self._number))

    def _failing(self, operation: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.check()
            return operation(*arguments, **options)

        return call

    def _open(self, path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if mode in ("r", "rb"):
            return builtins.open(path, mode, *rest, **options)
        self.check()
        file = builtins.open(path, mode, *rest, **options)  # noqa: SIM115
        disk, write = self, file.write

        class Torn:
            """Writes half of what it is given when the disk is full."""

            def write(self, data: Any) -> int:
                try:
                    disk.check()
                except OSError:
                    write(data[: len(data) // 2])
                    raise
                return int(write(data))

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

        return Torn()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return same(train(CONFIG, out=tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_every_write_that_can_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, undisturbed: Any
) -> None:
    """The disk fails at the first, second, … thing done to it: one clear error, nothing lost."""
    full = 0
    while True:
        full += 1
        out = tmp_path / str(full)
        with monkeypatch.context() as patched:
            disk = Disk(patched, full, number)
            said = ""
            try:
                train(CONFIG, out=out, save_every=0)
            except RunError as error:
                said = str(error)
            if disk.count < full:
                break
        assert os.strerror(number) in said
        if (left := next(iter(out.iterdir()))).joinpath("config.json").exists():
            assert records.load_record(left).status in ("interrupted", "limit")
        assert same(train(CONFIG, out=out)) == undisturbed
    assert disk.count > 50, "too little was made to fail"


def test_a_directory_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(monkeypatch, 1, errno.EROFS)
    with pytest.raises(RunError, match=r"cannot write to .*Read-only file system; choose another"):
        train(CONFIG, out=tmp_path)


SPACE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """An empty directory on which a script may mount a disk of its own."""
    probe = [*SPACE, f"mount -t tmpfs none {tmp_path}"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this system lets no user mount a disk of their own")
    return tmp_path


@pytest.mark.slow
def test_a_full_and_a_read_only_disk(small_disk: Path) -> None:
    """A disk fills up under a run, then can only be read; writable again, all goes on."""
    run = shlex.join([*PROGRAM, *LONG, "--out", str(small_disk)])
    script = f"""
        mount -t tmpfs -o size=400k none {small_disk}
        dd if=/dev/zero of={small_disk}/ballast bs=1k count=370 2> /dev/null
        {run} --save-every 0.05 --quiet; echo "full $?"
        ls {small_disk}/*/record.json 2> /dev/null
        rm {small_disk}/ballast
        mount -o remount,ro {small_disk}
        {run} --quiet; echo "read-only $?"
        mount -o remount,rw {small_disk}
        {run} --quiet; echo "again $?"
        {run} --quiet; echo "done $?"
        cp -r {small_disk}/. kept
    """
    kept = small_disk.parent / f"{small_disk.name}-kept"
    (kept / "kept").mkdir(parents=True)
    done = subprocess.run([*SPACE, script], capture_output=True, text=True, cwd=kept, check=False)
    codes = dict(line.split() for line in done.stdout.splitlines())
    assert codes == {"full": "5", "read-only": "5", "again": "3", "done": "3"}, done
    assert "No space left on device" in done.stderr
    assert "Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr
    whole = subprocess.run(
        [*PROGRAM, *LONG, "--out", str(kept / "whole"), "--quiet"],
        check=False,
    )
    assert whole.returncode == 3
    (ended,) = records.load_records(kept / "kept")
    (other,) = records.load_records(kept / "whole")
    assert same(ended) == same(other)
