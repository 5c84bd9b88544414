"""Records to one page with the paper's figures, the tables and the claims' verdicts.

    report/index.html          everything, in one file that needs no other
    report/figures/NAME.svg    each figure as the paper arranges it, and as .pdf
    report/tables/NAME.csv     the numbers: runs, summary, pmnist, claims

No statistics are invented here: what is known comes from ``evidence``, verdicts from ``claims``.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torchgdu import claims, evidence, examine, figures, page, paper, stats, tables
from torchgdu.evidence import Evidence, Measured, Trial
from torchgdu.page import Cell, Html, join, tag
from torchgdu.panels import panels
from torchgdu.records import GATES, NORMS, Record, RunCorrupt, RunError, write_atomically


class Words(NamedTuple):
    """How a figure is introduced."""

    title: str
    text: str


WORDS: Mapping[str, Words] = {
    "adding": Words(
        "Adding problem",
        "Test error against training steps. A sequence holds two marked numbers, one in each half; "
        "the model answers with their sum at the end. A vertical line, or a short bar below it, "
        "is where a run was solved: a mean squared error below 0.002.",
    ),
    "temporal-order": Words(
        "3-bit temporal order",
        "Test accuracy against training steps. Three symbols, far apart among others, are X or Y; "
        "the model names their order at the end. A dashed vertical line is where a run had every "
        "test sequence right.",
    ),
    "reber": Words(
        "Multi-embedded Reber grammar",
        "Steps until every prediction in the test strings is right: of all symbols but the one "
        "before last (SC, short-term), of the one before last (LC, long-term), and of both. Box: "
        "median and quartiles; whiskers: range without outliers; dots: trials.",
    ),
    "gates": Words(
        "Gates on 10ERG",
        "The share β of its state that each unit keeps, along the same test string, once LC is "
        "met. A row is a unit; a dark line through the whole string is a unit that remembers.",
    ),
    "pmnist": Words(
        "Permuted sequential MNIST",
        "Images read pixel by pixel in one fixed random order. Test accuracy at the best "
        "validation. The paper prints GDU(4x62) beside 134.7 thousand parameters; that count, and "
        "the 256 units of its text, belong to 4x64, which is what runs here.",
    ),
    "error-norms": Words(
        "How far back errors reach",
        "Norm of the derivative of the loss by the state at each of the 784 steps of pMNIST, each "
        "curve divided by its maximum. For the LSTM the state is s and h together.",
    ),
    "controls": Words(
        "Controls",
        "Not in the paper. A GDU with groups of ten keeps 0.9 of its state before any training, "
        "a GRU half of it. These models start as slowly: a gate bias of ln 9. What they "
        "cannot do as well as the GDU is owed to the distributor and not to the slow start.",
    ),
    "initial": Words(
        "Initial settings",
        "Not in the paper, which leaves open how initial weights are drawn and the LSTM's forget "
        "bias. A model's strongest start is the one with the most solved runs over these three "
        "tasks, ties broken by the smaller median of steps; it is used everywhere else. The "
        "author's framework draws input and recurrent weights jointly, with a forget bias of 0.",
    ),
}

CHIPS: Mapping[claims.Verdict, tuple[str, str]] = {
    "reproduced": ("yes", "✓"),
    "not reproduced": ("no", "✗"),
    "mixed": ("half", "◐"),
    "not enough runs": ("open", "○"),
}
HOLDS = {True: ("yes", "✓", "holds"), False: ("no", "✗", "does not hold"),
         None: ("open", "○", "not enough runs")}  # fmt: skip


def write(
    records: Iterable[Record],
    out: str | os.PathLike[str],
    *,
    profile: str | None = None,
    data: str | os.PathLike[str] | None = None,
    problems: Sequence[str] = (),
) -> Path:
    """Write page, figures and tables into ``out`` and return the page.

    Where a figure needs what is in a run's weights and nobody has looked yet, that is done first.

    - `profile`: whose rows are shown, "quick" or "paper"; by default those the records belong to.
    - `data`: where the image files are, for error norms.
    - `problems`: what else must be told, such as records that cannot be read.
    """
    if profile is not None:
        paper.check(profile)
    figures.check()
    problems = list(problems)
    sound = _sound(records, problems)
    problems += examine.fill(sound, data)
    known = evidence.gather(sound, profile)
    folder = Path(out)
    try:
        for name in ("figures", "tables"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write to {out}: {error.strerror}; choose another --out") from None
    for name, lines in tables.tables(known).items():
        write_atomically(folder / "tables" / f"{name}.csv", lines.encode())
    for figure in known.figures:
        drawn = panels(known, figure)
        for kind in ("svg", "pdf") if drawn else ():
            whole = figures.render(figures.arrange(drawn), kind)
            write_atomically(folder / "figures" / f"{figure}.{kind}", whole)
    text = page.page("The Grouped Distributor Unit, measured", _body(known, problems))
    write_atomically(folder / "index.html", text.encode())
    return folder / "index.html"


def _sound(records: Iterable[Record], problems: list[str]) -> list[Record]:
    """Return the records whose files can all be read; note why others cannot."""
    found = []
    for record in records:
        try:
            _ = record.metrics, evidence.beside(record, GATES), evidence.beside(record, NORMS)
        except RunCorrupt as error:
            problems.append(f"Left out: {error}")
            continue
        found.append(record)
    return found


# --- The page ----------------------------------------------------------------------------------


def _body(known: Evidence, problems: Sequence[str]) -> Html:
    return join(
        [
            _head(known, problems),
            _overview(known) if known.judges else Html(""),
            *(_section(known, figure) for figure in known.figures),
            _runs(known),
            tag(
                "footer",
                "Made by torchgdu from the records of runs. The paper: Luo & Yu, Learning "
                "Longer-term Dependencies via Grouped Distributor Unit.",
            ),
        ]
    )


def _head(known: Evidence, problems: Sequence[str]) -> Html:
    trials = _trials(known)
    done = sum(trial.done for trial in trials)
    bad = Counter(trial.state for trial in trials)
    paper_text = (
        "Every experiment of the paper, run again: its figures, its table, and what became of its "
        "claims."
    )
    quick_text = (
        "The quick profile: small versions of three of the paper's experiments, to see that "
        "everything works. So few and so short runs decide nothing, so there are no verdicts here."
    )
    facts = {
        "Runs with an outcome": f"{done:,} of {len(trials):,}",
        "Diverged": f"{bad['diverged']:,}",
        "Failed": f"{bad['failed']:,}",
        "Revision": ", ".join(_revisions(trials)) or "–",
        "Semantics": ", ".join(sorted({str(t.config.semantics) for t in trials})),
    }
    links = [("verdicts", "Verdicts")] if known.judges else []
    links += [(figure, WORDS[figure].title) for figure in known.figures] + [("runs", "All runs")]
    return join(
        [
            tag("h1", "The Grouped Distributor Unit, measured"),
            tag("p", paper_text if known.judges else quick_text, class_="lead"),
            tag("dl", *(tag("div", tag("dt", k), tag("dd", v)) for k, v in facts.items()),
                class_="facts"),
            *(tag("p", problem, class_="note") for problem in (*problems, *known.notes)),
            tag("nav", *(tag("a", text, href=f"#{name}") for name, text in links)),
            tag(
                "div",
                tag("button", "Dark colours", id="scheme", type="button"),
                tag("button", "Show every trial", id="trials", type="button", aria_pressed="true"),
                class_="tools",
            ),
        ]
    )  # fmt: skip


def _overview(known: Evidence) -> Html:
    """Return every claim with its verdicts, a line each."""
    by_claim: dict[claims.Claim, list[claims.Judged]] = {}
    for judged in known.judged:
        by_claim.setdefault(judged.claim, []).append(judged)
    lines = []
    for claim, found in by_claim.items():
        verdicts = []
        for judged in found:
            said = [tag("small", judged.variant)] if judged.variant else []
            verdicts.append(tag("span", *said, _chip(judged.verdict)))
        link = tag("a", claim.statement, href=f"#{claim.figure}")
        lines.append(tag("li", tag("span", link), *verdicts))
    counts = Counter(judged.verdict for judged in known.judged)
    heads = ("The paper says", "Verdict", "LSTM, author's start")
    head = tag("li", *(tag("span", text) for text in heads), class_="head")
    return tag(
        "section",
        tag("h2", "Verdicts"),
        tag(
            "p",
            "By rules fixed before the runs. What is said about an LSTM is judged twice: with its "
            "strongest start and with that of the author's framework. ",
            ", ".join(f"{counts[verdict]} {verdict}" for verdict in CHIPS if counts[verdict]) + ".",
        ),
        tag("ul", head, *lines, class_="verdicts"),
        tag(
            "details",
            tag("summary", "The rules"),
            tag(
                "ul",
                *(
                    tag("li", text)
                    for text in (
                        "Runs that were not solved rank last, those that diverged among them.",
                        "A is faster than B: one-sided exact Mann–Whitney test on steps, p < 0.05, "
                        "at least 5 trials each (mERG: 10).",
                        "A is no slower than B: median at most 1.1 times that of B.",
                        "A fails: none of at least 5 trials solved.",
                        "A claim is reproduced when it holds at every length the paper shows, not "
                        "reproduced when it holds at none, mixed when lengths disagree, and "
                        "otherwise there are not enough runs. At a length it holds when all that "
                        "it says there does.",
                        "A trial whose worker failed is counted as the best and as the worst: the "
                        "answer must be the same.",
                    )
                ),
            ),
        ),
        id="verdicts",
    )


def _chip(verdict: claims.Verdict) -> Html:
    kind, mark = CHIPS[verdict]
    return page.chip(kind, mark, verdict)


def _section(known: Evidence, figure: str) -> Html:
    title, text = WORDS[figure]
    drawn = panels(known, figure)
    parts: list[Cell] = [tag("h2", title), tag("p", text)]
    if drawn:
        parts += [_legend(drawn), _drawings(figure, drawn)]
    parts.append(_numbers(known, figure))
    parts += [_claim(each) for each in _grouped(known, figure)]
    parts.append(_provenance(known, figure, bool(drawn)))
    return tag("section", *parts, id=figure)


def _legend(drawn: Sequence[figures.Panel]) -> Html:
    names = figures.models_of(drawn)
    if not names:
        return Html("")
    buttons = (
        tag("button", page.line(name), name, type="button", aria_pressed="true", data_model=name)
        for name in names
    )
    return tag("div", *buttons, class_="legend")


def _drawings(figure: str, drawn: Sequence[figures.Panel]) -> Html:
    shown = []
    for number, panel in enumerate(drawn):
        svg = figures.render(figures.arrange([panel], 1, legend=False), "svg", text=True)
        label = f"{WORDS[figure].title}, {panel.title}: the numbers are in the table below"
        shown.append(tag("figure", page.drawing(svg, f"{figure}-{number}", label)))
    return tag("div", *shown, class_="panels")


def _grouped(known: Evidence, figure: str) -> list[list[claims.Judged]]:
    found: dict[str, list[claims.Judged]] = {}
    for judged in known.judged:
        if judged.claim.figure == figure:
            found.setdefault(judged.claim.statement, []).append(judged)
    return list(found.values())


def _claim(found: Sequence[claims.Judged]) -> Html:
    """Return one statement of the paper, its rule, and what the runs say, for either start."""
    claim = found[0].claim
    parts: list[Cell] = [
        tag("h3", claim.statement),
        tag("p", f"Rule: {claim.rule}.", class_="rule"),
    ]
    for judged in found:
        said = f"LSTM with its {judged.variant}".replace("its author's", "the author's")
        parts.append(tag("h4", _chip(judged.verdict), said if judged.variant else ""))
        lines = []
        for check in judged.checks:
            kind, mark, words = HOLDS[check.holds]
            sign = tag("span", mark, class_=f"chip {kind}", title=words, aria_label=words,
                       role="img")  # fmt: skip
            pieces = (tag("span", piece) for piece in check.evidence.split(" · "))
            lines.append(tag("li", sign, tag("span", check.panel), tag("span", *pieces)))
        parts.append(tag("ul", *lines))
    return tag("div", *parts, class_="claim")


def _provenance(known: Evidence, figure: str, drawn: bool) -> Html:
    trials = [trial for each in known.of(figure) for trial in each.trials]
    semantics = sorted({str(t.config.semantics) for t in trials})
    counts = _revisions(trials)
    said = "; ".join(f"revision {name}: {n} runs" for name, n in counts.items()) or "no runs yet"
    engines = sorted({_engine(t.record) for t in trials if t.record and t.record.environment})
    parts: list[Cell] = [
        f"{said[0].upper()}{said[1:]}. Semantics {', '.join(semantics)}.",
        f" Computed by {', '.join(engines)}." if engines else "",
    ]
    if drawn:
        links = (tag("a", kind.upper(), href=f"figures/{figure}.{kind}") for kind in ("svg", "pdf"))
        parts += [" This figure as ", join(links, " or "), "."]
    return tag("p", *parts, class_="note")


def _engine(record: Record) -> str:
    found = record.environment
    parts = [f"the {found['backend']}", found.get("instructions"), f"torch {found['torch']}"]
    return ", ".join(str(part) for part in parts if part)


def _revisions(trials: Iterable[Trial]) -> dict[str, int]:
    """Return how many runs come from each revision."""
    counts: Counter[str] = Counter()
    for trial in trials:
        if trial.record is not None and trial.record.environment:
            revision = trial.record.environment.get("revision") or "unknown"
            mark = "+" if revision.endswith("+") else ""
            counts[revision[:10] + mark if len(revision) > 10 else revision] += 1
    return dict(counts.most_common())


def _trials(known: Evidence) -> list[Trial]:
    """Return every trial once, though figures share runs."""
    return list({t.config: t for each in known.rows for t in each.trials}.values())


# --- Tables ------------------------------------------------------------------------------------


def _numbers(known: Evidence, figure: str) -> Html:
    """Return what was measured, a row a model."""
    if figure == "pmnist":
        return _pmnist(known)
    rows = known.of(figure)
    if figure == "controls":
        rows = _beside_controls(known, rows)
    quantities = [q for q in evidence.QUANTITIES[figure] if q != "start"]
    if figure == "controls":
        quantities = ["SC", "LC", *quantities, "kept at the start", "kept"]
    body: list[Sequence[Cell] | str] = []
    for panel in dict.fromkeys(each.row.panel for each in rows):
        body.append(panel)
        for each in (each for each in rows if each.row.panel == panel):
            measured = [_spread(each, quantity) for quantity in quantities]
            body.append([_model(known, each), *measured, _state(each), _parameters(each)])
    heads = [HEADS.get(quantity, quantity) for quantity in quantities]
    kind = "many" if len(quantities) > 2 else None
    whole = page.table(["", *heads, "trials", "parameters"], body, "t" * len(heads) + "ttn", kind)
    if figure == "initial":
        return whole + _starts(known)
    return whole


HEADS = {
    "solved": "steps to solve", "SC": "steps to SC", "LC": "steps to LC",
    "kept": "units with β > 0.9 throughout, after LC",
    "kept at the start": "the same, untrained",
    "5": "mean of the curve, 5 epochs", "50": "50 epochs",
}  # fmt: skip


def _beside_controls(known: Evidence, controls: Sequence[Measured]) -> list[Measured]:
    """Return the controls, each task's followed by the main rows on the same task."""
    found: list[Measured] = []
    for panel in dict.fromkeys(each.row.panel for each in controls):
        group = [each for each in controls if each.row.panel == panel]
        found += group
        task = group[0].row.config
        for each in known.rows:
            config = each.row.config
            same = (config.task, config.length, config.multiple) == (
                task.task, task.length, task.multiple,
            )  # fmt: skip
            if same and each.row.figure == config.task and not each.row.variant:
                row = replace(each.row, figure="controls", panel=panel)
                found.append(Measured(row, each.trials))
    return found


