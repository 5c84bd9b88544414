"""The drawings: plain numbers in, matplotlib axes out. No records, no torch, no statistics.

Colours are one a model everywhere, told apart by colour-blind readers too, and a variant of a
model is dashed. Every artist that shows a model carries its name as gid, so that what was drawn
can be read back, and switched off on the page.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any

from torchgdu import stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, GRID = "#1b2430", "#6b7685", "#dfe3e8"
SHADES: Mapping[str, str] = {"ink": INK, "faint": FAINT, "grid": GRID}

DASHED = (0, (4, 1.5))
"""How a variant of a model is drawn."""

COLOURS: Mapping[str, str] = {
    "gdu": "#0067b1",
    "gru": "#d1550b",
    "lstm": "#00876a",
    "ugrnn": "#b8860b",
    "small": "#b0508f",
    "other": "#59636f",
}
"""One colour a model; the page has a second set for its dark side under the same names."""


class PlotMissing(ImportError):
    """matplotlib is not installed."""


def colour_of(model: str) -> str:
    """Return the key in ``COLOURS`` of a model's name.

    >>> colour_of("GDU(10x10)"), colour_of("GDU(10x1)"), colour_of("LSTM(100), author's start")
    ('gdu', 'small', 'lstm')
    """
    if model.startswith(("GDU(10x1)", "GDU(5x25)", "GDU(5x51)")):
        return "small"
    return next((key for key in COLOURS if model.lower().startswith(key)), "other")


def title(cell: str, size: str | int | None) -> str:
    """Return a model as the paper writes it.

    >>> title("gdu", "10x10")
    'GDU(10x10)'
    """
    return f"{cell.upper()}({size})"


@dataclass(frozen=True)
class Curve:
    """One trial: its test metric over the steps, and where it was solved."""

    model: str
    steps: Sequence[float]
    values: Sequence[float]
    solved: float | None = None
    main: bool = True
    """The one trial of its model that is drawn strongly."""


@dataclass(frozen=True)
class Panel:
    """What one panel of a figure shows, ready to be drawn."""

    title: str
    kind: str
    """A key of ``DRAW``."""
    data: Mapping[str, Any] = field(default_factory=dict)


STYLE: Mapping[str, Any] = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.facecolor": "white",
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
    "legend.fontsize": 8,
    "legend.labelcolor": INK,
    "text.color": INK,
    "svg.hashsalt": "torchgdu",
    "figure.dpi": 100,
}
"""Quiet and self-contained."""


def check() -> None:
    """Say what to install where there is no matplotlib."""
    with style():
        pass


@contextlib.contextmanager
def style(**more: Any) -> Iterator[None]:
    """Set matplotlib's style for a while; say what to install without it."""
    try:
        import matplotlib
    except ImportError:
        raise PlotMissing("drawing needs matplotlib: pip install 'torchgdu[plot]'") from None
    settings: Any = {**STYLE, **more}
    with matplotlib.rc_context(settings):
        yield


def axes() -> Axes:
    """Return fresh axes of a figure of its own, which a notebook shows."""
    with style():
        from matplotlib import pyplot as plt

        found: Axes = plt.subplots(figsize=(5.0, 3.4), layout="constrained")[1]
    return found


