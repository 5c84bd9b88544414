"""The adding problem: the sum of two marked numbers, far apart in a long sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchgdu.tasks.base import Batch, Scorer, Settings, Span, Task, check_whole

SOLVED = 0.002


@dataclass(frozen=True)
class Adding(Task):
    """Add the two marked values of a sequence of `length` steps (Hochreiter & Schmidhuber, 1997).

    Input (value ~ U[0, 1), mark): one mark is 1 at a uniform place in each half, the first being
    the steps below ⌊L/2⌋. Target: the sum of the two marked values, read at the last step; loss
    and metric are the mean squared error. Always answering 1 scores 1/6.

    >>> batch = Adding(length=1000).batch(20, torch.Generator().manual_seed(0))
    >>> batch.input.shape, batch.target.shape
    (torch.Size([1000, 20, 2]), torch.Size([20, 1]))
    """

    length: int = 200

    def __post_init__(self) -> None:
        """Refuse a length that cannot hold the marks."""
        check_whole("length", self.length, 2)

    name = "adding"
    input_size = 2
    output_size = 1
    primary = "mse"
    higher_is_better = False

    @property
    def chance(self) -> dict[str, float]:
        """The variance of the sum of two uniform numbers, about 0.167."""
        return {"mse": 1 / 6}

    @property
    def goal(self) -> dict[str, float]:
        """Solved below this error."""
        return {"mse": SOLVED}

    @property
    def settings(self) -> Settings:
        """Fresh batches of 20, Adam 0.01, a test of 500 sequences every 20 steps."""
        return Settings(
            batch_size=20,
            learning_rate=0.01,
            test_every=Span(20),
            limit=Span(10_000),
            test_batch_size=min(500, max(20, 500_000 // self.length)),  # about 0.5 GB at most
        )

    def batch(self, size: int, generator: torch.Generator | None = None) -> Batch:
        """`size` fresh sequences."""
        check_whole("batch size", size, 1)
        half, sequence = self.length // 2, np.arange(size)
        values = torch.rand(self.length, size, generator=generator).numpy()
        places = torch.stack([
            torch.randint(0, half, (size,), generator=generator),
            torch.randint(half, self.length, (size,), generator=generator),
        ]).numpy()  # fmt: skip
        # numpy, since waking torch's threads can cost more than all of this.
        input = np.zeros((self.length, size, 2), np.float32)
        input[:, :, 0] = values
        input[places, sequence, 1] = 1
        target = values[places, sequence].sum(0)
        return Batch(torch.from_numpy(input), torch.from_numpy(target).unsqueeze(1))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean squared error."""
        return torch.nn.functional.mse_loss(output, target)

    def scorer(self) -> Scorer:
        """The mean squared error over all batches."""
        return _SquaredError()

    def reached(self, scores: Mapping[str, float]) -> dict[str, bool]:
        """Solved when the error is below 0.002."""
        return {"solved": scores["mse"] < SOLVED}

    def describe(self, count: int = 3, data_seed: int = 0) -> str:
        """The marked positions and values."""
        batch = self.test_batches(data_seed)[0]
        assert isinstance(batch.input, Tensor)
        lines = [f"{count} sequences of {self.length} steps; the marked values and their sum:"]
        for (values, marks), target in zip(
            batch.input[:, :count].permute(1, 2, 0), batch.target, strict=False
        ):
            first, second = marks.nonzero().flatten().tolist()
            lines.append(
                f"  step {first:>5}: {values[first]:.4f}   step {second:>5}: {values[second]:.4f}"
                f"   target {target.item():.4f}"
            )
        return "\n".join(lines)


class _SquaredError(Scorer):
    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, output: Tensor, batch: Batch) -> None:
        error = output.double() - batch.target.double()
        self._sum += float(error.square().sum())
        self._count += error.numel()

    def scores(self) -> dict[str, float]:
        return {"mse": self._sum / self._count}
