"""What `torchgdu info` says, from the command line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from torchgdu import ops


def info(**environment: str) -> dict[str, str]:
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHGDU", "OMP"))}
    done = subprocess.run(
        [sys.executable, "-m", "torchgdu.cli", "info"]
        if False
        else [sys.executable, "-c", "from torchgdu.cli import main; main()", "info"],
        capture_output=True, text=True, check=True, env=settings | environment,
    )  # fmt: skip
    pairs = (line.split("  ", 1) for line in done.stdout.splitlines())
    return {name: value.strip() for name, value in pairs}


def test_engine_and_instructions_and_why() -> None:
    library = ops.library()
    found = info(OMP_NUM_THREADS="1")
    assert found["engine"] == f"version {library.version}, {library.path}"
    assert found["instructions"].startswith(f"{library.supported[-1]} (the highest that")
    assert found["backend"].startswith("engine on the CPU")
    assert found["threads"] == "1 (OMP_NUM_THREADS=1)"
    assert found["torch"] == torch.__version__


def test_what_was_asked_for_is_named() -> None:
    lowest = ops.library().levels[0]
    found = info(TORCHGDU_ISA=lowest, TORCHGDU_BACKEND="reference")
    assert found["instructions"].startswith(f"{lowest} (TORCHGDU_ISA={lowest};")
    assert found["backend"] == "reference (TORCHGDU_BACKEND=reference)"


def test_a_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchgdu import info as module
    from torchgdu.ops import engine

    monkeypatch.setattr(engine, "load", lambda: "there was no compiler")
    found = module.describe()
    assert found["engine"] == "none: there was no compiler"
    assert found["backend"].startswith("reference, in plain torch")
