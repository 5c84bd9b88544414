"""The generated tasks against their definitions, and what all tasks have in common."""

import doctest
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch.nn.utils.rnn import PackedSequence

from torchgdu.models import SequenceModel
from torchgdu.tasks import TASKS, Adding, Batch, Reber, Settings, Span, Task, TemporalOrder
from torchgdu.tasks.base import Accuracy, EpochSource, check_whole, generator, right, split

P = 1e-4
"""A χ² test fails below this; seeds are fixed, so it does so always or never."""

GENERATED = [Adding(50), TemporalOrder(60), Reber(2)]


def uniform(values: NDArray[Any], low: int, high: int) -> None:
    """All integers in [low, high) come, no others do, and equally often."""
    assert values.min() >= low
    assert values.max() < high
    counts = np.bincount(values - low, minlength=high - low)
    assert len(counts) == 1 or stats.chisquare(counts).pvalue > P


def numbers(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(batch: Batch) -> torch.Tensor:
    assert isinstance(batch.input, torch.Tensor)
    return batch.input


def same(one: Batch, other: Batch) -> bool:
    def tensors(batch: Batch) -> list[torch.Tensor]:
        inputs = [batch.input.data]
        if isinstance(batch.input, PackedSequence):
            inputs.append(batch.input.batch_sizes)
        return [*inputs, batch.target, *([] if batch.extra is None else [batch.extra])]

    pairs = list(zip(tensors(one), tensors(other), strict=True))
    return all(a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


class TestAdding:
    @pytest.mark.parametrize("length", [2, 3, 20, 21])
    def test_one_mark_stands_uniformly_in_each_half(self, length: int) -> None:
        marks = dense(Adding(length).batch(20_000, numbers()))[:, :, 1].numpy().T
        assert set(np.unique(marks)) <= {0.0, 1.0}
        assert (marks.sum(1) == 2).all()
        first, second = np.array([np.flatnonzero(row) for row in marks]).T
        uniform(first, 0, length // 2)
        uniform(second, length // 2, length)
        if length == 20:  # nor do the two know of each other
            table = np.histogram2d(first, second, bins=(10, 10))[0]
            assert stats.chi2_contingency(table).pvalue > P

    def test_values_are_uniform_and_the_target_is_the_marked_sum(self) -> None:
        batch = Adding(30).batch(2_000, numbers())
        input, target = dense(batch), batch.target
        for (values, marks), answer in zip(input.permute(1, 2, 0).tolist(), target, strict=True):
            expected = sum(v for v, m in zip(values, marks, strict=True) if m == 1)
            assert answer.item() == pytest.approx(expected, abs=1e-6)
        values = input[:, :, 0].flatten().numpy()
        assert stats.kstest(values, "uniform").pvalue > P
        assert values.min() >= 0
        assert values.max() < 1

    def test_always_answering_one_scores_chance(self) -> None:
        task = Adding(100)
        batch = task.batch(100_000, numbers())
        score = task.score([(torch.ones_like(batch.target), batch)])["mse"]
        assert task.chance["mse"] == pytest.approx(0.167, abs=5e-4)
        assert score == pytest.approx(1 / 6, abs=0.003)

    def test_the_score_is_the_mean_over_batches_of_different_size(self) -> None:
        task = Adding(10)
        parts = split(task.batch(23, numbers()), 5)
        outputs = [torch.randn(len(part.target), 1) for part in parts]
        expected = np.mean(
            [
                (float(o) - float(t)) ** 2
                for output, part in zip(outputs, parts, strict=True)
                for o, t in zip(output[:, 0], part.target[:, 0], strict=True)
            ]
        )
        assert task.score(zip(outputs, parts, strict=True))["mse"] == pytest.approx(expected)
        loss = task.loss(outputs[0], parts[0].target)
        assert loss.item() == pytest.approx(task.score([(outputs[0], parts[0])])["mse"])

    def test_solved_is_strictly_below_the_threshold(self) -> None:
        task = Adding(10)
        assert task.reached({"mse": math.nextafter(0.002, 0)}) == {"solved": True}
        for mse in (0.002, 1.0, math.nan, math.inf):
            assert task.reached({"mse": mse}) == {"solved": False}


class TestTemporalOrder:
    @pytest.mark.parametrize(("length", "symbols"), [(100, 3), (101, 3), (20, 2), (35, 1), (70, 5)])
    def test_symbols_places_and_classes(self, length: int, symbols: int) -> None:
        task = TemporalOrder(length, symbols)
        batch = task.batch(4_000, numbers())
        input, target = dense(batch), batch.target
        assert set(torch.unique(input).tolist()) == {0.0, 1.0}
        assert (input.sum(2) == 1).all()
        texts = ["".join("abcdXY"[c] for c in text) for text in input.argmax(2).T.tolist()]
        places = np.array([[i for i, c in enumerate(text) if c in "XY"] for text in texts])
        assert places.shape == (4_000, symbols)
        for k in range(1, symbols + 1):
            start = math.floor((k - 1) * length / symbols)
            uniform(places[:, k - 1], start, start + 10)
        for text, label in zip(texts[:500], target.tolist(), strict=False):
            bits = text.translate(str.maketrans("XY", "01", "abcd"))
            assert int(bits, 2) == label
        uniform(target.numpy(), 0, 2**symbols)
        rest = "".join(texts).translate(str.maketrans("abcd", "0123", "XY"))
        uniform(np.frombuffer(rest.encode(), np.uint8) - ord("0"), 0, 4)
        assert task.output_size == 2**symbols

    def test_a_constant_answer_scores_chance(self) -> None:
        task = TemporalOrder(30)
        batch = task.batch(20_000, numbers())
        answer = torch.tensor([0.0, 0, 0, 1, 0, 0, 0, 0]).expand(20_000, 8)
        assert task.score([(answer, batch)])["accuracy"] == pytest.approx(0.125, abs=0.01)
        assert task.chance == {"accuracy": 0.125}

    def test_solved_is_all_right(self) -> None:
        task = TemporalOrder(30)
        good, bad = split(task.batch(10, numbers()), 5)
        right = (torch.nn.functional.one_hot(good.target, 8).float(), good)
        assert task.reached(task.score([right])) == {"solved": True}
        scores = task.score([right, (torch.zeros(5, 8), bad)])
        assert scores == {"accuracy": 0.5}
        assert task.reached(scores) == {"solved": False}


def test_a_tie_or_nan_is_not_right() -> None:
    batch = Batch(torch.zeros(1, 4, 1), torch.tensor([0, 1, 2, 0]))
    output = torch.tensor([[1.0, 1, 0], [0, 2, 1], [0, 0, math.nan], [1, math.nan, 0]])
    scorer = Accuracy()
    scorer.add(output, batch)
    assert scorer.scores() == {"accuracy": 0.25}


def test_right_needs_every_legal_above_every_illegal() -> None:
    legal = torch.tensor([True, False, True, False])
    for output, expected in [
        ([2.0, 1, 3, 0], True),
        ([2.0, 2, 3, 0], False),
        ([0.0, 1, 3, 0], False),
        ([2.0, 1, 3, 2.5], False),
        ([math.inf, 1, 3, -math.inf], True),
    ]:
        assert bool(right(torch.tensor(output), legal)) is expected


@pytest.mark.parametrize("task", GENERATED, ids=lambda task: task.name)
class TestEveryGeneratedTask:
    def test_a_generator_decides_the_batch(self, task: Task) -> None:
        assert same(task.batch(7, numbers(1)), task.batch(7, numbers(1)))
        assert not same(task.batch(7, numbers(1)), task.batch(7, numbers(2)))

    def test_without_a_generator_torch_s_own_is_used(self, task: Task) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            first = task.batch(7)
            torch.manual_seed(3)
            assert same(first, task.batch(7))

    def test_the_test_set_follows_the_data_seed_only(self, task: Task) -> None:
        state = torch.get_rng_state()
        tests = task.test_batches(data_seed=0)
        torch.manual_seed(5)
        assert all(same(a, b) for a, b in zip(tests, task.test_batches(0), strict=True))
        assert not same(tests[0], task.test_batches(1)[0])
        torch.set_rng_state(state)

    def test_the_batch_size_does_not_change_the_test_set(self, task: Task) -> None:
        def targets(batch_size: int) -> torch.Tensor:
            return torch.cat([b.target for b in task.test_batches(0, batch_size)]).sort()[0]

        assert torch.equal(targets(1), targets(33))

    def test_training_data_are_other_data_than_the_test_set(self, task: Task) -> None:
        source = task.source(seed=0, data_seed=0, batch_size=64)
        assert not same(source.next(), task.test_batches(0, 64)[0])
        other = task.source(seed=1, data_seed=0, batch_size=64)
        assert not same(task.source(0, 0, 64).next(), other.next())

    @pytest.mark.parametrize("steps", [0, 1, 17, 99, 1000, 1003])  # an epoch has 1000, if any
    def test_a_source_goes_on_bit_for_bit(self, task: Task, steps: int) -> None:
        source = task.source(seed=4, data_seed=2)
        for _ in range(steps):
            source.next()
        state = {key: value.clone() for key, value in source.state().items()}
        expected = [source.next() for _ in range(20)]
        again = task.source(seed=4, data_seed=2)
        again.next()
        again.restore(state)
        assert again.epoch == (0.0 if source.steps_per_epoch is None else steps / 1000)
        assert all(same(batch, again.next()) for batch in expected)
        assert source.state().keys() == again.state().keys()
        assert all(torch.equal(value, again.state()[key]) for key, value in source.state().items())

    @pytest.mark.parametrize("size", [0, -1, True, 1.5])
    def test_a_bad_batch_size_is_an_error(self, task: Task, size: int) -> None:
        for call in (
            lambda: task.batch(size),
            lambda: task.source(0, 0, size),
            lambda: task.test_batches(0, size),
        ):
            with pytest.raises((ValueError, TypeError), match="batch size"):
                call()

    def test_describe_shows_as_many_examples_as_asked(self, task: Task) -> None:
        assert len(task.describe(4).splitlines()) == 5
        assert task.describe(2, data_seed=1) != task.describe(2, data_seed=0)


def test_describe_tells_the_truth() -> None:
    adding, order = Adding(40), TemporalOrder(40)
    batch = adding.test_batches()[0]
    places = [row.nonzero().flatten().tolist() for row in dense(batch)[:, :3, 1].T]
    for line, (first, second), target in zip(
        adding.describe().splitlines()[1:], places, batch.target, strict=False
    ):
        assert f"step {first:>5}" in line
        assert f"step {second:>5}" in line
        assert line.endswith(f"target {target.item():.4f}")
    for line, label in zip(
        order.describe().splitlines()[1:], order.test_batches()[0].target.tolist(), strict=False
    ):
        assert f"class {label} ({format(label, '03b').replace('0', 'X').replace('1', 'Y')})" in line


class Numbers(EpochSource):
    """A training set of the numbers below its size."""

    def take(self, index: torch.Tensor) -> Batch:
        return Batch(torch.zeros(1, len(index), 1), index)


def test_an_epoch_takes_every_example_once_in_a_new_order() -> None:
    source = Numbers(10, 4, numbers())
    assert source.steps_per_epoch == 3
    epochs = [[source.next().target for _ in range(3)] for _ in range(4)]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [4, 4, 2]
        assert sorted(torch.cat(epoch).tolist()) == list(range(10))
    assert len({tuple(torch.cat(epoch).tolist()) for epoch in epochs}) == 4
    assert source.epoch == 4.0
    with pytest.raises(ValueError, match="batch size must be from 1 to 10, not 11"):
        Numbers(10, 11, numbers())


def test_the_first_example_of_an_epoch_is_uniform() -> None:
    source = Numbers(10, 10, numbers())
    uniform(np.array([int(source.next().target[0]) for _ in range(3_000)]), 0, 10)


def test_streams_of_different_purpose_share_nothing() -> None:
    keys = [(p, s) for p in ("adding/train", "adding/test", "order") for s in range(50)]
    drawn = {torch.randint(0, 2**62, (), generator=generator(*key)).item() for key in keys}
    assert len(drawn) == len(keys)


PINNED = {
    "adding": "eb4cf8e3385a207694781ad321a6eaff98b0ac51728f594646e0bbfa8a4442ed",
    "temporal-order": "a3fce2d011b5c324daae90967fd26908d1c1ed56048f86c8e3f8bc4e755f5c8d",
    "reber": "182e83403543d0a8bdafa58c6b6002c40e557da13879be3db31ede3cc07a63c7",
}


@pytest.mark.parametrize("name", PINNED)
def test_data_are_the_same_on_every_platform(name: str) -> None:
    # What changes these changes everyone's data: raise config.SEMANTICS with it.
    batch = TASKS[name]().test_batches()[0]
    content = batch.input.data.numpy().tobytes() + batch.target.numpy().tobytes()
    source = TASKS[name]().source(seed=0)
    for _ in range(3):
        content += source.next().input.data.numpy().tobytes()
    assert hashlib.sha256(content).hexdigest() == PINNED[name]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adding(1), "length must be from 2 up, not 1"),
        (lambda: Adding(2.0), "length must be a whole number, not 2.0"),  # type: ignore[arg-type]
        (lambda: TemporalOrder(29), "length must be from 30 up, not 29"),
        (lambda: TemporalOrder(1000, 17), "symbols must be from 1 to 16, not 17"),
        (lambda: Reber(0), "multiple must be from 1 up, not 0"),
        (lambda: Reber(True), "multiple must be a whole number, not True"),
        (lambda: check_whole("x", "7", 1), "x must be a whole number, not '7'"),
    ],
)
def test_wrong_options_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}$"):
        make()


