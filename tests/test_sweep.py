"""Every run exactly once or a clear failure, whatever is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import KilledWorker

from torchgdu import records
from torchgdu import sweep as module
from torchgdu.config import ConfigError, RunConfig
from torchgdu.observe import Observer, Progress
from torchgdu.records import Record, RunBusy, RunCorrupt, RunDirectory, RunError
from torchgdu.sweep import TRIES, Job, Watcher, asked, stored, sweep
from torchgdu.tasks import DataError
from torchgdu.train import DriftError, Interrupted, resolve, train

TINY = RunConfig(task="adding", length=10, groups="2x2", steps=60, threads=1)
RUNS = [TINY.replace(seed=seed) for seed in range(3)]


class Listening(Watcher):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def noted(self, message: str) -> None:
        self.notes.append(message)


def comparable(out: Path) -> dict[str, tuple[dict[str, Any], bytes]]:
    """Everything about the finished runs of a store but times, host and process."""
    found = {}
    for record in records.load_records(out):
        assert record.path is not None
        if not record.done:
            continue
        values = record.to_dict()
        del values["process"]
        found[record.id] = (values, (record.path / "metrics.jsonl").read_bytes())
    return found


@pytest.fixture(scope="module")
def made_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three runs, one after the other, without a scheduler."""
    out = tmp_path_factory.mktemp("here")
    sweep(RUNS, out)
    return out


def made_up(config: RunConfig, **values: Any) -> Record:
    fields: dict[str, Any] = {"status": "solved", "step": 40, "steps_to": {"solved": 40}}
    return Record(config=resolve(config), **(fields | values))


# --- The store ---------------------------------------------------------------------------------


def test_what_is_stored_is_not_repeated(
    made_here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = shutil.copytree(made_here, tmp_path / "out")
    before = comparable(out)
    assert len(before) == 3
    monkeypatch.setattr(module, "train", None)
    jobs = sweep([*RUNS, RUNS[0]], out)
    assert [(job.config, job.state) for job in jobs] == [(run, "done") for run in RUNS]
    assert comparable(out) == before


def test_a_result_of_any_backend_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "train", None)
    for run, backend in zip(RUNS, ("engine", "reference", "reference"), strict=True):
        record = made_up(run)
        record = Record(config=record.config.replace(backend=backend), status="limit", step=60)
        records.write_files(tmp_path / "below" / backend, record.to_files())
    assert [job.state for job in sweep(RUNS, tmp_path)] == ["done"] * 3
    assert set(stored(tmp_path)) == {asked(resolve(run)) for run in RUNS}


def test_the_finished_one_of_two_backends_counts(tmp_path: Path) -> None:
    run = resolve(TINY)
    with RunDirectory.open(tmp_path, run.replace(backend="engine")):
        pass
    done = Record(config=run.replace(backend="reference"), status="limit", step=60)
    records.write_files(tmp_path, done.to_files())
    assert stored(tmp_path)[asked(run)] == done


def test_an_interrupted_run_goes_on(made_here: Path, tmp_path: Path) -> None:
    class Stop(Observer):
        def tested(self, run: Progress, line: Mapping[str, Any]) -> None:
            run.stop = signal.SIGTERM

    with pytest.raises(Interrupted, match="saved at step 20"):
        train(RUNS[1], out=tmp_path, observer=Stop())
    sweep(RUNS, tmp_path)
    assert comparable(tmp_path) == comparable(made_here)
    resumed = {r.config.seed: r.process["resumes"] for r in records.load_records(tmp_path)}
    assert [len(resumed[seed]) for seed in range(3)] == [0, 1, 0]
    assert resumed[1][0]["step"] == 20


