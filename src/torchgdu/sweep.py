"""Many runs, each made exactly once: here, or on the workers of Dask's distributed scheduler.

    >>> import tempfile
    >>> from torchgdu.config import RunConfig
    >>> run = RunConfig(task="adding", length=10, groups="4x2", steps=20)
    >>> with tempfile.TemporaryDirectory() as out:
    ...     jobs = sweep([run, run.replace(seed=1)], out)
    ...     [(job.config.seed, job.state, job.record.status) for job in jobs]
    [(0, 'done', 'limit'), (1, 'done', 'limit')]

The same call again makes what is missing: what the store holds is not repeated, and what was
interrupted goes on from its checkpoint. A run whose worker fails or dies is tried again, and noted
as failed in the end, so that it is counted and not lost.

One process makes one run at a time, with one thread where the run says so. The records come back
through the scheduler; no disk is shared. A worker keeps the checkpoints on its own disk, so that a
run tried again on the same machine goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

from torchgdu import examine, records
from torchgdu.config import ConfigError, RunConfig
from torchgdu.observe import Observer, Progress
from torchgdu.records import Record, RunBusy, RunCorrupt, RunError
from torchgdu.tasks import DataError
from torchgdu.train import DriftError, Interrupted, resolve, signals, train

if TYPE_CHECKING:
    from distributed import Client, Future, SpecCluster, Worker

TRIES = 3
"""A run is given up after so many failures."""

PATIENCE = 30.0
"""Seconds without the scheduler after which it is gone."""


class Stopped(KeyboardInterrupt):
    """A signal stopped the sweep; the same call goes on from there."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _Refused(RunError):
    """A run was not begun, for a reason that another try does not change."""


class _GivenBack(RuntimeError):
    """A worker has stopped a run, as it was told to: nothing is wrong with either."""


Plan = Callable[[Mapping[RunConfig, Record]], Iterable[RunConfig]]
"""From the runs that have ended to all runs wanted so far, in order.

Runs that have ended are named as by `asked`, completely."""


@dataclass
class Job:
    """One run of a sweep, and how far it has come."""

    config: RunConfig
    """As asked for."""
    run: RunConfig
    """Complete, as its record will hold it."""
    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    record: Record | None = None
    """Once it has ended; of a failed run, one that says why."""
    tries: int = 0
    """How often it failed."""
    step: int = 0
    last_step: int = 0
    scores: Mapping[str, float] = field(default_factory=dict)
    """Of the last complete test."""
    began: tuple[float, int] = (0.0, 0)
    """When it was started or gone on with in this sweep, and at which step."""
    ended: float = 0.0
    """When it ended in this sweep."""

    @property
    def seconds_left(self) -> float:
        """At most how long it still runs; infinity as long as nothing is known."""
        since, first = self.began
        done = self.step - first
        return (
            (time.monotonic() - since) / done * (self.last_step - self.step) if done else math.inf
        )


class Watcher:
    """Sees a sweep; by default says nothing."""

    def changed(self, jobs: Collection[Job]) -> None:
        """Something has changed, or some time has passed."""

    def noted(self, message: str) -> None:
        """Something must be known: a failure, a retry."""

    def closed(self) -> None:
        """Nothing more will come, whatever the reason."""