def test_spans_count_steps() -> None:
    assert Span(20).steps(None) == 20
    assert Span(0.1, "epochs").steps(550) == 55
    assert Span(6, "epochs").steps(550) == 3300
    assert Span(0.1, "epochs").steps(1) == 1
    with pytest.raises(ValueError, match="no epochs"):
        Span(1, "epochs").steps(None)


def test_the_paper_s_settings() -> None:
    every = Span(20)
    assert Adding(200).settings == Settings(20, 0.01, every, Span(10_000))
    assert TemporalOrder(100).settings == Settings(20, 0.001, every, Span(50_000))
    assert Reber(10).settings == Settings(
        1, 0.0003, every, Span(300, "epochs"), test_size=256, test_batch_size=256
    )
    for name in ("mnist", "pmnist"):
        assert TASKS[name]().settings == Settings(
            100, 0.001, Span(0.1, "epochs"), Span(100, "epochs"), Span(6, "epochs"),
            test_size=10_000,
        )  # fmt: skip
    for task in (make() for make in TASKS.values()):
        assert (task.settings.optimizer, task.settings.dropout) == ("adam", 0.0)
        assert task.settings.clip is None


@pytest.mark.parametrize("length", [200, 1000, 5000, 10000])
def test_long_test_sets_come_in_batches_that_fit(length: int) -> None:
    # 500 sequences in all, whose states of 100 units stay below half a gigabyte at once.
    sizes = [dense(b).shape[1] for b in Adding(length).test_batches()]
    assert sum(sizes) == 500
    assert max(sizes) * length * 100 * 4 < 2**29