@pytest.mark.parametrize("name", ["record.json", "metrics.jsonl"])
def test_a_damaged_record_is_a_clear_failure(made_here: Path, tmp_path: Path, name: str) -> None:
    out = shutil.copytree(made_here, tmp_path / "out")
    bad = next(r for r in records.load_records(out) if r.config.seed == 1)
    assert bad.path is not None
    text = (bad.path / name).read_bytes()
    (bad.path / name).write_bytes(text[: len(text) // 2])
    with pytest.raises(RunCorrupt, match=rf"{bad.id}(?s:.*)Move what is damaged away"):
        sweep(RUNS, out)
    shutil.rmtree(bad.path)
    assert [job.state for job in sweep(RUNS, out)] == ["done"] * 3
    assert comparable(out) == comparable(made_here)


def test_two_sweeps_do_not_share_a_store(tmp_path: Path) -> None:
    with (
        module._locked(tmp_path / "new" / "store") as store,
        pytest.raises(RunBusy, match="another sweep is at work"),
    ):
        sweep(RUNS, store)
    assert [job.state for job in sweep([], tmp_path / "new" / "store")] == []


def test_an_unusable_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write to .*file/below.*choose another --out"):
        sweep(RUNS, tmp_path / "file" / "below")


# --- Failures ----------------------------------------------------------------------------------


def failing(times: int, error: Exception) -> Callable[..., Record]:
    """Training in which seed 1 fails some times."""
    left = [times]

    def fake(config: RunConfig, **options: Any) -> Record:
        if config.seed == 1 and left[0]:
            left[0] -= 1
            raise error
        return train(config, **options)

    return fake


def test_a_failing_run_is_tried_again(
    made_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "train", failing(TRIES - 1, OSError("disk on\nfire")))
    watcher = Listening()
    jobs = sweep(RUNS, tmp_path, watcher=watcher)
    assert [(job.state, job.tries) for job in jobs] == [("done", 0), ("done", 2), ("done", 0)]
    assert len(watcher.notes) == 2
    assert all("disk on fire; trying again" in note for note in watcher.notes)
    assert comparable(tmp_path) == comparable(made_here)


def test_a_run_that_always_fails_is_noted_and_the_next_sweep_tries_it_again(
    made_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "train", failing(TRIES, ValueError("no")))
    watcher = Listening()
    jobs = sweep(RUNS, tmp_path, watcher=watcher)
    assert [job.state for job in jobs] == ["done", "failed", "done"]
    assert "ValueError: no; given up" in watcher.notes[-1]
    found = stored(tmp_path)
    assert [found[asked(resolve(run))].status for run in RUNS] == ["limit", "failed", "limit"]
    assert found[asked(resolve(RUNS[1]))].failure == "ValueError: no"
    assert [job.state for job in sweep(RUNS, tmp_path)] == ["done"] * 3
    assert comparable(tmp_path) == comparable(made_here)


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (DriftError("torch was 2.5, is 2.6"), 1),
        (ConfigError("device", "cuda cannot be used here"), 1),
        (DataError("mnist is not here"), TRIES),
    ],
)
def test_circumstances_are_no_failure_of_the_run(
    made_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, tries: int
) -> None:
    """What is changed by changing them is said, and nothing is noted in the store."""
    monkeypatch.setattr(module, "train", failing(TRIES, error))
    watcher = Listening()
    jobs = sweep(RUNS, tmp_path, watcher=watcher)
    assert [(job.state, job.tries) for job in jobs] == [("done", 0), ("failed", tries), ("done", 0)]
    assert watcher.notes[-1].endswith(f"{error}; given up")
    assert not (tmp_path / resolve(RUNS[1]).identity()).exists()
    monkeypatch.setattr(module, "train", train)
    assert [job.state for job in sweep(RUNS, tmp_path)] == ["done"] * 3
    assert comparable(tmp_path) == comparable(made_here)


def test_a_run_in_use_elsewhere_fails_but_is_not_noted_as_failed(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, resolve(RUNS[1])):
        jobs = sweep(RUNS, tmp_path)
        assert [job.state for job in jobs] == ["done", "failed", "done"]
        assert jobs[1].record is not None
        assert "in use by process" in str(jobs[1].record.failure)
        assert records.load_record(tmp_path / resolve(RUNS[1]).identity()).status == "running"
    assert [job.state for job in sweep(RUNS, tmp_path)] == ["done"] * 3


