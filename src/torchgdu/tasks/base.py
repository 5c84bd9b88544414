"""What a task is: where its batches come from, its loss, its metrics, and when it is solved.

A task knows no model. Training needs five things of it::

    source = task.source(seed, data_seed)                  # endless, resumable training batches
    batch = source.next()
    task.loss(model(batch.input), batch.target).backward()
    scores = task.score((model(b.input), b) for b in task.test_batches(data_seed))
    task.reached(scores)                                   # {"solved": False}

Times are the first dimension of everything, as everywhere in torchgdu. Randomness comes from
`torch.Generator`s on the CPU, whose streams do not depend on the platform.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Readout = Literal["last", "every"]


@dataclass(frozen=True)
class Span:
    """A stretch of training: so many steps (batches) or epochs.

    >>> Span(0.1, "epochs").steps(steps_per_epoch=550)
    55
    """

    amount: float
    unit: Literal["steps", "epochs"] = "steps"

    def steps(self, steps_per_epoch: int | None) -> int:
        """The stretch in steps, at least one; epochs need a training set to count through."""
        if self.unit == "steps":
            return max(1, int(self.amount))
        if steps_per_epoch is None:
            raise ValueError("this task has no epochs: every batch is fresh; give steps instead")
        return max(1, round(self.amount * steps_per_epoch))


@dataclass(frozen=True)
class Settings:
    """How the paper trains on a task. Every one has an option in training.

    Training ends when the task is solved, at `limit`, or after `patience` without a better
    validation, whichever comes first. `test_size` is the number of test sequences and
    `test_batch_size` how many of them to evaluate at once; it changes memory, not scores.
    """

    batch_size: int
    learning_rate: float
    test_every: Span
    limit: Span
    patience: Span | None = None
    optimizer: Literal["adam"] = "adam"
    dropout: float = 0.0
    clip: float | None = None
    test_size: int = 500
    test_batch_size: int = 500


def generator(*key: str | int) -> torch.Generator:
    """A CPU generator of its own for every key, so that no two purposes share random numbers.

    >>> bool(torch.rand((), generator=generator("test", 0))
    ...      == torch.rand((), generator=generator("train", 0)))
    False
    """
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


def check_whole(what: str, value: object, low: int, high: int | None = None) -> None:
    """Raise unless `value` is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be a whole number, not {value!r}")
    if value < low or (high is not None and value > high):
        reach = f"from {low} up" if high is None else f"from {low} to {high}"
        raise ValueError(f"{what} must be {reach}, not {value}")


class Batch(NamedTuple):
    """Inputs and what the model should say to them.

    - `input`: [T, B, I] float32, or a `PackedSequence`, longest first, where lengths differ.
    - `target`: [B, 1] float32 (regression) or [B] int64 (classes) for a task read at the last
      step; [N] int64 in packed data order for one read at every step.
    - `extra`: what scoring needs beyond the target, if anything (mERG: the legal successors,
      [N, 7] bool).
    """

    input: Tensor | PackedSequence
    target: Tensor
    extra: Tensor | None = None

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Batch:
        """The same batch elsewhere; `dtype` converts what is floating point only."""
        input: Tensor | PackedSequence
        if isinstance(self.input, PackedSequence):
            input = self.input._replace(data=self.input.data.to(device=device, dtype=dtype))
        else:
            input = self.input.to(device=device, dtype=dtype)
        return Batch(
            input,
            self.target.to(device=device, dtype=dtype if self.target.is_floating_point() else None),
            None if self.extra is None else self.extra.to(device=device),
        )


