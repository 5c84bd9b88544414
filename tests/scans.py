"""Arguments of ``ops.scan`` for every cell, and its results with all gradients, for comparisons."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchgdu import functional, ops
from torchgdu.functional import CELLS, Extra

Compute = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]


@contextlib.contextmanager
def engine_at(level: str, threads: int = 1) -> Iterator[None]:
    """Compute with the engine, with one of its instruction sets, and so many threads."""
    library, before = ops.library(), torch.get_num_threads()
    usual = library.level
    library.level = library.levels.index(level)
    torch.set_num_threads(threads)
    try:
        with ops.use_backend("engine"):
            yield
    finally:
        library.level = usual
        torch.set_num_threads(before)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Whatever is allocated and not written reads as NaN."""
    torch.use_deterministic_algorithms(True)  # whose use this is, once every allocation is filled
    assert torch.empty(3).isnan().all()
    assert torch.zeros(8, dtype=torch.uint8).new_empty(8).view(torch.float64).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def loss_of(read: list[Tensor]) -> Tensor:
    """A number whose gradient is another one for every entry."""
    terms = [(v * torch.cos(v.detach() * 3 + k)).sum() for k, v in enumerate(read)]
    return torch.stack(terms).sum()


@dataclass(frozen=True)
class Scan:
    """All arguments of one call of ``scan``."""

    cell: str
    x: Tensor
    state: tuple[Tensor, ...]
    weight_ih: Tensor
    weight_hh: Tensor
    bias: Tensor | None = None
    extra: Extra = functional.PLAIN
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        cell: str,
        steps: int,
        batch: int,
        inputs: int,
        partition: tuple[int, ...] = (4, 2, 1, 5),
        *,
        bias: bool = True,
        lengths: list[int] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Scan:
        """Numbers of the size that initial values have, in float64."""
        numbers = torch.Generator().manual_seed(seed)

        def draw(*shape: int, bound: float = 1.0) -> Tensor:
            drawn = torch.rand(*shape, generator=numbers, dtype=torch.float64)
            return drawn.mul_(2 * bound).sub_(bound)

        units = sum(partition) if cell == "gdu" else 12
        rows = len(CELLS[cell].rows) * units
        h, c = draw(batch, units), draw(batch, units)
        clock = torch.randint(0, 50, (batch,), generator=numbers)
        state = (h, c) if cell == "lstm" else (h, clock) if cell == "cwrnn" else (h,)
        extra = functional.PLAIN
        if cell == "gdu":
            shares = torch.rand(len(partition), generator=numbers, dtype=torch.float64)
            deltas = shares.mul(0.98).add(0.01) * torch.tensor(partition)
            extra = functional.spread(deltas, partition)
        elif cell == "cwrnn":
            extra = Extra(partition=(1, 2, 3))
        elif cell == "gru_after":
            extra = Extra(bias_hn=draw(units, bound=0.5))
        x = draw(steps, batch, inputs)
        if lengths is not None:
            lengths = [*sorted(lengths, reverse=True)][:batch]
            lengths[0] = steps
            packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths))
            x, options["batch_sizes"] = packed.data, packed.batch_sizes
        return cls(
            cell, x, state,
            draw(rows, inputs, bound=math.sqrt(6 / (inputs + units))),
            draw(rows, units, bound=math.sqrt(6 / (2 * units))),
            draw(rows, bound=0.5) if bias else None, extra, options,
        )  # fmt: skip

    def map(self, change: Callable[[Tensor], Tensor]) -> Scan:
        """Return the same call with every floating-point tensor changed."""

        def each(value: Any) -> Any:
            return change(value) if value is not None and value.is_floating_point() else value

        bias_hn, scale, base = map(each, self.extra[:3])
        return replace(
            self, x=each(self.x), state=tuple(map(each, self.state)),
            weight_ih=each(self.weight_ih), weight_hh=each(self.weight_hh), bias=each(self.bias),
            extra=Extra(bias_hn, scale, base, self.extra.partition),
        )  # fmt: skip

    def differentiable(self) -> dict[str, Tensor]:
        """Return what can have a gradient, by name."""
        named = {
            "x": self.x, "h": self.state[0], "weight_ih": self.weight_ih,
            "weight_hh": self.weight_hh, "bias": self.bias,
            **self.extra._asdict(),
        }  # fmt: skip
        if self.cell == "lstm":
            named["c"] = self.state[1]
        return {k: v for k, v in named.items() if isinstance(v, Tensor)}

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the operator torchgdu::scan."""
        cell, state, extra = self.cell, self.state, self.extra
        return (
            cell, self.x, state[0], state[1] if cell == "lstm" else None,
            state[1] if cell == "cwrnn" else None, self.weight_ih, self.weight_hh, self.bias,
            extra.bias_hn, extra.scale, extra.base, self.options.get("batch_sizes"),
            " ".join(map(str, extra.partition)), self.options.get("reverse", False),
            self.options.get("checkpoint") or 0,
        )  # fmt: skip

    def run(self, compute: Compute | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Call ``compute``, by default ``ops.scan``."""
        return (compute or ops.scan)(
            self.cell, self.x, self.state, self.weight_ih, self.weight_hh, self.bias, self.extra,
            **self.options,
        )  # fmt: skip

    def results(self, loss: str = "all", compute: Compute | None = None) -> dict[str, Tensor]:
        """Return values and all gradients, by name.

        ``loss``: of "all" results, the "last" output or the final "state".
        """
        call = self.map(lambda value: value.detach().requires_grad_())
        output, final = call.run(compute)
        found = {"output": output, **{f"final {k}": v for k, v in enumerate(final)}}
        states = [value for value in final if value.is_floating_point()]
        read = {"all": [output, *states], "last": [output[-1:]], "state": states}[loss]
        total = loss_of(read)
        inputs = call.differentiable()
        gradients = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
        for name, value, gradient in zip(inputs, inputs.values(), gradients, strict=True):
            found[f"gradient of {name}"] = torch.zeros_like(value) if gradient is None else gradient
        return {name: value.detach() for name, value in found.items()}