def test_more_than_one_worker_without_dask_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    for options in ({"workers": 2}, {"cluster": "tcp://127.0.0.1:1"}):
        with pytest.raises(ConfigError, match=r"pip install 'torchgdu\[cluster\]'"):
            sweep(RUNS, tmp_path, **options)
    assert [job.state for job in sweep(RUNS[:1], tmp_path)] == ["done"]  # one needs none


def test_a_plan_names_more_as_runs_end(tmp_path: Path) -> None:
    """The second run follows from how the first one ended, the third from the second."""
    seen: list[dict[int, str]] = []

    def plan(ended: Mapping[RunConfig, Record]) -> Sequence[RunConfig]:
        seen.append({config.seed: record.status for config, record in ended.items()})
        return RUNS[: 1 + len({config.seed for config in ended})]

    jobs = sweep(plan, tmp_path)
    assert [job.config.seed for job in jobs] == [0, 1, 2]
    assert seen == [{}, {0: "limit"}, {0: "limit", 1: "limit"}, dict.fromkeys(range(3), "limit")]


# --- Workers, by a client that does as it is told ------------------------------------------------


class Future:
    def __init__(self, key: str, status: str = "pending", result: Any = None) -> None:
        self.key, self.status, self._result = key, status, result

    def result(self, timeout: float) -> Any:
        assert timeout > 0
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


class Client:
    """Answers each submission with the next of the given ends, a status and a result."""

    def __init__(self, *ends: tuple[str, Any]) -> None:
        self.status = "running"
        self.sizes = {"a": 1, "b": 1}
        self.submitted: list[int] = []
        self.cancelled: list[Any] = []
        self.most = 0
        self._ends = list(ends)
        self._open: list[Future] = []
        self.handler: Callable[[Any], None] = print

    def nthreads(self) -> dict[str, int]:
        return self.sizes

    def subscribe_topic(self, topic: str, handler: Callable[[Any], None]) -> None:
        self.handler = handler

    def submit(self, function: Any, run: str, *rest: Any, key: str, pure: bool) -> Future:
        config = RunConfig.from_json(run)
        self.submitted.append(config.seed)
        assert not pure
        status, result = self._ends.pop(0) if self._ends else ("finished", made_up(config))
        if isinstance(result, Record):
            result = result.to_files()
        self._open.append(Future(key, status, result))
        self.most = max(self.most, sum(f.status == "pending" for f in self._open))
        return self._open[-1]

    def cancel(self, futures: Sequence[Any]) -> None:
        self.cancelled += futures


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 1.0)


def crew(out: Path, client: Client, runs: Sequence[RunConfig] = RUNS) -> module._Crew:
    out.mkdir(exist_ok=True)
    work = module._Work(lambda _: runs, out, Listening())
    return module._Crew(client, work, module._Order(None, False, 30.0), None)  # type: ignore[arg-type]


def complete(made: module._Crew) -> list[Job]:
    for _ in range(50):
        made.fill()
        if made.idle:
            return list(made._work.jobs.values())
        made.look()
    raise AssertionError("the sweep does not end")


@pytest.mark.parametrize(
    "end",
    [("cancelled", None), ("lost", None), ("error", module._GivenBack("saved at step 3"))],
    ids=str,
)
def test_what_is_lost_on_the_way_is_made_again(tmp_path: Path, end: tuple[str, Any]) -> None:
    """However often: it is no fault of the run."""
    client = Client(*[end] * (TRIES + 2))
    jobs = complete(crew(tmp_path, client))
    assert [(job.state, job.tries) for job in jobs] == [("done", 0)] * 3
    assert len(client.submitted) == 3 + TRIES + 2
    assert len(records.load_records(tmp_path)) == 3


def test_a_worker_that_always_dies_gives_the_run_up(tmp_path: Path) -> None:
    killed = KilledWorker("task", SimpleNamespace(address="tcp://b"), 2)  # type: ignore[arg-type]
    jobs = complete(crew(tmp_path, Client(("error", killed))))
    assert [job.state for job in jobs] == ["failed", "done", "done"]
    failed = records.load_record(tmp_path / resolve(RUNS[0]).identity())
    assert (failed.status, failed.failure) == ("failed", "3 workers died while they made it")


