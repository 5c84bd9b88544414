"""What a run leaves on disk, and reading it back.

One run is one directory, named by `RunConfig.identity`:

    config.json                     the frozen description, written first
    metrics.jsonl                   one JSON line a test; no times, so equal runs have equal bytes
    checkpoint-STEP.safetensors     the tensors needed to go on, the two newest
    checkpoint-STEP.json            the rest of it, and the checksum of the tensors; written last
    epoch-N.safetensors             weights kept on request
    gates.json, error-norms.json    what was seen in the weights, so that these need not be kept
    record.json                     the outcome, once there is one
    failure.json                    why a sweep gave the run up; gone once it is tried again
    lock                            held by the process at work, which it names

Reading is cheap and torch-free: metrics are read when asked for. Writing is atomic: a file is
complete and on the disk before it gets its name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from io import FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, get_args

from torchgdu.config import ConfigError, RunConfig

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1

Status = Literal["solved", "finished", "limit", "diverged", "interrupted", "running", "failed"]

VOLATILE = ("process",)
"""The only keys of record.json in which two runs of the same description may differ."""

CONFIG, METRICS, RECORD, LOCK = "config.json", "metrics.jsonl", "record.json", "lock"
FAILURE = "failure.json"
GATES, NORMS = "gates.json", "error-norms.json"


class RunError(RuntimeError):
    """A run directory that cannot be used; the message says which and what to do."""


class RunBusy(RunError):
    """Another process is at work in the run directory."""


class RunCorrupt(RunError):
    """What is in the run directory is not what was written there."""


class NotThere(LookupError):
    """What was asked for is not there: a run of that name, its weights, an epoch kept."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What became of a run; the same whether read from disk, received or made up for a test.

    >>> record = Record(config=RunConfig(task="adding"), status="solved", step=420,
    ...                 steps_to={"solved": 420}, scores={"mse": 0.0015})
    >>> Record.from_json(record.to_json()) == record
    True
    """

    config: RunConfig
    status: Status
    step: int = 0
    """Steps taken."""
    epoch: float = 0.0
    steps_to: Mapping[str, int | None] = field(default_factory=dict)
    """The first step at which each criterion was met; None: never."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """The last full test; with a validation set, the test of the best weights."""
    best: Mapping[str, Any] | None = None
    """Step and validation scores of the best weights, where the task has a validation set."""
    parameters: int = 0
    task: Mapping[str, Any] = field(default_factory=dict)
    """The task's primary metric, direction, chance level and goal."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the task says of its data: checksums, the permutation."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Versions, revision, machine, engine."""
    drift: Sequence[Mapping[str, Any]] = ()
    """What changed at a resume and was accepted by the user."""
    diverged: str | None = None
    """What was not finite, where the run diverged."""
    failure: str | None = None
    """Why a sweep gave the run up, where every worker that tried it failed."""
    own: Mapping[str, Any] | None = None
    """Identifies a task or model of the user's own."""
    metric_lines: Mapping[str, int] = field(default_factory=dict)
    """Number, bytes and CRC-32 of the lines of metrics.jsonl."""
    process: Mapping[str, Any] = field(default_factory=dict)
    """Times, host, process and resumes: what may differ between equal runs."""
    path: Path | None = field(default=None, compare=False)
    """The run's directory, where it has one."""
    given: Sequence[Mapping[str, Any]] | None = field(default=None, compare=False, repr=False)
    """The metrics of a record without a directory."""

    @property
    def id(self) -> str:
        """The run's identity, the name of its directory."""
        return self.config.identity(self.own)

    @property
    def done(self) -> bool:
        """Whether the run has an outcome: nothing is left to do."""
        return self.status not in ("interrupted", "running", "failed")

    @property
    def out(self) -> Path:
        """Where the run's directory is: the place to go on with it, which a new name is not."""
        path = (self.path or Path(self.id)).resolve()
        if path.name != self.id:
            raise RunCorrupt(f"{path} was renamed: to go on with it, name it {self.id} again")
        return path.parent

    @property
    def metrics(self) -> Sequence[Mapping[str, Any]]:
        """One mapping a test: step, epoch, loss, and the scores; read from disk when asked for."""
        if self.given is not None or self.path is None:
            return self.given or ()
        return read_metrics(self.path, self.metric_lines or None)

    def to_dict(self) -> dict[str, Any]:
        """Return what record.json holds."""
        skip = ("path", "given", "config")
        body = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skip}
        return {"format": FORMAT, "id": self.id, "config": asdict(self.config), **body}

    def to_json(self) -> str:
        """Return what record.json holds, as indented JSON."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, path: Path | None = None) -> Record:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        if values.pop("format", None) != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        name = values.pop("id")
        if values["status"] not in get_args(Status):
            raise ValueError(f"unknown status {values['status']!r}")
        values["config"] = RunConfig.from_dict(values["config"])
        values["drift"] = tuple(values["drift"])
        record = cls(**values, path=path)
        if record.id != name:
            raise ValueError(f"its description belongs to run {record.id}, not {name}")
        return record

    def to_files(self) -> dict[str, bytes]:
        """Return the files that make up the record, to be sent elsewhere; no weights."""
        lines = "".join(metric_line(line) for line in self.metrics)
        beside = [self.path / name for name in (GATES, NORMS)] if self.path else []
        seen = {path.name: path.read_bytes() for path in beside if path.exists()}
        return {RECORD: self.to_json().encode(), METRICS: lines.encode(), **seen}


def write_files(out: str | os.PathLike[str], files: Mapping[str, bytes]) -> Record:
    """Store what `Record.to_files` returned under `out`, the record last; returns the record."""
    record = Record.from_json(files[RECORD].decode())
    directory = Path(out) / record.id
    _writable(directory)
    for name in sorted(files, key=lambda name: name == RECORD):
        if name != os.path.basename(name) or name.startswith("."):
            raise ValueError(f"{name!r} is not a plain file name")
        write_atomically(directory / name, files[name])
    with contextlib.suppress(FileNotFoundError):
        (directory / FAILURE).unlink()
    return load_record(directory)


def write_failure(out: str | os.PathLike[str], config: RunConfig, failure: str) -> Record:
    """Note under `out` that a run was given up, so that it counts as failed, not as missing."""
    record = Record(config=config, status="failed", failure=failure)
    directory = Path(out) / record.id
    _writable(directory)
    write_atomically(directory / FAILURE, record.to_json().encode())
    return load_record(directory)


def load_record(directory: str | os.PathLike[str]) -> Record:
    """Read one run directory, finished or not."""
    path = Path(directory)
    try:
        with contextlib.suppress(FileNotFoundError):
            return Record.from_json((path / RECORD).read_text("utf-8"), path)
        with contextlib.suppress(FileNotFoundError):
            return Record.from_json((path / FAILURE).read_text("utf-8"), path)
        return _unfinished(path)
    except FileNotFoundError:
        raise RunCorrupt(f"{path} is not a run directory: it has no {CONFIG}") from None
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise RunCorrupt(f"{path} holds a record that cannot be read: {error}") from error


def _unfinished(path: Path) -> Record:
    values = json.loads((path / CONFIG).read_text("utf-8"))
    state: Mapping[str, Any] = {}
    for step in reversed(_checkpoint_steps(path)):
        with contextlib.suppress(RunCorrupt):
            state = _checkpoint_state(path, step)["state"]
            break
    return Record(
        config=RunConfig.from_dict(values["config"]),
        own=values["own"],
        status="running" if _locked(path) else "interrupted",
        step=state.get("step", 0),
        epoch=state.get("epoch", 0.0),
        steps_to=state.get("steps_to", {}),
        scores=state.get("scores", {}),
        process=state.get("process", {}),
        path=path,
    )


def read_weights(path: Path, epoch: int | None = None) -> dict[str, Tensor]:
    """Read a run's best weights where it has such, else its last; or those kept after `epoch`."""
    from safetensors.torch import load_file

    if epoch is not None:
        name = path / f"epoch-{epoch}.safetensors"
        if not name.exists():
            kept = sorted(p.stem for p in path.glob("epoch-*.safetensors"))
            raise NotThere(f"{path} keeps no epoch {epoch}; it has {', '.join(kept) or 'none'}")
        return load_file(name)
    for step in reversed(_checkpoint_steps(path)):
        tensors, _ = _read_checkpoint(path, step)
        for part in ("best/", "model/"):
            weights = {k[len(part) :]: v for k, v in tensors.items() if k.startswith(part)}
            if weights:
                return weights
    raise NotThere(f"{path} holds a record without weights: it was made elsewhere")


