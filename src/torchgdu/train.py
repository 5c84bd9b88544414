"""Training: one loop for every task and model, which a kill at any moment does not change.

    >>> import tempfile
    >>> from torchgdu.config import RunConfig
    >>> config = RunConfig(task="adding", length=10, groups="4x2", steps=40)
    >>> with tempfile.TemporaryDirectory() as out:
    ...     record = train(config, out=out)
    ...     record.status, record.step, [line["step"] for line in record.metrics]
    ('limit', 40, [20, 40])

The same call again goes on where the run was left, or returns the record it ended with.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from torchgdu import environment, models, ops, records, tasks
from torchgdu.config import CELLS, OWN, SEMANTICS, TASKS, ConfigError, RunConfig
from torchgdu.layers import parameter_count
from torchgdu.observe import Observer, Progress
from torchgdu.records import Record, RunDirectory, RunError, Status
from torchgdu.tasks import Batch

FULL_TEST_EVERY = 25
"""One in so many tests is complete; the others end when no open criterion can be met any more."""

PREVIEW = 16
"""Sequences that are tested first, to see whether the others are needed."""

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}


class DriftError(RunError):
    """A run would go on where it computes other bits than before."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped the training after a checkpoint; the same call goes on from there."""

    def __init__(self, number: int, run: Progress) -> None:
        super().__init__(f"{signal.Signals(number).name}: saved at step {run.step} in {run.path}")
        self.number = number
        self.run = run


def train(
    config: RunConfig,
    *,
    model: nn.Module | None = None,
    task: tasks.Task | None = None,
    out: str | os.PathLike[str] = "runs",
    data: str | os.PathLike[str] | None = None,
    observer: Observer | None = None,
    accept_drift: bool = False,
    save_every: float = 30.0,
) -> Record:
    """Train as `config` says, or go on with it, and return the record.

    - `model`: trained in place of a built-in one; `config.cell` is "own" then. It takes the
      task's `Batch.input` and answers like `models.SequenceModel`.
    - `task`: learnt in place of a built-in one; `config.task` is "own" then.
    - `out`: where the run's directory is made, named by the run's identity.
    - `data`: where the image files are, for tasks that need them.
    - `accept_drift`: go on although torch, backend, instruction set, threads or data changed.
    - `save_every`: seconds between checkpoints. Has no influence on the result.

    SIGINT and SIGTERM save a checkpoint and raise `Interrupted`, a KeyboardInterrupt.
    """
    observer = observer or Observer()
    task = make_task(config, task, data)
    config = resolve(config, task if config.task == OWN else None)
    with _surroundings(config), signals() as received:
        model = make_model(config, task, model)
        own = _own(config, task, model)
        done = records.finished(out, config, own)
        if done is not None:
            observer.finished(done)
            return done

        # All that can be wrong with the arguments shows here, before there is a directory.
        optimizer = _optimizer(config, model)
        source = task.source(config.seed, config.data_seed, config.batch_size)
        test = _Test(config, task)
        run = _progress(config, task, model, source, Path(out) / config.identity(own))
        convert = _conversion(config)
        learnt = dict(model.named_parameters())
        with RunDirectory.open(out, config, own) as directory:
            saver = _Saver(directory, run, model, optimizer, source)
            saver.resume(observer, accept_drift)
            saved = shown = time.monotonic()
            observer.started(run)
            model.train()

            while (status := _outcome(run)) is None:
                if received or run.stop:
                    saver.save()
                    raise Interrupted(run.stop or received[0], run)

                batch = convert(source.next())
                optimizer.zero_grad()
                loss = task.loss(model(batch.input), batch.target)
                loss.backward()
                run.loss = loss.item()
                run.diverged = _not_finite(run, learnt)
                if run.diverged:
                    continue
                if config.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), config.clip)
                optimizer.step()
                run.step += 1
                run.epoch = source.epoch
                run.loss_sum += run.loss

                if run.step % run.test_every == 0 or run.step == run.last_step:
                    line = test(model, run)
                    directory.append(line)
                    if test.validation and _better(run, line):
                        saver.best = _weights(model)
                    observer.tested(run, line)
                if run.epoch in config.keep_epochs:
                    directory.keep(f"epoch-{int(run.epoch)}", _weights(model))

                now = time.monotonic()
                if now - shown >= 0.1:
                    observer.stepped(run)
                    shown = now
                if now - saved >= save_every:
                    saver.save()
                    saved = time.monotonic()

            saver.save()
            if saver.best is not None and status != "diverged":
                model.load_state_dict(saver.best)
                run.scores = test.final(model)
            saver.clock()
            record = directory.finish(_record(run, own, status, directory))
    observer.finished(record)
    return record


