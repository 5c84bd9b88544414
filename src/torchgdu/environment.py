"""What computes a run: versions, revision, machine and engine, for its record."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy
import torch

from torchgdu import ops
from torchgdu.config import RunConfig

BITS = ("torch", "torch instructions", "backend", "instructions", "threads", "data")
"""What may change the bits of a result: a run does not go on under others unasked."""


def describe(config: RunConfig) -> dict[str, Any]:
    """Return everything about this process that a record keeps."""
    engine = ops.library() if config.backend == "engine" else None
    return {
        "torchgdu": _version(),
        "revision": revision(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "torch instructions": torch.backends.cpu.get_cpu_capability(),
        "backend": config.backend,
        "instructions": engine.instructions if engine else None,
        "engine": engine.version if engine else None,
        "threads": config.threads,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
    }


def revision() -> str | None:
    """Return the git revision of the source, with a + where it has changes; None if installed."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        # Installed into an environment inside some other repository is not being part of it.
        if not git("ls-files", Path(__file__).name):
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(here))
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _version() -> str | None:
    try:
        return version("torchgdu")
    except PackageNotFoundError:
        return None


def processor() -> str:
    """Return the processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
