"""The paper's equations in plain torch: the specification that every faster path must equal.

Every cell is a gated additive state transition (GAST):

    s̄_t = φ(W_s x_t + U_s γ_t(s_{t-1}) + b_s)        s_t = β_t ⊙ s_{t-1} + α_t ⊙ s̄_t

``step`` is one such step of the named cell, with its gates; ``scan`` runs it along a sequence.
Sizes: T time steps, B batch, I input, H state, G gates and candidates, N symbols of a packed batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

from torchgdu.groups import Groups, Run

State: TypeAlias = tuple[Tensor, ...]
Checkpoint: TypeAlias = int | Literal["auto"] | None

KINK = 1e-6
"""δ ≤ 1 + KINK·M counts as δ ≤ 1, and a learnt δ stays within [KINK·M, (1 − KINK)·M]."""


class Step(NamedTuple):
    """One step of a cell: the new state and the gates that made it, each [B, H]."""

    state: State
    alpha: Tensor
    """α_t, the share of the candidate that is written."""
    beta: Tensor
    """β_t, the share of the old state that is kept."""
    gamma: Tensor
    """What the candidate reads the old state through; for the LSTM o_t, read by the next step."""
    candidate: Tensor
    """s̄_t."""


class Extra(NamedTuple):
    """What only some cells have."""

    bias_hn: Tensor | None = None
    """[H], ``gru_after``: the recurrent bias inside the reset product."""
    scale: Tensor | None = None
    """[H], ``gdu``: α = scale · d + base, one entry a unit (see ``spread``)."""
    base: Tensor | None = None
    partition: tuple[int, ...] = ()
    """``gdu``: the size of each group. ``cwrnn``: the period of each group."""


PLAIN = Extra()


def affine(delta: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scale, base) with α = scale · d + base for each group, both branches of the paper.

    δ ≤ 1:  (δ, 0).   δ > 1:  ((M − δ)/(M − 1), (δ − 1)/(M − 1)).   ``delta``, ``sizes``: [groups].

    >>> affine(torch.tensor([0.5, 2.0]), torch.tensor([4, 4]))
    (tensor([0.5000, 0.6667]), tensor([0.0000, 0.3333]))
    """
    small = (sizes == 1) | (delta <= 1 + KINK * sizes)
    others = torch.where(small, 1, sizes - 1)
    scale = torch.where(small, delta, (sizes - delta) / others)
    base = torch.where(small, torch.zeros_like(delta), (delta - 1) / others)
    return scale, base


def learnt_delta(rho: Tensor, sizes: Tensor) -> Tensor:
    """Return δ = M·sigmoid(ρ), kept within [1e-6·M, (1 − 1e-6)·M]; ``rho``, ``sizes``: [groups].

    Half precision cannot hold those limits: δ is then float32.
    """
    return sizes * torch.sigmoid(rho.to(_wide(rho.dtype))).clamp(KINK, 1 - KINK)


def group_softmax(logits: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the softmax inside each group of neighbours along the last dimension, Σ sizes long."""
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    parts = logits.split([size * count for size, count in runs], -1)
    soft = [
        part.unflatten(-1, (count, size)).softmax(-1).flatten(-2)
        for part, (size, count) in zip(parts, runs, strict=True)
    ]
    return soft[0] if len(soft) == 1 else torch.cat(soft, -1)


def distribute(
    logits: Tensor, groups: str | Iterable[Run] | Groups, delta: Tensor | None = None
) -> Tensor:
    """Distribute δ_i over each group along the last dimension: the operator ζ(·; {δ_i, M_i}).

    d = softmax inside each group;  α = δ·d  if δ ≤ 1,
    else α = (M − δ)/(M − 1) · d + (δ − 1)/(M − 1).  Each group of α sums to its δ.

    Args:
        logits: [..., H], any size up to ±1e4 and −inf; a group that is all −inf gives NaN.
        groups: the groups of the H units.
        delta: [groups], used in place of the groups' own δ; may require gradients. It is looked at
            where that is possible, not while compiling, tracing or inside transforms.

    Returns:
        α, like the logits; δ of half precision is taken in float32 all the same.

    >>> distribute(torch.zeros(6), "2x1+4x1x3.0")
    tensor([0.5000, 0.5000, 0.7500, 0.7500, 0.7500, 0.7500])
    """
    groups = Groups(groups)
    if logits.dim() == 0 or logits.size(-1) != groups.units:
        raise ValueError(
            f"logits {tuple(logits.shape)} do not end in the {groups.units} units of '{groups}'"
        )
    if delta is None:
        delta = torch.tensor(groups.deltas, dtype=_wide(logits.dtype), device=logits.device)
    elif delta.shape != (len(groups.sizes),):
        raise ValueError(
            f"delta {tuple(delta.shape)} must have one entry for each of {len(groups.sizes)} groups"
        )
    elif _readable(delta):
        _check_delta(delta, groups.sizes)
    extra = spread(delta.to(_wide(delta.dtype)), groups.sizes)
    return _distribute(logits, extra).to(logits.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32 in place of half precision, which cannot tell δ = 99.9 from 100."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _readable(value: Tensor) -> bool:
    """Return whether Python may look at the numbers: not those of a compiler or a transform."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack()
        or _transformed()
        or value.is_meta
        or type(value) not in (Tensor, torch.nn.Parameter)
    )


