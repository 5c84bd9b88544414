"""The temporal order problem: in which order did a few rare symbols come?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchgdu.tasks.base import Accuracy, Batch, Scorer, Settings, Span, Task, check_whole

ALPHABET = "abcdXY"
WINDOW = 10


@dataclass(frozen=True)
class TemporalOrder(Task):
    """Tell the order of `symbols` X or Y hidden among a, b, c, d (Hochreiter & Schmidhuber, 1997).

    The k-th stands at a uniform place in [⌊(k−1)L/n⌋, ⌊(k−1)L/n⌋ + 10), n the number of symbols
    (3 in the paper), and is X or Y with equal probability; all else is uniform over a, b, c, d.
    6 one-hot inputs, 2ⁿ classes (XX…X is 0, the first symbol the highest bit, Y = 1), read at the
    last step. Cross-entropy; the metric is accuracy.

    >>> task = TemporalOrder(length=100)
    >>> batch = task.batch(20, torch.Generator().manual_seed(0))
    >>> batch.input.shape, batch.target.shape, task.output_size
    (torch.Size([100, 20, 6]), torch.Size([20]), 8)
    """

    length: int = 100
    symbols: int = 3

    def __post_init__(self) -> None:
        """Refuse a length that cannot hold the marks."""
        check_whole("symbols", self.symbols, 1, 16)
        check_whole("length", self.length, WINDOW * self.symbols)  # windows must not overlap

    name = "temporal-order"
    input_size = len(ALPHABET)
    primary = "accuracy"
    higher_is_better = True

    @property
    def output_size(self) -> int:
        """One class for each order."""
        return int(2**self.symbols)

    @property
    def chance(self) -> dict[str, float]:
        """All orders are equally likely."""
        return {"accuracy": 1 / self.output_size}

    @property
    def goal(self) -> dict[str, float]:
        """Solved when every test sequence is right."""
        return {"accuracy": 1.0}

    @property
    def settings(self) -> Settings:
        """Fresh batches of 20, Adam 0.001, a test of 500 sequences every 20 steps."""
        return Settings(
            batch_size=20,
            learning_rate=0.001,
            test_every=Span(20),
            limit=Span(50_000),
            test_batch_size=min(500, max(20, 500_000 // self.length)),
        )

    def batch(self, size: int, generator: torch.Generator | None = None) -> Batch:
        """`size` fresh sequences."""
        check_whole("batch size", size, 1)
        n = self.symbols
        text = torch.randint(0, 4, (self.length, size), generator=generator).numpy()
        starts = np.array([[k * self.length // n] for k in range(n)])
        places = starts + torch.randint(0, WINDOW, (n, size), generator=generator).numpy()
        bits = torch.randint(0, 2, (n, size), generator=generator).numpy()
        # numpy, since waking torch's threads can cost more than all of this.
        text[places, np.arange(size)] = 4 + bits
        input = np.eye(len(ALPHABET), dtype=np.float32).take(text, axis=0)
        weights = 2 ** np.arange(n)[::-1]
        return Batch(torch.from_numpy(input), torch.from_numpy(weights @ bits))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy."""
        return torch.nn.functional.cross_entropy(output, target)

    def scorer(self) -> Scorer:
        """The accuracy."""
        return Accuracy()

    def reached(self, scores: Mapping[str, float]) -> dict[str, bool]:
        """Solved at accuracy 1."""
        return {"solved": scores["accuracy"] == 1.0}

    def describe(self, count: int = 3, data_seed: int = 0) -> str:
        """The text around each marked position, and the class."""
        batch = self.test_batches(data_seed)[0]
        assert isinstance(batch.input, Tensor)
        lines = [f"{count} sequences of {self.length} symbols; where X and Y stand:"]
        for text, target in zip(
            batch.input[:, :count].argmax(2).T.tolist(), batch.target.tolist(), strict=False
        ):
            letters = "".join(ALPHABET[c] for c in text)
            places = [i for i, c in enumerate(letters) if c in "XY"]
            shown = "   ".join(
                f"step {i:>3}: {letters[max(0, i - 3) : i]:>3}{letters[i : i + 4]:<4}"
                for i in places
            )
            order = "".join(letters[i] for i in places)
            lines.append(f"  {shown}   class {target} ({order})")
        return "\n".join(lines)