def _model(known: Evidence, each: Measured) -> Html:
    row, config = each.row, each.row.config
    start = paper.Start(config.init, config.forget_bias)
    best = row.figure == "initial" and known.decided and known.starts[config.cell] == start
    note = tag("span", " ← strongest", class_="soft") if best else ""
    return page.swatch(row.name) + row.name + note


def _parameters(each: Measured) -> str:
    counts = (t.record.parameters for t in each.trials if t.record and t.record.parameters)
    count = next(counts, None)
    return "–" if count is None else f"{count:,}"


def _state(each: Measured) -> Html:
    """Return how many trials there are and how they ended."""
    parts: list[Cell] = [f"{len(each.done)} of {len(each.trials)}"]
    said = []
    for state, words in STATES.items():
        trials = [trial for trial in each.trials if trial.state == state]
        if not trials:
            continue
        steps = {trial.record.step for trial in trials if trial.record}
        at = f" at {min(steps):,}" if len(steps) == 1 and state == "limit" else ""
        said.append(f"{len(trials)} {words}{at}")
    if said:
        parts += [tag("span", ", ".join(said), class_="soft")]
    return tag("span", *parts)


STATES = {
    "limit": "stopped", "diverged": "diverged", "failed": "failed", "unfinished": "under way",
    "missing": "missing",
}  # fmt: skip


