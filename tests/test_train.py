"""Training: known numbers, the same numbers again, and every way a run can end."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import torchgdu
from conftest import SmallImages
from torchgdu import environment, ops, records, tasks
from torchgdu import train as training
from torchgdu.config import CELLS, SEMANTICS, ConfigError, RunConfig
from torchgdu.models import SequenceModel
from torchgdu.observe import Observer, Progress
from torchgdu.records import Record, RunBusy, RunCorrupt
from torchgdu.tasks import Batch
from torchgdu.train import OPTIMIZERS, DriftError, Interrupted, resolve, train

TINY: dict[str, Any] = {"task": "adding", "length": 10, "groups": "4x2", "threads": 1}
SMALL: dict[str, dict[str, Any]] = {
    "adding": {"length": 20},
    "temporal-order": {"length": 30},
    "reber": {"multiple": 2},
    "mnist": {"batch_size": 10},
    "pmnist": {"batch_size": 10},
}


def tiny(**values: Any) -> RunConfig:
    return RunConfig(**{**TINY, **values})


def small(task: str, **values: Any) -> RunConfig:
    """Twenty steps of a small model on any task, exact enough to be compared across machines."""
    common: dict[str, Any] = {
        "groups": "3x2+4x1x0.5", "steps": 20, "test_every": 5, "dtype": "float64",
        "backend": "reference", "threads": 1,
    }  # fmt: skip
    return RunConfig(task=task, **{**common, **SMALL[task], **values})


def same(record: Record) -> tuple[dict[str, Any], bytes]:
    """What must be equal between equal runs: the record, and the metrics' bytes."""
    values = record.to_dict()
    for name in records.VOLATILE:
        del values[name]
    assert record.path is not None
    return values, (record.path / "metrics.jsonl").read_bytes()


def weights(record: Record) -> dict[str, list[float]]:
    assert record.path is not None
    return {k: v.tolist() for k, v in sorted(records.read_weights(record.path).items())}


class Stop(Exception):
    """What a run dies of in a test."""