def test_names_and_sizes() -> None:
    sizes = {
        name: (task.input_size, task.output_size, task.readout)
        for name, task in ((name, make()) for name, make in TASKS.items())
        if task.name == name
    }
    assert sizes == {
        "adding": (2, 1, "last"),
        "temporal-order": (6, 8, "last"),
        "reber": (7, 7, "every"),
        "mnist": (1, 10, "last"),
        "pmnist": (1, 10, "last"),
    }


def test_a_batch_moves_between_types() -> None:
    for task in GENERATED:
        batch = task.batch(3, numbers()).to("cpu", torch.float64)
        assert batch.input.data.dtype == torch.float64
        assert batch.target.dtype == (torch.float64 if task.name == "adding" else torch.int64)
        assert batch.extra is None or batch.extra.dtype == torch.bool


def test_the_page_s_examples_run() -> None:
    page = Path(__file__).parents[1] / "docs" / "tasks.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 10
    assert result.failed == 0


def best(call: Callable[[], object], times: int) -> float:
    def once() -> float:
        start = perf_counter()
        call()
        return perf_counter() - start

    return min(once() for _ in range(times))


@pytest.mark.parametrize("task", [Adding(500), TemporalOrder(500), Reber(40)])
def test_data_cost_far_less_than_a_training_step(task: Task) -> None:
    # Both grow with the length, so the share at L = 10,000 is the same.
    model = SequenceModel(
        "gdu", task.input_size, task.output_size, groups="10x10", readout=task.readout
    )
    source = task.source(seed=0)

    def step() -> None:
        batch = source.next()
        task.loss(model(batch.input), batch.target).backward()

    assert best(source.next, 20) < 0.025 * best(step, 3)