def _spread(each: Measured, quantity: str) -> Html:
    """Return median, quartiles and successes of a quantity."""
    text = _summary(each, quantity)
    middle, _, rest = text.partition(" (")
    return tag("span", middle) + (tag("span", "(" + rest, class_="soft") if rest else "")


def _summary(each: Measured, quantity: str) -> str:
    if quantity not in evidence.quantities(each.row):
        return ""
    values = each.values(quantity)
    if quantity in evidence.STEPS:
        return claims.summary(values) if values else "–"
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "–"
    share = quantity.startswith("kept")
    low, middle, high = (stats.quantile(known, q) for q in (0.25, 0.5, 0.75))
    shown = [f"{100 * v:.1f} %" if share else f"{v:.3f}" for v in (middle, low, high)]
    return f"{shown[0]} ({shown[1]} to {shown[2]}), n = {len(known)}"


def _pmnist(known: Evidence) -> Html:
    body: list[Sequence[Cell] | str] = []
    for each in known.of("pmnist"):
        row = each.row
        if not body or row.panel not in [part for part in body if isinstance(part, str)]:
            body.append(row.panel)
        thousands, accuracy = paper.PMNIST[row.model]
        printed = "" if row.variant else f"{accuracy:.1f}"
        name = row.name + (" *" if row.model == "GDU(4x64)" else "")
        short = [
            f"{epochs:g} epochs: {_percent([r.scores.get('accuracy', math.nan) for r in runs])}"
            for epochs, runs in known.shorter(row).items()
        ]
        body.append(
            [
                page.swatch(row.name) + name, f"{thousands:.1f}", printed,
                _percent(each.values("accuracy")), _state(each), "; ".join(short) or "–",
            ]
        )  # fmt: skip
    head = [
        "", "thousand parameters", "paper, test %", "measured, test %", "trials", "shorter runs",
    ]  # fmt: skip
    return page.table(head, body, "tnnttt") + tag(
        "p", "* printed in the paper as GDU(4x62).", class_="note"
    )


