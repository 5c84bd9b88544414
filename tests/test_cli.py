"""The command line: what it refuses and how fast, its exit codes, what it shows and where."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import SmallImages
from torchgdu import cli, records
from torchgdu.config import CELLS, CHOICES, RANGES, TASKS, RunConfig
from torchgdu.display import command
from torchgdu.records import Record, load_records

PROGRAM = [sys.executable, "-c", "from torchgdu.cli import main; main()"]
TINY = ["train", "adding", "--length", "10", "--groups", "4x2", "--threads", "1"]


class Ran:
    """What came of a command run in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capfd = monkeypatch, capfd
        self.out = self.err = ""

    def __call__(self, *words: object) -> int:
        self._monkeypatch.setattr(sys, "argv", ["torchgdu", *map(str, words)])
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        self.out, self.err = self._capfd.readouterr()
        code = caught.value.code
        assert isinstance(code, int) or code is None
        return code or 0


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Ran:
    monkeypatch.chdir(tmp_path)
    return Ran(monkeypatch, capfd)


# --- Arguments ---------------------------------------------------------------------------------

WRONG: list[tuple[str, str]] = [
    ("train", "Missing argument 'TASK'"),
    ("train addin", "TASK: 'addin' is not one of adding, temporal-order, reber, mnist, pmnist"),
    ("train own", "'TASK': a task or model of your own is given in Python"),
    ("train adding --cell own", "'--cell': a task or model of your own is given in Python"),
    ("train adding --cell rnn", "--cell: 'rnn' is not one of srn, lstm, gru, ugrnn, mgu, cwrnn"),
    ("train adding --length 1", "--length: 1 is not allowed: whole numbers 2 to 1000000"),
    ("train adding --length ten", "--length: 'ten' is not allowed: whole numbers 2 to 1000000"),
    ("train temporal-order --length 29", "--length: 29 is too short for 3 symbols; allowed: 30 to"),
    ("train temporal-order --symbols 17", "--symbols: 17 is not allowed: whole numbers 1 to 16"),
    ("train reber --multiple 0", "--multiple: 0 is not allowed: whole numbers 1 to 1000"),
    ("train reber --batch-size 1001", "--batch-size: 1001 is more than the training set"),
    ("train pmnist --dataset cifar", "--dataset: 'cifar' is not one of mnist, fashion-mnist"),
    ("train adding --groups 10xx", "--groups: "),
    ("train adding --groups 10x10x10", "--groups: "),
    ("train adding --hidden 100", "--hidden: cell gdu takes its units from groups"),
    ("train adding --cell lstm --hidden 0", "--hidden: 0 is not allowed: whole numbers 1 to"),
    ("train adding --layers 65", "--layers: 65 is not allowed: whole numbers 1 to 64"),
    ("train adding --layers 2 --dropout 1", "--dropout: 1 is not allowed: 0 to 0.99"),
    ("train adding --init big", "--init: 'big' is not one of separate, joint"),
    (
        "train adding --cell lstm --forget-bias 101",
        "--forget-bias: 101 is not allowed: -100 to 100",
    ),
    ("train adding --cell gru --keep-bias nan", "--keep-bias: nan is not allowed: -100 to 100"),
    ("train adding --cell gru --reset never", "--reset: 'never' is not one of before, after"),
    ("train adding --cell mgu --gamma delta", "--gamma: 'delta' is not one of alpha, beta"),
    (
        "train adding --cell gru --learn-delta",
        "--learn-delta: cell gru has no such option; only gdu",
    ),
    ("train adding --cell cwrnn --periods 2,1", "--periods: (2, 1) is not ascending whole numbers"),
    ("train adding --checkpoint often", "--checkpoint: 'often' is neither 'auto' nor a whole"),
    ("train adding --optimizer lbfgs", "--optimizer: 'lbfgs' is not one of adam, adamw, rmsprop"),
    ("train adding --lr 0", "--lr: 0 is not allowed: 1e-12 to 1000"),
    ("train adding --clip -1", "--clip: -1 is not allowed: 0 to"),
    (
        "train adding --batch-size 2.5",
        "--batch-size: 2.5 is not allowed: whole numbers 1 to 100000",
    ),
    ("train adding --test-every 1.5", "--test-every: 1.5 is not allowed: whole numbers"),
    ("train adding --steps -1", "--steps: -1 is not allowed: whole numbers 0 to"),
    ("train adding --steps 0", "--steps: 0 would never end; allowed: 1 to 1000000000"),
    ("train adding --epochs 3", "--epochs: task adding has no epochs: count in steps, 1 to"),
    ("train reber --patience 3", "--patience: task reber has no validation set"),
    ("train adding --stop now", "--stop: 'now' is not one of solved, never"),
    ("train pmnist --keep-epochs 5,5", "--keep-epochs: (5, 5) is not ascending whole numbers"),
    ("train adding --seed 4294967296", "--seed: 4294967296 is not allowed: whole numbers 0 to"),
    (
        "train adding --data-seed x",
        "--data-seed: 'x' is not allowed: whole numbers 0 to 4294967295",
    ),
    ("train adding --dtype half", "--dtype: 'half' is not one of float32, float64"),
    ("train adding --device tpu", "--device: 'tpu' is none of cpu, cuda"),
    ("train adding --backend fast", "--backend: 'fast' is not one of auto, engine, reference"),
    ("train adding --threads 0", "--threads: 0 is not allowed: whole numbers 1 to 1024"),
    ("train adding --save-every nan", "'--save-every': 'nan' is not allowed: 0 or more seconds"),
    ("train adding --wings 2", "No such option: --wings"),
    ("train reber --epochs 0", "--epochs: 0 would never end, as there is no other limit"),
    ("reproduce nosuch", "FIGURE: no figure 'nosuch'; there are initial, reber, gates"),
    ("reproduce gates", "FIGURE: the quick profile has adding, temporal-order, reber only"),
    ("reproduce --profile slow", "--profile: 'slow' is not one of quick, paper"),
    ("reproduce --cluster tcp://here:1 --workers 2", "--workers: belongs to this machine"),
    ("report --profile slow", "--profile: 'slow' is not one of quick, paper"),
    ("report nowhere", "no such directory: nowhere"),
    ("analyse nosuch", "no run 'nosuch' in runs"),
    ("bench --shapes adding,nosuch", "--shapes: no 'nosuch'; there are adding, reber"),
    ("data fetch mnist --from ftp://x", "'--from': ftp://x is neither a directory nor an https"),
    ("runs list --out nowhere", "no such directory: nowhere"),
    ("runs show xyz", "no run 'xyz' in runs"),
    ("runs resume xyz --out nowhere", "no run 'xyz' in nowhere"),
    ("walk", "No such command 'walk'"),
]


