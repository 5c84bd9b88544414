"""The command line: argv to one call a command. No logic, and no torch before it is needed."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from torchgdu.config import CHOICES, OWN, RANGES, TASKS, ConfigError, RunConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would take as long to load as everything else
    help="The Grouped Distributor Unit and its relatives: train, compare, reproduce.",
)
runs = typer.Typer(help="Look at runs, and go on with them; without a command: list them.")
app.add_typer(runs, name="runs")
datasets = typer.Typer(no_args_is_help=True, help="Look at what is learnt, and fetch images.")
app.add_typer(datasets, name="data")

EXIT = {"solved": 0, "finished": 0, "limit": 3, "diverged": 4}
"""How a run's outcome becomes the exit code."""
BAD_ARGUMENT, UNUSABLE = 2, 5


def main() -> None:
    """Run the command line; every expected failure is one line and an exit code."""
    from torchgdu.records import NotThere, RunError

    try:
        app(prog_name="torchgdu")
    except ConfigError as error:
        option = error.option.replace("_", "-")
        name = option.upper() if option in ("task", "figure") else f"--{option}"
        _fail(f"{name}: {error.message.removesuffix(f', {OWN}')}", BAD_ARGUMENT)
    except RunError as error:
        _fail(str(error), UNUSABLE)
    except ImportError as error:
        if "torchgdu[" not in str(error):
            raise
        _fail(str(error), UNUSABLE)
    except (NotThere, FileNotFoundError) as error:
        _fail(str(error), BAD_ARGUMENT)
    except OSError as error:
        _fail(str(error), UNUSABLE)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"Error: {message}", err=True)
    sys.exit(code)


