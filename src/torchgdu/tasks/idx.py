"""Reading idx files, the format of MNIST and its relatives, strictly."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

_GZIP = b"\x1f\x8b"
_UBYTE = 8
_KINDS = {1: "labels", 3: "images"}


class DataError(OSError):
    """A data file that is missing or not what it should be; the message says what to do."""


class DataMissing(DataError, FileNotFoundError):
    """Files that are not where they were looked for."""


def size(shape: tuple[int, ...]) -> int:
    """Bytes of an unpacked file of this shape."""
    return 4 + 4 * len(shape) + math.prod(shape)


def read(path: Path, shape: tuple[int, ...]) -> bytes:
    """The bytes of the file, packed or not; never many more than an unpacked one has."""
    limit = size(shape) + 2**16  # gzip makes nothing longer than this
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > limit:
        raise DataError(f"{path} is too long: at most {limit} bytes were expected")
    return content


def unpack(content: bytes, shape: tuple[int, ...], origin: object) -> bytes:
    """`content` without its gzip layer, if it has one, but no more than one byte too many."""
    if not content.startswith(_GZIP):
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            return file.read(size(shape) + 1)  # one more, so that a bomb is seen, not unpacked
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{origin} is a damaged gzip file: {error}") from error


def parse(content: bytes, shape: tuple[int, ...], origin: object) -> npt.NDArray[np.uint8]:
    """The array in unpacked `content`, which must have exactly this shape.

    Two zero bytes, the element type (8 is uint8), the number of dimensions, each dimension as a
    big-endian 32-bit number; then the elements, and nothing after them.

    >>> parse(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]), (3,), "labels").tolist()
    [7, 2, 1]
    """
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(f"{origin} is not an idx file: it begins with {content[:4]!r}")
    if content[2] != _UBYTE or content[3] != len(shape):
        found = _KINDS.get(content[3], f"{content[3]} dimensions")
        found += "" if content[2] == _UBYTE else f" of element type 0x{content[2]:02x}"
        wanted = _KINDS.get(len(shape), f"{len(shape)} dimensions")
        raise DataError(f"{origin} holds {found} where {wanted} belong; were files swapped?")
    header = 4 + 4 * len(shape)
    if len(content) >= header:
        found_shape = tuple(int(n) for n in np.frombuffer(content[4:header], ">u4"))
        if found_shape != shape:
            wanted = _times(shape)
            raise DataError(f"{origin} says it holds {_times(found_shape)} values, not {wanted}")
    if len(content) != size(shape):
        fault = "is truncated" if len(content) < size(shape) else "goes on after its end"
        raise DataError(f"{origin} {fault}: {_times(shape)} values need {size(shape)} bytes")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