def _read_checkpoint(path: Path, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return both halves of a checkpoint, verified."""
    from safetensors.torch import load

    body = _checkpoint_state(path, step)
    name = path / f"checkpoint-{step}.safetensors"
    try:
        data = name.read_bytes()
    except FileNotFoundError:
        raise RunCorrupt(f"{name} is missing") from None
    if _digest(data) != body["tensors"]:
        raise RunCorrupt(f"{name} is damaged: its checksum differs")
    return load(data), body


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    """Yield every run directory that is in `paths` or anywhere below them, in order of name."""
    for each in paths:
        root = Path(each)
        if not root.is_dir():
            raise FileNotFoundError(f"no such directory: {root}")
        for folder, below, files in os.walk(root):
            below.sort()
            if {RECORD, FAILURE, CONFIG} & set(files):
                below.clear()
                yield Path(folder)


def load_records(
    *paths: str | os.PathLike[str], errors: list[RunCorrupt] | None = None
) -> list[Record]:
    """Read all runs in or below `paths`. An unreadable one raises, or is added to `errors`."""
    records = []
    for directory in find_runs(paths):
        try:
            records.append(load_record(directory))
        except RunCorrupt as error:
            if errors is None:
                raise
            errors.append(error)
    return records


def finished(
    out: str | os.PathLike[str], config: RunConfig, own: Mapping[str, Any] | None = None
) -> Record | None:
    """Return the outcome of a run, if it has one already."""
    path = Path(out) / config.identity(own)
    return load_record(path) if (path / RECORD).exists() else None


def find_record(out: str | os.PathLike[str], run: str) -> Record:
    """Return the run named `run`: a directory, a full name or a beginning that only one has."""
    if (Path(run) / RECORD).exists() or (Path(run) / CONFIG).exists():
        return load_record(run)
    paths = list(find_runs([out])) if Path(out).is_dir() else []
    found = [p for p in paths if p.name == run] or [p for p in paths if p.name.startswith(run)]
    # The hash at the end is the part that is unique and short to type.
    found = found or [p for p in paths if p.name.rpartition("_")[2].startswith(run)]
    if len(found) != 1:
        names = ", ".join(p.name for p in found[:5]) + (" …" if len(found) > 5 else "")
        raise NotThere(
            f"{run!r} is the beginning of {len(found)} runs: {names}"
            if found
            else f"no run {run!r} in {out}"
        )
    return load_record(found[0])


def metric_line(values: Mapping[str, Any]) -> str:
    """Return one line of metrics.jsonl."""
    return json.dumps(values, ensure_ascii=False) + "\n"


def read_metrics(path: Path, check: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
    """Read the metrics of a run directory; `check` is what a finished record says of them."""
    try:
        data = (path / METRICS).read_bytes()
    except FileNotFoundError:
        data = b""
    if check is not None and (len(data), zlib.crc32(data)) != (check["bytes"], check["crc32"]):
        raise RunCorrupt(f"{path / METRICS} is not what the run wrote: its checksum differs")
    complete = data[: data.rfind(b"\n") + 1]  # a run at work may be in the middle of a line
    return [json.loads(line) for line in complete.splitlines()]


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is either as before or complete and on the disk, whatever happens."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make {directory}: {error.strerror}; choose another --out") from None


def _locked(path: Path) -> bool:
    try:
        with open(path / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _checkpoint_steps(path: Path) -> list[int]:
    names = (re.fullmatch(r"checkpoint-(\d+)\.json", p.name) for p in path.iterdir())
    return sorted(int(match[1]) for match in names if match)


def _lone_halves(path: Path) -> list[Path]:
    """Return the tensors that a kill left without the JSON half of their checkpoint."""
    halves = path.glob("checkpoint-*.safetensors")
    return [half for half in halves if not half.with_suffix(".json").exists()]


def _checkpoint_state(path: Path, step: int) -> dict[str, Any]:
    """Return the JSON half of a checkpoint, verified."""
    name = path / f"checkpoint-{step}.json"
    try:
        whole = json.loads(name.read_text("utf-8"))
        body: dict[str, Any] = whole["body"]
        if _digest(json.dumps(body, sort_keys=True).encode()) != whole["sha256"]:
            raise ValueError("its checksum differs")
        if body["format"] != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
    except FileNotFoundError:
        raise RunCorrupt(f"{name} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunCorrupt(f"{name}: {error}") from None
    return body


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class RunDirectory:
    """The one writer of a run directory: holds its lock from `open` to `close`.

    Every way of failing leaves the last checkpoint as it was.
    """

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock
        self._metrics: FileIO | None = None
        self._saved = -1  # the step of the newest checkpoint
        self._lines = self._bytes = self._crc = 0

    @classmethod
    def open(
        cls, out: str | os.PathLike[str], config: RunConfig, own: Mapping[str, Any] | None = None
    ) -> RunDirectory:
        """Make or enter the directory of a run, and lock it."""
        path = Path(out) / config.identity(own)
        _writable(path)
        try:
            lock = open(path / LOCK, "a+")  # noqa: SIM115 (held until close)
        except OSError as error:
            raise RunError(
                f"cannot write to {path}: {error.strerror}; choose another --out"
            ) from None
        run = cls(path, lock)
        try:
            run._take(lock)
            run._describe(config, own)
        except BaseException:
            run.close()
            raise
        return run

    def _take(self, lock: IO[str]) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            raise RunBusy(f"{self.path} is in use by {owner}") from None
        with self._writing("the lock"):
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()

    def _describe(self, config: RunConfig, own: Mapping[str, Any] | None) -> None:
        halves = _lone_halves(self.path)
        for stale in (*self.path.glob(".*.tmp"), *self.path.glob(FAILURE), *halves):
            with self._writing("the directory"):
                stale.unlink()
        values = {"format": FORMAT, "config": asdict(config), "own": own}
        text = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
        name = self.path / CONFIG
        if not name.exists():
            self._write(CONFIG, text.encode())
        elif json.loads(text) != self._read_config():
            raise RunCorrupt(
                f"{name} describes another run than its directory's name; "
                "move the directory away to start anew"
            )

    def _read_config(self) -> Any:
        try:
            return json.loads((self.path / CONFIG).read_text("utf-8"))
        except ValueError as error:
            raise RunCorrupt(
                f"{self.path / CONFIG} cannot be read ({error}); "
                "move the directory away to start anew"
            ) from None

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"cannot write {what} in {self.path}: {error.strerror}. What was written before "
                "is intact: the same command goes on from the last checkpoint"
            ) from error

    def _write(self, name: str, data: bytes) -> None:
        with self._writing(name):
            write_atomically(self.path / name, data)

    def append(self, values: Mapping[str, Any]) -> None:
        """Add one line to the metrics."""
        data = metric_line(values).encode()
        with self._writing(METRICS):
            if self._metrics is None:
                self._metrics = open(self.path / METRICS, "ab", buffering=0)  # noqa: SIM115
            if self._metrics.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._count(data)

    def _count(self, data: bytes) -> None:
        self._lines += data.count(b"\n")
        self._bytes += len(data)
        self._crc = zlib.crc32(data, self._crc)

    @property
    def metric_lines(self) -> dict[str, int]:
        """Number, bytes and CRC-32 of the lines so far."""
        return {"lines": self._lines, "bytes": self._bytes, "crc32": self._crc}

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write a checkpoint, then remove all but this one and the one before.

        A step is saved once: a kill between the two files of a second time would leave neither.
        """
        from safetensors.torch import save

        if step == self._saved:
            return
        if self._metrics is not None:
            with self._writing(METRICS):
                os.fsync(self._metrics.fileno())
        data = save(dict(tensors))
        body = {
            "format": FORMAT,
            "tensors": _digest(data),
            "metric_lines": self.metric_lines,
            "state": state,
        }
        whole = {"body": body, "sha256": _digest(json.dumps(body, sort_keys=True).encode())}
        self._write(f"checkpoint-{step}.safetensors", data)
        self._write(f"checkpoint-{step}.json", json.dumps(whole, indent=1).encode())
        self._saved = step
        for old in _checkpoint_steps(self.path)[:-2]:
            self._remove(old)

    def _remove(self, step: int) -> None:
        with self._writing("the directory"):
            for suffix in ("json", "safetensors"):  # the JSON half is what makes it a checkpoint
                (self.path / f"checkpoint-{step}.{suffix}").unlink(missing_ok=True)

    def resume(self) -> tuple[dict[str, Tensor], dict[str, Any], list[str]] | None:
        """Go back to the newest good checkpoint: its tensors, its state, and what was wrong.

        Cuts the metrics written after it. None: the run has not come to its first checkpoint.
        """
        steps = _checkpoint_steps(self.path)
        notes: list[str] = []
        for step in reversed(steps):
            try:
                tensors, body = self._load(step)
            except RunCorrupt as error:
                notes.append(f"{error}; falling back to the checkpoint before it")
                continue
            for bad in steps[len(steps) - len(notes) :]:
                self._remove(bad)
            self._saved = step
            return tensors, body["state"], notes
        if steps:
            raise RunCorrupt(
                "no good checkpoint is left: "
                + "; ".join(note.partition("; falling")[0] for note in notes)
                + f". Move {self.path} away to start anew"
            )
        metrics = self.path / METRICS
        if metrics.exists() and metrics.stat().st_size:  # the first checkpoint comes before them
            raise RunCorrupt(
                f"{metrics} has results, but there is no checkpoint to go on from. "
                f"Move {self.path} away to start anew"
            )
        return None

    def _load(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, body = _read_checkpoint(self.path, step)
        wanted = body["metric_lines"]
        self._cut(wanted["bytes"])
        if self.metric_lines != wanted:
            raise RunCorrupt(f"{self.path / METRICS} is not what checkpoint {step} saw")
        return tensors, body

    def _cut(self, size: int) -> None:
        """Forget the metrics from byte `size` on."""
        self._lines = self._bytes = self._crc = 0
        name = self.path / METRICS
        if not name.exists():
            return
        with open(name, "rb") as file:
            self._count(file.read(size))
        with self._writing(METRICS):
            os.truncate(name, self._bytes)

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write weights that stay for good."""
        from safetensors.torch import save

        self._write(f"{name}.safetensors", save(dict(tensors)))

    def finish(self, record: Record) -> Record:
        """Write the outcome."""
        self._write(RECORD, record.to_json().encode())
        return load_record(self.path)

    def close(self) -> None:
        """Let others in."""
        if self._metrics is not None:
            self._metrics.close()
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        """Return itself, locked."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
