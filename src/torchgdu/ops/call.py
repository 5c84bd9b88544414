"""One call of the engine: what is given is checked, what is missing is made, and all is passed on.

A tensor passes as the address of its numbers, so nothing gets here that has not been looked at.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchgdu.functional import CELLS, Extra, State, check_batch_sizes
from torchgdu.ops import engine


class Problem(NamedTuple):
    """The arguments of the operators; names and shapes as in ``functional.scan``."""

    cell: str
    x: Tensor
    h: Tensor
    c: Tensor | None
    clock: Tensor | None
    weight_ih: Tensor
    weight_hh: Tensor
    bias: Tensor | None
    bias_hn: Tensor | None
    scale: Tensor | None
    base: Tensor | None
    batch_sizes: Tensor | None
    partition: str
    """Its numbers with spaces between: a list of them takes torch 1 µs a number to pass on."""
    reverse: bool
    checkpoint: int
    """0 keeps everything for backward, ``AUTO`` is √T."""


AUTO = -1
"""√T as a number: a compiler may not know T, and what it does not know has no ``math.isqrt``."""


DIFFERENTIABLE = ("x", "h", "c", "weight_ih", "weight_hh", "bias", "bias_hn", "scale", "base")
"""What has a gradient, in the order in which ``backward`` returns those that are wanted."""

# What each cell has beside x, h, weights and bias: needed, or possible.
_NEEDED = {"lstm": {"c"}, "cwrnn": {"clock"}, "gdu": {"scale", "base"}}
_POSSIBLE = {"gru_after": {"bias_hn"}}
_ROWS = {cell: len(CELLS[cell].rows) for cell in engine.CELLS}
_NUMBER = {cell: k for k, cell in enumerate(engine.CELLS)}


class _Sizes(NamedTuple):
    steps: int
    batch: int
    inputs: int
    units: int
    output: tuple[int, ...]


def _check(p: Problem) -> _Sizes:
    """Return the sizes of a problem in which everything fits, or say what does not."""
    rows = _ROWS.get(p.cell)
    if rows is None:
        raise ValueError(f"cell={p.cell!r} is not one of {', '.join(engine.CELLS)}")
    x, dtype = p.x, p.x.dtype
    if dtype not in engine.DTYPES:
        raise TypeError(f"x must be float32 or float64, not {dtype}")
    if x.dim() != (3 if p.batch_sizes is None else 2) or p.h.dim() != 2:
        raise ValueError(
            "x must be [T, B, I], or [N, I] with batch_sizes, and h [B, H]; "
            f"got x {list(x.shape)} and h {list(p.h.shape)}"
        )
    batch, units = p.h.shape
    inputs = x.size(-1)
    if p.batch_sizes is None:
        steps = x.size(0)
        lead: tuple[int, ...] = (steps, batch)
    else:
        check_batch_sizes(p.batch_sizes, x.size(0), batch)
        steps = p.batch_sizes.size(0)
        lead = (x.size(0),)
    if not steps or not inputs or not units:
        raise ValueError(f"T={steps}, I={inputs}, H={units}: each must be at least 1")
    if p.checkpoint < AUTO:
        raise ValueError(
            f"checkpoint={p.checkpoint} must be a number of steps, 0 for none or {AUTO} for √T"
        )
    gates, state, one = rows * units, (batch, units), (units,)
    for name, value, shape in (
        ("x", x, (*lead, inputs)),
        ("h", p.h, state),
        ("weight_ih", p.weight_ih, (gates, inputs)),
        ("weight_hh", p.weight_hh, (gates, units)),
        ("bias", p.bias, (gates,)),
    ):
        if value is not None:
            _fit(name, value, shape, dtype)
    own = _NEEDED.get(p.cell, _NOTHING)
    for name, value, shape, kind in (
        ("c", p.c, state, dtype),
        ("clock", p.clock, (batch,), torch.int64),
        ("bias_hn", p.bias_hn, one, dtype),
        ("scale", p.scale, one, dtype),
        ("base", p.base, one, dtype),
    ):
        if value is None:
            if name in own:
                raise ValueError(f"cell={p.cell!r} needs {name}")
        elif name not in own and name not in _POSSIBLE.get(p.cell, _NOTHING):
            raise ValueError(f"cell={p.cell!r} has no {name}")
        else:
            _fit(name, value, shape, kind)
    return _Sizes(steps, batch, inputs, units, (*lead, units))


_NOTHING: set[str] = set()


def _fit(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise an error unless ``value`` is what the engine reads under this name."""
    if value.shape != shape or value.dtype is not dtype or not value.is_cpu:
        kind = ValueError if value.dtype is dtype and value.is_cpu else TypeError
        raise kind(
            f"{name} must be {list(shape)}, {dtype} on the CPU; "
            f"got {list(value.shape)}, {value.dtype} on {value.device}"
        )
    if not _address(value) and value.numel():
        raise RuntimeError(f"{name} has no memory to read: its storage was freed or never filled")