def _value(text: str) -> object:
    """Return the number, or the tuple of numbers, or the text, for `RunConfig` to judge."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    with suppress(ValueError):
        return tuple(int(part) for part in text.split(","))
    return text


def _range(name: str) -> str:
    low, high = RANGES[name]
    return f"{low:.12g} to {high:.12g}"


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise typer.BadParameter(f"{text!r} is not allowed: 0 or more seconds")


def _not_own(name: str) -> str:
    if name == OWN:
        raise typer.BadParameter("a task or model of your own is given in Python: train(…)")
    return name


def _dataset(name: str) -> str:
    if name not in CHOICES["dataset"]:
        raise typer.BadParameter(f"must be {' or '.join(CHOICES['dataset'])}, not {name!r}")
    return name


def _source(place: str | None) -> str | None:
    scheme, colon, _ = (place or "").partition("://")
    if colon and scheme not in ("https", "http"):
        raise typer.BadParameter(f"{place} is neither a directory nor an https or http address")
    return place


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"torchgdu {version('torchgdu')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


# What several commands share.
Out = Annotated[Path, typer.Option(help="Where run directories are.")]
Data = Annotated[Path | None, typer.Option(help="Where the image files are.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
Board = Annotated[bool, typer.Option(help="Write TensorBoard logs into the run's directory.")]
AcceptDrift = Annotated[
    bool, typer.Option(help="Go on under other torch, backend, instructions or threads.")
]
SaveEvery = Annotated[
    float, typer.Option(parser=_seconds, metavar="SECONDS", help="Between checkpoints.")
]
Task = Annotated[
    str,
    typer.Argument(callback=_not_own, metavar="TASK", help=", ".join(CHOICES["task"][:-1])),
]


def choice(name: str, help: str) -> Any:
    """Make an option with the choices of a field."""
    shown = "|".join(value for value in CHOICES[name] if value != OWN)
    return typer.Option(callback=_not_own, metavar=shown, help=help)


def number(name: str, help: str) -> Any:
    """Make an option that shows the range of a field."""
    return typer.Option(parser=_value, metavar=_range(name), help=help)


def numbers(metavar: str, help: str) -> Any:
    """Make an option for several numbers with commas between."""
    return typer.Option(parser=_value, metavar=metavar, help=help)


# What tells one task of a kind from another.
Length = Annotated[int | None, number("length", "Steps (adding, temporal-order).")]
Symbols = Annotated[int | None, number("symbols", "To remember (temporal-order).")]
Multiple = Annotated[int | None, number("multiple", "Strings embedded (reber).")]
Dataset = Annotated[str | None, choice("dataset", "Which images (mnist, pmnist).")]
DataSeed = Annotated[int, number("data_seed", "Of data sets and permutation.")]


@app.command()
def train(
    task: Task,
    length: Length = None,
    symbols: Symbols = None,
    multiple: Multiple = None,
    dataset: Dataset = None,
    cell: Annotated[str, choice("cell", "The recurrent cell.")] = "gdu",
    groups: Annotated[str | None, typer.Option(help="Groups of a GDU: 2x35+10x3.")] = None,
    hidden: Annotated[int | None, number("hidden", "Units of any other cell.")] = None,
    layers: Annotated[int, number("layers", "Recurrent layers.")] = 1,
    dropout: Annotated[float, number("dropout", "Between layers.")] = 0.0,
    init: Annotated[str, choice("init", "How initial weights are drawn.")] = "separate",
    forget_bias: Annotated[float | None, number("forget_bias", "Start of it (lstm).")] = None,
    keep_bias: Annotated[
        float | None, number("keep_bias", "Start of the keep gate's (gru, ugrnn, mgu).")
    ] = None,
    learn_delta: Annotated[
        bool | None, typer.Option("--learn-delta/--no-learn-delta", help="Learn δ (gdu).")
    ] = None,
    reset: Annotated[str | None, choice("reset", "Where the reset gate acts (gru).")] = None,
    gamma: Annotated[str | None, choice("gamma", "What the candidate reads by (mgu).")] = None,
    periods: Annotated[str | None, numbers("1,2,4,…", "Periods (cwrnn).")] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(parser=_value, metavar="auto|N", help="Recompute states, save memory."),
    ] = None,
    optimizer: Annotated[str | None, choice("optimizer", "By default as in the paper.")] = None,
    lr: Annotated[float | None, number("lr", "The learning rate.")] = None,
    clip: Annotated[float | None, number("clip", "Largest gradient norm; 0: none.")] = None,
    batch_size: Annotated[int | None, number("batch_size", "Sequences a step.")] = None,
    test_every: Annotated[
        float | None, number("test_every", "Steps between tests; below 1: of an epoch.")
    ] = None,
    steps: Annotated[int | None, number("steps", "Limit; 0: none.")] = None,
    epochs: Annotated[float | None, number("epochs", "Limit; 0: none.")] = None,
    patience: Annotated[
        float | None, number("patience", "Epochs without a better validation; 0: no end.")
    ] = None,
    stop: Annotated[str | None, choice("stop", "When solved, or at the limit only.")] = None,
    keep_epochs: Annotated[str | None, numbers("5,50,…", "Keep weights after these.")] = None,
    seed: Annotated[int, number("seed", "Of weights, batches, order.")] = 0,
    data_seed: DataSeed = 0,
    dtype: Annotated[str, choice("dtype", "Precision.")] = "float32",
    device: Annotated[str, typer.Option(help="Where to compute.")] = "cpu",
    backend: Annotated[str, choice("backend", "What computes the recurrence.")] = "auto",
    threads: Annotated[int | None, number("threads", "By default as torch has it.")] = None,
    out: Out = Path("runs"),
    data: Data = None,
    quiet: Quiet = False,
    tensorboard: Board = False,
    accept_drift: AcceptDrift = False,
    save_every: SaveEvery = 30.0,
) -> None:
    """Train a model on a task, or go on with it: the same command is the same run.

    Settings are the paper's unless given. Exit code: 0 solved or finished, 2 bad argument, 3 limit
    reached unsolved, 4 diverged, 5 run directory busy, corrupt or not writable, 130 or 143
    interrupted and saved.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    _train(
        RunConfig(**{name: given[name] for name in RunConfig.names() if name in given}),
        out, data, quiet, tensorboard, accept_drift, save_every,
    )  # fmt: skip


