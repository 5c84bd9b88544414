"""The engine without Python, under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = str(Path(sys.executable).parent)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_driver(sanitizer: str, tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=os.pathsep.join([BIN, os.environ["PATH"]]))
    assert cmake, "the driver is built with cmake, which the extra 'test' installs"
    configure = [
        cmake, "-S", str(ROOT), "-B", str(tmp_path), f"-DTGDU_SANITIZE={sanitizer}",
        "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1",
    ]  # fmt: skip
    for command in (configure, [cmake, "--build", str(tmp_path), "--parallel", "2"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    options = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}
    done = subprocess.run(
        [tmp_path / "engine_driver"], capture_output=True, text=True, env={**os.environ, **options}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *levels, last = done.stdout.splitlines()
    assert levels
    assert last == f"{1440 * len(levels)} runs"