def test_a_failure_on_a_worker_is_tried_again_then_noted(tmp_path: Path) -> None:
    fault = ("error", RunError("disk full (on b)"))
    client = Client(fault, ("pending", None))
    made = crew(tmp_path, client, RUNS[:1])
    made.fill()
    made.look()
    assert made._work.next() is not None  # waits for its second try
    client = Client(*[fault] * TRIES)
    (job,) = complete(crew(tmp_path, client, RUNS[:1]))
    assert (job.state, job.tries, client.submitted) == ("failed", TRIES, [0] * TRIES)
    assert records.load_records(tmp_path)[0].failure == "disk full (on b)"
    client = Client(("error", module._Refused("torch was 2.5, is 2.6 (on b)")))
    (job,) = complete(crew(tmp_path / "other", client, RUNS[:1]))
    assert (job.state, job.tries, client.submitted) == ("failed", 1, [0])
    assert records.load_records(tmp_path / "other") == []


def test_a_result_lost_with_its_worker_is_waited_for(tmp_path: Path) -> None:
    client = Client(("finished", TimeoutError()))
    made = crew(tmp_path, client, RUNS[:1])
    made.fill()
    made.look()
    assert not made.idle
    client._open[0]._result = made_up(RUNS[0]).to_files()
    assert [job.state for job in complete(made)] == ["done"]
    assert client.submitted == [0]


def test_a_second_record_changes_nothing(tmp_path: Path) -> None:
    made = crew(tmp_path, Client(), RUNS[:1])
    first = records.write_files(tmp_path, made_up(RUNS[0], process={"host": "first"}).to_files())
    assert first.path is not None
    before = (first.path / "record.json").read_bytes()
    jobs = complete(made)
    assert [job.state for job in jobs] == ["done"]
    assert (first.path / "record.json").read_bytes() == before
    assert jobs[0].record == first


@pytest.mark.parametrize("text", [b'{"format": 1', None], ids=["torn", "of another run"])
def test_a_damaged_answer_is_a_failure_of_the_run(tmp_path: Path, text: bytes | None) -> None:
    files = made_up(RUNS[1]).to_files()
    files = files | {"record.json": text} if text else files
    (job,) = complete(crew(tmp_path, Client(*[("finished", files)] * TRIES), RUNS[:1]))
    assert job.state == "failed"
    assert [r.status for r in records.load_records(tmp_path)] == ["failed"]


def test_a_store_that_cannot_be_written_ends_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no fault of the runs: none is given up."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records, "write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        complete(crew(tmp_path, Client()))


def test_a_scheduler_that_is_gone_ends_the_sweep(tmp_path: Path, patient: None) -> None:
    client = Client(("finished", made_up(RUNS[0])), *[("pending", None)] * 2)
    made = crew(tmp_path, client)
    made.fill()
    made.look()
    client.status = "connecting"
    start = time.monotonic()
    with pytest.raises(RunError, match=r"the scheduler is gone\. What is done is stored"):
        complete(made)
    assert time.monotonic() - start >= 1
    assert [r.config.seed for r in records.load_records(tmp_path)] == [0]
    client.status = "closed"
    with pytest.raises(RunError, match="the scheduler is gone"):
        made.look()


def test_no_more_runs_at_a_time_than_workers_and_these_may_come_and_go(tmp_path: Path) -> None:
    client = Client(*[("pending", None)] * 3)
    made = crew(tmp_path, client)
    made.fill()
    assert client.submitted == [0, 1]
    client.sizes = {"a": 1, "b": 1, "c": 1}
    made._counted -= 10
    made.fill()
    assert client.submitted == [0, 1, 2]
    client.sizes = {"a": 2}
    made._counted -= 10
    with pytest.raises(RunError, match="a: start workers with --nthreads 1"):
        made.fill()