def sweep(
    runs: Iterable[RunConfig] | Plan,
    out: str | os.PathLike[str] = "runs",
    *,
    workers: int = 1,
    cluster: str | None = None,
    data: str | os.PathLike[str] | None = None,
    scratch: str | os.PathLike[str] | None = None,
    accept_drift: bool = False,
    save_every: float = 30.0,
    watcher: Watcher | None = None,
) -> list[Job]:
    """Make the runs that `out` does not hold yet, and return what became of every one.

    - `runs`: the descriptions, or a plan that names more of them as runs end.
    - `workers`: processes on this machine; 1 works in this process and needs no scheduler.
    - `cluster`: the address of a scheduler whose workers do the work, one thread each.
    - `data`: where the image files are, on the workers' machines.
    - `scratch`: where workers of a cluster keep checkpoints; their cache directory if not given.

    SIGINT and SIGTERM stop the runs after a checkpoint and raise `Stopped`, a KeyboardInterrupt.
    """
    fixed = () if callable(runs) else tuple(runs)
    plan: Plan = runs if callable(runs) else lambda _: fixed
    order = _Order(str(data) if data is not None else None, accept_drift, save_every)
    with signals() as received, _locked(Path(out)) as store:
        work = _Work(plan, store, watcher or Watcher())
        if cluster is None and workers == 1:
            _here(work, order, received)
        elif cluster is None:
            with _distributed(), _local(workers) as local:
                _there(work, order, received, local, str(store.resolve()))
        else:
            with _distributed():
                place = None if scratch is None else os.fspath(scratch)
                _there(work, order, received, cluster, place)
        return list(work.jobs.values())


def stored(out: str | os.PathLike[str]) -> dict[RunConfig, Record]:
    """Return what is in a store, by what was asked for: a damaged record is an error.

    Where a run is there twice, as made by two backends, the one that is done counts.
    """
    errors: list[RunCorrupt] = []
    found: dict[RunConfig, Record] = {}
    if Path(out).is_dir():
        for record in records.load_records(out, errors=errors):
            key = asked(record.config)
            if record.done and record.own is None:
                with _collected(errors):
                    _ = record.metrics  # which are verified
            if key not in found or (record.done and not found[key].done):
                found[key] = record
    if errors:
        raise RunCorrupt(
            "; ".join(map(str, errors)) + ". Move what is damaged away to have the run made anew"
        )
    return found


def asked(config: RunConfig) -> RunConfig:
    """Return a complete description without what computed it: a result of any backend will do."""
    return config.replace(backend="auto")


