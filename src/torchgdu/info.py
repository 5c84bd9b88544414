"""What `torchgdu info` says: which engine, instruction set and threads are in use, and why."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import torch

from torchgdu import environment, ops


def describe() -> dict[str, str]:
    """Return what computes here and why, as text by name."""
    return {
        "torchgdu": version("torchgdu"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "processor": f"{environment.processor()}, {os.cpu_count()} at hand",
        "backend": _backend(),
        **_engine(),
        "threads": f"{torch.get_num_threads()} ({_threads()})",
    }


def show() -> str:
    """Return it in lines."""
    found = describe()
    width = max(map(len, found))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in found.items())


def _backend() -> str:
    asked = ops.wanted()
    if asked != "auto":
        return f"{asked} (TORCHGDU_BACKEND={asked})"
    if ops.no_engine():
        return "reference, in plain torch, many times slower (there is no engine)"
    return "engine on the CPU in float32 and float64, else reference (auto)"


def _engine() -> dict[str, str]:
    missing = ops.no_engine()
    if missing:
        return {"engine": f"none: {missing}", "instructions": "none"}
    library = ops.library()
    asked = os.environ.get("TORCHGDU_ISA")
    why = f"TORCHGDU_ISA={asked}" if asked else "the highest that this processor has"
    built = ", ".join(
        name if name in library.supported else f"{name} (not on this processor)"
        for name in library.levels
    )
    return {
        "engine": f"version {library.version}, {library.path}",
        "instructions": f"{library.instructions} ({why}; built for {built})",
    }


def _threads() -> str:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if os.environ.get(name):
            return f"{name}={os.environ[name]}"
    return "torch's default; torch.set_num_threads changes it"