def test_news_of_a_run_reach_its_job_and_strangers_are_ignored(tmp_path: Path) -> None:
    client = Client(("pending", None))
    made = crew(tmp_path, client, RUNS[:1])
    made.fill()
    (key,) = made._futures
    place = {"step": 20, "last_step": 60, "scores": {"mse": 0.1}}
    client.handler((0.0, {"key": "other", "began": True, **place}))
    client.handler((0.0, {"key": key, "began": True, **place, "step": 10}))
    client.handler((0.0, {"key": key, "began": False, **place}))
    client.handler((0.0, {"key": key, "note": "a checkpoint was damaged"}))
    made._listen(0.05)
    (job,) = made._work.jobs.values()
    assert (job.step, job.last_step, job.scores) == (20, 60, {"mse": 0.1})
    assert 0 < job.seconds_left < 60
    assert isinstance(made._work.watcher, Listening)
    assert made._work.watcher.notes == [f"{job.run.identity()}: a checkpoint was damaged"]


def test_stopping_waits_for_the_runs_that_began(tmp_path: Path, patient: None) -> None:
    client = Client(("pending", None), ("pending", None))
    made = crew(tmp_path, client)
    made.fill()
    first, _ = made._futures
    news = {"began": True, "step": 0, "last_step": 60, "scores": {}}
    client.handler((0.0, {"key": first, **news}))
    made._listen(0.01)
    client.handler((0.0, {"key": first, "ended": True}))
    start = time.monotonic()
    made.stop(lambda: False)
    assert time.monotonic() - start < 0.9
    assert len(client.cancelled) == 2


# --- Real processes ----------------------------------------------------------------------------

LONG = [TINY.replace(steps=6000, stop="never", seed=seed) for seed in range(4)]


def test_workers_make_the_same_records(made_here: Path, tmp_path: Path) -> None:
    watcher = Listening()
    jobs = sweep(RUNS, tmp_path, workers=2, watcher=watcher)
    assert [job.state for job in jobs] == ["done"] * 3
    assert watcher.notes == []
    assert comparable(tmp_path) == comparable(made_here)
    hosts = {r.process["process"] for r in records.load_records(tmp_path)}
    assert os.getpid() not in hosts
    assert len(hosts) == 2


class Driver:
    """A sweep in its own process group."""

    def __init__(self, out: Path, runs: Sequence[RunConfig], **options: Any) -> None:
        self.out, self.log = out, out.with_suffix(".log")
        self.log.touch()
        script = Path(__file__).with_name("sweep_driver.py")
        options.setdefault("save_every", 0.2)
        command = [sys.executable, str(script), str(out), json.dumps(options)]
        command.append(json.dumps([asdict(run) for run in runs]))
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def children(self) -> list[int]:
        """The processes of its workers."""
        path = Path(f"/proc/{self.process.pid}/task")
        pids = {int(p) for t in path.iterdir() for p in (t / "children").read_text().split()}
        return [p for p in pids if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self, code: int = 0, timeout: float = 240) -> None:
        assert self.process.wait(timeout) == code, self.text


def until(true: Callable[[], bool], timeout: float = 120) -> None:
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def checkpoints(*folders: Path) -> int:
    """How many runs are in the middle of their work."""
    names = [p for folder in folders for p in folder.glob("*/checkpoint-*.json")]
    under_way = {p.parent for p in names if p.name != "checkpoint-0.json"}
    return sum(not (run / "record.json").exists() for run in under_way)