def thin(
    steps: Sequence[float], values: Sequence[float], most: int = 240
) -> tuple[list[float], list[float]]:
    """Return at most ``most`` of the points: the smallest and largest of every stretch.

    Stretches are equally long on the logarithmic axis of the drawing, so what is left out could
    not be told apart there.

    >>> thin(range(1, 1001), [0.0] * 500 + [9.0] + [0.0] * 499, most=10)[1].count(9.0)
    1
    """
    if len(steps) <= most:
        return list(steps), list(values)
    first, last = math.log(steps[0]), math.log(steps[-1])
    stretches: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        place = int((math.log(step) - first) / (last - first) * (most // 2 - 1))
        stretches.setdefault(place, []).append(i)
    keep = {0, len(steps) - 1}
    for part in stretches.values():
        keep |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return [steps[i] for i in sorted(keep)], [values[i] for i in sorted(keep)]


def curves(
    axes: Axes,
    curves: Sequence[Curve],
    *,
    metric: str,
    chance: float | None = None,
    goal: float | None = None,
    log: bool = False,
    limit: float | None = None,
) -> Axes:
    """Draw a test metric over training steps, each trial of each model, with where it was solved.

    Below the axis every trial's solved step is a short bar; the main trial's goes right up.
    """
    # Variants first, then single trials below main ones.
    for curve in sorted(curves, key=lambda each: (each.main, "," not in each.model)):
        colour = COLOURS[colour_of(curve.model)]
        line = DASHED if "," in curve.model else "solid"
        steps, values = thin(curve.steps, curve.values, 240 if curve.main else 100)
        weight: dict[str, Any] = (
            {"linewidth": 1.4, "zorder": 3, "label": curve.model}
            if curve.main
            else {"linewidth": 0.7, "alpha": 0.35, "zorder": 2}
        )
        gid = curve.model if curve.main else f"{curve.model}|trial"
        axes.plot(steps, values, color=colour, linestyle=line, gid=gid, **weight)
        if curve.solved is not None:
            height = 1.0 if curve.main else 0.06
            axes.axvline(
                curve.solved, ymax=height, color=colour, gid=f"{gid}|solved",
                linestyle=(0, (2, 2)), linewidth=1.0 if curve.main else 1.6,
                alpha=0.8, zorder=1,
            )  # fmt: skip
    for value, name in ((chance, "chance"), (goal, "goal")):
        if value is not None:
            axes.axhline(value, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
            axes.annotate(
                name, (1, value), xycoords=("axes fraction", "data"), xytext=(3, 0),
                textcoords="offset points", va="center", color=FAINT, fontsize=8,
            )  # fmt: skip
    axes.set_xscale("log")
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.03)
    if limit is not None:
        axes.set_xlim(20, limit)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("training step")
    axes.set_ylabel(metric)
    axes.grid(True, axis="y")
    if not curves:
        _missing(axes)
    return axes


def boxes(
    axes: Axes, groups: Mapping[str, Mapping[str, Sequence[float]]], *, limit: float | None = None
) -> Axes:
    """Draw a box plot a criterion and model; what was never met lies on the line at the top.

    ``groups``: criterion → model → steps of each trial (``inf``: never).
    """
    known = [
        v for models in groups.values() for values in models.values() for v in values
        if math.isfinite(v)
    ]  # fmt: skip
    top = 1.12 * max(known) if known else limit or 1.0
    never = any(
        math.isinf(v) for models in groups.values() for values in models.values() for v in values
    )
    models = list(dict.fromkeys(name for each in groups.values() for name in each))
    width = 0.8 / max(1, len(models))
    for place, each in enumerate(groups.values()):
        for k, model in enumerate(models):
            values = each.get(model, [])
            if not values:
                continue
            x = place + (k - (len(models) - 1) / 2) * width
            colour, variant = COLOURS[colour_of(model)], "," in model
            box = stats.spread(values)

            def at(value: float) -> float:
                return top if math.isinf(value) else value

            axes.bxp(
                [
                    {
                        "whislo": at(box.low), "q1": at(box.lower), "med": at(box.median),
                        "q3": at(box.upper), "whishi": at(box.high),
                        "fliers": [at(v) for v in box.outliers],
                    }
                ],
                positions=[x], widths=width * 0.72, patch_artist=True, manage_ticks=False,
                boxprops={
                    "facecolor": (colour, 0.08 if variant else 0.3), "edgecolor": colour,
                    "linestyle": DASHED if variant else "solid", "gid": model,
                },
                medianprops={"color": colour, "linewidth": 2, "gid": model},
                whiskerprops={"color": colour, "gid": model},
                capprops={"color": colour, "gid": model},
                flierprops={
                    "marker": "o", "markersize": 3, "markeredgecolor": colour,
                    "markerfacecolor": "none", "gid": model,
                },
            )  # fmt: skip
            spots = [x + width * 0.22 * ((i % 5) / 2 - 1) for i in range(len(values))]
            axes.plot(
                spots, [at(v) for v in values], linestyle="none", marker=".", markersize=3.5,
                color=colour, gid=f"{model}|trials", zorder=4,
            )  # fmt: skip
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_xlim(-0.5, max(len(groups), 1) - 0.5)
    axes.set_ylim(0, top * 1.08)
    if never:
        axes.axhline(top, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.annotate(
            "never", (0, top), xycoords=("axes fraction", "data"), xytext=(2, 2),
            textcoords="offset points", color=FAINT, fontsize=8,
        )  # fmt: skip
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylabel("training steps")
    axes.grid(True, axis="y")
    if not any(values for each in groups.values() for values in each.values()):
        _missing(axes)
    return axes


def bars(axes: Axes, groups: Mapping[str, Mapping[str, float | None]], *, note: str = "") -> Axes:
    """Draw the best result a criterion and model; one never met has no bar and says so."""
    models = list(dict.fromkeys(name for each in groups.values() for name in each))
    width = 0.8 / max(1, len(models))
    for place, each in enumerate(groups.values()):
        for k, model in enumerate(models):
            x = place + (k - (len(models) - 1) / 2) * width
            value = each.get(model)
            colour = COLOURS[colour_of(model)]
            if value is None:
                continue
            if math.isinf(value):
                axes.text(x, 0, " never", rotation=90, ha="center", va="bottom", color=colour,
                          fontsize=8, gid=model)  # fmt: skip
                continue
            axes.bar(
                x, value, width * 0.8, color=colour, alpha=0.4 if "," in model else 0.9,
                gid=model,
            )  # fmt: skip
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_xlim(-0.5, max(len(groups), 1) - 0.5)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylabel("training steps")
    axes.grid(True, axis="y")
    if note:
        axes.annotate(
            note, (1, 1), xycoords="axes fraction", ha="right", va="top", color=FAINT, fontsize=8
        )
    if all(value is None for each in groups.values() for value in each.values()):
        _missing(axes)
    return axes


def histogram(axes: Axes, counts: Mapping[int, int], *, label: str) -> Axes:
    """Draw the density of whole numbers, given how often each occurs."""
    total = sum(counts.values())
    low, high = min(counts), max(counts)
    width = max(1, (high - low) // 24)
    edges = list(range(low, high + width + 1, width))
    density = [
        sum(n for value, n in counts.items() if edge <= value < edge + width) / total / width
        for edge in edges[:-1]
    ]
    axes.stairs(density, edges, fill=True, color=FAINT, alpha=0.7, gid="density")
    axes.set_xlabel(label)
    axes.set_ylabel("density")
    axes.grid(True, axis="y")
    return axes


def heat_map(beta: Sequence[Sequence[float]], axes: Axes) -> Axes:
    """Draw β, a row a unit and a column a step: dark where a unit keeps what it holds."""
    image = axes.imshow(
        beta, vmin=0, vmax=1, cmap="Blues", aspect="auto", interpolation="none", origin="upper",
        gid="beta",
    )  # fmt: skip
    axes.set_xlabel("symbol")
    axes.set_ylabel("unit")
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, aspect=30)
    bar.ax.spines["outline"].set_visible(False)
    bar.set_label("β")
    return axes


def gates(axes: Axes, beta: Sequence[Sequence[float]] | None) -> Axes:
    """Draw the heat map of a finished run, or say that there is none."""
    if not beta:
        return _missing(axes)
    return heat_map(beta, axes)


def norm_curves(
    curves: Mapping[str, Sequence[float]], axes: Axes, *, normalise: bool = True
) -> Axes:
    """Draw error norms against the step to which the error has come back, one curve a model."""
    for name, values in curves.items():
        top = max(values) if normalise and max(values) > 0 else 1.0
        colour = COLOURS[colour_of(name)]
        line = DASHED if "," in name else "solid"
        axes.plot(
            range(1, len(values) + 1), [v / top for v in values], color=colour, linestyle=line,
            linewidth=1.4, label=name or None, gid=name or "norms",
        )  # fmt: skip
    axes.set_xlabel("step t")
    axes.set_ylabel("‖∂L/∂s‖, normalised" if normalise else "‖∂L/∂s‖")
    axes.grid(True, axis="y")
    if normalise:
        axes.set_ylim(0, 1.05)
    return axes


def norms(axes: Axes, curves: Mapping[str, Sequence[float]]) -> Axes:
    """Draw the error norms of finished runs, or say that there are none."""
    return norm_curves(curves, axes) if curves else _missing(axes)


def _missing(axes: Axes) -> Axes:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, "no runs yet", transform=axes.transAxes, ha="center", color=FAINT)
    return axes


DRAW: Mapping[str, Callable[..., Axes]] = {
    "curves": curves, "boxes": boxes, "bars": bars, "histogram": histogram, "gates": gates,
    "norms": norms,
}  # fmt: skip


def draw(panel: Panel, axes: Axes) -> Axes:
    """Draw a panel with its title."""
    DRAW[panel.kind](axes, **panel.data)
    axes.set_title(panel.title)
    return axes


def arrange(panels: Sequence[Panel], columns: int = 2, *, legend: bool = True) -> Figure:
    """Return one figure with the panels side by side as in the paper, the legend in the first."""
    rows = math.ceil(len(panels) / columns)
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.2 * columns, 3.1 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for place, panel in zip(grid.flat, panels, strict=False):
            draw(panel, place)
        for place in grid.flat[len(panels) :]:
            place.set_visible(False)
        handles, labels = _legend(panels)
        if labels and legend:
            grid.flat[0].legend(handles, labels, loc="best")
    return figure


def _legend(panels: Sequence[Panel]) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    names = models_of(panels)
    lines = [
        Line2D([], [], color=COLOURS[colour_of(name)], linewidth=1.6,
               linestyle=DASHED if "," in name else "solid")
        for name in names
    ]  # fmt: skip
    return lines, names


def models_of(panels: Sequence[Panel]) -> list[str]:
    """Return the names of the models in some panels, in order of appearance."""
    names: dict[str, None] = {}
    for panel in panels:
        shown = panel.data.get("curves", ())
        if isinstance(shown, Mapping):
            names |= dict.fromkeys(shown)
        else:
            names |= dict.fromkeys(curve.model for curve in shown)
        for each in panel.data.get("groups", {}).values():
            names |= dict.fromkeys(model for model, values in each.items() if values)
    return list(names)


def render(figure: Figure, kind: str, *, text: bool = False) -> bytes:
    """Return the figure as "svg", "pdf" or "png" bytes, transparent, the same for the same data.

    With ``text`` an SVG keeps its words as text, to be set in the font of the page.
    """
    buffer = BytesIO()
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with style(**{"svg.fonttype": "none" if text else "path"}):
        figure.savefig(buffer, format=kind, transparent=kind == "svg", metadata=dates)
    return buffer.getvalue()