class Source(ABC):
    """An endless stream of training batches that can be left and taken up again bit for bit."""

    steps_per_epoch: int | None = None
    """Batches in one pass through the training set; None where every batch is fresh."""

    @abstractmethod
    def next(self) -> Batch:
        """The next batch."""

    @property
    @abstractmethod
    def epoch(self) -> float:
        """Passes through the training set so far; 0.0 where every batch is fresh."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on from here."""

    @abstractmethod
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from where `state` was taken."""


class FreshSource(Source):
    """Batches of a task that are drawn anew at every step."""

    def __init__(self, task: Task, batch_size: int, seed: int) -> None:
        check_whole("batch size", batch_size, 1)
        self._task, self._batch_size = task, batch_size
        self._generator = generator(task.name, "train", seed)

    def next(self) -> Batch:
        """The next batch."""
        return self._task.batch(self._batch_size, self._generator)

    @property
    def epoch(self) -> float:
        """0.0: there are no epochs."""
        return 0.0

    def state(self) -> dict[str, Tensor]:
        """The generator's state."""
        return {"generator": self._generator.get_state()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from where `state` was taken."""
        self._generator.set_state(state["generator"])


class EpochSource(Source):
    """Batches from a fixed training set of `size` examples, reshuffled at the start of each epoch.

    Every example comes once an epoch; the last batch is smaller where `batch_size` does not
    divide `size`. Subclasses say how examples become a batch.
    """

    def __init__(self, size: int, batch_size: int, generator: torch.Generator) -> None:
        check_whole("batch size", batch_size, 1, size)
        self.steps_per_epoch: int = math.ceil(size / batch_size)
        self._size, self._batch_size, self._generator = size, batch_size, generator
        self._step = 0
        self._shuffle()

    def _shuffle(self) -> None:
        self._before = self._generator.get_state()
        self._order = torch.randperm(self._size, generator=self._generator)

    @abstractmethod
    def take(self, index: Tensor) -> Batch:
        """The examples `index` ([B] int64) as a batch."""

    def next(self) -> Batch:
        """The next batch; the first of an epoch shuffles."""
        place = self._step % self.steps_per_epoch
        if place == 0 and self._step > 0:
            self._shuffle()
        self._step += 1
        start = place * self._batch_size
        return self.take(self._order[start : start + self._batch_size])

    @property
    def epoch(self) -> float:
        """Passes through the training set so far."""
        return self._step / self.steps_per_epoch

    def state(self) -> dict[str, Tensor]:
        """The steps taken, and the generator as it was before it shuffled this epoch."""
        return {"generator": self._before.clone(), "step": torch.tensor(self._step)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from where `state` was taken."""
        self._generator.set_state(state["generator"])
        self._shuffle()
        self._step = int(state["step"])


class Scorer(ABC):
    """Metrics over any number of batches, one batch at a time."""

    @abstractmethod
    def add(self, output: Tensor, batch: Batch) -> None:
        """Count a model's `output` for `batch`."""

    @abstractmethod
    def scores(self) -> dict[str, float]:
        """The metrics over everything added."""

    @property
    def failed(self) -> frozenset[str]:
        """The criteria that cannot be met any more, whatever the batches still to come say.

        A test that is only there to find the first step at which a criterion is met may stop
        once those it looks for are among them. Empty where whole scores are wanted every time.
        """
        return frozenset()


def right(output: Tensor, legal: Tensor) -> Tensor:
    """Which answers are right: the smallest legal output is above the largest illegal one.

    `output` and `legal` (bool) are [..., O], the result is [...]. A tie is wrong, and so is NaN.

    >>> right(torch.tensor([[2., 1., 0.], [2., 1., 1.]]), torch.tensor([True, True, False]))
    tensor([ True, False])
    """
    best_illegal = output.masked_fill(legal, -math.inf).amax(-1, keepdim=True)
    # None of the illegal outputs is above the largest of them.
    return ((output > best_illegal) == legal).all(-1)


class Accuracy(Scorer):
    """The share of sequences whose class has the highest output of all."""

    def __init__(self) -> None:
        self._right = self._count = 0

    def add(self, output: Tensor, batch: Batch) -> None:
        """Count a model's `output` [B, O] for `batch`."""
        legal = torch.nn.functional.one_hot(batch.target, output.shape[-1]).bool()
        self._right += int(right(output, legal).sum())
        self._count += len(output)

    def scores(self) -> dict[str, float]:
        """The accuracy over everything added."""
        return {"accuracy": self._right / self._count}


class Task(ABC):
    """A task of the paper, or a user's own.

    Subclasses are frozen dataclasses whose fields identify the task (such as its length); a
    field with `compare=False` (such as where files are) does not. A task whose batches are all
    fresh needs `batch`; one with a fixed training set brings its own `source` and `test_batches`.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The task's name on the command line."""

    @property
    @abstractmethod
    def input_size(self) -> int:
        """I, the number of inputs."""

    @property
    @abstractmethod
    def output_size(self) -> int:
        """The number of outputs the model's read-out must have."""

    @property
    def readout(self) -> Readout:
        """Whether the model answers after the last step, or at every one."""
        return "last"

    @property
    @abstractmethod
    def primary(self) -> str:
        """The metric to show and to choose the best weights by."""

    @property
    @abstractmethod
    def higher_is_better(self) -> bool:
        """Which way the primary metric improves."""

    @property
    @abstractmethod
    def chance(self) -> dict[str, float]:
        """What a model that has learnt nothing scores."""

    @property
    @abstractmethod
    def goal(self) -> dict[str, float]:
        """The values at which the task counts as solved; empty where the paper names none."""

    @property
    @abstractmethod
    def settings(self) -> Settings:
        """How the paper trains on this task."""

    @abstractmethod
    def batch(self, size: int, generator: torch.Generator | None = None) -> Batch:
        """`size` sequences drawn with `generator`, or with torch's own."""

    def source(self, seed: int, data_seed: int = 0, batch_size: int | None = None) -> Source:
        """Training batches. `seed` sets fresh batches and order, `data_seed` the training set."""
        size = self.settings.batch_size if batch_size is None else batch_size
        return FreshSource(self, size, seed)

    def test_batches(self, data_seed: int = 0, batch_size: int | None = None) -> Sequence[Batch]:
        """The test set, the same for every `seed`, in batches of the settings' or this size."""
        whole = self.batch(self.settings.test_size, generator(self.name, "test", data_seed))
        return split(whole, self.settings.test_batch_size if batch_size is None else batch_size)

    def validation_batches(
        self, data_seed: int = 0, batch_size: int | None = None
    ) -> Sequence[Batch]:
        """The validation set; empty where the paper has none."""
        return ()

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The training loss, a scalar."""

    @abstractmethod
    def scorer(self) -> Scorer:
        """A new, empty scorer."""

    def score(self, results: Iterable[tuple[Tensor, Batch]]) -> dict[str, float]:
        """The metrics over all (output, batch) pairs."""
        scorer = self.scorer()
        for output, batch in results:
            scorer.add(output, batch)
        return scorer.scores()

    @abstractmethod
    def reached(self, scores: Mapping[str, float]) -> dict[str, bool]:
        """Which criteria `scores` meet; the one called "solved" ends the training."""

    def describe(self, count: int = 3, data_seed: int = 0) -> str:
        """A few examples that a person can read."""
        batch = self.batch(count, generator(self.name, "test", data_seed))
        return f"input\n{batch.input}\ntarget\n{batch.target}"

    def provenance(self, data_seed: int = 0) -> dict[str, object]:
        """What a run's record must hold of the data besides the seeds, as plain JSON."""
        return {}


def split(batch: Batch, size: int) -> list[Batch]:
    """A batch of equally long sequences as batches of at most `size` of them."""
    check_whole("batch size", size, 1)
    assert isinstance(batch.input, Tensor)
    inputs = batch.input.split(size, dim=1)
    targets = batch.target.split(size)
    return [Batch(i.contiguous(), t) for i, t in zip(inputs, targets, strict=True)]
