"""What tests share: seeds, hypothesis' settings, no skip unseen in CI, and small image files."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from numpy.typing import NDArray

from torchgdu.tasks import mnist, mnist_files

# Runs on a shared machine say nothing about time; equal examples every run, so failures repeat.
settings.register_profile("torchgdu", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("torchgdu")

EXPECTED_SKIPS = [r"this processor has no", r"this system lets no user mount a disk"]
"""Reasons, as regular expressions, for which a test may be skipped in CI."""

_skipped: list[str] = []


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _note(report)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not any(re.search(expected, reason) for expected in EXPECTED_SKIPS):
        _skipped.append(f"{report.nodeid}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _skipped and os.environ.get("TORCHGDU_CI") and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped and os.environ.get("TORCHGDU_CI"):
        terminalreporter.section("skipped without being expected to: a failure in CI", red=True)
        for line in _skipped:
            terminalreporter.line(line)


@dataclass(frozen=True)
class SmallImages:
    """Small files that stand in for the published ones."""

    published: dict[str, dict[str, bytes]]
    """Unpacked contents by dataset and name."""

    @staticmethod
    def idx(values: NDArray[Any]) -> bytes:
        sizes = struct.pack(f">{values.ndim}I", *values.shape)
        return bytes([0, 0, 8, values.ndim]) + sizes + values.astype(np.uint8).tobytes()

    @staticmethod
    def packed(content: bytes) -> bytes:
        return gzip.compress(content, mtime=0)

    def write(self, directory: Path, dataset: str = "mnist", gzipped: bool = True) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.published[dataset].items():
            if gzipped:
                (directory / f"{name}.gz").write_bytes(self.packed(content))
            else:
                (directory / name).write_bytes(content)
        return directory


def publish_small_images(monkeypatch: pytest.MonkeyPatch) -> SmallImages:
    """Let sets of 60 training images, 10 for validation, and 20 test images be the real ones."""
    images = SmallImages({"mnist": {}, "fashion-mnist": {}})
    numbers = np.random.default_rng(0)
    for dataset, files in images.published.items():
        sums = {}
        for name, shape in mnist_files.SHAPES.items():
            shape = (60 if name.startswith("train") else 20, *shape[1:])
            values = numbers.integers(0, 10 if len(shape) == 1 else 256, shape)
            files[name] = images.idx(values)
            content_sum = hashlib.sha256(files[name]).hexdigest()
            packed_sum = hashlib.sha256(images.packed(files[name])).hexdigest()
            sums[name] = mnist_files.Sums(packed_sum, content_sum if dataset == "mnist" else None)
        monkeypatch.setitem(mnist_files.DATASETS, dataset, sums)
    for name, shape in list(mnist_files.SHAPES.items()):
        count = 60 if name.startswith("train") else 20
        monkeypatch.setitem(mnist_files.SHAPES, name, (count, *shape[1:]))
    monkeypatch.setattr(mnist, "VALIDATION", 10)
    return images


@pytest.fixture
def small_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SmallImages]:
    """Small image files in place of the published ones; none cached."""
    images = publish_small_images(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHGDU_DATA", raising=False)
    yield images
    mnist_files.load.cache_clear()
    mnist._parts.cache_clear()