def _address(value: Tensor | None) -> int:
    """Return where the numbers lie, or 0: nowhere.

    A view that does not begin where its freed storage does has an address, of nothing.
    """
    if value is None:
        return 0
    address = value.data_ptr()
    return 0 if address == value.storage_offset() * value.element_size() else address


def join(partition: tuple[int, ...]) -> str:
    """Return a partition as the operators take it."""
    return " ".join(map(str, partition))


joined = lru_cache(join)
"""``join``, but that a compiler cannot follow."""


@lru_cache
def split(partition: str) -> tuple[int, ...]:
    """Return the numbers of a partition."""
    if not all(part.isdecimal() for part in partition.split()):
        raise ValueError(f"partition={partition!r} must be whole numbers with spaces between")
    return tuple(map(int, partition.split()))


@lru_cache
def _partition(cell: str, partition: tuple[int, ...], units: int) -> array[int]:
    """Return the partition as the engine takes it: sizes of groups, or periods."""
    if any(not 1 <= part < 2**63 for part in partition):
        raise ValueError("partition must be numbers from 1")
    if cell == "gdu" and sum(partition) != units:
        raise ValueError(f"partition must be sizes that sum to H={units}, not {sum(partition)}")
    if cell == "cwrnn" and (not partition or units % len(partition)):
        raise ValueError(f"partition must be the periods of equal parts of H={units}")
    if partition and cell not in ("gdu", "cwrnn"):
        raise ValueError(f"cell={cell!r} has no partition")
    return array("q", partition)


class _Call:
    """One call of the engine: the fields of its struct, and all that must live meanwhile."""

    def __init__(self, p: Problem, sizes: _Sizes) -> None:
        self.library = library = engine.library()
        partition = _partition(p.cell, split(p.partition), sizes.units)
        x = _by_rows(p.x)
        given = (
            p.h, p.c, p.clock, p.weight_ih, p.weight_hh, p.bias, p.bias_hn, p.scale, p.base
        )  # fmt: skip
        tensors = [None if value is None else value.contiguous() for value in given]
        lengths = None if p.batch_sizes is None else p.batch_sizes.contiguous()
        self.kept = x, tensors, lengths, partition
        steps, batch, inputs, units, _ = sizes
        self.batch = batch
        x_step, x_row = x.stride()[:2] if lengths is None else (0, x.stride(0))
        stretch = math.isqrt(steps) if p.checkpoint == AUTO else p.checkpoint
        self.head = (
            _NUMBER[p.cell], engine.DTYPES[x.dtype], library.level, torch.get_num_threads(),
            p.reverse, steps, batch, inputs, units, len(partition),
            stretch if stretch < steps else 0, x_step, x_row,
        )  # fmt: skip
        self.inputs = (
            _address(lengths), partition.buffer_info()[0], *map(_address, (x, *tensors)),
        )  # fmt: skip

    def pack(self, results: tuple[int, ...], grad_strides: tuple[int, ...] = (0, 0)) -> bytes:
        """Return the struct but for the gradients; ``results``: output, h_n, c_n, saved."""
        return engine.PROBLEM.pack(*self.head, *grad_strides, *self.inputs, *results)

    def saved(self) -> int:
        """Return how many bytes backward needs beside inputs and output."""
        if not self.batch:
            return 0
        return int(self.library.saved(self.pack((0, 0, 0, 0)) + engine.NO_GRADIENTS))


