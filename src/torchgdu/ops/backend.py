"""Who computes: the engine or the reference, by request or by what is there."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchgdu.ops import engine

BACKENDS = ("auto", "engine", "reference")
_chosen: ContextVar[str | None] = ContextVar("torchgdu backend", default=None)


def use_backend(name: str) -> AbstractContextManager[None]:
    """Return a context in which layers and cells compute with this backend.

    "engine" is the compiled engine: an error where there is none, or where it cannot serve.
    "reference" is plain torch. "auto" takes the engine where it serves: on the CPU, in float32 and
    float64 (half precision computes in float32). Outside, TORCHGDU_BACKEND decides, else "auto".
    A backward pass uses what its forward pass used; so does a compiled function what it was
    compiled under. Other threads and asynchronous tasks are left alone.

    >>> import torchgdu
    >>> with torchgdu.use_backend("reference"):
    ...     output, h_n = torchgdu.GDU(3, "5x2")(torch.randn(7, 2, 3))
    """
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} is not one of {', '.join(BACKENDS)}")
    return _using(name)


@contextmanager
def _using(name: str) -> Iterator[None]:
    if name == "engine":
        engine.library()
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


@functools.cache
def _usual() -> str:
    name = os.environ.get("TORCHGDU_BACKEND") or "auto"
    if name not in BACKENDS:
        raise ValueError(f"TORCHGDU_BACKEND={name} is not one of {', '.join(BACKENDS)}")
    return name


def wanted() -> str:
    """Return the backend asked for here: one of ``BACKENDS``."""
    return _chosen.get() or _usual()


def available() -> str:
    """Return the backend that computes on the CPU here: "engine" or "reference"."""
    name = wanted()
    if name != "auto":
        return name
    return "reference" if _missing() else "engine"


@functools.cache
def _missing() -> bool:
    """Return whether there is no engine, and say so once; an error where it is required."""
    loaded = engine.load()
    if not isinstance(loaded, str):
        return False
    if os.environ.get("TORCHGDU_REQUIRE_ENGINE", "0") not in ("", "0"):
        raise RuntimeError(f"TORCHGDU_REQUIRE_ENGINE is set, but there is no engine: {loaded}")
    warnings.warn(
        "torchgdu computes without its engine, in plain torch, which is many times slower: "
        f"{loaded}. TORCHGDU_BACKEND=reference asks for this in silence.",
        stacklevel=2,
    )
    return True


def _request() -> tuple[str, str]:
    return wanted(), available()


# A compiler cannot look into a context variable: it takes what holds where it compiles. This is
# torch.compiler.assume_constant_result, which would load the whole compiler to do it.
_request._dynamo_marked_constant = True  # type: ignore[attr-defined]


def engine_serves(x: Tensor) -> bool:
    """Return whether the engine is to compute for this input; an error where it must and cannot."""
    asked, name = _request()
    if name == "reference":
        return False
    if x.is_cpu and (x.dtype is torch.float32 or x.dtype is torch.float64):
        served = None if torch.compiler.is_compiling() else _transformed()
    else:
        served = f"float32 and float64 on the CPU, not {x.dtype} on {x.device.type}"
    if served and asked == "engine":
        raise RuntimeError(f"the engine serves {served}: use_backend('auto') finds another way")
    return served is None


def _transformed() -> str | None:
    """Return what the engine serves instead, where torch looks for operations it can rewrite."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "no transforms of torch.func"
    if forward_ad._current_level >= 0:
        return "no forward-mode differentiation"
    if torch._C._get_tracing_state() is not None:
        return "no torch.jit.trace"
    return None