@contextlib.contextmanager
def _collected(errors: list[RunCorrupt]) -> Iterator[None]:
    try:
        yield
    except RunCorrupt as error:
        errors.append(error)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[Path]:
    """Make the store, and keep other sweeps out of it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / ".sweep", "a")  # noqa: SIM115 (held until the end)
    except OSError as error:
        raise RunError(f"cannot write to {out}: {error.strerror}; choose another --out") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusy(f"another sweep is at work in {out}") from None
        yield out


# --- Bookkeeping -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Order:
    """How runs are to be made, wherever."""

    data: str | None
    accept_drift: bool
    save_every: float


class _Work:
    """Every run of the sweep, and what has become of it. Knows nothing of processes."""

    def __init__(self, plan: Plan, store: Path, watcher: Watcher) -> None:
        self.store, self.watcher = store, watcher
        self.jobs: dict[RunConfig, Job] = {}
        self._plan = plan
        self._known = stored(store)
        self._replan()

    def _replan(self) -> None:
        """Ask the plan again: what has ended may decide what comes next."""
        ended = {key: record for key, record in self._known.items() if record.done}
        ended |= {asked(job.run): job.record for job in self.jobs.values() if job.record}
        wanted: dict[RunConfig, Job] = {}
        for config in self._plan(ended):
            if config not in wanted:
                wanted[config] = self.jobs.get(config) or self._job(config)
        gone = {k: job for k, job in self.jobs.items() if k not in wanted}
        self.jobs = wanted | gone
        self.watcher.changed(self.jobs.values())

    def _job(self, config: RunConfig) -> Job:
        job = Job(config, resolve(config))
        known = self._known.get(asked(job.run))
        if known is not None:
            job.step = known.step
            if known.done:
                job.state, job.record = "done", known
        return job

    def next(self) -> Job | None:
        """Return the first run that waits."""
        return next((job for job in self.jobs.values() if job.state == "waiting"), None)

    def start(self, job: Job) -> None:
        """Note that a run is on its way."""
        job.state, job.began = "running", (time.monotonic(), job.step)
        self.watcher.changed(self.jobs.values())

    def progress(self, job: Job, news: Mapping[str, Any]) -> None:
        """Note how far a run has come."""
        if "note" in news:
            self.watcher.noted(f"{job.run.identity()}: {news['note']}")
            return
        if news["began"]:
            job.began = (time.monotonic(), news["step"])
        job.step, job.last_step, job.scores = news["step"], news["last_step"], news["scores"]
        self.watcher.changed(self.jobs.values())

    def finish(self, job: Job, record: Record) -> None:
        """Note that a run has an outcome."""
        job.state, job.record, job.step = "done", record, record.step
        job.ended = time.monotonic()
        self._replan()

    def fail(self, job: Job, error: Exception) -> None:
        """Note what a run, or the worker that made it, raised."""
        kind = _kind(error)
        self.trouble(job, _reason(error), final=kind is _Refused, note=kind is RunError)

    def trouble(self, job: Job, error: str, final: bool = False, note: bool = True) -> None:
        """Note a failure: the run waits for another try, or is given up.

        `final`: there will be no other try. `note`: once given up, the store says so.
        """
        job.tries += 1
        job.state = "waiting"
        if job.tries < TRIES and not final:
            self.watcher.noted(f"{job.run.identity()}: {error}; trying again")
            self.watcher.changed(self.jobs.values())
            return
        self.watcher.noted(f"{job.run.identity()}: {error}; given up")
        job.state, job.ended = "failed", time.monotonic()
        job.record = Record(config=job.run, status="failed", failure=error)
        if note:
            job.record = records.write_failure(self.store, job.run, error)
        self._replan()

    def again(self, job: Job) -> None:
        """Note that a run was stopped for no fault of its own."""
        job.state = "waiting"


class _Reporter(Observer):
    """Tells how a run is doing, twice a second, and stops it when nobody wants it any more."""

    def __init__(
        self, send: Callable[[dict[str, Any]], None], wanted: Callable[[], bool] = lambda: True
    ) -> None:
        self._send, self._wanted = send, wanted
        self._last = 0.0

    def _report(self, run: Progress, began: bool = False) -> None:
        self._last = time.monotonic()
        place = {"step": run.step, "last_step": run.last_step}
        self._send({"began": began, **place, "scores": dict(run.scores)})

    def started(self, run: Progress) -> None:
        """Tell where it begins."""
        self._report(run, began=True)

    def stepped(self, run: Progress) -> None:
        """Tell where it is, now and then."""
        if not self._wanted():
            run.stop = signal.SIGTERM
        if time.monotonic() - self._last >= 0.5:
            self._report(run)

    def noted(self, message: str) -> None:
        """Pass it on."""
        self._send({"note": message})


# --- In this process ---------------------------------------------------------------------------


def _here(work: _Work, order: _Order, received: list[int]) -> None:
    """Make one run after the other."""
    while not received and (job := work.next()) is not None:
        work.start(job)
        try:
            record = train(
                job.run, out=work.store, data=order.data,
                observer=_Reporter(partial(work.progress, job)),
                accept_drift=order.accept_drift, save_every=order.save_every,
            )  # fmt: skip
        except Interrupted as stopped:
            raise Stopped(stopped.number) from None
        except Exception as error:
            work.fail(job, error)
        else:
            work.finish(job, record)
    if received:
        raise Stopped(received[0])


def _kind(error: Exception) -> type[RunError]:
    """Return what follows: a failure to try again and to note, or one of the circumstances."""
    if isinstance(error, (_Refused, DriftError, ConfigError)):
        return _Refused
    return RunBusy if isinstance(error, (RunBusy, DataError)) else RunError


def _reason(error: BaseException) -> str:
    """Return an error as one line."""
    expected = isinstance(error, (RunError, ConfigError, OSError))
    text = str(error) if expected else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


# --- On workers --------------------------------------------------------------------------------

_alone = threading.Lock()
"""Torch has one random state a process: a worker makes one run at a time."""


def _make(run: str, order: _Order, scratch: str | None, topic: str) -> dict[str, bytes]:
    """Make one run on a worker, and return the files of its record."""
    from distributed import get_worker

    worker: Worker = get_worker()
    key = worker.get_current_task()

    def send(news: dict[str, Any]) -> None:
        worker.log_event(topic, {"key": key, **news})

    def wanted() -> bool:
        # Who asked for it may be gone, or may have cancelled it.
        task = worker.state.tasks.get(key)
        return worker.status.name == "running" and task is not None and task.state != "cancelled"

    if not _alone.acquire(blocking=False):
        raise RunError(f"{worker.address} has several threads; start it with --nthreads 1")
    try:
        record = train(
            RunConfig.from_json(run), out=scratch or _cache(), data=order.data,
            observer=_Reporter(send, wanted), accept_drift=order.accept_drift,
            save_every=order.save_every,
        )  # fmt: skip
        return _files(record, order)
    except Interrupted as stopped:
        raise _GivenBack(str(stopped)) from None  # a KeyboardInterrupt would end the worker
    except Exception as error:
        # It travels as text: no more than its kind makes a difference.
        raise _kind(error)(f"{_reason(error)} (on {socket.gethostname()})") from None
    finally:
        _alone.release()
        send({"ended": True})


def _cache() -> Path:
    """Return where a worker of a cluster keeps run directories."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torchgdu" / "runs"


