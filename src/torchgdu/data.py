"""What `torchgdu data` does: show a task's examples, fetch the image files."""

from __future__ import annotations

import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from torchgdu.tasks import TASKS, DataError, DataMissing, idx
from torchgdu.tasks.mnist_files import (
    DATASETS,
    SHAPES,
    cache_directory,
    check,
    files_in,
)

MIRRORS = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    "fashion-mnist": (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
    ),
}
TIMEOUT = 30.0
"""Seconds without an answer after which a mirror counts as failed."""


def show(
    task: str,
    count: int = 3,
    data_seed: int = 0,
    directory: str | os.PathLike[str] | None = None,
    **options: Any,
) -> str:
    """A few test examples of a task, and what it takes to solve it.

    `directory` is where image files are; the tasks that need none do without.

    >>> print(show("reber", count=1, multiple=2))  # doctest: +ELLIPSIS
    reber(multiple=2): ...
    """
    places = {"directory": os.fspath(directory)} if directory and "dataset" in options else {}
    made = TASKS[task](**options, **places)
    named = ", ".join(f"{key}={value}" for key, value in options.items())
    chance = ", ".join(f"{name} {value:.3g}" for name, value in made.chance.items())
    goal = ", ".join(f"{name} {value:.3g}" for name, value in made.goal.items())
    sizes = ", ".join(
        f"{number} {what}{'s' * (number > 1)}"
        for number, what in ((made.input_size, "input"), (made.output_size, "output"))
    )
    head = f"{task}({named}): {sizes}; chance {chance}; goal {goal or 'none'}"
    return f"{head}\n{made.describe(count, data_seed)}"


def fetch(dataset: str, source: str | os.PathLike[str] | None = None) -> Path:
    """Put a dataset's four files into the cache and return their directory.

    `source` is a directory or a URL that holds them; otherwise the public mirrors are tried in
    turn. All four must have their published sha256 before the first is written, and they
    appear in the cache all at once or not at all.
    """
    target = cache_directory() / dataset
    if _complete(dataset, target):
        return target
    console = Console(stderr=True)
    if source is None:
        contents = _download(dataset, MIRRORS[dataset], console)
    elif str(source).startswith(("https://", "http://")):
        contents = _download(dataset, (str(source).rstrip("/"),), console)
    elif "://" in str(source):
        raise DataError(f"{source} is neither a directory nor an https:// or http:// address")
    else:
        contents = _copy(dataset, Path(source))
    try:
        _write(contents, target)
    except OSError as error:
        raise DataError(
            f"{target} cannot be written: {error.strerror or error}; "
            "XDG_CACHE_HOME names another place for the cache"
        ) from error
    return target


def _complete(dataset: str, directory: Path) -> bool:
    try:
        for name, path in files_in(directory).items():
            _published(dataset, name, idx.read(path, SHAPES[name]), path)
    except DataError:
        return False
    return len(files_in(directory)) == len(SHAPES)


def _published(dataset: str, name: str, content: bytes, origin: object) -> bytes:
    if not check(dataset, name, content, origin).verified:
        wanted = DATASETS[dataset][name].packed
        raise DataError(f"{origin} is not the published gzip file, whose sha256 is {wanted}")
    return content


def _copy(dataset: str, directory: Path) -> dict[str, bytes]:
    """File names and contents from a directory."""
    files = files_in(directory)
    missing = [name for name in SHAPES if name not in files]
    if missing:
        raise DataMissing(f"{directory} holds no {', '.join(missing)} (with or without .gz)")
    return {
        path.name: _published(dataset, name, idx.read(path, SHAPES[name]), path)
        for name, path in files.items()
    }


def _download(dataset: str, mirrors: tuple[str, ...], console: Console) -> dict[str, bytes]:
    """File names and contents from the first mirror that has them right, file by file."""
    contents = {}
    with _bar(console) as progress:
        for name in SHAPES:
            faults = []
            for mirror in mirrors:
                url = f"{mirror}/{name}.gz"
                try:
                    content = _get(url, idx.size(SHAPES[name]) + 2**16, progress)
                    contents[f"{name}.gz"] = _published(dataset, name, content, url)
                    break
                except (OSError, ValueError, http.client.HTTPException) as error:
                    faults.append(f"  {url}: {getattr(error, 'reason', None) or error}")
            else:
                raise DataError(
                    f"{dataset} could not be downloaded:\n" + "\n".join(faults) + "\n"
                    f"Without a connection: get {', '.join(f'{n}.gz' for n in SHAPES)} by other "
                    f"means, then `torchgdu data fetch {dataset} --from DIR`"
                )
    return contents


def _get(url: str, limit: int, progress: Progress) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "torchgdu"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        length = answer.headers.get("Content-Length")
        bar = progress.add_task(url.rsplit("/", 1)[1], total=int(length) if length else None)
        content = bytearray()
        while block := answer.read(2**16):
            content += block
            progress.update(bar, completed=len(content))
            if len(content) > limit:
                raise DataError(f"is too long: at most {limit} bytes were expected")
        if length and len(content) < int(length):
            raise DataError(f"broke off after {len(content)} of {length} bytes")
    return bytes(content)


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        yield progress


def _write(contents: dict[str, bytes], target: Path) -> None:
    """All files or none: they are written beside the target, which is then put in place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as space:
        fresh = Path(space) / "fresh"
        fresh.mkdir()
        for name, content in contents.items():
            with (fresh / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        if target.exists():
            target.rename(Path(space) / "stale")  # damaged or incomplete; removed with the space
        fresh.rename(target)