def resolve(config: RunConfig, task: tasks.Task | None = None) -> RunConfig:
    """Fill in the paper's settings of the task, and this machine's threads and backend."""
    if config.semantics != SEMANTICS:
        raise ConfigError(
            "semantics", f"{config.semantics} is that of another version; this one has {SEMANTICS}"
        )
    paper = make_task(config, task).settings
    in_epochs = paper.limit.unit == "epochs"
    every = paper.test_every
    values = {
        "optimizer": paper.optimizer,
        "lr": paper.learning_rate,
        "clip": paper.clip or 0.0,
        "batch_size": paper.batch_size,
        "test_every": every.amount if every.unit == "epochs" else int(every.amount),
        "steps": 0 if in_epochs else int(paper.limit.amount),
        "epochs": paper.limit.amount if in_epochs else 0.0,
        "patience": paper.patience.amount if paper.patience else 0.0,
        "stop": "solved",
        "threads": torch.get_num_threads(),
    }
    config = config.replace(**{k: v for k, v in values.items() if getattr(config, k) is None})
    return config.replace(backend=_backend(config))


def _backend(config: RunConfig) -> str:
    """Return "engine" or "reference", whichever computes this run here."""
    if config.backend == "engine":
        reason = ops.no_engine()
        if config.device != "cpu":
            reason = f"it computes on the CPU, not on {config.device}"
        if reason:
            raise ConfigError("backend", f"the engine cannot be had: {reason}")
    if config.backend == "auto":
        return ops.available() if config.device == "cpu" else "reference"
    return config.backend


def load(
    run: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] = "runs",
    model: nn.Module | None = None,
    task: tasks.Task | None = None,
    epoch: int | None = None,
) -> nn.Module:
    """Return the model of a run, in evaluation mode.

    Where the task has a validation set, these are the weights of the best validation, otherwise
    those of the last step; with `epoch`, those kept after that epoch (`keep_epochs`).
    `run` is a run's directory, or the beginning of its name in `out`. A model or task of the
    user's own is given again; the model is filled with the weights.
    """
    record = records.find_record(out, os.fspath(run))
    assert record.path is not None
    with torch.random.fork_rng():  # the first weights are drawn, and replaced
        filled = make_model(record.config, make_task(record.config, task), model)
    filled.load_state_dict(records.read_weights(record.path, epoch))
    return filled.eval()


def untrained(config: RunConfig) -> nn.Module:
    """Return the built-in model of a run as it is before the first step, in evaluation mode."""
    with _surroundings(config):
        return make_model(config, make_task(config)).eval()


# --- What a run is made of ---------------------------------------------------------------------


def make_task(
    config: RunConfig, own: tasks.Task | None = None, data: str | os.PathLike[str] | None = None
) -> tasks.Task:
    """Return the task that a run learns."""
    if (config.task == OWN) != (own is not None):
        raise ConfigError("task", '"own" and a task object belong together: give both or neither')
    if own is not None:
        return own
    options: dict[str, Any] = {name: getattr(config, name) for name in TASKS[config.task]}
    if "dataset" in options and data is not None:
        options["directory"] = os.fspath(data)
    return tasks.TASKS[config.task](**options)