def _files(record: Record, order: _Order) -> dict[str, bytes]:
    """Return a run's small files, among them what figures need of its weights."""
    assert record.path is not None
    for problem in examine.fill([record], order.data):
        raise RunError(problem)
    return record.to_files() | {records.CONFIG: (record.path / records.CONFIG).read_bytes()}


@contextlib.contextmanager
def _distributed() -> Iterator[None]:
    """Set up Dask for a sweep: quiet, without profiler, web pages or failures of its own."""
    try:
        import dask.config
        import distributed  # noqa: F401
    except ImportError:
        raise ConfigError(
            "workers", "more than one, or a cluster, needs: pip install 'torchgdu[cluster]'"
        ) from None
    import logging

    settings = {
        "distributed.nanny.pre-spawn-environ.DASK_LOGGING__DISTRIBUTED": "critical",
        "distributed.scheduler.allowed-failures": TRIES - 1,
        "distributed.scheduler.http.routes": [],
        "distributed.worker.http.routes": [],
        "distributed.worker.profile.enabled": False,
        "distributed.diagnostics.nvml": False,
    }
    logger = logging.getLogger("distributed")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with dask.config.set(settings):
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _local(workers: int) -> Iterator[SpecCluster]:
    """Yield a scheduler and workers on this machine, reachable from this machine only.

    The workers watch a pipe from this process and end with it, however it ends.
    """
    from distributed import Nanny, Scheduler, SpecCluster

    here: dict[str, Any] = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    # Ctrl-C reaches every process of the terminal: only this one is to answer it.
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    with tempfile.TemporaryDirectory(prefix="torchgdu-") as directory:
        options = {
            **here, "nthreads": 1, "memory_limit": 0, "preload": [ignore], "dashboard": False,
            "local_directory": directory,
        }  # fmt: skip
        with SpecCluster(
            scheduler={"cls": Scheduler, "options": {**here, "port": 0, "dashboard": False}},
            workers={n: {"cls": Nanny, "options": options} for n in range(workers)},
            name="torchgdu",
        ) as cluster:
            yield cluster


def _there(
    work: _Work, order: _Order, received: list[int], address: str | SpecCluster, scratch: str | None
) -> None:
    """Make the runs on workers, as many at a time as there are workers."""
    from distributed import Client

    try:
        client = Client(address, timeout=10, set_as_default=False, name="torchgdu")
    except (OSError, ValueError) as error:
        raise RunError(f"no scheduler at {address}: {_reason(error)}") from None
    with client:
        crew = _Crew(client, work, order, scratch)
        while not received:
            crew.fill()
            if crew.idle:
                return
            crew.look()
        crew.stop(lambda: len(received) > 1)
        raise Stopped(received[0])