@app.command()
def report(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[DIR]…", help="Where runs are.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write.")] = Path("report"),
    profile: Annotated[
        str | None,
        typer.Option(metavar="quick|paper", help="Whose runs; by default what is there."),
    ] = None,
    data: Data = None,
) -> None:
    """Make a page of the paper's figures, tables and claims from the records of runs.

    Reads what is in the directories or below them, by default runs. Exit code: 0 written, 2 bad
    argument, 5 not writable.
    """
    from torchgdu import paper
    from torchgdu.records import RunCorrupt, load_records

    if profile is not None:
        paper.check(profile)
    errors: list[RunCorrupt] = []
    found = load_records(*(folders or [Path("runs")]), errors=errors)
    from torchgdu.report import write

    typer.echo(write(found, out, profile=profile, data=data, problems=list(map(str, errors))))


@app.command()
def analyse(
    run: Annotated[str, typer.Argument(help="A directory, or the beginning of a run's name.")],
    out: Out = Path("runs"),
    to: Annotated[Path | None, typer.Option(help="Where to write; else beside the run.")] = None,
    data: Data = None,
) -> None:
    """Draw the gates and the error norms of a run.

    As SVG and PDF, whose names are printed. Exit code: 0 written, 2 bad argument or no weights, 5
    not readable or not writable.
    """
    from torchgdu.records import find_record

    record = find_record(out, run)
    from torchgdu.examine import analyse

    for path in analyse(record, to, data):
        typer.echo(path)


@app.command()
def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FIGURE]…|all", help="Of the profile's; by default all of them."),
    ] = None,
    profile: Annotated[
        str, typer.Option(metavar="quick|paper", help="A few minutes, or the paper's settings.")
    ] = "quick",
    trials: Annotated[int | None, typer.Option(min=1, help="Seeds a model.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; by default one a core, where Dask is installed."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A Dask scheduler: tcp://host:8786.")
    ] = None,
    out: Out = Path("runs"),
    data: Data = None,
    scratch: Annotated[
        Path | None, typer.Option(help="Where a cluster's workers keep checkpoints.")
    ] = None,
    report: Annotated[Path, typer.Option(help="Where the report is written.")] = Path("report"),
    quiet: Quiet = False,
    accept_drift: AcceptDrift = False,
) -> None:
    """Make the paper's runs and a report on them; the same command goes on where it was left.

    What --out holds is not repeated. Exit code: 0 every run has an outcome, solved or not, 2 bad
    argument, 5 a run failed (which is reported), the store is busy, corrupt or not writable, or
    the scheduler is gone, 130 or 143 interrupted and saved.
    """
    from torchgdu import paper

    paper.check(profile, figures)
    if cluster is not None and workers is not None:
        raise ConfigError("workers", "belongs to this machine; a cluster has its own")
    from torchgdu.reproduce import command

    code = command(
        figures or ["all"], profile, out=out, trials=trials, workers=workers, cluster=cluster,
        data=data, scratch=scratch, report=report, quiet=quiet, accept_drift=accept_drift,
    )  # fmt: skip
    raise typer.Exit(code)


