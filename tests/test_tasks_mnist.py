"""Sequential MNIST: the order of pixels, the parts of the data, and faulty files."""

import errno
import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from torchgdu.tasks import DataError, SequentialMNIST
from torchgdu.tasks.base import Batch
from torchgdu.tasks.idx import parse, unpack
from torchgdu.tasks.mnist_files import cache_directory, find

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


def pixels(content: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(content, np.uint8, offset=16).reshape(-1, 784)


def labels(content: bytes) -> list[int]:
    return list(content[8:])


def dense(batch: Batch) -> torch.Tensor:
    assert isinstance(batch.input, torch.Tensor)
    return batch.input


@pytest.fixture
def files(small_images: Any, tmp_path: Path) -> dict[str, bytes]:
    """The small MNIST in the first place that is looked at; its contents."""
    small_images.write(tmp_path / "cache" / "torchgdu" / "mnist")
    published: dict[str, bytes] = small_images.published["mnist"]
    return published


class TestTask:
    def test_an_image_is_read_row_by_row(self, files: dict[str, bytes]) -> None:
        (batch,) = SequentialMNIST(permuted=False).test_batches()
        assert dense(batch).shape == (784, 20, 1)
        expected = pixels(files[TEST_IMAGES]).astype(np.float32) / np.float32(255)
        assert (dense(batch)[:, :, 0].numpy() == expected.T).all()
        assert batch.target.tolist() == labels(files[TEST_LABELS])

    def test_one_permutation_for_everything(self, files: dict[str, bytes]) -> None:
        plain, permuted = SequentialMNIST(False), SequentialMNIST(True)
        order = permuted.permutation(data_seed=0)
        assert sorted(order.tolist()) == list(range(784))
        for part in ("test_batches", "validation_batches"):
            (before,), (after,) = getattr(plain, part)(0), getattr(permuted, part)(0)
            assert torch.equal(dense(before)[order], dense(after))
            assert torch.equal(before.target, after.target)
        before, after = (task.source(3, 0, 50).next() for task in (plain, permuted))
        assert torch.equal(dense(before)[order], dense(after))
        assert permuted.provenance()["permutation"] == order.tolist()
        assert plain.provenance()["permutation"] is None
        assert not torch.equal(order, permuted.permutation(1))
        assert not torch.equal(
            dense(permuted.test_batches(0)[0]), dense(permuted.test_batches(1)[0])
        )

    def test_the_permutation_is_pinned(self) -> None:
        # What changes it changes everyone's data: raise config.SEMANTICS with it.
        assert SequentialMNIST(True).permutation(0)[:8].tolist() == PERMUTATION
        assert SequentialMNIST(False).permutation(7).tolist() == list(range(784))

    def test_training_and_validation_share_the_training_file(self, files: dict[str, bytes]) -> None:
        task = SequentialMNIST(False)
        images, names = pixels(files[TRAIN_IMAGES]), labels(files[TRAIN_LABELS])

        def rows(batches: list[Batch]) -> Counter[tuple[bytes, int]]:
            return Counter(
                ((image * 255).round().to(torch.uint8).numpy().tobytes(), int(label))
                for batch in batches
                for image, label in zip(dense(batch)[:, :, 0].T, batch.target, strict=True)
            )

        everything = [(images[i].tobytes(), names[i]) for i in range(60)]
        assert rows(list(task.validation_batches(0, 3))) == Counter(everything[:10])
        source = task.source(seed=0, batch_size=20)
        assert source.steps_per_epoch == 3
        epochs = [[source.next() for _ in range(3)] for _ in range(2)]
        assert [len(batch.target) for batch in epochs[0]] == [20, 20, 10]
        for epoch in epochs:
            assert rows(epoch) == Counter(everything[10:])
        assert not torch.equal(dense(epochs[0][0]), dense(epochs[1][0]))
        assert source.epoch == 2.0

    @pytest.mark.parametrize("steps", [0, 4, 10, 13])
    def test_a_source_goes_on_bit_for_bit(self, files: dict[str, bytes], steps: int) -> None:
        source = SequentialMNIST(True).source(seed=1, batch_size=10)
        for _ in range(steps):
            source.next()
        state = source.state()
        expected = [source.next() for _ in range(12)]
        again = SequentialMNIST(True).source(seed=1, batch_size=10)
        again.restore(state)
        for batch in expected:
            other = again.next()
            assert torch.equal(dense(batch), dense(other))
            assert torch.equal(batch.target, other.target)

    def test_a_batch_draws_training_images(self, files: dict[str, bytes]) -> None:
        batch = SequentialMNIST(False).batch(200, torch.Generator().manual_seed(0))
        drawn = {row.tobytes() for row in (dense(batch)[:, :, 0].T * 255).round().byte().numpy()}
        assert drawn <= {row.tobytes() for row in pixels(files[TRAIN_IMAGES])[10:]}
        assert len(drawn) > 40

    def test_scores_and_criteria(self, files: dict[str, bytes]) -> None:
        task = SequentialMNIST(False)
        (batch,) = task.test_batches()
        answer = torch.nn.functional.one_hot(batch.target, 10).float()
        answer[:5] = 0
        assert task.score([(answer, batch)]) == {"accuracy": 0.75}
        assert task.goal == {}
        assert task.reached({"accuracy": 1.0}) == {}
        assert task.loss(answer, batch.target).item() == pytest.approx(
            float(-torch.log_softmax(answer, 1)[range(20), batch.target].mean())
        )

    def test_the_directory_does_not_count_for_identity(self) -> None:
        assert SequentialMNIST(True, directory="a") == SequentialMNIST(True, directory="b")
        assert SequentialMNIST(True) != SequentialMNIST(False)
        with pytest.raises(ValueError, match="one of mnist, fashion-mnist, not 'cifar'"):
            SequentialMNIST(dataset="cifar")

    def test_describe_draws_the_image_and_its_permutation(self, files: dict[str, bytes]) -> None:
        ink = pixels(files[TEST_IMAGES])[0] > 80
        order = SequentialMNIST(True).permutation().numpy()
        lines = SequentialMNIST(True).describe(1).splitlines()
        assert lines[0].startswith(f"class {labels(files[TEST_LABELS])[0]}")
        for at, drawn in ((0, ink), (31, ink[order])):
            for row in range(28):
                for column in range(28):
                    block = lines[1 + row // 2].ljust(59)[at + column]
                    assert (block in ("▀█", "▄█")[row % 2]) == drawn[28 * row + column]


PERMUTATION = [523, 470, 747, 697, 726, 430, 301, 401]


class TestWhereFilesAre:
    def test_the_order_of_places(
        self, small_images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def found(directory: Path | None = None) -> Path:
            (place,) = {path.parent for _, path in find("mnist", directory)}
            return place

        with pytest.raises(DataError, match=r"`torchgdu data fetch mnist` downloads it; or put"):
            find("mnist")
        cache = small_images.write(tmp_path / "cache" / "torchgdu" / "mnist")
        assert found() == cache
        monkeypatch.setenv("TORCHGDU_DATA", str(tmp_path / "named"))
        assert found() == cache
        small_images.write(tmp_path / "named")
        assert found() == tmp_path / "named"
        small_images.write(tmp_path / "named" / "mnist", gzipped=False)
        assert found() == tmp_path / "named" / "mnist"
        own = small_images.write(tmp_path / "own")
        assert found(own) == own
        (own / f"{TEST_LABELS}.gz").unlink()
        assert found(own) == tmp_path / "named" / "mnist"
        with pytest.raises(DataError, match="nowhere does not exist"):
            find("mnist", tmp_path / "nowhere")

    def test_an_incomplete_directory_is_named(self, small_images: Any, tmp_path: Path) -> None:
        own = small_images.write(tmp_path / "own")
        (own / f"{TEST_LABELS}.gz").unlink()
        with pytest.raises(DataError, match=rf"own \(without {TEST_LABELS}\)"):
            find("mnist", own)

    @pytest.mark.parametrize("gzipped", [True, False])
    def test_files_may_be_packed_or_not(
        self, small_images: Any, tmp_path: Path, gzipped: bool
    ) -> None:
        own = small_images.write(tmp_path / "own", gzipped=gzipped)
        task = SequentialMNIST(directory=str(own))
        content = small_images.published["mnist"]
        assert task.test_batches()[0].target.tolist() == labels(content[TEST_LABELS])
        assert task.provenance()["verified"] is True

    def test_unpacked_fashion_counts_as_not_verified(
        self, small_images: Any, tmp_path: Path
    ) -> None:
        for gzipped in (True, False):
            own = small_images.write(tmp_path / str(gzipped), "fashion-mnist", gzipped)
            task = SequentialMNIST(dataset="fashion-mnist", directory=str(own))
            assert task.provenance()["verified"] is gzipped

    def test_the_cache_is_where_the_system_keeps_caches(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert cache_directory() == Path("/somewhere/torchgdu")
        monkeypatch.delenv("XDG_CACHE_HOME")
        for system, place in (("linux", ".cache"), ("darwin", "Library/Caches")):
            monkeypatch.setattr("sys.platform", system)
            assert cache_directory() == Path.home() / place / "torchgdu"
        monkeypatch.setattr("sys.platform", "win32")
        monkeypatch.setenv("LOCALAPPDATA", "/local")
        assert cache_directory() == Path("/local/torchgdu")


def spoil(directory: Path, fault: str, published: dict[str, bytes]) -> str:
    """Damage one file as `fault` says; its name."""
    images, others = directory / f"{TRAIN_IMAGES}.gz", directory / f"{TRAIN_LABELS}.gz"
    content = published[TRAIN_IMAGES]
    if fault == "truncated gzip":
        images.write_bytes(images.read_bytes()[:-1000])
    elif fault == "damaged gzip":
        raw = bytearray(images.read_bytes())
        raw[len(raw) // 2] ^= 255
        images.write_bytes(raw)
    elif fault == "truncated":
        images.write_bytes(content[:-1])
    elif fault == "only a header":
        images.write_bytes(content[:10])
    elif fault == "empty":
        images.write_bytes(b"")
    elif fault == "too long":
        images.write_bytes(content + b"\0")
    elif fault == "much too long":
        images.write_bytes(content + bytes(2**17))
    elif fault == "rubbish after gzip":
        images.write_bytes(images.read_bytes() + b"rubbish")
    elif fault == "bomb":
        images.write_bytes(gzip.compress(content + bytes(2**25)))
    elif fault == "swapped kinds":
        images.write_bytes(others.read_bytes())
    elif fault == "swapped parts":
        images.write_bytes((directory / f"{TEST_IMAGES}.gz").read_bytes())
    elif fault == "not idx":
        images.write_bytes(b"<!DOCTYPE html><html>Not found</html>")
    elif fault == "element type":
        images.write_bytes(content[:2] + b"\x0d" + content[3:])
    elif fault == "dimensions":
        images.write_bytes(content[:3] + b"\x07" + content[4:])
    elif fault == "label":
        others.write_bytes(published[TRAIN_LABELS][:-1] + b"\x0a")
        return others.name
    elif fault == "other pixels":
        images.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif fault == "huge dimensions":
        images.write_bytes(content[:4] + b"\xff" * 12 + content[16:])
    else:
        raise AssertionError(fault)
    return images.name


FAULTS = {
    "truncated gzip": "is a damaged gzip file",
    "damaged gzip": "is a damaged gzip file",
    "truncated": "is truncated: 60×28×28 values need 47056 bytes",
    "only a header": "is truncated",
    "empty": "is not an idx file",
    "too long": "goes on after its end",
    "much too long": "is too long",
    "rubbish after gzip": "is a damaged gzip file",
    "bomb": "goes on after its end",
    "swapped kinds": "holds labels where images belong; were files swapped?",
    "swapped parts": "says it holds 20×28×28 values, not 60×28×28",
    "not idx": "is not an idx file: it begins with b'<!DO'",
    "element type": "of element type 0x0d where images belong",
    "dimensions": "holds 7 dimensions where images belong",
    "label": "holds the label 10; labels go from 0 to 9",
    "other pixels": "is not mnist's train-images-idx3-ubyte: the sha256 of its content is",
    "huge dimensions": "says it holds 4294967295×4294967295×4294967295 values",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_one_clear_error(fault: str, small_images: Any, tmp_path: Path) -> None:
    own = small_images.write(tmp_path / "own")
    name = spoil(own, fault, small_images.published["mnist"])
    with pytest.raises(DataError) as caught:
        SequentialMNIST(directory=str(own)).source(seed=0)
    assert str(caught.value).startswith(str(own / name) + " ")
    assert FAULTS[fault] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(2**26))
    assert len(unpack(bomb, (10,), "bomb")) == 8 + 10 + 1


def test_mnist_is_not_taken_for_fashion(small_images: Any, tmp_path: Path) -> None:
    for gzipped in (True, False):
        own = small_images.write(tmp_path / str(gzipped), "mnist", gzipped)
        with pytest.raises(DataError, match="is not fashion-mnist's"):
            SequentialMNIST(dataset="fashion-mnist", directory=str(own)).test_batches()


def test_an_unreadable_file_is_named(
    small_images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = small_images.write(tmp_path / "own")

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"ubyte\.gz cannot be read: Permission denied"):
        SequentialMNIST(directory=str(own)).test_batches()


@pytest.mark.parametrize("size", range(8))
def test_no_beginning_of_a_file_is_a_file(size: int) -> None:
    content = bytes([0, 0, 8, 1, 0, 0, 0, 1, 5])
    assert parse(content, (1,), "x").tolist() == [5]
    with pytest.raises(DataError):
        parse(content[:size], (1,), "x")