def test_wrong_arguments_are_named_without_torch(tmp_path: Path) -> None:
    """One process tries them all; the exit code is 2 each time, and torch never gets loaded."""
    program = f"""
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from torchgdu.cli import main
found = []
for words in {[shlex.split(line) for line, _ in WRONG]!r}:
    out, err, sys.argv = io.StringIO(), io.StringIO(), ["torchgdu", *words]
    code = None
    with redirect_stdout(out), redirect_stderr(err):
        try: main()
        except SystemExit as end: code = end.code
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps([found, "torch" in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    found, torch_loaded = json.loads(done.stdout)
    assert not torch_loaded
    for (line, message), (code, out, err) in zip(WRONG, found, strict=True):
        assert (code, out) == (2, ""), line
        assert message in err, line
        assert ", own" not in err, line
        assert err.splitlines()[-1].startswith("Error: "), line
    assert not any(tmp_path.iterdir())


def test_every_field_of_a_run_has_an_option(run: Ran) -> None:
    assert run("train", "--help") == 0
    shown = set(re.findall(r"--[a-z-]+", run.out))
    fields = {f"--{name.replace('_', '-')}" for name in RunConfig.names()}
    assert fields - shown == {"--task", "--name", "--semantics"}
    more = {"out", "data", "quiet", "tensorboard", "accept-drift", "save-every", "no-learn-delta"}
    assert {f"--{name}" for name in more} <= shown
    for name, values in CHOICES.items():
        for value in set(values) - {"own"}:
            assert value in run.out, name
    for name in RANGES:
        if name not in ("multiple",):
            assert cli._range(name) in " ".join(run.out.split()), name


def test_help_is_quick() -> None:
    """`torchgdu --help` takes at most three times as long as importing typer alone."""

    def seconds(*words: str) -> float:
        start = time.perf_counter()
        subprocess.run(words, check=True, capture_output=True)
        return time.perf_counter() - start

    pairs = [
        (seconds(*PROGRAM, "--help"), seconds(sys.executable, "-c", "import typer"))
        for _ in range(7)
    ]
    ratio = min(a for a, _ in pairs) / min(b for _, b in pairs)
    assert ratio < 3, pairs


def test_files_that_are_missing_are_a_bad_argument(run: Ran, tmp_path: Path) -> None:
    assert run("train", "pmnist", "--data", "nowhere") == 2
    assert "the data directory nowhere does not exist" in run.err
    assert run("reproduce", "pmnist", "--profile", "paper", "--data", tmp_path / "nowhere") == 2
    assert run.out == ""
    assert run("data", "fetch", "mnist", "--from", "nowhere") == 2
    assert "nowhere holds no train-images-idx3-ubyte" in run.err


def test_a_page_that_cannot_be_written(run: Ran, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").write_text("")
    assert run("report", "--out", "file/report") == 5
    assert "cannot write to file/report: Not a directory; choose another --out" in run.err


def test_a_reader_who_goes_away_stops_nothing(tmp_path: Path) -> None:
    """As with `torchgdu train … | head -1`: the run goes on to its end, in silence."""
    words = [*TINY, "--steps", "400", "--test-every", "20", "--out", tmp_path]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*PROGRAM, *map(str, words)], **pipes) as run:
        assert run.stdout is not None
        run.stdout.readline()
        run.stdout.close()
        assert run.stderr is not None
        assert run.stderr.read() == b""
    assert run.returncode == 3
    (record,) = load_records(tmp_path)
    assert record.step == 400


@pytest.mark.parametrize("words", [["--help"], ["runs", "--help"], ["data", "--help"]])
def test_help_comes_without_torch(words: list[str]) -> None:
    program = (
        "import sys; from torchgdu.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: sys.exit(99 if 'torch' in sys.modules else end.code)"
    )
    subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True)


# --- Exit codes and what is printed ------------------------------------------------------------


def test_solved_finished_limit_and_diverged(
    run: Ran, tmp_path: Path, small_images: SmallImages
) -> None:
    easy = ["train", "adding", "--length", "2", "--groups", "10x2", "--threads", "1"]
    assert run(*easy) == 0
    assert re.search(r"^solved at step \d+ in [\d.]+ s: mse 0\.00\d+  \[runs/", run.out, re.M)
    assert run(*TINY, "--steps", 20) == 3
    assert "stopped at its limit, 20 steps, unsolved" in run.out
    assert run(*TINY, "--optimizer", "sgd", "--lr", 1000, "--steps", 500) == 4
    assert re.search(r"^diverged: (loss|gradient of) .* at step \d+", run.out, re.M)
    data = small_images.write(tmp_path / "data")
    image = ["train", "mnist", "--groups", "4x2", "--batch-size", 25, "--epochs", 1]
    assert run(*image, "--data", data) == 0
    assert "finished at step 2" in run.out
    # The same outcome and code, with nothing done again.
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/*")}
    assert run(*TINY, "--steps", 20) == 3
    assert run.out.startswith("done before: stopped at its limit, 20 steps, unsolved")
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/*")} == before


def test_quiet_says_nothing(run: Ran) -> None:
    assert run(*TINY, "--steps", 20, "--quiet") == 3
    assert (run.out, run.err) == ("", "")


def test_lines_on_a_pipe(run: Ran) -> None:
    assert run(*TINY, "--steps", 40) == 3
    head, first, last = run.out.splitlines()
    assert re.fullmatch(r"adding-10_gdu-4x2_s0_\w{10}: 185 parameters, in runs", head)
    assert re.match(r"20/40 .*loss [\d.]+  mse [\d.]+ \(chance 0\.167, goal 0\.002\)", first)
    assert last.startswith("stopped at its limit")
    assert "\x1b" not in run.out


def test_corrupt_busy_and_unreadable_directories(run: Ran, tmp_path: Path) -> None:
    assert run(*TINY, "--steps", 20) == 3
    (path,) = (tmp_path / "runs").iterdir()
    (path / "record.json").write_text("{")
    assert run(*TINY, "--steps", 20) == 5
    assert f"Error: runs/{path.name} holds a record that cannot be read" in run.err
    assert run("runs", "show", path.name) == 5
    assert run("runs", "list") == 5
    assert "cannot be read" in run.err
    (path / "record.json").unlink()
    for name in path.glob("checkpoint-*.json"):
        name.write_text("{}")
    assert run(*TINY, "--steps", 20) == 5
    assert "no good checkpoint is left" in run.err
    (tmp_path / "file").write_text("")
    assert run(*TINY, "--out", "file") == 5
    assert "choose another --out" in run.err


def test_a_damaged_checkpoint_is_told_and_the_end_is_the_same(run: Ran, tmp_path: Path) -> None:
    words = [*TINY, "--steps", "60", "--save-every", "0"]
    assert run(*words, "--out", "whole") == 3
    assert run(*words, "--quiet") == 3
    (path,) = (tmp_path / "runs").iterdir()
    (path / "record.json").unlink()
    newest = path / "checkpoint-60.safetensors"
    newest.write_bytes(newest.read_bytes()[:-9])
    assert run(*words, "--quiet") == 3
    assert "Warning: " in run.err
    assert "falling back to the checkpoint before it" in run.err
    (whole,), (again,) = (records.load_records(tmp_path / part) for part in ("whole", "runs"))
    assert again.metrics == whole.metrics
    assert again.scores == whole.scores
    assert "falling back" in again.process["notes"][0]


# --- Looking back ------------------------------------------------------------------------------


def test_runs_are_listed(run: Ran) -> None:
    assert run(*TINY, "--steps", 20) == 3
    assert run(*TINY, "--steps", 20, "--seed", 1) == 3
    assert run("runs", "list") == 0
    listed = run.out
    assert re.findall(r"^adding-10_gdu-4x2_s(\d)_\w+ +limit +20  mse 0\.\d+$", listed, re.M) == [
        "0", "1",
    ]  # fmt: skip
    assert run("runs") == 0
    assert run.out == listed


def test_show_prints_the_command_that_makes_the_run_again(run: Ran, tmp_path: Path) -> None:
    assert run(*TINY, "--steps", 20, "--test-every", 5, "--clip", 0.5, "--learn-delta") == 3
    (record,) = records.load_records("runs")
    assert run("runs", "show", record.id[-10:]) == 0
    (said,) = re.findall(r"made by  (.*)", run.out)
    assert record.environment["torch"] in run.out
    program, *words = shlex.split(said)
    assert program == "torchgdu"
    assert run(*words, "--out", "again") == 3
    (again,) = records.load_records("again")
    assert again.id == record.id
    assert again.metrics == record.metrics


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("cell", CELLS)
def test_every_command_describes_its_run_exactly(
    task: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[RunConfig] = []
    monkeypatch.setattr(cli, "_train", lambda config, *_: found.append(config))
    values: dict[str, Any] = {"seed": 3, "data_seed": 2, "lr": 1e-05, "clip": 0.0, "layers": 2}
    values |= {"dropout": 0.25, "init": "joint", "optimizer": "sgd", "dtype": "float64"}
    values |= {"threads": 2, "backend": "reference", "checkpoint": "auto", "stop": "never"}
    values |= {"batch_size": 7, "steps": 12, "test_every": 3}
    if task not in ("adding", "temporal-order"):
        values |= {"epochs": 2.5, "keep_epochs": (1, 2), "test_every": 0.125}
    of_cells: dict[str, dict[str, Any]] = {
        "lstm": {"forget_bias": 0.0}, "gru": {"reset": "after", "keep_bias": -1.5},
        "ugrnn": {"keep_bias": 2.0}, "mgu": {"gamma": "beta"}, "srn": {},
        "cwrnn": {"periods": (1, 5)}, "gdu": {"learn_delta": True, "groups": "2x3x0.5,3x2"},
    }  # fmt: skip
    values |= of_cells[cell]
    for config in (RunConfig(task=task, cell=cell), RunConfig(task=task, cell=cell, **values)):
        line = shlex.split(command(Record(config=config, status="limit")))
        monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(SystemExit):
            cli.main()
        assert found.pop() == config


def test_an_own_run_is_shown_as_python() -> None:
    config = RunConfig(task="own", cell="own", name="mine")
    record = Record(config=config, status="limit", own={"task": {}, "model": {}})
    text = command(record)
    assert text.endswith(", task=…, model=…)")
    literal = text[len("train(RunConfig.from_json(") : text.index("), task=")]
    assert RunConfig.from_json(eval(literal)) == config


def test_resume_by_the_beginning_of_a_name_and_from_inside(
    run: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*TINY, "--steps", 40, "--save-every", 0) == 3
    (whole,) = records.load_records("runs")
    assert whole.path is not None
    for words in (["adding-10_gdu"], [whole.id], [str(whole.path)]):
        (whole.path / "record.json").unlink()
        assert run("runs", "list") == 0
        assert "interrupted" in run.out
        assert run("runs", "resume", *words) == 3
        (again,) = records.load_records("runs")
        assert (again.id, again.scores) == (whole.id, whole.scores)
    path = whole.path.resolve()
    (path / "record.json").unlink()
    monkeypatch.chdir(path)
    assert run("runs", "resume", ".") == 3
    monkeypatch.chdir(tmp_path)
    assert [record.id for record in records.load_records("runs")] == [whole.id]


# --- On a terminal, and TensorBoard ------------------------------------------------------------


def test_a_terminal_gets_a_live_display(tmp_path: Path) -> None:
    """A bar, the scores against chance and goal, the time left; gone when the outcome is there."""
    leader, follower = pty.openpty()
    words = [*PROGRAM, *TINY, "--steps", "1500", "--lr", "1e-6", "--length", "30"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=follower) as process:
        os.close(follower)
        shown = b""
        while True:
            try:
                block = os.read(leader, 65536)
            except OSError:  # the terminal's other end is closed
                break
            if not block:
                break
            shown += block
    os.close(leader)
    assert process.returncode == 3
    text = shown.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "━" in plain
    assert re.search(r"\d/1,500  [\d.e+]+ steps/s  at most \d+:\d\d:\d\d left", plain)
    assert re.search(r"loss [\d.]+  mse [\d.]+ \(chance 0\.167, goal 0\.002\)", plain)
    last = plain.rstrip().splitlines()[-1]
    assert "stopped at its limit, 1,500 steps, unsolved" in last
    # The bar was erased before the last line was written.
    assert "\x1b[2K" in text[text.rindex("━") :]


def test_tensorboard_gets_the_metrics(run: Ran, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    assert run(*TINY, "--steps", 60, "--quiet", "--tensorboard") == 3
    (record,) = records.load_records("runs")
    assert record.path is not None
    log: Any = EventAccumulator(str(record.path / "tensorboard"))
    log.Reload()
    for name in ("loss", "mse"):
        seen = {event.step: event.value for event in log.Scalars(name)}
        expected = {line["step"]: line[name] for line in record.metrics}
        assert seen == pytest.approx(expected, rel=1e-6)
    assert run(*TINY, "--steps", 60, "--out", "plain", "--quiet") == 3
    (plain,) = records.load_records("plain")
    assert plain.metrics == record.metrics


def test_tensorboard_missing_is_said_before_anything(
    run: Ran, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert run(*TINY, "--tensorboard") == 2
    assert "--tensorboard: needs: pip install 'torchgdu[tensorboard]'" in run.err
    assert not any(tmp_path.iterdir())