def gone(pids: Sequence[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.fixture(scope="module")
def long_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("long")
    sweep(LONG, out)
    return out


@pytest.mark.slow
def test_a_killed_worker_costs_nothing_but_time(long_here: Path, tmp_path: Path) -> None:
    driver = Driver(tmp_path / "out", LONG, workers=2)
    until(lambda: checkpoints(driver.out) == 2)
    os.kill(driver.children[0], signal.SIGKILL)
    driver.wait()
    assert comparable(driver.out) == comparable(long_here)
    resumed = [r for r in records.load_records(driver.out) if r.process["resumes"]]
    assert len(resumed) == 1  # on this machine its checkpoint is at hand
    assert len(re.findall(r": (?:stopped|solved) at", driver.text)) == 4


@pytest.mark.slow
def test_a_run_that_kills_its_workers_is_given_up_and_the_others_are_not(
    made_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deadly(run: str, *rest: Any) -> Any:
        from torchgdu import sweep

        if RunConfig.from_json(run).seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return sweep._make(run, *rest)

    monkeypatch.setattr(module, "_make", deadly)
    jobs = sweep(RUNS, tmp_path, workers=2)
    assert [job.state for job in jobs] == ["done", "failed", "done"]
    assert jobs[1].record is not None
    assert jobs[1].record.failure == f"{TRIES} workers died while they made it"
    expected = comparable(made_here)
    del expected[jobs[1].record.id]
    assert comparable(tmp_path) == expected


def test_what_figures_need_of_the_weights_comes_back_without_them(tmp_path: Path) -> None:
    run = RunConfig(task="reber", multiple=10, groups="2x2", steps=20, threads=1)
    record = train(run, out=tmp_path)
    files = module._files(record, module._Order(None, False, 30.0))
    assert sorted(files) == ["config.json", "gates.json", "metrics.jsonl", "record.json"]
    moved = records.write_files(tmp_path / "elsewhere", files)
    assert moved.path is not None
    assert {path.name: path.read_bytes() for path in moved.path.iterdir()} == files
    assert moved == record


@pytest.mark.slow
def test_a_killed_driver_takes_its_workers_along_and_can_start_again(
    long_here: Path, tmp_path: Path
) -> None:
    driver = Driver(tmp_path / "out", LONG, workers=2)
    until(lambda: checkpoints(driver.out) == 2)
    workers = driver.children
    assert len(workers) == 2
    driver.kill()
    until(lambda: gone(workers), 15)
    again = Driver(tmp_path / "out", LONG, workers=2)
    again.wait()
    assert comparable(again.out) == comparable(long_here)
    resumed = [r for r in records.load_records(again.out) if r.process["resumes"]]
    assert len(resumed) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_saves_and_leaves_no_process(
    long_here: Path, tmp_path: Path, workers: int
) -> None:
    """Ctrl-C reaches every process of the terminal."""
    driver = Driver(tmp_path / "out", LONG, workers=workers, save_every=1000)
    until(lambda: "4 runs:" in driver.text and len(list(driver.out.glob("*/metrics.jsonl"))) > 0)
    children = driver.children
    os.killpg(driver.process.pid, signal.SIGINT)
    driver.wait(130)
    assert "Traceback" not in driver.text
    until(lambda: gone(children), 5)
    assert checkpoints(driver.out) >= 1  # which only the interrupt wrote
    Driver(driver.out, LONG, workers=workers).wait()
    assert comparable(driver.out) == comparable(long_here)


@pytest.mark.slow
def test_local_workers_listen_to_this_machine_only(tmp_path: Path) -> None:
    """Every listening socket of driver and workers is bound to 127.0.0.1."""
    driver = Driver(tmp_path / "out", LONG, workers=2)
    until(lambda: checkpoints(driver.out) == 2)
    own = set()
    for pid in [driver.process.pid, *driver.children]:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if link.is_symlink() and os.readlink(link).startswith("socket:["):
                own.add(os.readlink(link)[8:-1])
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{driver.process.pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in own:
                listening.append(local.split(":")[0])
    driver.kill()
    assert set(listening) == {"0100007F"}


@contextmanager
def scheduler(*prefix: str, host: str = "127.0.0.1", port: int) -> Iterator[subprocess.Popen[Any]]:
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", host,
               "--port", str(port), "--no-dashboard", "--dashboard-address", ":0"]  # fmt: skip
    process = subprocess.Popen([*prefix, *command], start_new_session=True, stderr=-3)
    try:
        yield process
    finally:
        with_group(process, signal.SIGKILL)


@contextmanager
def worker(*prefix: str, address: str, home: Path) -> Iterator[subprocess.Popen[Any]]:
    home.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--nthreads", "1",
               "--no-dashboard", "--local-directory", str(home)]  # fmt: skip
    environment = {**os.environ, "XDG_CACHE_HOME": str(home / "cache")}
    process = subprocess.Popen(
        [*prefix, *command], start_new_session=True, stderr=-3, env=environment
    )
    try:
        yield process
    finally:
        with_group(process, signal.SIGKILL)


def with_group(process: subprocess.Popen[Any], number: int) -> None:
    """Send a signal to a process and all it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    process.wait()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_a_lost_scheduler_is_a_clear_failure_and_nothing_is_lost(
    long_here: Path, tmp_path: Path
) -> None:
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    store = tmp_path / "out"
    caches = [tmp_path / name / "cache" / "torchgdu" / "runs" for name in "ab"]
    for attempt in range(2):
        with (
            scheduler(port=port) as head,
            worker(address=address, home=tmp_path / "a"),
            worker(address=address, home=tmp_path / "b"),
        ):
            driver = Driver(store, LONG, cluster=address)
            if attempt == 0:
                until(lambda: checkpoints(*caches) == 2)
                with_group(head, signal.SIGKILL)
                driver.wait(5)
                assert "the scheduler is gone" in driver.text
            else:
                driver.wait()
    assert comparable(store) == comparable(long_here)
    driver = Driver(store, [TINY], cluster=address)
    driver.wait(5)
    assert f"no scheduler at {address}" in driver.text


@contextmanager
def machines(count: int) -> Iterator[tuple[str, list[str]]]:
    """Network namespaces joined by a bridge; yields the address of this end, and their names."""
    tag = f"tg{os.getpid() % 10000}"
    net = f"10.{213 + os.getpid() % 40}.{os.getpid() % 250}"

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    names = [f"{tag}n{i}" for i in range(count)]
    try:
        ip("link", "add", f"{tag}b", "type", "bridge")
        ip("addr", "add", f"{net}.1/24", "dev", f"{tag}b")
        ip("link", "set", f"{tag}b", "up")
        for i, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"{tag}v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{tag}v{i}", "master", f"{tag}b", "up")
            ip("-n", name, "addr", "add", f"{net}.{i + 2}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield f"{net}.1", names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{tag}b"], capture_output=True)


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
)
def test_machines_without_a_shared_disk_one_of_which_dies(long_here: Path, tmp_path: Path) -> None:
    """Three machines; the second is cut off for good in the middle of its run."""
    port = free_port()
    with machines(3) as (host, names):
        address = f"tcp://{host}:{port}"
        inside = [("ip", "netns", "exec", name) for name in names]
        homes = [tmp_path / name for name in names]
        caches = [home / "cache" / "torchgdu" / "runs" for home in homes]
        with (
            scheduler(host=host, port=port),
            worker(*inside[0], address=address, home=homes[0]),
            worker(*inside[1], address=address, home=homes[1]) as second,
        ):
            driver = Driver(tmp_path / "out", LONG, cluster=address)
            until(lambda: checkpoints(caches[0]) == checkpoints(caches[1]) == 1)
            with_group(second, signal.SIGKILL)
            with worker(*inside[2], address=address, home=homes[2]):
                driver.wait()
    assert comparable(driver.out) == comparable(long_here)
    assert len(re.findall(r": (?:stopped|solved) at", driver.text)) == 4
    # Each was finished on one machine, and what the dead one had only begun by another.
    finished = [{p.parent.name for p in cache.glob("*/record.json")} for cache in caches]
    lost = {p.parent.name for p in caches[1].glob("*/config.json")} - finished[1]
    assert sorted(name for names in finished for name in names) == sorted(comparable(long_here))
    assert len(lost) == 1
    assert lost <= finished[0] | finished[2]


@pytest.mark.slow
def test_workers_of_a_killed_driver_stop(long_here: Path, tmp_path: Path) -> None:
    """A cluster does not go on with what nobody waits for; it goes on when somebody does."""
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    cache = tmp_path / "a" / "cache" / "torchgdu" / "runs"
    endless = [TINY.replace(steps=10**9)]
    with scheduler(port=port), worker(address=address, home=tmp_path / "a"):
        driver = Driver(tmp_path / "out", endless, cluster=address)
        until(lambda: checkpoints(cache) == 1)
        driver.kill()
        (path,) = cache.iterdir()
        until(lambda: records.load_record(path).status == "interrupted", 20)
        Driver(tmp_path / "next", LONG[:1], cluster=address).wait()
    assert len(records.load_records(tmp_path / "next")) == 1