def _percent(values: Sequence[float]) -> str:
    known = [100 * value for value in values if not math.isnan(value)]
    if not known:
        return "–"
    low, middle, high = (stats.quantile(known, q) for q in (0.25, 0.5, 0.75))
    between = f" ({low:.1f} to {high:.1f})" if len(known) > 1 else ""
    return f"{middle:.1f}{between}, n = {len(known)}"


def _starts(known: Evidence) -> Html:
    said = "; ".join(f"{cell.upper()}: {start}" for cell, start in known.starts.items())
    if known.decided:
        return tag("p", f"Strongest, and used everywhere else: {said}.", class_="note")
    return tag(
        "p",
        "This table is not complete, so no start is decided on; a model whose part of it is not "
        f"complete starts by default. Used everywhere else: {said}.",
        class_="note",
    )


def _runs(known: Evidence) -> Html:
    """Return what is missing, under way, failed or diverged, and what belongs to no row."""
    lists: list[Cell] = []
    for state, title in (
        ("failed", "Failed: given up after retries, and counted"),
        ("diverged", "Diverged: counted as unsolved"),
        ("unfinished", "Under way or interrupted: not counted yet"),
        ("missing", "Missing"),
    ):
        lines, counts = [], []
        for each in known.rows:
            trials = [trial for trial in each.trials if trial.state == state]
            if not trials:
                continue
            counts.append(len(trials))
            which = f"{WORDS[each.row.figure].title}, {each.row.panel}, {each.row.name}: "
            lines.append(tag("li", which + _about(trials)))
        if lines:
            opened = "open" if state in ("failed", "diverged") else None
            lists.append(
                tag("details", tag("summary", f"{title} ({sum(counts)})"), tag("ul", *lines),
                    open=opened)
            )  # fmt: skip
    if known.others:
        lines = [tag("li", tag("code", r.id), f" {_outcome(r)}") for r in known.others]
        lists.append(
            tag("details", tag("summary", f"Runs that are part of no figure ({len(lines)})"),
                tag("ul", *lines))
        )  # fmt: skip
    names = ("runs", "summary", "pmnist", "claims") if known.judges else ("runs", "summary")
    links = (tag("a", f"{name}.csv", href=f"tables/{name}.csv") for name in names)
    return tag(
        "section", tag("h2", "All runs"), tag("p", "As tables: ", join(links, ", "), "."), *lists,
        id="runs",
    )  # fmt: skip


def _about(trials: Sequence[Trial]) -> str:
    """Return what there is to say of trials that ended alike."""
    said = []
    for trial in trials:
        record, name = trial.record, f"trial {trial.config.seed + 1}"
        if record is None:
            numbers = ", ".join(str(each.config.seed + 1) for each in trials)
            return f"trial{'s' * (len(trials) > 1)} {numbers}"
        what = record.failure or record.diverged or f"at step {record.step:,}"
        said.append(f"{name} ({what})")
    return "; ".join(said)


def _outcome(record: Record) -> str:
    solved = record.steps_to.get("solved")
    at = f" at step {solved if record.status == 'solved' and solved else record.step:,}"
    return ("stopped" if record.status == "limit" else record.status) + at
