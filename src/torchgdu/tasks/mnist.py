"""Sequential MNIST: an image read one pixel a step, in rows or in one fixed random order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from torchgdu.tasks.base import (
    Accuracy,
    Batch,
    EpochSource,
    Scorer,
    Settings,
    Source,
    Span,
    Task,
    check_whole,
    generator,
    split,
)
from torchgdu.tasks.mnist_files import (
    DATASETS,
    SHAPES,
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    Bytes,
    Paths,
    find,
    load,
)

PIXELS = 28 * 28
VALIDATION = 5_000


@dataclass(frozen=True)
class SequentialMNIST(Task):
    """Name the digit (or garment) after reading its 784 pixels, one a step (Le et al., 2015).

    Pixels are in [0, 1], in rows from the top left, or `permuted` by one fixed random order that
    depends on the data seed only. 10 classes read at the last step; cross-entropy; accuracy. Of
    the 60,000 training images the first 5,000 are for validation. `dataset` is "mnist" or
    "fashion-mnist"; `directory` is where its files are, if not in one of the usual places.
    """

    permuted: bool = False
    dataset: str = "mnist"
    directory: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Refuse an unknown dataset; whether its files are there is seen when they are needed."""
        if self.dataset not in DATASETS:
            raise ValueError(f"dataset must be one of {', '.join(DATASETS)}, not {self.dataset!r}")

    input_size = 1
    output_size = 10
    primary = "accuracy"
    higher_is_better = True

    @property
    def name(self) -> str:
        """The name says whether pixels are permuted."""
        return "pmnist" if self.permuted else "mnist"

    @property
    def chance(self) -> dict[str, float]:
        """Ten classes, almost equally frequent."""
        return {"accuracy": 0.1}

    @property
    def goal(self) -> dict[str, float]:
        """None: training ends when the validation no longer improves."""
        return {}

    @property
    def settings(self) -> Settings:
        """Batches of 100, Adam 0.001, ten validations an epoch, patience of 6 epochs."""
        return Settings(
            batch_size=100,
            learning_rate=0.001,
            test_every=Span(0.1, "epochs"),
            limit=Span(100, "epochs"),
            patience=Span(6, "epochs"),
            test_size=SHAPES[TEST_LABELS][0],
            test_batch_size=500,
        )

    def permutation(self, data_seed: int = 0) -> Tensor:
        """The pixel read at each step."""
        if not self.permuted:
            return torch.arange(PIXELS)
        return torch.randperm(PIXELS, generator=generator("mnist", "permutation", data_seed))

    def batch(self, size: int, generator: torch.Generator | None = None) -> Batch:
        """`size` training images, drawn with replacement, in the order of data seed 0."""
        check_whole("batch size", size, 1)
        images, labels = self._part("train", 0)
        index = torch.randint(0, len(labels), (size,), generator=generator)
        return _sequences(images[index.numpy()], labels[index.numpy()])

    def source(self, seed: int, data_seed: int = 0, batch_size: int | None = None) -> Source:
        """The 55,000 training images, reshuffled each epoch."""
        size = self.settings.batch_size if batch_size is None else batch_size
        images, labels = self._part("train", data_seed)
        return _ImageSource(images, labels, size, generator("mnist", "order", seed))

    def test_batches(self, data_seed: int = 0, batch_size: int | None = None) -> Sequence[Batch]:
        """The 10,000 test images."""
        whole = _sequences(*self._part("test", data_seed))
        return split(whole, self.settings.test_batch_size if batch_size is None else batch_size)

    def validation_batches(
        self, data_seed: int = 0, batch_size: int | None = None
    ) -> Sequence[Batch]:
        """The first 5,000 training images, which training does not see."""
        whole = _sequences(*self._part("validation", data_seed))
        return split(whole, self.settings.test_batch_size if batch_size is None else batch_size)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy."""
        return torch.nn.functional.cross_entropy(output, target)

    def scorer(self) -> Scorer:
        """The accuracy over all batches."""
        return Accuracy()

    def reached(self, scores: Mapping[str, float]) -> dict[str, bool]:
        """Nothing: there is no goal."""
        return {}

    def describe(self, count: int = 3, data_seed: int = 0) -> str:
        """Test images as blocks; where pixels are permuted, in the order they are read beside."""
        files = load(self.dataset, find(self.dataset, self.directory))
        order = self.permutation(data_seed).numpy()
        lines = []
        for image, label in zip(
            files[TEST_IMAGES].values[:count].reshape(-1, PIXELS),
            files[TEST_LABELS].values.tolist(),
            strict=False,
        ):
            sides = [_blocks(image), _blocks(image[order])][: 1 + self.permuted]
            lines.append(f"class {label}" + (", and as the model reads it" * self.permuted))
            lines += ["   ".join(row).rstrip() for row in zip(*sides, strict=True)]
        return "\n".join(lines)

    def provenance(self, data_seed: int = 0) -> dict[str, object]:
        """The files' checksums, whether they are the published ones, and the permutation."""
        files = load(self.dataset, find(self.dataset, self.directory))
        return {
            "sha256": {name: file.sha256 for name, file in files.items()},
            "verified": all(file.verified for file in files.values()),
            "permutation": self.permutation(data_seed).tolist() if self.permuted else None,
        }

    def _part(self, part: str, data_seed: int) -> tuple[Bytes, Bytes]:
        """Images [N, 784] in reading order, and labels [N]."""
        order_seed = data_seed if self.permuted else None
        return _parts(self.dataset, find(self.dataset, self.directory), order_seed)[part]


@lru_cache(maxsize=2)
def _parts(dataset: str, paths: Paths, order_seed: int | None) -> dict[str, tuple[Bytes, Bytes]]:
    """All images permuted once, so that a batch is a plain gather of rows."""
    files = {name: file.values for name, file in load(dataset, paths).items()}
    order = SequentialMNIST(order_seed is not None, dataset).permutation(order_seed or 0).numpy()
    images = files[TRAIN_IMAGES].reshape(-1, PIXELS).take(order, axis=1)
    labels = files[TRAIN_LABELS]
    return {
        "train": (images[VALIDATION:], labels[VALIDATION:]),
        "validation": (images[:VALIDATION], labels[:VALIDATION]),
        "test": (files[TEST_IMAGES].reshape(-1, PIXELS).take(order, axis=1), files[TEST_LABELS]),
    }


class _ImageSource(EpochSource):
    def __init__(
        self, images: Bytes, labels: Bytes, batch_size: int, numbers: torch.Generator
    ) -> None:
        super().__init__(len(labels), batch_size, numbers)
        self._images, self._labels = images, labels

    def take(self, index: Tensor) -> Batch:
        return _sequences(self._images[index.numpy()], self._labels[index.numpy()])


def _sequences(images: Bytes, labels: Bytes) -> Batch:
    """Images [B, 784] as sequences [784, B, 1]."""
    # numpy, since waking torch's threads can cost more than all of this.
    pixels = np.divide(images.T, np.float32(255), dtype=np.float32, order="C")
    return Batch(torch.from_numpy(pixels).unsqueeze(2), torch.from_numpy(labels.astype(np.int64)))


def _blocks(image: Bytes) -> list[str]:
    """Two rows of pixels a line."""
    ink = image.reshape(14, 2, 28) > 80
    return ["".join(" ▀▄█"[int(up) + 2 * int(low)] for up, low in pair.T) for pair in ink]
