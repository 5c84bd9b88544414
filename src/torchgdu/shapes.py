"""What `torchgdu bench` times, known without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchgdu.config import ConfigError


@dataclass(frozen=True)
class Shape:
    """What is computed: a batch of sequences through one layer."""

    name: str
    batch: int
    inputs: int
    steps: int
    groups: str
    hidden: int

    def operations(self, gates: int, training: bool) -> int:
        """Multiplications and additions of the matrix products of one time step.

        Training adds the gradients of weights and states; the input's is not asked for.
        """
        inner = self.inputs + self.hidden
        rows = inner + (inner + self.hidden if training else 0)
        return 2 * self.batch * rows * gates * self.hidden


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("adding", 20, 2, 1000, "10x10", 100),
        Shape("reber", 1, 7, 200, "2x35+10x3", 100),
        Shape("pmnist-128", 100, 1, 784, "4x32", 128),
        Shape("pmnist-256", 100, 1, 784, "4x64", 256),
        Shape("large", 64, 512, 128, "8x64", 512),
    )
}


def check(names: Iterable[str]) -> None:
    """Say which name is that of no shape."""
    for name in names:
        if name not in SHAPES:
            raise ConfigError("shapes", f"no {name!r}; there are {', '.join(SHAPES)}")