class _Crew:
    """Workers, and the runs that are on them now."""

    def __init__(self, client: Client, work: _Work, order: _Order, scratch: str | None) -> None:
        self._client, self._work, self._order, self._scratch = client, work, order, scratch
        self._topic = f"torchgdu-{uuid.uuid4().hex}"
        self._news: SimpleQueue[Mapping[str, Any]] = SimpleQueue()
        self._futures: dict[str, tuple[Future[Any], Job]] = {}
        self._begun: set[str] = set()
        self._seen = self._counted = time.monotonic()
        self._size = self._count()
        client.subscribe_topic(self._topic, lambda event: self._news.put(event[1]))

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self._futures and self._work.next() is None

    def _count(self) -> int:
        threads = self._client.nthreads()
        several = [address for address, number in threads.items() if number != 1]
        if several:
            raise RunError(f"{', '.join(several)}: start workers with --nthreads 1")
        return len(threads)

    def fill(self) -> None:
        """Give work to idle workers."""
        if self._client.status != "running":
            return
        if time.monotonic() - self._counted > 2:
            self._counted = time.monotonic()
            with contextlib.suppress(OSError):
                self._size = self._count()
        while len(self._futures) < self._size and (job := self._work.next()) is not None:
            self._work.start(job)
            key = f"torchgdu-{job.run.identity()}-{uuid.uuid4().hex[:8]}"
            future = self._client.submit(
                _make, job.run.to_json(), self._order, self._scratch, self._topic,
                key=key, pure=False,
            )  # fmt: skip
            self._futures[key] = (future, job)

    def look(self) -> None:
        """Wait a little, then note what has become of the runs."""
        self._listen(0.2)
        if self._client.status == "running":
            self._seen = time.monotonic()
        elif self._client.status == "closed" or time.monotonic() - self._seen > PATIENCE:
            raise RunError(
                "the scheduler is gone. What is done is stored, and the workers keep their "
                "checkpoints: the same command goes on once there is a scheduler"
            )
        else:
            return
        for key, (future, job) in list(self._futures.items()):
            if future.status != "pending" and self._ended(future, job):
                del self._futures[key]

    def _ended(self, future: Future[Any], job: Job) -> bool:
        """Note the end of a run; False if its result was lost on the way, and is made again."""
        from distributed import KilledWorker

        if future.status in ("cancelled", "lost"):
            self._work.again(job)
            return True
        try:
            record = self._store(job, future.result(timeout=60))
        except TimeoutError:
            return False
        except _GivenBack:
            self._work.again(job)
        except KilledWorker:
            self._work.trouble(job, f"{TRIES} workers died while they made it", final=True)
        except OSError:
            raise  # the store cannot be written
        except Exception as error:
            self._work.fail(job, error)
        else:
            self._work.finish(job, record)
        return True

    def _store(self, job: Job, files: Mapping[str, bytes]) -> Record:
        """Store what a worker sent, unless it is there already."""
        name = job.run.identity()
        path = self._work.store / name
        if (path / records.RECORD).exists():
            return records.load_record(path)
        if Record.from_json(files[records.RECORD].decode()).id != name:
            raise RunCorrupt("the worker sent the record of another run")
        return records.write_files(self._work.store, files)

    def _listen(self, seconds: float) -> None:
        """Wait for news, and pass all of it on."""
        until = time.monotonic() + seconds
        while True:
            try:
                news = self._news.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                self._work.watcher.changed(self._work.jobs.values())
                return
            key = news["key"]
            if "ended" in news:
                self._begun.discard(key)
            elif key in self._futures:
                self._begun.add(key)
                self._work.progress(self._futures[key][1], news)

    def stop(self, at_once: Callable[[], bool]) -> None:
        """Have all workers stop after a checkpoint, and wait for them."""
        self._client.cancel([future for future, _ in self._futures.values()])
        until = time.monotonic() + PATIENCE
        while self._begun and time.monotonic() < until and not at_once():
            self._listen(0.1)