def make_model(config: RunConfig, task: tasks.Task, own: nn.Module | None = None) -> nn.Module:
    """Return the model that a run trains, with fresh weights."""
    if (config.cell == OWN) != (own is not None):
        raise ConfigError("cell", '"own" and a model belong together: give both or neither')
    dtype = getattr(torch, config.dtype)
    try:
        torch.empty(0, device=config.device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("device", f"{config.device} cannot be used here: {error}") from None
    if own is not None:
        return own.to(config.device, dtype)
    shared = ("hidden", "layers", "dropout", "init", "checkpoint")
    options: dict[str, Any] = {
        name: getattr(config, name) for name in (*shared, *CELLS[config.cell])
    }
    if config.groups is not None:
        groups = config.groups.split(",")
        options["groups"] = groups if len(groups) > 1 else groups[0]
    return models.SequenceModel(
        config.cell,
        task.input_size,
        task.output_size,
        readout=task.readout,
        device=config.device,
        dtype=dtype,
        **options,
    )


def _own(config: RunConfig, task: tasks.Task, model: nn.Module) -> dict[str, Any] | None:
    """Identify what is the user's own: the task's fields, the shapes of the model's weights."""
    own: dict[str, Any] = {}
    if config.task == OWN:
        own["task"] = {"type": type(task).__qualname__, **_settings(task)}
    if config.cell == OWN:
        own["model"] = {name: list(value.shape) for name, value in model.state_dict().items()}
    return own or None


def _settings(task: tasks.Task) -> dict[str, str]:
    """Return what sets one task apart from others of its type: its fields, or its attributes."""
    if is_dataclass(task):
        names = [each.name for each in fields(task) if each.compare]
    else:
        names = [name for name in vars(task) if not name.startswith("_")]
    found = {name: repr(getattr(task, name)) for name in names}
    for name, text in found.items():
        if re.search(r" at 0x[0-9a-f]+>", text):
            raise ConfigError(
                "task",
                f"{type(task).__qualname__}.{name} is {text}, which tells no two of its kind apart "
                "in another process: make it a number or a string, or begin its name with _",
            )
    return found


def _optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    # The fused step takes a third of the time; RMSprop has none.
    fused = {} if config.optimizer == "rmsprop" else {"fused": True}
    return OPTIMIZERS[str(config.optimizer)](model.parameters(), lr=config.lr, **fused)


def _progress(
    config: RunConfig, task: tasks.Task, model: nn.Module, source: tasks.Source, path: Path
) -> Progress:
    """Return the state before the first step."""
    data = task.provenance(config.data_seed)
    setting = environment.describe(config)
    setting["data"] = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    limits = (config.steps, _in_steps("epochs", config.epochs, source))
    last = min(limit for limit in limits if limit)
    for epoch in config.keep_epochs:
        if _in_steps("keep_epochs", epoch, source) > last:
            raise ConfigError("keep_epochs", f"the run ends at step {last}, before epoch {epoch}")
    every = config.test_every or 0
    return Progress(
        config=config,
        path=path,
        parameters=parameter_count(model),
        task={
            "primary": task.primary,
            "higher_is_better": task.higher_is_better,
            "chance": task.chance,
            "goal": task.goal,
        },
        data=data,
        last_step=last,
        test_every=int(every) if every >= 1 else _in_steps("test_every", every, source),
        patience=_in_steps("patience", config.patience, source),
        environment=setting,
        process={"started": _now(), "seconds": 0.0, "resumes": [], "notes": [], **_here()},
    )


def _in_steps(option: str, epochs: float | None, source: tasks.Source) -> int:
    if not epochs:
        return 0
    if source.steps_per_epoch is None:
        raise ConfigError(option, "this task has no epochs: every batch is fresh; count in steps")
    return max(1, round(epochs * source.steps_per_epoch))


def _conversion(config: RunConfig) -> Callable[[Batch], Batch]:
    """Return what brings a batch to the model's device and dtype."""
    if config.device == "cpu" and config.dtype == "float32":
        return lambda batch: batch
    dtype = getattr(torch, config.dtype)
    return lambda batch: batch.to(config.device, dtype)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the weights."""
    return {k: v.detach().to("cpu", copy=True) for k, v in model.state_dict().items()}


# --- Where it stands ---------------------------------------------------------------------------


def _outcome(run: Progress) -> Status | None:
    """Return how the run has ended, if it has."""
    solved = run.steps_to.get("solved") is not None
    waited = run.step - run.best["step"] if run.best else 0
    if run.diverged:
        return "diverged"
    if solved and run.config.stop == "solved":
        return "solved"
    if run.step < run.last_step and not (run.patience and waited >= run.patience):
        return None
    if solved:
        return "solved"
    return "limit" if run.task["goal"] else "finished"


def _not_finite(run: Progress, learnt: Mapping[str, nn.Parameter]) -> str | None:
    """Return what is NaN or infinite, if anything is: the loss or the gradient of a weight."""
    if not math.isfinite(run.loss):
        return f"loss {run.loss} at step {run.step + 1}"
    # A sum is finite only if every term is, and is by far the cheapest to ask for.
    if math.isfinite(sum(p.grad.sum().item() for p in learnt.values() if p.grad is not None)):
        return None
    gradients = {name: p.grad for name, p in learnt.items() if p.grad is not None}
    bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    return f"gradient of {', '.join(bad)} at step {run.step + 1}" if bad else None


def _better(run: Progress, line: Mapping[str, Any]) -> bool:
    """Note whether a validation is the best so far."""
    name = run.task["primary"]
    sign = 1 if run.task["higher_is_better"] else -1
    if run.best and not sign * line[name] > sign * run.best["scores"][name]:
        return False
    run.best = {"step": run.step, "epoch": run.epoch, "scores": dict(run.scores)}
    return True


def _record(
    run: Progress, own: Mapping[str, Any] | None, status: Status, directory: RunDirectory
) -> Record:
    run.process["finished"] = _now()
    return Record(
        config=run.config,
        own=own,
        status=status,
        step=run.step,
        epoch=run.epoch,
        steps_to=run.steps_to,
        scores=run.scores,
        best=run.best,
        parameters=run.parameters,
        task=run.task,
        data=run.data,
        environment=run.environment,
        drift=run.drift,
        diverged=run.diverged,
        metric_lines=directory.metric_lines,
        process=run.process,
    )


class _Test:
    """Tests a model, and notes the first step at which each criterion is met."""

    def __init__(self, config: RunConfig, task: tasks.Task) -> None:
        self._task = task
        self._seed = config.data_seed
        self._convert = _conversion(config)
        validation = self._converted(task.validation_batches(self._seed))
        self.validation = bool(validation)
        """Whether there is a validation set; then the test set waits for the end."""
        if config.patience and not validation:
            raise ConfigError("patience", f"task {task.name} has no validation set to wait for")
        self._batches = validation or self._converted(task.test_batches(self._seed))
        self._preview: list[Batch] = []
        if type(task.scorer()).failed is not tasks.Scorer.failed:
            self._preview = self._converted(task.test_batches(self._seed, PREVIEW))[:1]

    def _converted(self, batches: Iterable[Batch]) -> list[Batch]:
        return [self._convert(batch) for batch in batches]

    def __call__(self, model: nn.Module, run: Progress) -> dict[str, Any]:
        """Test, and return a line for the metrics."""
        wanted = {name for name, step in run.steps_to.items() if step is None}
        complete = run.step == run.last_step or run.step % (FULL_TEST_EVERY * run.test_every) == 0
        scorer = None
        if wanted and not complete and self._preview:
            scorer = self._score(model, self._preview)
            if not wanted <= scorer.failed:
                scorer = None
        partial = scorer is not None
        scorer = scorer or self._score(model, self._batches)
        scores = scorer.scores()
        for name, met in self._task.reached(scores).items():
            if run.steps_to.setdefault(name) is None and met and not partial:
                run.steps_to[name] = run.step
        if not partial:
            run.scores = scores
        line = {
            "step": run.step,
            "epoch": run.epoch,
            "loss": run.loss_sum / (run.step - run.tested),
            **scores,
        }
        run.loss_sum, run.tested = 0.0, run.step
        return line | {"partial": True} if partial else line

    def final(self, model: nn.Module) -> dict[str, float]:
        """Return the scores over the test set."""
        return self._score(model, self._converted(self._task.test_batches(self._seed))).scores()

    @torch.no_grad()
    def _score(self, model: nn.Module, batches: list[Batch]) -> tasks.Scorer:
        model.eval()
        scorer = self._task.scorer()
        for batch in batches:
            scorer.add(model(batch.input), batch)
        model.train()
        return scorer


# --- Saving and going on -----------------------------------------------------------------------


class _Saver:
    """Everything that must survive a kill: into a checkpoint, and out of it again."""

    def __init__(
        self, directory: RunDirectory, run: Progress, model: nn.Module,
        optimizer: torch.optim.Optimizer, source: tasks.Source,
    ) -> None:  # fmt: skip
        self._directory, self._run = directory, run
        self._model, self._optimizer, self._source = model, optimizer, source
        self.best: dict[str, Tensor] | None = None
        """The weights of the best validation."""
        self._since = time.monotonic()

    def clock(self) -> None:
        """Count the time since the last call."""
        now = time.monotonic()
        self._run.process["seconds"] = round(self._run.process["seconds"] + now - self._since, 3)
        self._since = now

    def save(self) -> None:
        """Write a checkpoint of this moment."""
        self.clock()
        parts: dict[str, Mapping[str, Tensor]] = {
            "model": _weights(self._model),
            "best": self.best or {},
            "source": self._source.state(),
            "random": {"cpu": torch.get_rng_state()},
        }
        if torch.device(self._run.config.device).type == "cuda":
            state = torch.cuda.get_rng_state(self._run.config.device)
            parts["random"] = {**parts["random"], "cuda": state}
        for index, values in self._optimizer.state_dict()["state"].items():
            present = {name: value for name, value in values.items() if value is not None}
            parts[f"optimizer/{index}"] = {k: v.to("cpu", copy=True) for k, v in present.items()}
        tensors = {
            f"{part}/{k}": v.contiguous() for part, vs in parts.items() for k, v in vs.items()
        }
        self._directory.save(self._run.step, tensors, self._run.state())

    def resume(self, observer: Observer, accept_drift: bool) -> None:
        """Go on from the last good checkpoint, if there is one; else write the first."""
        found = self._directory.resume()
        if found is None:
            self.save()
            return
        tensors, state, notes = found
        for note in notes:
            observer.noted(note)
        self._check_drift(state, accept_drift)
        setting, here = self._run.environment, _here()
        self._run.restore(state)
        self._run.environment = setting
        self._run.process["notes"] += notes
        self._run.process["resumes"].append({"step": self._run.step, "time": _now(), **here})

        def part(name: str) -> dict[str, Tensor]:
            return {k[len(name) + 1 :]: v for k, v in tensors.items() if k.startswith(name + "/")}

        self._model.load_state_dict(part("model"))
        self.best = part("best") or None
        self._source.restore(part("source"))
        torch.set_rng_state(tensors["random/cpu"])
        if "random/cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random/cuda"], self._run.config.device)
        whole = self._optimizer.state_dict()
        for index in range(sum(len(group["params"]) for group in whole["param_groups"])):
            values = part(f"optimizer/{index}")
            if values:
                whole["state"][index] = values
        self._optimizer.load_state_dict(whole)

    def _check_drift(self, state: Mapping[str, Any], accept: bool) -> None:
        before, now = state["environment"], self._run.environment
        changed = [key for key in environment.BITS if before.get(key) != now.get(key)]
        if changed and not accept:
            raise DriftError(
                f"{self._run.path} was computed under other conditions: "
                + ", ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in changed)
                + ". Bits would differ from here on. Restore them, or say --accept-drift "
                "(accept_drift=True): the record will tell"
            )
        for key in changed:
            change = {"what": key, "was": before.get(key), "is": now.get(key)}
            state["drift"].append({"step": state["step"], **change})


@contextlib.contextmanager
def _surroundings(config: RunConfig) -> Iterator[None]:
    """Set threads and random numbers for a run, and put them back after it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads or threads)
    try:
        with ops.use_backend(config.backend), torch.random.fork_rng():
            torch.manual_seed(config.seed)
            yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM; a second one of either interrupts at once."""
    received: list[int] = []

    def receive(number: int, _: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread gets signals
        return
    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _here() -> dict[str, Any]:
    return {"host": socket.gethostname(), "process": os.getpid()}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
