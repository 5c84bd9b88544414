"""The four files of MNIST or Fashion-MNIST: where they are, and whether they are the right ones."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from torchgdu.tasks import idx
from torchgdu.tasks.idx import DataError, DataMissing

Bytes: TypeAlias = npt.NDArray[np.uint8]
Paths: TypeAlias = tuple[tuple[str, Path], ...]

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
SHAPES: dict[str, tuple[int, ...]] = {
    TRAIN_IMAGES: (60_000, 28, 28),
    TRAIN_LABELS: (60_000,),
    TEST_IMAGES: (10_000, 28, 28),
    TEST_LABELS: (10_000,),
}


class Sums(NamedTuple):
    """sha256 of a published gzip file, and of its content where that is published too."""

    packed: str
    content: str | None = None


DATASETS: dict[str, dict[str, Sums]] = {
    "mnist": {
        TRAIN_IMAGES: Sums(
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        TRAIN_LABELS: Sums(
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        TEST_IMAGES: Sums(
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        TEST_LABELS: Sums(
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    },
    "fashion-mnist": {
        TRAIN_IMAGES: Sums("3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        TRAIN_LABELS: Sums("a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        TEST_IMAGES: Sums("346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        TEST_LABELS: Sums("67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    },
}


class File(NamedTuple):
    """One of the four files, read and checked."""

    values: Bytes
    sha256: str
    """Of the unpacked content."""
    verified: bool
    """Whether it is byte for byte what was published."""


def check(dataset: str, name: str, content: bytes, origin: object) -> File:
    """The array in `content`, gzipped or not, if it may be `dataset`'s file `name`.

    Content whose published sum is known must have it. Fashion-MNIST has published sums for its
    gzip files only: unpacked, its structure is checked and it counts as not verified.
    """
    sums, shape = DATASETS[dataset][name], SHAPES[name]
    unpacked = idx.unpack(content, shape, origin)
    values = idx.parse(unpacked, shape, origin)
    if len(shape) == 1 and int(values.max()) > 9:
        raise DataError(f"{origin} holds the label {values.max()}; labels go from 0 to 9")
    digest = hashlib.sha256(unpacked).hexdigest()
    verified = digest == sums.content or hashlib.sha256(content).hexdigest() == sums.packed
    others = {s.content for files in DATASETS.values() for s in files.values()}
    if not verified and (sums.content is not None or digest in others):
        raise DataError(
            f"{origin} is not {dataset}'s {name}: the sha256 of its content is {digest}"
        )
    return File(values, digest, verified)


def cache_directory() -> Path:
    """Where fetched data are kept, in one directory a dataset."""
    home = Path.home()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = os.environ.get("XDG_CACHE_HOME") or home / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    return Path(base) / "torchgdu"


def find(dataset: str, directory: str | os.PathLike[str] | None = None) -> Paths:
    """(name, path) of the four files, from the first of these places that has them all.

    `directory`, then the environment's TORCHGDU_DATA, then the cache; in each the files stand in
    a directory with the dataset's name, or directly. They may be gzipped (NAME.gz) or not.
    """
    if directory is not None and not Path(directory).is_dir():
        raise DataMissing(f"the data directory {directory} does not exist")
    named = [directory, os.environ.get("TORCHGDU_DATA") or None, cache_directory()]
    tried = []
    for root in (Path(place) for place in named if place is not None):
        for place in (root / dataset, root):
            files = files_in(place)
            if len(files) == len(SHAPES):
                return tuple(files.items())
            missing = ", ".join(name for name in SHAPES if name not in files)
            if files:
                tried.append(f"{place} (without {missing})")
        tried.append(str(root))
    raise DataMissing(
        f"{dataset} is not here; looked in {', '.join(tried)}. `torchgdu data fetch {dataset}` "
        f"downloads it; or put {', '.join(SHAPES)} (or the same with .gz) into a directory and "
        "name it with --data DIR or TORCHGDU_DATA"
    )


def files_in(directory: Path) -> dict[str, Path]:
    """Which of the four files are in `directory`."""
    there = {}
    for name in SHAPES:
        for path in (directory / f"{name}.gz", directory / name):
            if path.is_file():
                there[name] = path
                break
    return there


@lru_cache(maxsize=2)
def load(dataset: str, paths: Paths) -> dict[str, File]:
    """The four files, read and checked."""
    return {name: check(dataset, name, idx.read(path, SHAPES[name]), path) for name, path in paths}