@runs.callback(invoke_without_command=True)
def _runs(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_runs()


@runs.command("list")
def list_runs(out: Out = Path("runs")) -> None:
    """List the runs in a directory, with what became of each."""
    from torchgdu.display import show_runs

    show_runs(out)


@runs.command("show")
def show_run(
    run: Annotated[str, typer.Argument(help="A directory, or the beginning of a run's name.")],
    out: Out = Path("runs"),
) -> None:
    """Show a run: outcome, settings, and the command that makes it."""
    from torchgdu.display import show_run
    from torchgdu.records import find_record

    show_run(find_record(out, run))


@runs.command("resume")
def resume_run(
    run: Annotated[str, typer.Argument(help="A directory, or the beginning of a run's name.")],
    out: Out = Path("runs"),
    data: Data = None,
    quiet: Quiet = False,
    tensorboard: Board = False,
    accept_drift: AcceptDrift = False,
    save_every: SaveEvery = 30.0,
) -> None:
    """Go on with a run that was interrupted."""
    from torchgdu.records import find_record

    record = find_record(out, run)
    _train(record.config, record.out, data, quiet, tensorboard, accept_drift, save_every)


@datasets.command("show")
def show_data(
    task: Task,
    length: Length = None,
    symbols: Symbols = None,
    multiple: Multiple = None,
    dataset: Dataset = None,
    data_seed: DataSeed = 0,
    count: Annotated[int, typer.Option(min=1, max=20, help="How many examples.")] = 3,
    data: Data = None,
) -> None:
    """Print test examples of a task.

    Marked steps, strings in brackets, images before and after the permutation.
    """
    config = RunConfig(
        task=task, length=length, symbols=symbols, multiple=multiple, dataset=dataset,
        data_seed=data_seed,
    )  # fmt: skip
    from torchgdu.data import show

    options = {name: getattr(config, name) for name in TASKS[task]}
    typer.echo(show(task, count, data_seed, data, **options))


@datasets.command("fetch")
def fetch_data(
    dataset: Annotated[
        str, typer.Argument(callback=_dataset, metavar="|".join(CHOICES["dataset"]))
    ],
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            callback=_source,
            metavar="DIR|URL",
            help="What holds the files; else the mirrors.",
        ),
    ] = None,
) -> None:
    """Put a dataset's four files into the cache.

    Their published sha256 are checked first.

    Exit code: 0 they are there, 2 bad argument, 5 they could not be had, or are the wrong ones.
    """
    from torchgdu.data import fetch

    typer.echo(fetch(dataset, source))


@app.command()
def info() -> None:
    """Print which engine, instruction set and number of threads are in use, and why."""
    from torchgdu.info import show

    typer.echo(show())


@app.command()
def bench(
    shapes: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="Of adding, reber, pmnist-128, …")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="By default as torch has it.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="For each shape, about.")] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown (the default).")
    ] = False,
) -> None:
    """Check the layers' values, then time them beside torch.nn's.

    Exit code: 0 measured, 2 bad argument.
    """
    if json and markdown:
        raise typer.BadParameter("--json and --markdown are two forms of one thing")
    from torchgdu.shapes import SHAPES, check

    names = tuple(shapes.split(",")) if shapes is not None else tuple(SHAPES)
    check(names)
    from torchgdu import bench

    report = bench.run(names, threads, seconds, lambda line: typer.echo(f"{line} …", err=True))
    for why in report.disturbed:
        typer.echo(f"Warning: {why}: the numbers are not to be relied on", err=True)
    if json:
        from json import dumps

        typer.echo(dumps(report.data(), indent=2, ensure_ascii=False))
    else:
        typer.echo(bench.markdown(report))


def _train(
    config: RunConfig, out: Path, data: Path | None, quiet: bool, tensorboard: bool,
    accept_drift: bool, save_every: float,
) -> None:  # fmt: skip
    from torchgdu import display
    from torchgdu.train import Interrupted, train

    try:
        with display.watch(quiet, tensorboard) as observer:
            record = train(
                config, out=out, data=data, observer=observer, accept_drift=accept_drift,
                save_every=save_every,
            )  # fmt: skip
    except Interrupted as interrupted:
        typer.echo(display.how_to_go_on(interrupted.run, data, tensorboard), err=True)
        raise typer.Exit(128 + interrupted.number) from None
    raise typer.Exit(EXIT[record.status])