def _by_rows(value: Tensor) -> Tensor:
    """Return ``value``, copied where its rows are not contiguous; repeated rows are copied once."""
    if value.stride(-1) == 1 or value.size(-1) == 1:
        return value
    small = value
    for dim in range(value.dim() - 1):
        if value.stride(dim) == 0:
            small = small.narrow(dim, 0, 1)
    return small.contiguous().expand(value.shape)


def _done(status: int) -> None:
    if status == engine.NO_MEMORY:
        raise MemoryError("the engine found no memory for its own buffers")
    if status:
        raise RuntimeError(f"the engine refused the call ({status})")


_PLAIN = (Tensor, torch.nn.Parameter)


def plain(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether these are tensors like any other, and nobody looks on.

    One without an address may be made of zeros that are nowhere, or stand for another: torch knows.
    """
    if torch._C._len_torch_dispatch_stack():
        return False
    return all(
        value is None
        or (type(value) in _PLAIN and value.is_cpu and not value.is_neg() and _address(value) != 0)
        for value in tensors
    )


def forward(p: Problem, save: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output, h_n, c_n and saved; the last two empty where there are none."""
    sizes = _check(p)
    call = _Call(p, sizes)
    output, h_n = p.x.new_empty(sizes.output), p.h.new_empty((sizes.batch, sizes.units))
    c_n = p.h.new_empty(0 if p.c is None else (sizes.batch, sizes.units))
    saved = p.x.new_empty(call.saved() if save else 0, dtype=torch.uint8)
    if sizes.batch:
        results = output.data_ptr(), h_n.data_ptr(), c_n.data_ptr(), saved.data_ptr()
        _done(call.library.forward(call.pack(results) + engine.NO_GRADIENTS))
    return output, h_n, c_n, saved


def step(
    cell: str, x: Tensor, state: State, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor | None,
    extra: Extra,
) -> State | None:  # fmt: skip
    """Return the state after one symbol, x [B, I], without gradients; None: take the long way.

    A single step takes no longer than one look at its arguments, so there is only one look, and
    what ``plain`` and ``_address`` do stands in it.
    """
    h = state[0]
    bias_hn, scale, base, partition = extra
    c = state[1] if cell == "lstm" else None
    clock = state[1] if cell == "cwrnn" else None
    if (
        torch._C._len_torch_dispatch_stack()
        or h.dim() != 2
        or x.dim() != 2
        or (scale is None or base is None) is (cell == "gdu")
        or (bias_hn is not None and cell != "gru_after")
        or (clock is not None and not (clock.dtype is torch.int64 and plain((clock,))))
    ):
        return None
    (batch, units), inputs, dtype = h.shape, x.size(1), x.dtype
    gates, like_h, like_bias = _ROWS[cell] * units, (batch, units), (units,)
    addresses, width = [], x.element_size()
    for value, shape in (
        (x, (batch, inputs)), (h, like_h), (c, like_h), (weight_ih, (gates, inputs)),
        (weight_hh, (gates, units)), (bias, (gates,)), (bias_hn, like_bias), (scale, like_bias),
        (base, like_bias),
    ):  # fmt: skip
        if value is None:
            addresses.append(0)
        elif (
            value.shape == shape
            and value.dtype is dtype
            and type(value) in _PLAIN
            and value.is_contiguous()
            and value.is_cpu
            and not value.is_neg()
            and (address := value.data_ptr()) != value.storage_offset() * width
        ):
            addresses.append(address)
        else:
            return None
    if clock is not None:
        if clock.shape != (batch,):
            return None
        clock = clock.contiguous()
    if not (batch and inputs and units):
        return None
    library, parts = engine.library(), _partition(cell, partition, units)
    output, h_n = torch.empty_like(h), torch.empty_like(h)
    c_n = None if c is None else torch.empty_like(c)
    at_x, at_h, at_c, *at_others = addresses
    _done(library.forward(engine.PROBLEM.pack(
        _NUMBER[cell], engine.DTYPES[dtype], library.level, torch.get_num_threads(), 0, 1, batch,
        inputs, units, len(parts), 0, 0, inputs, 0, 0, 0, parts.buffer_info()[0], at_x, at_h, at_c,
        0 if clock is None else clock.data_ptr(), *at_others, output.data_ptr(), h_n.data_ptr(),
        0 if c_n is None else c_n.data_ptr(), 0,
    ) + engine.NO_GRADIENTS))  # fmt: skip
    if clock is not None:
        return h_n, clock + 1
    return (h_n,) if c_n is None else (h_n, c_n)


def backward(
    p: Problem,
    output: Tensor,
    saved: Tensor,
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Return the gradients that are ``wanted`` of ``DIFFERENTIABLE``."""
    sizes = _check(p)
    state = (sizes.batch, sizes.units)
    for name, value, shape in (
        ("output", output, sizes.output),
        ("grad_output", grad_output, sizes.output),
        ("grad_h_n", grad_h_n, state),
        ("grad_c_n", grad_c_n, state),
    ):
        if value is not None:
            _fit(name, value, shape, p.x.dtype)
    if len(wanted) != len(DIFFERENTIABLE):
        raise ValueError(f"wanted must be {len(DIFFERENTIABLE)} flags, got {len(wanted)}")
    grads: list[Tensor | None] = []
    for name, want in zip(DIFFERENTIABLE, wanted, strict=True):
        value = getattr(p, name)
        if want and value is None:
            raise ValueError(f"there is no {name} whose gradient could be wanted")
        grads.append(value.new_empty(value.shape) if want else None)
    results = [grad for grad in grads if grad is not None]
    if not sizes.batch:
        return [grad.zero_() for grad in results]
    call = _Call(p, sizes)
    _fit("saved", saved, (call.saved(),), torch.uint8)
    if saved.data_ptr() % 64 or not saved.is_contiguous():
        saved = saved.clone(memory_format=torch.contiguous_format)
    output = output.contiguous()
    strides: tuple[int, ...] = (0, 0)
    if grad_output is not None:
        grad_output = _by_rows(grad_output)
        strides = (0, grad_output.stride(0)) if grad_output.dim() == 2 else grad_output.stride()[:2]
    grad_h_n = None if grad_h_n is None else grad_h_n.contiguous()
    grad_c_n = None if grad_c_n is None else grad_c_n.contiguous()
    came = (grad_output, grad_h_n, grad_c_n)
    gradients = engine.GRADIENTS.pack(*map(_address, came), *map(_address, grads))
    given = call.pack((output.data_ptr(), 0, 0, saved.data_ptr()), strides)
    _done(call.library.backward(given + gradients))
    return results


def saved_bytes(p: Problem) -> int:
    """Return how many bytes ``scan_saving`` saves, from sizes that may be symbols.

    They grow with the number of symbols, or with that of the states between stretches.
    """
    packed = p.batch_sizes is not None
    steps = p.batch_sizes.size(0) if p.batch_sizes is not None else p.x.size(0)
    count = p.x.size(0) if packed else p.x.size(0) * p.x.size(1)
    auto = p.checkpoint == AUTO
    # Whether √T < T is not left to symbols: they know whether T > 1, and not what a root is.
    stretches = bool(steps > 1 if auto else 0 < p.checkpoint < steps)
    if stretches:
        stretch = _root(steps) if auto else p.checkpoint
        count = (steps + stretch - 1) // stretch * p.h.size(0)
    library = engine.library()
    head = (
        _NUMBER[p.cell], engine.DTYPES[p.x.dtype], library.level, 1, 0, 1, 1, int(p.x.size(-1)),
        int(p.h.size(1)), 0, stretches, 0, 0, 0, 0,
    )  # fmt: skip
    one = library.saved(engine.PROBLEM.pack(*head, *[0] * 16) + engine.NO_GRADIENTS)
    return int(one) * count


def _root(steps: int) -> int:
    """Return ⌊√T⌋, of a symbol too."""
    return math.isqrt(steps) if type(steps) is int else torch.sym_int(torch.sym_sqrt(steps))