def _transformed() -> bool:
    """Return whether torch.func is at work: it cannot recompute, and would fail where asked to."""
    compiling = torch.compiler.is_compiling()
    return not compiling and torch._C._functorch.peek_interpreter_stack() is not None


def _check_delta(delta: Tensor, sizes: Sequence[int]) -> None:
    for k, (value, size) in enumerate(zip(delta.tolist(), sizes, strict=True)):
        if not 0 < value < size:
            raise ValueError(f"delta[{k}] = {value} is not between 0 and {size}, the group's size")


def spread(delta: Tensor, sizes: tuple[int, ...]) -> Extra:
    """Return what the GDU needs of its groups: (scale, base) of ``affine``, one entry a unit."""
    per_group = torch.tensor(sizes, device=delta.device)
    scale, base = (
        value.repeat_interleave(per_group, output_size=sum(sizes))
        for value in affine(delta, per_group)
    )
    return Extra(scale=scale, base=base, partition=sizes)


def _distribute(logits: Tensor, extra: Extra) -> Tensor:
    assert extra.scale is not None
    assert extra.base is not None
    return extra.scale * group_softmax(logits, extra.partition) + extra.base


def highway(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    extra: Extra,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return y = T ⊙ H(x) + (1 − T) ⊙ x, with ``weight`` [2·H, H]: rows of the gate T, then of H.

    T = ζ(W_T x + b_T) where ``extra`` comes from ``spread``, else T = σ(W_T x + b_T).
    y has the dtype of x, also where the constants of the distributor have a wider one.
    """
    gate, candidate = F.linear(x, weight, bias).chunk(2, -1)
    transform = torch.sigmoid(gate) if extra.scale is None else _distribute(gate, extra)
    return (transform * activation(candidate) + (1 - transform) * x).to(x.dtype)


def clockwork_mask(periods: Sequence[int], units: int) -> Tensor:
    """Return [H, H], True where unit i of a CW-RNN may read unit j: its period is no shorter.

    >>> clockwork_mask((1, 2), 2)
    tensor([[ True,  True],
            [False,  True]])
    """
    each = torch.tensor(periods).repeat_interleave(units // len(periods))
    return each >= each.unsqueeze(-1)


# One function a cell. `pre` = W x_t + b for all rows, [B, G·H]; `u`: the transposed recurrent
# matrices, one for each product the cell takes with its state, cut once for all steps.

Weights: TypeAlias = tuple[Tensor, ...]


def _srn(pre: Tensor, state: State, u: Weights, extra: Extra) -> Step:
    (s,) = state
    candidate = torch.tanh(pre + s @ u[0])
    one = torch.ones_like(candidate)
    return Step((candidate,), one, torch.zeros_like(candidate), one, candidate)


def _cwrnn(pre: Tensor, state: State, u: Weights, extra: Extra) -> Step:
    s, clock = state
    candidate = torch.tanh(pre + s @ u[0])
    periods = torch.tensor(extra.partition, device=clock.device)
    units = periods.repeat_interleave(s.size(-1) // len(extra.partition))
    active = clock.unsqueeze(-1) % units == 0
    alpha = active.to(candidate.dtype)
    new = torch.where(active, candidate, s)  # a sleeping unit keeps its value, come what may
    return Step((new, clock + 1), alpha, 1 - alpha, torch.ones_like(alpha), candidate)


def _lstm(pre: Tensor, state: State, u: Weights, extra: Extra) -> Step:
    h, s = state
    i, f, g, o = (pre + h @ u[0]).chunk(4, -1)
    i, f, o, candidate = torch.sigmoid(i), torch.sigmoid(f), torch.sigmoid(o), torch.tanh(g)
    s = f * s + i * candidate
    return Step((o * torch.tanh(s), s), i, f, o, candidate)


def _gru(pre: Tensor, state: State, u: Weights, extra: Extra) -> Step:
    (s,) = state
    gates, n = pre.split([u[0].size(1), u[1].size(1)], -1)
    r, z = torch.sigmoid(gates + s @ u[0]).chunk(2, -1)
    candidate = torch.tanh(n + (r * s) @ u[1])
    return Step((z * s + (1 - z) * candidate,), 1 - z, z, r, candidate)


def _gru_after(pre: Tensor, state: State, u: Weights, extra: Extra) -> Step:
    (s,) = state
    r, z, n = pre.chunk(3, -1)
    u_r, u_z, u_n = (s @ u[0]).chunk(3, -1)
    r, z = torch.sigmoid(r + u_r), torch.sigmoid(z + u_z)
    candidate = torch.tanh(n + r * (u_n if extra.bias_hn is None else u_n + extra.bias_hn))
    return Step((z * s + (1 - z) * candidate,), 1 - z, z, r, candidate)


def _ugrnn(pre: Tensor, state: State, u: Weights, extra: Extra) -> Step:
    (s,) = state
    gate, candidate = (pre + s @ u[0]).chunk(2, -1)
    return _coupled(s, torch.sigmoid(gate), torch.tanh(candidate))


def _gdu(pre: Tensor, state: State, u: Weights, extra: Extra) -> Step:
    (s,) = state
    gate, candidate = (pre + s @ u[0]).chunk(2, -1)
    return _coupled(s, _distribute(gate, extra), torch.tanh(candidate))


def _coupled(s: Tensor, alpha: Tensor, candidate: Tensor, gamma: Tensor | None = None) -> Step:
    beta = 1 - alpha
    gamma = torch.ones_like(alpha) if gamma is None else gamma
    return Step((beta * s + alpha * candidate,), alpha, beta, gamma, candidate)


def _mgu(read: Literal["alpha", "beta"]) -> Callable[[Tensor, State, Weights, Extra], Step]:
    def mgu(pre: Tensor, state: State, u: Weights, extra: Extra) -> Step:
        (s,) = state
        gate, candidate = pre.chunk(2, -1)
        f = torch.sigmoid(gate + s @ u[0])
        gamma = f if read == "alpha" else 1 - f
        return _coupled(s, f, torch.tanh(candidate + (gamma * s) @ u[1]), gamma)

    return mgu


class Cell(NamedTuple):
    """One row of the table of cells."""

    rows: tuple[str, ...]
    """The gates and candidates whose weights are stacked, in order; G = len(rows)."""
    states: tuple[str, ...]
    """The parts of the state; the first one is the output."""
    step: Callable[[Tensor, State, Weights, Extra], Step]
    products: tuple[int, ...] = ()
    """How many rows each product with the state takes, in order; () is one product for all."""

    def cut(self, weight_hh: Tensor) -> Weights:
        """Return the transposed recurrent matrices that ``step`` takes."""
        if not self.products:
            return (weight_hh.T,)
        units = weight_hh.size(1)
        return tuple(u.T for u in weight_hh.split([units * rows for rows in self.products]))


CELLS: dict[str, Cell] = {
    "srn": Cell(("candidate",), ("h",), _srn),
    "lstm": Cell(("i", "f", "g", "o"), ("h", "c"), _lstm),
    "gru": Cell(("r", "z", "n"), ("h",), _gru, (2, 1)),
    "gru_after": Cell(("r", "z", "n"), ("h",), _gru_after),
    "ugrnn": Cell(("alpha", "candidate"), ("h",), _ugrnn),
    "mgu": Cell(("f", "candidate"), ("h",), _mgu("alpha"), (1, 1)),
    "mgu_beta": Cell(("f", "candidate"), ("h",), _mgu("beta"), (1, 1)),
    "cwrnn": Cell(("candidate",), ("h", "clock"), _cwrnn),
    "gdu": Cell(("alpha", "candidate"), ("h",), _gdu),
}


def step(
    cell: str,
    x: Tensor,
    state: State,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    extra: Extra = PLAIN,
) -> Step:
    """One step of ``cell`` with all its gates; ``x`` [B, I], every part of ``state`` as in scan."""
    kind = CELLS[cell]
    return kind.step(F.linear(x, weight_ih, bias), state, kind.cut(weight_hh), extra)


def checkpoint_interval(checkpoint: Checkpoint, steps: int) -> int | None:
    """Return the number of steps between stored states: ``"auto"`` is √T, None stores all."""
    if checkpoint is None:
        return None
    if checkpoint == "auto":
        return max(1, math.isqrt(steps))
    if isinstance(checkpoint, bool) or not isinstance(checkpoint, int) or checkpoint < 1:
        raise ValueError(f"checkpoint={checkpoint!r} is not None, 'auto' or a whole number from 1")
    return checkpoint


def check_batch_sizes(sizes: Tensor, symbols: int, batch: int) -> None:
    """Raise an error unless so many of B sequences, never growing, run through N symbols."""
    if sizes.dtype is not torch.int64 or not sizes.is_cpu or sizes.dim() != 1:
        raise TypeError(
            f"batch_sizes must be [T], torch.int64 on the CPU; "
            f"got {list(sizes.shape)}, {sizes.dtype} on {sizes.device}"
        )
    if (
        not sizes.numel()
        or sizes[0] != batch
        or sizes[-1] < 1
        or (sizes[1:] > sizes[:-1]).any()
        or sizes.sum() != symbols
    ):
        raise ValueError(
            f"batch_sizes must fall from B={batch} to at least 1, and be {symbols} symbols in all"
        )


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
    """Run ``cell`` along a sequence.

    Args:
        cell: a name in ``CELLS``.
        x: [T, B, I], or packed [N, I] with ``batch_sizes`` as in a ``PackedSequence``.
        state: h [B, H]; for the LSTM (h, c), for the CW-RNN (h, clock int64 [B]).
        weight_ih: [G·H, I].
        weight_hh: [G·H, H].
        bias: [G·H] or None.
        extra: what only this cell has.
        batch_sizes: int64 [T] on the CPU, never growing, how many sequences are still running.
        reverse: go from each sequence's last symbol to its first; outputs stay in place.
        checkpoint: store the state every so many steps only, recompute the rest in backward;
            see ``checkpoint_interval``. Transforms of ``torch.func`` store everything.

    Returns:
        The outputs, [T, B, H] or packed [N, H], and the state after each sequence's own last step.
    """
    if batch_sizes is None:
        lengths = [x.size(1)] * x.size(0)
        flat = x.flatten(0, 1)
    else:
        check_batch_sizes(batch_sizes, x.size(0), state[0].size(0))
        lengths = batch_sizes.tolist()
        flat = x
    batch = x.size(1) if batch_sizes is None else state[0].size(0)
    for name, part in zip(CELLS[cell].states, state, strict=True):
        if part.size(0) != batch:  # a single row would be spread over all
            raise ValueError(f"{name} must have B={batch} rows; got {list(part.shape)}")
    kind = CELLS[cell]
    interval = checkpoint_interval(checkpoint, len(lengths))

    def segment(part: Tensor, lengths: list[int], *start: Tensor) -> tuple[Tensor, ...]:
        """Run the steps of one stretch of time; finished sequences keep their state."""
        state = start
        pre = F.linear(part, weight_ih, bias).split(lengths)
        u = kind.cut(weight_hh)
        outputs = list(pre)
        for t in reversed(range(len(lengths))) if reverse else range(len(lengths)):
            running = lengths[t]
            if running == state[0].size(0):
                state = kind.step(pre[t], state, u, extra).state
                outputs[t] = state[0]
            else:
                now, waiting = zip(*(v.tensor_split([running]) for v in state), strict=True)
                new = kind.step(pre[t], now, u, extra).state
                outputs[t] = new[0]
                state = tuple(map(torch.cat, zip(new, waiting, strict=True)))
        return torch.cat(outputs), *state

    final: Sequence[Tensor] = state
    if interval is None or interval >= len(lengths) or _transformed():
        output, *final = segment(flat, lengths, *state)
    else:
        parts = [lengths[t : t + interval] for t in range(0, len(lengths), interval)]
        outputs = list(flat.split([sum(part) for part in parts]))
        for k in reversed(range(len(parts))) if reverse else range(len(parts)):
            outputs[k], *final = recompute(
                segment, outputs[k], parts[k], *final, use_reentrant=False
            )
        output = torch.cat(outputs)
    if batch_sizes is None:
        output = output.unflatten(0, (x.size(0), x.size(1)))
    return output, tuple(final)
