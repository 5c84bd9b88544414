"""The compiled engine: found, loaded, and called by pointer. Its contract is csrc/engine.h."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
from pathlib import Path

import torch

VERSION = 1
"""The contract that this file speaks: TGDU_VERSION."""

CELLS = ("srn", "lstm", "gru", "gru_after", "ugrnn", "mgu", "mgu_beta", "cwrnn", "gdu")
NO_MEMORY = 1
DTYPES = {torch.float32: 0, torch.float64: 1}

FILE = {"darwin": "libtorchgdu.dylib", "win32": "torchgdu.dll"}.get(sys.platform, "libtorchgdu.so")

# tgdu_problem: every field has 8 bytes, and a pointer is a number. One struct, in three parts:
# what both directions read and forward writes, the gradients that come, the gradients that go.
PROBLEM = struct.Struct("@31q")
GRADIENTS = struct.Struct("@12q")
NO_GRADIENTS = bytes(GRADIENTS.size)


class Library:
    """The loaded engine."""

    def __init__(self, path: Path) -> None:
        """Load the library; OSError or AttributeError where it is not one."""
        library = ctypes.CDLL(str(path))
        self.path = path
        library.tgdu_version.restype = ctypes.c_int64
        self.version = int(library.tgdu_version())
        if self.version != VERSION:
            raise OSError(f"{path} is of version {self.version}, this package needs {VERSION}")
        for name in ("levels", "level_supported", "saved", "forward", "backward"):
            getattr(library, f"tgdu_{name}").restype = ctypes.c_int64
        name_of, supported = library.tgdu_level_name, library.tgdu_level_supported
        name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_int64]
        supported.argtypes = [ctypes.c_int64]
        numbers = range(library.tgdu_levels())
        self.levels: tuple[str, ...] = tuple(name_of(k).decode() for k in numbers)
        """The instruction sets it was built for, from the lowest."""
        self.supported = tuple(self.levels[k] for k in numbers if supported(k))
        """Those that this processor has."""
        self.level = self.levels.index(self._choose())
        # A bytes object passes as its address: nothing is copied, nothing is wrapped.
        self.saved, self.forward, self.backward = (
            library.tgdu_saved, library.tgdu_forward, library.tgdu_backward,
        )  # fmt: skip
        for function in (self.saved, self.forward, self.backward):
            function.argtypes = [ctypes.c_char_p]
        self._peak = library.tgdu_peak
        self._peak.restype = ctypes.c_double
        self._peak.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_double]

    def _choose(self) -> str:
        """Return the highest supported level, or the one that TORCHGDU_ISA names."""
        name = os.environ.get("TORCHGDU_ISA") or self.supported[-1]
        if name not in self.supported:
            why = "this processor does not have it" if name in self.levels else "there is no such"
            raise ValueError(f"TORCHGDU_ISA={name}: {why}; it can be {', '.join(self.supported)}")
        return name

    @property
    def instructions(self) -> str:
        """The name of the instruction set in use."""
        return self.levels[self.level]

    def peak(self, dtype: torch.dtype, threads: int, milliseconds: float = 100) -> float:
        """Return what the processor can do at most, in 10^9 operations a second."""
        return float(self._peak(self.level, DTYPES[dtype], threads, milliseconds))


@functools.cache
def load() -> Library | str:
    """Return the engine, or the reason why there is none."""
    import torchgdu

    found = [Path(folder) / FILE for folder in torchgdu.__path__]
    for path in found:
        if path.exists():
            try:
                return Library(path)
            except (OSError, AttributeError) as error:
                return f"it cannot be loaded: {error}"
    return f"{FILE} was not built: there was no C++ compiler at installation"


def no_engine() -> str | None:
    """Return why there is no engine here, or None: there is one."""
    loaded = load()
    return loaded if isinstance(loaded, str) else None


def library() -> Library:
    """Return the engine, which must be there."""
    loaded = load()
    if isinstance(loaded, str):
        raise RuntimeError(f"torchgdu has no engine here: {loaded}")
    return loaded
