"""The recurrence as layers call it: one door to whatever computes it."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgdu import functional
from torchgdu.functional import (
    CELLS,
    PLAIN,
    Cell,
    Checkpoint,
    Extra,
    State,
    checkpoint_interval,
    clockwork_mask,
    highway,
    learnt_delta,
    spread,
)
from torchgdu.ops import call, operator
from torchgdu.ops.backend import available, engine_serves, use_backend, wanted
from torchgdu.ops.call import Problem
from torchgdu.ops.engine import library, no_engine
from torchgdu.ops.operator import single

# What layers need of the specification; they see nothing else of it.
__all__ = [
    "CELLS",
    "PLAIN",
    "Cell",
    "Checkpoint",
    "Extra",
    "State",
    "autocasting",
    "available",
    "checkpoint_interval",
    "clockwork_mask",
    "highway",
    "learnt_delta",
    "library",
    "no_engine",
    "scan",
    "spread",
    "step",
    "use_backend",
    "wanted",
]

_HALF = (torch.float16, torch.bfloat16)


def autocasting(device: str) -> bool:
    """Return whether autocast is on for this type of device; some types have none."""
    if torch.compiler.is_compiling():  # torch 2.6 cannot look into the question below
        return device != "meta" and torch.is_autocast_enabled(device)
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def scan(
    cell: str,
    x: Tensor,
    state: State,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    extra: Extra = PLAIN,
    *,
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
    checkpoint: Checkpoint = None,
) -> tuple[Tensor, State]:
    """Run ``cell`` along a sequence: arguments and result of ``functional.scan``.

    Half precision and autocast compute in float32 and return the input's or autocast's dtype.
    """
    wanted = x.dtype
    if autocasting(x.device.type) and wanted != torch.float64:
        wanted = torch.get_autocast_dtype(x.device.type)
    given = (cell, x, state, weight_ih, weight_hh, bias, extra)
    if wanted not in _HALF:
        return _compute(*given, batch_sizes, reverse, checkpoint)
    with torch.autocast(x.device.type, enabled=False):
        x, weight_ih, weight_hh, bias = map(single, (x, weight_ih, weight_hh, bias))
        bias_hn, scale, base = map(single, extra[:3])
        extra = Extra(bias_hn, scale, base, extra.partition)
        state = tuple(map(single, state))
        output, final = _compute(
            cell, x, state, weight_ih, weight_hh, bias, extra, batch_sizes, reverse, checkpoint
        )
    return output.to(wanted), tuple(v.to(wanted) if v.is_floating_point() else v for v in final)


def _compute(
    cell: str, x: Tensor, state: State, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor | None,
    extra: Extra, batch_sizes: Tensor | None, reverse: bool, checkpoint: Checkpoint,
) -> tuple[Tensor, State]:  # fmt: skip
    """Let the engine do it, or the reference."""
    if not engine_serves(x):
        return functional.scan(
            cell, x, state, weight_ih, weight_hh, bias, extra,
            batch_sizes=batch_sizes, reverse=reverse, checkpoint=checkpoint,
        )  # fmt: skip
    write = call.join if torch.compiler.is_compiling() else call.joined
    partition = write(extra.partition)
    interval = call.AUTO if checkpoint == "auto" else checkpoint_interval(checkpoint, 1)
    problem = Problem(
        cell, x, state[0], state[1] if cell == "lstm" else None,
        state[1] if cell == "cwrnn" else None, weight_ih, weight_hh, bias, extra.bias_hn,
        extra.scale, extra.base, batch_sizes, partition, reverse, interval or 0,
    )  # fmt: skip
    output, h_n, c_n = operator.scan(*problem)
    if cell == "lstm":
        return output, (h_n, c_n)
    if problem.clock is None:
        return output, (h_n,)
    return output, (h_n, problem.clock + _lengths(x, batch_sizes, problem.clock))


def _lengths(x: Tensor, batch_sizes: Tensor | None, clock: Tensor) -> Tensor | int:
    """Return how many symbols each sequence has: so many steps have more sequences than its row."""
    if batch_sizes is None:
        return x.size(0)
    rows = torch.arange(clock.size(0), device=clock.device)
    return torch.searchsorted(-batch_sizes, -rows)


def step(
    cell: str,
    x: Tensor,
    state: State,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    extra: Extra = PLAIN,
) -> State:
    """Run one step of ``cell``: ``x`` [B, I], the state as in ``scan``; returns the new state."""
    usual = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if usual and not torch.is_autocast_enabled("cpu") and engine_serves(x):
        new = call.step(cell, x, state, weight_ih, weight_hh, bias, extra)
        if new is not None:
            return new
    return scan(cell, x.unsqueeze(0), state, weight_ih, weight_hh, bias, extra)[1]