@dataclass
class At(Observer):
    """Does something once, at the first test at or after a step."""

    step: int
    do: Callable[[Progress], None]
    lines: list[Mapping[str, Any]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def started(self, run: Progress) -> None:
        self.starts.append(run.step)

    def noted(self, message: str) -> None:
        self.notes.append(message)

    def tested(self, run: Progress, line: Mapping[str, Any]) -> None:
        self.lines.append(line)
        if run.step >= self.step:
            self.step = 10**9
            self.do(run)


def die(_: Progress) -> None:
    raise Stop


def nothing(_: Progress) -> None:
    pass


# --- Known numbers -----------------------------------------------------------------------------

# The mean losses and the scores at steps 5, 10, 15 and 20.
GOLDEN: dict[str, dict[str, list[float]]] = {
    "adding": {
        "loss": [1.3512507224, 0.3334205462, 0.1970862695, 0.2165532363],
        "mse": [0.5023493418, 0.1608008790, 0.2332873921, 0.1863941501],
    },
    "temporal-order": {
        "loss": [2.0766095351, 2.0940843347, 2.0759335750, 2.0957416738],
        "accuracy": [0.168, 0.170, 0.178, 0.174],
    },
    "reber": {
        "loss": [1.9731724357, 1.9713567128, 1.9699117925, 1.9835220023],
        "sc": [0, 0, 0, 0],
        "lc": [3 / 256, 1 / 16, 1 / 16, 3 / 256],
    },
    "mnist": {
        "loss": [2.6398323225, 2.5844619440, 2.5310872327, 2.4818195260],
        "accuracy": [0, 0, 0, 0],
    },
    "pmnist": {
        "loss": [2.6339529734, 2.5777255305, 2.5237045404, 2.4744475444],
        "accuracy": [0, 0, 0, 0],
    },
}


@pytest.mark.parametrize("task", SMALL)
def test_known_numbers(task: str, tmp_path: Path, small_images: SmallImages) -> None:
    data = small_images.write(tmp_path / "data")
    record = train(small(task, seed=3, data_seed=4), out=tmp_path, data=data)
    assert [line["step"] for line in record.metrics] == [5, 10, 15, 20]
    found = {name: [line[name] for line in record.metrics] for name in GOLDEN[task]}
    assert found == {name: pytest.approx(v, abs=1e-6) for name, v in GOLDEN[task].items()}


def slow_score(task: str, model: nn.Module, batches: list[Batch]) -> dict[str, float]:
    """The scores, counted one sequence after the other."""
    right, count = {"accuracy": 0, "sc": 0, "lc": 0, "both": 0}, 0
    square = 0.0
    for batch in batches:
        outputs = model(batch.input)
        if task == "reber":
            assert isinstance(batch.input, PackedSequence)
            assert batch.extra is not None
            offsets = batch.input.batch_sizes.cumsum(0) - batch.input.batch_sizes
            for b in range(int(batch.input.batch_sizes[0])):
                rows = offsets[batch.input.batch_sizes > b] + b
                good = []
                legals = batch.extra[rows].tolist()
                for values, legal in zip(outputs[rows].tolist(), legals, strict=True):
                    allowed = [v for v, ok in zip(values, legal, strict=True) if ok]
                    others = [v for v, ok in zip(values, legal, strict=True) if not ok]
                    good.append(min(allowed) > max(others))
                last = good.pop(-2)
                right["lc"] += last
                right["sc"] += all(good)
                right["both"] += last and all(good)
                count += 1
        else:
            for output, target in zip(outputs, batch.target, strict=True):
                if task == "adding":
                    square += (output - target).item() ** 2
                else:
                    right["accuracy"] += int(output.argmax()) == int(target)
                count += 1
    if task == "adding":
        return {"mse": square / count}
    names = ("sc", "lc", "both") if task == "reber" else ("accuracy",)
    return {name: right[name] / count for name in names}


@pytest.mark.parametrize("task", SMALL)
def test_agrees_with_a_plain_loop(task: str, tmp_path: Path, small_images: SmallImages) -> None:
    """The same numbers come out of the loop that anyone would write, with Adam by its formula."""
    data = small_images.write(tmp_path / "data")
    config = resolve(small(task, seed=3, data_seed=4))
    record = train(config, out=tmp_path, data=data)

    options = dict(SMALL[task])
    options.pop("batch_size", None)
    if "mnist" in task:
        options["directory"] = str(data)
    learnt = tasks.TASKS[task](**options)
    torch.manual_seed(3)
    model = SequenceModel(
        "gdu", learnt.input_size, learnt.output_size, groups="3x2+4x1x0.5",
        readout=learnt.readout, dtype=torch.float64,
    )  # fmt: skip
    source = learnt.source(3, 4, config.batch_size)
    test = learnt.validation_batches(4) or learnt.test_batches(4)
    moments = {k: (torch.zeros_like(p), torch.zeros_like(p)) for k, p in model.named_parameters()}
    assert config.lr is not None
    expected: list[dict[str, Any]] = []
    losses: list[float] = []
    for step in range(1, 21):
        batch = source.next().to(dtype=torch.float64)
        output = model(batch.input)
        if task == "adding":
            loss = ((output - batch.target) ** 2).mean()
        else:
            chosen = output.flatten(0, -2).log_softmax(-1)
            loss = -chosen[torch.arange(len(chosen)), batch.target].mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
                first, second = moments[name]
                first.mul_(0.9).add_(0.1 * g)
                second.mul_(0.999).add_(0.001 * g * g)
                root = (second / (1 - 0.999**step)).sqrt() + 1e-8
                p.sub_(config.lr * first / (1 - 0.9**step) / root)
        losses.append(loss.item())
        if step % 5 == 0:
            with torch.no_grad():
                scores = slow_score(task, model, [b.to(dtype=torch.float64) for b in test])
            expected.append({"step": step, "loss": sum(losses) / 5, **scores})
            losses = []
    lines = [dict(line) for line in record.metrics]
    for line in lines:
        line.pop("epoch")
        if line.pop("partial", False):  # of the first strings only; the losses are still those
            for name in ("sc", "lc", "both"):
                del line[name]
                del expected[line["step"] // 5 - 1][name]
    assert lines == [pytest.approx(line, abs=1e-9) for line in expected]


@pytest.mark.parametrize("task", SMALL)
def test_the_paper_s_settings_are_the_defaults(task: str) -> None:
    config = resolve(RunConfig(task=task, threads=1))
    paper = tasks.TASKS[task]().settings
    assert (config.optimizer, config.lr, config.clip) == ("adam", paper.learning_rate, 0.0)
    assert config.batch_size == paper.batch_size
    assert config.test_every == paper.test_every.amount
    assert {"steps": config.steps, "epochs": config.epochs}[paper.limit.unit] == paper.limit.amount
    assert config.patience == (6.0 if "mnist" in task else 0.0)
    assert (config.dropout, config.stop, config.threads) == (0.0, "solved", 1)
    assert resolve(config) == config
    assert resolve(config.replace(lr=0.5, stop="never")) == config.replace(lr=0.5, stop="never")


def test_other_semantics_are_refused() -> None:
    with pytest.raises(ConfigError, match="that of another version; this one has"):
        resolve(tiny(semantics=SEMANTICS + 1))


# --- Outcomes ----------------------------------------------------------------------------------


def test_solved_ends_the_run_at_the_first_step_that_meets_the_goal(tmp_path: Path) -> None:
    config = tiny(length=2, groups="10x2", steps=400)
    record = train(config, out=tmp_path)
    met = [line["step"] for line in record.metrics if line["mse"] < 0.002]
    assert (record.status, record.steps_to, met) == (
        "solved",
        {"solved": record.step},
        [record.step],
    )
    assert record.scores == {"mse": record.metrics[-1]["mse"]}
    on = train(config.replace(stop="never"), out=tmp_path)
    assert (on.status, on.step, on.steps_to) == ("solved", 400, record.steps_to)
    assert on.metrics[: len(record.metrics)] == record.metrics


def test_limit_is_the_outcome_where_a_goal_was_not_reached(tmp_path: Path) -> None:
    record = train(tiny(steps=30), out=tmp_path)
    assert (record.status, record.step, record.steps_to) == ("limit", 30, {"solved": None})
    # The last step is tested whether or not a test is due.
    assert [line["step"] for line in record.metrics] == [20, 30]


def test_finished_is_the_outcome_where_there_is_no_goal(
    tmp_path: Path, small_images: SmallImages
) -> None:
    data = small_images.write(tmp_path / "data")
    record = train(small("mnist", steps=None, epochs=2), out=tmp_path, data=data)
    assert (record.status, record.step, record.epoch) == ("finished", 10, 2.0)


class Poisoned(nn.Linear):
    """Answers from the last input, until one answer, or one gradient, is not a number."""

    def __init__(self, at: int, what: str) -> None:
        torch.manual_seed(0)
        super().__init__(2, 1)
        self._left, self._what = at, what

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input[-1])
        if self.training:
            self._left -= 1
            if self._left == 0 and self._what == "loss":
                return output * math.nan
            if self._left == 0:
                return output + (self.weight.sum() * 0).sqrt()  # 0, with the slope 0 · ∞
        return output


@pytest.mark.parametrize(
    ("what", "said"),
    [("loss", "loss nan at step 33"), ("gradient", "gradient of weight at step 33")],
)
def test_diverged_stops_and_keeps_the_last_good_weights(
    tmp_path: Path, what: str, said: str
) -> None:
    own: dict[str, Any] = {**OWN_BOTH, "task": "adding", "length": 10}
    record = train(RunConfig(**own), model=Poisoned(33, what), out=tmp_path)
    assert (record.status, record.step, record.diverged) == ("diverged", 32, said)
    good = train(RunConfig(**own, steps=32), model=Poisoned(0, what), out=tmp_path / "good")
    assert weights(record) == weights(good)
    assert all(math.isfinite(v) for line in record.metrics for v in line.values())


def test_a_real_divergence_is_noticed(tmp_path: Path) -> None:
    record = train(tiny(optimizer="sgd", lr=1000.0, steps=500), out=tmp_path)
    assert record.status == "diverged"
    assert all(math.isfinite(v) for vs in flat(weights(record)) for v in vs)


def flat(values: dict[str, Any]) -> list[list[float]]:
    return [torch.tensor(value).flatten().tolist() for value in values.values()]


def test_large_but_finite_gradients_are_no_divergence(tmp_path: Path) -> None:
    class Steep(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input[-1]) + self.bias * 1e38

    torch.manual_seed(0)
    model = Steep(2, 1)
    nn.init.zeros_(model.bias)
    config = RunConfig(task="adding", cell="own", name="steep", threads=1, steps=1, lr=1e-12)
    assert train(config, model=model, out=tmp_path).status == "limit"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_is_saved_and_goes_on_to_the_same_end(tmp_path: Path, number: int) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    whole = train(tiny(steps=60), out=tmp_path / "whole")
    kill = At(20, lambda run: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted, match="saved at step 20 in") as caught:
        train(tiny(steps=60), out=tmp_path, observer=kill)
    assert caught.value.number == number
    assert isinstance(caught.value, KeyboardInterrupt)
    left = records.load_record(tmp_path / whole.id)
    assert (left.status, left.step, left.done) == ("interrupted", 20, False)
    watch = At(0, nothing)
    assert same(train(tiny(steps=60), out=tmp_path, observer=watch)) == same(whole)
    assert watch.starts == [20]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_signal_interrupts_at_once(tmp_path: Path) -> None:
    def twice(_: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        train(tiny(steps=60), out=tmp_path, observer=At(20, twice))
    assert not isinstance(caught.value, Interrupted)


def test_training_in_a_thread(tmp_path: Path) -> None:
    found: list[Record] = []
    thread = threading.Thread(target=lambda: found.append(train(tiny(steps=20), out=tmp_path)))
    thread.start()
    thread.join()
    assert same(found[0]) == same(train(tiny(steps=20), out=tmp_path / "again"))


# --- The same again ----------------------------------------------------------------------------


@pytest.mark.parametrize("task", SMALL)
def test_equal_runs_leave_equal_bits(task: str, tmp_path: Path, small_images: SmallImages) -> None:
    data = small_images.write(tmp_path / "data")
    config = small(task, dtype="float32", groups="5x2", layers=2, dropout=0.5, steps=10)
    first, second = (
        train(config, out=tmp_path / out, data=data, save_every=often)
        for out, often in (("first", 0.0), ("second", 1e9))
    )
    assert same(first) == same(second)
    assert weights(first) == weights(second)
    other = train(config.replace(seed=1), out=tmp_path / "first", data=data)
    assert weights(other) != weights(first)


@pytest.mark.parametrize("task", ["adding", "reber"])
def test_equal_runs_on_two_threads_leave_equal_bits(tmp_path: Path, task: str) -> None:
    options: dict[str, Any] = {"adding": {"length": 60}, "reber": {"multiple": 5}}[task]
    config = RunConfig(task=task, **options, groups="10x10", threads=2, steps=20, test_every=10)
    first, second = (train(config, out=tmp_path / out) for out in ("first", "second"))
    assert same(first) == same(second)
    assert weights(first) == weights(second)


def test_seeds_mean_what_they_say(tmp_path: Path) -> None:
    def losses(**values: int) -> list[float]:
        record = train(small("reber", **values), out=tmp_path)
        return [line["loss"] for line in record.metrics]

    def tests(**values: int) -> object:
        return train(small("reber", **values), out=tmp_path).data

    assert losses(seed=1) != losses(seed=0) != losses(data_seed=1)
    assert tests(seed=1) == tests(seed=0) != tests(data_seed=1)


def test_nothing_around_a_run_is_changed(tmp_path: Path) -> None:
    before = (torch.get_rng_state(), torch.get_num_threads())
    record = train(tiny(steps=20, threads=before[1] + 1), out=tmp_path)
    torchgdu.load(record.path or "")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


def test_numbers_drawn_outside_do_not_matter(tmp_path: Path) -> None:
    first = train(tiny(steps=20), out=tmp_path / "first")
    torch.rand(17)
    assert same(train(tiny(steps=20), out=tmp_path / "second")) == same(first)


RESUMED: dict[str, dict[str, Any]] = {
    **{cell: {"cell": cell, "groups": None if cell != "gdu" else "4x2"} for cell in CELLS},
    **{f"{name}-two": {"optimizer": name, "layers": 2, "dropout": 0.5} for name in OPTIMIZERS},
    "learnt": {"learn_delta": True, "groups": "4x2x0.5"},
    "clipped": {"clip": 0.01},
    "double": {"dtype": "float64", "init": "joint"},
}  # fmt: skip


@pytest.mark.parametrize("kind", RESUMED)
def test_every_kind_of_run_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    options = dict(RESUMED[kind])
    if options.get("cell", "gdu") != "gdu":
        options["hidden"] = 8
    config = tiny(**options, steps=12, test_every=2)
    whole = train(config, out=tmp_path / "whole")
    for step, often in ((2, 0.0), (6, 0.0), (8, 1e9)):
        with pytest.raises(Stop):
            train(config, out=tmp_path, observer=At(step, die), save_every=often)
    watch = At(0, nothing)
    ended = train(config, out=tmp_path, observer=watch)
    assert watch.starts == [5]  # the last that was saved before the step that died
    assert same(ended) == same(whole)
    assert weights(ended) == weights(whole)
    # The third saved nothing, so that its resume is forgotten.
    assert [resume["step"] for resume in ended.process["resumes"]] == [1, 5]


def test_clipping_clips(tmp_path: Path) -> None:
    """With plain gradient descent a step is at most lr × clip long."""
    start = train(tiny(steps=1, optimizer="sgd", lr=1e-12), out=tmp_path)
    end = train(tiny(steps=1, optimizer="sgd", lr=1.0, clip=0.001), out=tmp_path)
    pairs = zip(flat(weights(start)), flat(weights(end)), strict=True)
    length = math.sqrt(sum((a - b) ** 2 for s, e in pairs for a, b in zip(s, e, strict=True)))
    assert length == pytest.approx(0.001, rel=1e-3)


def test_a_finished_run_is_not_done_again(tmp_path: Path) -> None:
    record = train(tiny(steps=20), out=tmp_path)
    assert record.path is not None
    before = {p.name: p.stat().st_mtime_ns for p in record.path.iterdir()}
    watch = At(0, nothing)
    assert train(tiny(steps=20), out=tmp_path, observer=watch) == record
    assert watch.starts == []
    assert {p.name: p.stat().st_mtime_ns for p in record.path.iterdir()} == before


def test_a_busy_run_is_refused(tmp_path: Path) -> None:
    def again(run: Progress) -> None:
        with pytest.raises(RunBusy, match="in use by process"):
            train(run.config, out=tmp_path)

    assert train(tiny(steps=40), out=tmp_path, observer=At(20, again)).step == 40


# --- Other conditions --------------------------------------------------------------------------


def test_a_resume_under_other_conditions_stops_and_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(steps=60, test_every=10)
    with pytest.raises(Stop):
        train(config, out=tmp_path, observer=At(20, die), save_every=0)
    truth = environment.describe

    def other(config: RunConfig) -> dict[str, Any]:
        changes = {"torch": "1.0", "torch instructions": "ABACUS", "python": "4", "processor": "x"}
        return {**truth(config), **changes}

    monkeypatch.setattr(environment, "describe", other)
    wanted = r"torch was .*, is 1\.0, torch instructions was .*, is ABACUS\. .*--accept-drift"
    with pytest.raises(DriftError, match=wanted):
        train(config, out=tmp_path)
    record = train(config, out=tmp_path, accept_drift=True)
    assert [(d["step"], d["what"], d["is"]) for d in record.drift] == [
        (19, "torch", "1.0"),
        (19, "torch instructions", "ABACUS"),
    ]
    assert record.drift[0]["was"] == torch.__version__
    assert record.environment["torch"] == "1.0"


@pytest.mark.parametrize("key", environment.BITS)
def test_everything_that_can_change_bits_counts_as_drift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    with pytest.raises(Stop):
        train(tiny(steps=40), out=tmp_path, observer=At(20, die), save_every=0)
    (state,) = tmp_path.glob("*/checkpoint-19.json")
    text = json.loads(state.read_text())
    assert key in text["body"]["state"]["environment"]
    text["body"]["state"]["environment"][key] = "another"
    text["sha256"] = records._digest(json.dumps(text["body"], sort_keys=True).encode())
    state.write_text(json.dumps(text))
    with pytest.raises(DriftError, match=f"{key} was another, is"):
        train(tiny(steps=40), out=tmp_path)


def test_other_image_files_are_drift(tmp_path: Path, small_images: SmallImages) -> None:
    data = small_images.write(tmp_path / "data")
    with pytest.raises(Stop):
        train(small("mnist"), out=tmp_path, data=data, observer=At(5, die), save_every=0)
    # The same images from another place are the same run; the permutation is part of the data.
    moved = small_images.write(tmp_path / "moved", gzipped=False)
    record = train(small("mnist"), out=tmp_path, data=moved)
    assert record.drift == ()
    assert record.data["permutation"] is None
    assert record.data["verified"] is True
    order = tasks.SequentialMNIST(permuted=True).permutation(5)
    permuted = train(small("pmnist", data_seed=5), out=tmp_path, data=data)
    assert permuted.data["permutation"] == order.tolist()


# --- Tests, criteria and the end ---------------------------------------------------------------


def test_short_tests_find_the_same_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SC, LC and both are first met where tests of all strings at every interval say so."""
    config = RunConfig(
        task="reber", multiple=1, groups="10x4", lr=0.01, steps=1500, threads=1, stop="never"
    )
    short = train(config, out=tmp_path / "short")
    monkeypatch.setattr(training, "FULL_TEST_EVERY", 1)
    full = train(config, out=tmp_path / "full")
    assert not any("partial" in line for line in full.metrics)
    expected = {
        name: next(line["step"] for line in full.metrics if line[score] == 1)
        for name, score in (("sc", "sc"), ("lc", "lc"), ("solved", "both"))
    }
    assert short.steps_to == full.steps_to == expected
    assert len(set(expected.values())) > 1
    partial = [line for line in short.metrics if line.get("partial")]
    assert len(partial) > 10
    for one, other in zip(short.metrics, full.metrics, strict=True):
        assert one["loss"] == other["loss"]
        if not one.get("partial"):
            assert one == other
        assert one.get("partial") is None or min(one["sc"], one["lc"]) < 1
    whole = [line["step"] for line in short.metrics if not line.get("partial")]
    assert {500, 1000, 1500} <= set(whole)
    assert short.scores == {name: short.metrics[-1][name] for name in ("sc", "lc", "both")}


@dataclass(frozen=True)
class Scripted(tasks.Task):
    """Scores are read from a list, one a test: what the rules make of them is to be seen."""

    script: tuple[float, ...] = ()
    place: str = field(default="", compare=False)
    asked: list[int] = field(default_factory=list, compare=False)

    name = "scripted"
    input_size = 2
    output_size = 1
    primary = "score"
    higher_is_better = True

    @property
    def chance(self) -> dict[str, float]:
        return {"score": 0.0}

    @property
    def goal(self) -> dict[str, float]:
        return {}

    @property
    def settings(self) -> tasks.Settings:
        return tasks.Settings(
            batch_size=5,
            learning_rate=0.01,
            test_every=tasks.Span(0.5, "epochs"),
            limit=tasks.Span(10, "epochs"),
            patience=tasks.Span(1.5, "epochs"),
        )

    def batch(self, size: int, generator: torch.Generator | None = None) -> Batch:
        return Batch(torch.rand(3, size, 2, generator=generator), torch.ones(size, 1))

    def source(self, seed: int, data_seed: int = 0, batch_size: int | None = None) -> tasks.Source:
        return Ordered(self, batch_size or 5, tasks.generator("own", seed))

    def validation_batches(self, data_seed: int = 0, batch_size: int | None = None) -> list[Batch]:
        return [self.batch(2, tasks.generator("validation"))]

    def test_batches(self, data_seed: int = 0, batch_size: int | None = None) -> list[Batch]:
        return [self.batch(3, tasks.generator("test"))]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def scorer(self) -> tasks.Scorer:
        return FromScript(self)

    def reached(self, scores: Mapping[str, float]) -> dict[str, bool]:
        return {}


class Ordered(tasks.EpochSource):
    """Twenty examples: four batches of five an epoch."""

    def __init__(self, task: Scripted, batch_size: int, numbers: torch.Generator) -> None:
        super().__init__(20, batch_size, numbers)
        self._whole = task.batch(20, tasks.generator("training"))

    def take(self, index: Tensor) -> Batch:
        assert isinstance(self._whole.input, Tensor)
        return Batch(self._whole.input[:, index], self._whole.target[index])


class FromScript(tasks.Scorer):
    def __init__(self, task: Scripted) -> None:
        self._task, self._size = task, 0
        self._mean = 0.0

    def add(self, output: Tensor, batch: Batch) -> None:
        self._size = len(output)
        self._mean = float(output.mean())

    def scores(self) -> dict[str, float]:
        if self._size == 3:  # the test set
            return {"score": self._mean}
        self._task.asked.append(self._size)
        return {"score": self._task.script[len(self._task.asked) - 1]}


class Last(nn.Linear):
    """Answers from the last input alone."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input[-1])


OWN_BOTH: dict[str, Any] = {"task": "own", "cell": "own", "name": "mine", "threads": 1}


def linear() -> Last:
    torch.manual_seed(1)
    return Last(2, 1)


def test_patience_and_best_weights(tmp_path: Path) -> None:
    """Best at the third validation; equal ones after it are no better; three more, and it ends."""
    task = Scripted(script=(0.1, 0.5, 0.7, 0.7, 0.6, 0.7, 0.9, 0.9))
    kept: dict[int, dict[str, Tensor]] = {}
    model = linear()

    def keep(run: Progress) -> None:
        kept[run.step] = {k: v.clone() for k, v in model.state_dict().items()}
        watch.step = 0

    watch = At(0, keep)
    record = train(RunConfig(**OWN_BOTH), task=task, model=model, out=tmp_path, observer=watch)
    assert [line["step"] for line in record.metrics] == [2, 4, 6, 8, 10, 12]
    assert (record.status, record.step, record.epoch) == ("finished", 12, 3.0)
    assert record.best == {"step": 6, "epoch": 1.5, "scores": {"score": 0.7}}
    best = Last(2, 1)
    best.load_state_dict(kept[6])
    (test,) = task.test_batches()
    assert record.scores == {"score": pytest.approx(best(test.input).mean().item(), abs=1e-7)}
    assert weights(record) == {k: v.tolist() for k, v in sorted(kept[6].items())}
    loaded = torchgdu.load(record.path or "", model=Last(2, 1), task=task)
    assert not loaded.training
    assert torch.equal(loaded(test.input), best(test.input))
    assert not torch.equal(kept[6]["weight"], kept[12]["weight"])


def test_early_stop_survives_a_kill(tmp_path: Path) -> None:
    script = (0.1, 0.5, 0.7, 0.7, 0.6, 0.7)
    whole = train(
        RunConfig(**OWN_BOTH), task=Scripted(script=script), model=linear(), out=tmp_path / "whole"
    )
    # Saved after each step: the validation that died comes again, so its line is in twice.
    task = Scripted(script=(*script[:4], *script[3:]))
    config = RunConfig(**OWN_BOTH)
    with pytest.raises(Stop):
        train(config, task=task, model=linear(), out=tmp_path, observer=At(8, die), save_every=0)
    again = train(config, task=task, model=linear(), out=tmp_path)
    assert again.best == whole.best
    assert (again.step, again.scores, again.metrics) == (whole.step, whole.scores, whole.metrics)
    assert weights(again) == weights(whole)


def test_no_patience_goes_to_the_limit_and_epochs_are_kept(tmp_path: Path) -> None:
    task = Scripted(script=tuple(1 / n for n in range(1, 30)))
    model, kept = linear(), {}

    def keep(run: Progress) -> None:
        kept[run.epoch] = model.weight.tolist()
        watch.step = 0

    watch = At(0, keep)
    config = RunConfig(**OWN_BOTH, patience=0, epochs=4, keep_epochs=(1, 3))
    record = train(config, task=task, model=model, out=tmp_path, observer=watch)
    assert (record.epoch, record.best and record.best["step"]) == (4.0, 2)
    for epoch in (1, 3):
        loaded = torchgdu.load(record.path or "", model=Last(2, 1), task=task, epoch=epoch)
        assert loaded.state_dict()["weight"].tolist() == kept[epoch]
    with pytest.raises(LookupError, match="no epoch 2; it has epoch-1, epoch-3"):
        torchgdu.load(record.path or "", model=Last(2, 1), task=task, epoch=2)


def test_test_intervals_as_a_share_of_an_epoch(tmp_path: Path, small_images: SmallImages) -> None:
    data = small_images.write(tmp_path / "data")
    config = small("mnist", batch_size=5, test_every=0.3, steps=None, epochs=2, patience=0)
    record = train(config, out=tmp_path, data=data)
    assert [line["step"] for line in record.metrics] == [3, 6, 9, 12, 15, 18, 20]
    assert record.metrics[0]["epoch"] == 0.3


# --- One's own ---------------------------------------------------------------------------------


def test_own_shapes_and_options_count_for_the_identity(tmp_path: Path) -> None:
    config = RunConfig(**OWN_BOTH, steps=2)

    def run(model: nn.Module, **options: Any) -> Record:
        return train(config, task=Scripted(script=(0.0, 0.1), **options), model=model, out=tmp_path)

    class Wide(Last):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.register_buffer("more", torch.zeros(3))

    plain = run(Last(2, 1))
    assert run(Last(2, 1), place="elsewhere").id == plain.id
    assert run(Wide()).id != plain.id
    other = Scripted(script=(0.0, 0.2))
    assert train(config, task=other, model=Last(2, 1), out=tmp_path).id != plain.id
    assert plain.own is not None
    assert plain.own["model"] == {"weight": [1, 2], "bias": [1]}
    assert plain.id.startswith("mine_mine_s0_")


def test_own_tasks_that_differ_are_different_runs(tmp_path: Path) -> None:
    """Attributes count where there are no fields; what looks new in each process is refused."""

    class Task(tasks.Task):
        name, input_size, output_size, primary, higher_is_better = "t", 2, 1, "score", True
        chance, goal = Scripted.chance, Scripted.goal
        settings, batch = Scripted.settings, Scripted.batch
        validation_batches, test_batches = Scripted.validation_batches, Scripted.test_batches
        source, loss, reached = Scripted.source, Scripted.loss, Scripted.reached

        def __init__(self, length: object) -> None:
            self.length, self._asked = length, object()

        def scorer(self) -> tasks.Scorer:
            return FromScript(Scripted(script=(0.0, 0.1)))

    config = RunConfig(**OWN_BOTH, steps=2)

    def run(length: object) -> Record:
        return train(config, task=Task(length), model=Last(2, 1), out=tmp_path)

    assert run(5).id == run(5).id != run(50).id
    with pytest.raises(ConfigError, match=r"Task.length is <object object at 0x.*make it a number"):
        run(object())


def test_an_own_model_learns_a_built_in_task_and_the_reverse(tmp_path: Path) -> None:
    config = RunConfig(task="adding", length=10, cell="own", name="linear", threads=1, steps=40)
    model = linear()
    record = train(config, model=model, out=tmp_path)
    assert record.parameters == 3
    assert model.weight.tolist() == weights(record)["weight"]
    own = RunConfig(task="own", name="scripted", threads=1, groups="4x2", steps=4)
    task = Scripted(script=(0.1, 0.2, 0.3))
    learnt = train(own, task=task, out=tmp_path)
    assert learnt.step == 4
    assert isinstance(torchgdu.load(learnt.path or "", task=task), SequenceModel)


@pytest.mark.parametrize(
    ("config", "given", "option", "says"),
    [
        ({"task": "own", "name": "x"}, {}, "task", "belong together"),
        (TINY, {"task": Scripted()}, "task", "belong together"),
        ({**TINY, "groups": None, "cell": "own", "name": "x"}, {}, "cell", "belong together"),
        (TINY, {"model": Last(2, 1)}, "cell", "belong together"),
        ({**TINY, "device": "cuda:99"}, {}, "device", "cannot be used here"),
        (
            {"task": "reber", "steps": 2500, "keep_epochs": (2, 3)},
            {},
            "keep_epochs",
            "step 2500, b",
        ),
    ],
)
def test_bad_arguments_leave_nothing_behind(
    tmp_path: Path, config: dict[str, Any], given: dict[str, Any], option: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        train(RunConfig(**config), out=tmp_path, **given)
    assert caught.value.option == option
    assert not any(tmp_path.iterdir())


def test_patience_needs_a_validation_set(tmp_path: Path) -> None:
    class Blind(Scripted):
        def validation_batches(
            self, data_seed: int = 0, batch_size: int | None = None
        ) -> list[Batch]:
            return []

    with pytest.raises(ConfigError, match="task scripted has no validation set"):
        train(RunConfig(**OWN_BOTH), task=Blind(), model=linear(), out=tmp_path)


def test_missing_images_leave_nothing_behind(tmp_path: Path, small_images: SmallImages) -> None:
    with pytest.raises(tasks.DataError, match="mnist is not here"):
        train(small("mnist"), out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


# --- Loading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
def test_load_returns_the_trained_model(tmp_path: Path, cell: str) -> None:
    size: dict[str, Any] = {"groups": "4x2"} if cell == "gdu" else {"groups": None, "hidden": 8}
    record = train(tiny(cell=cell, **size, steps=40), out=tmp_path)
    model = torchgdu.load(record.id[:-4], out=tmp_path)
    assert not model.training
    task = tasks.Adding(10)
    with torch.no_grad():
        scores = task.score((model(b.input), b) for b in task.test_batches())
    assert scores == pytest.approx(record.scores, rel=1e-6)
    assert torchgdu.load(record.path or "").state_dict().keys() == model.state_dict().keys()


def test_load_takes_what_an_interrupted_run_has(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        train(tiny(steps=60), out=tmp_path, observer=At(40, die), save_every=0)
    (path,) = tmp_path.iterdir()
    loaded = torchgdu.load(path)
    until = train(tiny(steps=39), out=tmp_path)
    assert {k: v.tolist() for k, v in loaded.state_dict().items()} == weights(until)


def test_a_renamed_run_is_read_but_not_gone_on_with(tmp_path: Path) -> None:
    record = train(tiny(steps=20), out=tmp_path)
    assert record.path is not None
    moved = record.path.rename(tmp_path / "mine")
    found = records.find_record(tmp_path, str(moved))
    assert found == record
    with pytest.raises(RunCorrupt, match=f"name it {record.id} again"):
        print(found.out)
    assert records.load_record(moved.rename(record.path)).out == tmp_path


# --- The engine --------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
def test_engine_and_reference_learn_alike(tmp_path: Path, cell: str) -> None:
    """In float64 their losses stay together; each is a run of its own, and says so."""
    if reason := ops.no_engine():
        pytest.skip(f"the engine cannot be had: {reason}")
    size: dict[str, Any] = {"groups": "3x2+4x1x0.5"} if cell == "gdu" else {"hidden": 12}
    options = {**SMALL["reber"], **size, "cell": cell, "dtype": "float64", "threads": 1}
    config = RunConfig(task="reber", **options, layers=2, steps=20, test_every=5)
    engine, reference = (
        train(config.replace(backend=backend), out=tmp_path) for backend in ("engine", "reference")
    )
    assert engine.id != reference.id
    assert (engine.environment["backend"], engine.environment["instructions"]) == (
        "engine",
        ops.library().instructions,
    )
    assert reference.environment["instructions"] is None
    losses = [[line["loss"] for line in record.metrics] for record in (engine, reference)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    assert train(config, out=tmp_path).id == engine.id
