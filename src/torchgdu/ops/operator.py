"""torchgdu::scan: the engine as one operator of torch, with its gradients.

Where gradients will be asked for, autograd puts ``scan_saving`` in its place, which also returns
what ``scan_backward`` needs. None of them changes what it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from torchgdu import functional
from torchgdu.ops import call
from torchgdu.ops.call import DIFFERENTIABLE, Problem

LIBRARY = torch.library.Library("torchgdu", "DEF")

_PROBLEM = (
    "str cell, Tensor x, Tensor h, Tensor? c, Tensor? clock, Tensor weight_ih, Tensor weight_hh, "
    "Tensor? bias, Tensor? bias_hn, Tensor? scale, Tensor? base, Tensor? batch_sizes, "
    "str partition, bool reverse, SymInt checkpoint"
)
LIBRARY.define(f"scan({_PROBLEM}) -> (Tensor output, Tensor h_n, Tensor c_n)")
LIBRARY.define(f"scan_saving({_PROBLEM}) -> (Tensor output, Tensor h_n, Tensor c_n, Tensor saved)")
LIBRARY.define(
    f"scan_backward({_PROBLEM}, Tensor output, Tensor saved, Tensor? grad_output, "
    "Tensor? grad_h_n, Tensor? grad_c_n, bool[] wanted) -> Tensor[]"
)


_N = len(Problem._fields)
_TENSORS = slice(1, Problem._fields.index("partition"))
_C = Problem._fields.index("c")
_PLACES = [Problem._fields.index(name) for name in DIFFERENTIABLE]

scan = torch.ops.torchgdu.scan.default
scan_saving = torch.ops.torchgdu.scan_saving.default
scan_backward = torch.ops.torchgdu.scan_backward.default


def _scan(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    return call.forward(Problem(*given))[:3]


def _scan_saving(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return call.forward(Problem(*given), True)


def _scan_backward(*given: Any) -> list[Tensor]:
    return call.backward(Problem(*given[:_N]), *given[_N:])


def _scan_fake(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    p = Problem(*given)
    for value in given[_TENSORS]:
        if value is not None and value is not p.batch_sizes and value.device != p.x.device:
            raise TypeError(f"inputs are on {value.device} and on {p.x.device}")
    output = p.x.new_empty((*p.x.shape[:-1], p.h.size(-1)))
    c_n = p.h.new_empty(0 if p.c is None else p.h.shape)
    return output, p.h.new_empty(p.h.shape), c_n


def _scan_saving_fake(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    p = Problem(*given)
    return *_scan_fake(*given), p.x.new_empty(call.saved_bytes(p), dtype=torch.uint8)


def _scan_backward_fake(*given: Any) -> list[Tensor]:
    p = Problem(*given[:_N])
    values = (getattr(p, name) for name in DIFFERENTIABLE)
    return [v.new_empty(v.shape) for v, want in zip(values, given[-1], strict=True) if want]


class _Scan(torch.autograd.Function):
    """``scan`` with its gradients."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # a missing gradient is a null pointer
        compute = _scan_saving if call.plain(given[_TENSORS]) else scan_saving
        output, h_n, c_n, saved = compute(*given)
        if given[_C] is None:
            ctx.mark_non_differentiable(c_n)
        ctx.save_for_backward(*given[_TENSORS], output, saved)
        ctx.cell, ctx.rest = given[0], given[_TENSORS.stop :]
        return output, h_n, c_n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, output, saved = ctx.saved_tensors
        p = Problem(ctx.cell, *tensors, *ctx.rest)
        wanted = [ctx.needs_input_grad[k] for k in _PLACES]
        # A result that is differentiated again, or gradients of which each stands for many.
        if torch.is_grad_enabled() or any(map(_many, grads)):
            computed = _through_reference(p, grads, wanted)
        else:
            compute = _scan_backward if call.plain((*tensors, saved, *grads)) else scan_backward
            computed = compute(*p, output, saved, *grads, wanted)
        found: list[Tensor | None] = [None] * _N
        for k, value in zip(compress(_PLACES, wanted), computed, strict=True):
            found[k] = value
        return tuple(found)


def _many(value: Tensor | None) -> bool:
    """Return whether vmap has put many tensors into this one, as batched gradients are."""
    if value is None:
        return False
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(value) or functorch.is_legacy_batchedtensor(value)


def _through_reference(
    p: Problem, grads: Sequence[Tensor | None], wanted: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Return the gradients that are wanted, by operations that torch can look into."""
    again = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        # Views of their own: what one input owes to another is not this operator's to add.
        own: list[Any] = [v.view_as(v) if isinstance(v, Tensor) else v for v in p]
        inputs = [own[k] for k in compress(_PLACES, wanted)]
        p = Problem(*own)
        state = tuple(value for value in (p.h, p.c, p.clock) if value is not None)
        output, final = functional.scan(
            p.cell, p.x, state, p.weight_ih, p.weight_hh, p.bias,
            functional.Extra(p.bias_hn, p.scale, p.base, call.split(p.partition)),
            batch_sizes=p.batch_sizes, reverse=p.reverse,
        )  # fmt: skip
        given = [(v, g) for v, g in zip((output, *final), grads, strict=False) if g is not None]
        if not given:
            return [None] * len(inputs)
        results, those = zip(*given, strict=True)
        return torch.autograd.grad(results, inputs, those, create_graph=again, allow_unused=True)


def _differentiated(given: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in given
    )


def _autograd(*given: Any) -> Any:
    if _differentiated(given):
        return _Scan.apply(*given)  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return scan(*given)


def _underived(*given: Any) -> Any:
    if _differentiated(given):
        raise RuntimeError("of these operators, torchgdu::scan is the one that has gradients")
    with torch._C._AutoDispatchBelowAutograd():
        return (scan_saving if len(given) == _N else scan_backward)(*given)


def _autocast(*given: Any) -> tuple[Tensor, ...]:
    """Compute in float32 and return autocast's dtype; float64 stays what it is."""
    with torch.autocast("cpu", enabled=False):
        if given[1].dtype == torch.float64:
            return tuple(scan(*given))
        results = scan(*map(single, given))
    return tuple(value.to(torch.get_autocast_dtype("cpu")) for value in results)


def single(value: Any) -> Any:
    """Return floating-point numbers as float32, and anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


LIBRARY.impl("scan", _scan, "CPU")
LIBRARY.impl("scan", _autograd, "Autograd")
LIBRARY.impl("scan", _autocast, "AutocastCPU")
torch.library.register_fake("torchgdu::scan", _scan_fake, lib=LIBRARY)
LIBRARY.impl("scan_saving", _scan_saving, "CPU")
LIBRARY.impl("scan_saving", _underived, "Autograd")
torch.library.register_fake("torchgdu::scan_saving", _scan_saving_fake, lib=LIBRARY)
LIBRARY.impl("scan_backward", _scan_backward, "CPU")
LIBRARY.impl("scan_backward", _underived, "Autograd")
torch.library.register_fake("torchgdu::scan_backward", _scan_backward_fake, lib=LIBRARY)
