"""Figures show what the records say: what was drawn is read back."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
import pytest

import made_up
from torchgdu import evidence, figures, page, paper
from torchgdu.figures import COLOURS, Curve, Panel
from torchgdu.panels import lengths, panels
from torchgdu.paper import Row
from torchgdu.records import load_records
from torchgdu.tasks import Reber

pytest.importorskip("matplotlib")

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def rows(figure: str, panel: str) -> list[Row]:
    return [row for row in paper.rows("paper", [figure]) if row.panel == panel]


def drawn(panel: Panel) -> Axes:
    axes: Axes = figures.arrange([panel], 1).axes[0]
    return axes


def lines(axes: Axes, gid: str) -> list[Any]:
    return [line for line in axes.lines if line.get_gid() == gid]


def numbers(data: Any) -> list[float]:
    found: list[float] = np.ravel(data).tolist()
    return found


def test_curves_are_the_metrics_and_bars_where_it_was_solved() -> None:
    _, gru, gdu, *_ = rows("adding", "L = 200")
    metrics = {
        steps: [{"step": 20 * i, "mse": 0.2 / i} for i in range(1, steps // 20 + 1)]
        for steps in (400, 440, 600)
    }
    known = evidence.gather(
        [
            made_up.record(gru.runs[0], 600, metrics=metrics[600]),
            made_up.record(gdu.runs[0], 440, metrics=metrics[440]),
            made_up.record(gdu.runs[1], 400, metrics=metrics[400]),
        ]
    )
    axes = drawn(panels(known, "adding")[0])
    for gid, steps in (("GRU(100)", 600), ("GDU(10x10)", 400), ("GDU(10x10)|trial", 440)):
        (line,) = lines(axes, gid)
        assert numbers(line.get_xdata()) == [m["step"] for m in metrics[steps]]
        assert numbers(line.get_ydata()) == [m["mse"] for m in metrics[steps]]
        (bar,) = lines(axes, f"{gid}|solved")
        assert numbers(bar.get_xdata()) == [steps, steps]
        assert bar.get_color() == line.get_color() == COLOURS[figures.colour_of(gid)]
    assert axes.get_yscale() == "log"
    assert axes.get_title(loc="left") == "L = 200"
    assert not lines(axes, "LSTM(100)")


def test_an_unsolved_run_has_no_bar_and_a_diverged_one_ends_where_it_did() -> None:
    lstm = rows("temporal-order", "L = 500")[0]
    good = [{"step": s, "accuracy": 0.125} for s in (20, 40)]
    bad = [*good, {"step": 60, "accuracy": math.nan}]
    known = evidence.gather(
        [
            made_up.record(lstm.runs[0], None, metrics=good),
            made_up.record(lstm.runs[1], None, metrics=bad, status="diverged"),
        ]
    )
    axes = drawn(panels(known, "temporal-order")[2])
    drawn_lines = [line for line in axes.lines if str(line.get_gid()).startswith("LSTM(100)")]
    assert [numbers(line.get_xdata()) for line in drawn_lines] == [[20, 40], [20, 40]]


def test_long_curves_keep_their_extremes_and_ends() -> None:
    chance = np.random.default_rng(0)
    steps = [20 * i for i in range(1, 2501)]
    values = chance.random(2500).tolist()
    values[1700], values[30] = 5.0, -5.0
    kept, shown = figures.thin(steps, values, 240)
    assert len(kept) <= 240
    assert kept == sorted(set(kept))
    assert (
        dict(zip(steps, values, strict=True)).items() >= dict(zip(kept, shown, strict=True)).items()
    )
    assert (max(shown), min(shown)) == (5.0, -5.0)
    assert (kept[0], kept[-1]) == (20, 50_000)
    # On the drawing's axis nowhere is a hole wider than the drawing can show, or than the data's.
    holes = np.diff(np.log(kept))
    wide = (math.log(50_000) - math.log(20)) / 119
    assert all(h <= 2 * wide or b - a == 20 for h, a, b in zip(holes, kept, kept[1:], strict=False))


def test_boxes_hold_median_quartiles_range_and_outliers() -> None:
    values = [100.0, 110, 120, 130, 140, 150, 160, 170, 180, 900]
    axes = drawn(Panel("m = 10", "boxes", {"groups": {"LC": {"GDU(2x35+10x3)": values}}}))
    box = np.asarray(axes.patches[0].get_path().vertices)
    assert sorted(set(box[:-1, 1])) == [np.quantile(values, 0.25), np.quantile(values, 0.75)]
    heights = [numbers(line.get_ydata()) for line in axes.lines]
    assert [np.median(values)] * 2 in heights  # the median's line
    assert [np.quantile(values, 0.25), 100.0] in heights  # the whiskers reach what is inside
    assert [np.quantile(values, 0.75), 180.0] in heights
    assert [900.0] in heights  # and leave out what is not
    assert values in heights  # every trial is there, too


def test_trials_that_never_met_a_criterion_lie_on_a_line_that_says_so() -> None:
    values = [100.0, 200.0, math.inf, math.inf, math.inf]
    axes = drawn(Panel("m = 10", "boxes", {"groups": {"LC": {"GRU(100)": values}}}))
    (trials,) = lines(axes, "GRU(100)|trials")
    assert numbers(trials.get_ydata())[:2] == [100, 200]
    (top,) = set(numbers(trials.get_ydata())[2:])
    assert 200 < top < axes.get_ylim()[1]
    assert "never" in [text.get_text() for text in axes.texts]


def test_mERGs_figure_is_that_of_the_records() -> None:
    made = []
    for panel, n in (("m = 10", 10), ("m = 20", 10), ("m = 40", 2)):
        for row in rows("reber", panel):
            scale = {"lstm": 4, "gru": 3, "gdu": 1}[row.config.cell] * (row.config.multiple or 0)
            for run in row.runs[:n]:
                sc, lc = 100.0 * scale + run.seed, 200.0 * scale + run.seed
                made.append(made_up.record(run, lc + 20, sc=sc, lc=lc))
    four = panels(evidence.gather(made), "reber")
    assert [panel.kind for panel in four] == ["boxes", "boxes", "bars", "histogram"]
    groups = four[0].data["groups"]
    assert list(groups) == ["SC", "LC", "both"]
    assert groups["LC"]["GRU(100)"] == [6000.0 + seed for seed in range(10)]
    axes = drawn(four[2])
    bars: list[Any] = axes.patches[:4]  # those of SC
    heights = {bar.get_gid(): bar.get_height() for bar in bars}
    assert heights == {
        "LSTM(100)": 16_000, "GRU(100)": 12_000, "GDU(2x35+10x3)": 4000,
        "LSTM(100), author's start": 16_000,
    }  # fmt: skip
    assert "best of 2 runs" in [text.get_text() for text in axes.texts]


def test_best_results_that_never_came_are_said_not_drawn() -> None:
    groups = {"LC": {"GRU(100)": math.inf, "GDU(2x35+10x3)": 500.0}}
    axes = drawn(Panel("m = 40", "bars", {"groups": groups, "note": ""}))
    assert [bar.get_gid() for bar in axes.patches] == ["GDU(2x35+10x3)"]
    assert [t.get_text().strip() for t in axes.texts if t.get_gid() == "GRU(100)"] == ["never"]


def test_the_histogram_is_a_density_of_the_training_strings() -> None:
    counts = lengths(40)
    assert sum(counts.values()) == 1000
    assert min(counts) >= 5 * 40 + 4
    source = Reber(40).source(0)
    assert counts == Counter(len(source.next().target) + 1 for _ in range(1000))
    axes = drawn(Panel("lengths", "histogram", {"counts": counts, "label": "symbols"}))
    (stairs,) = axes.patches
    density, edges, _ = stairs.get_data()  # type: ignore[attr-defined]
    all_lengths = [length for length, n in counts.items() for _ in range(n)]
    expected, _ = np.histogram(all_lengths, edges, density=True)
    np.testing.assert_allclose(density, expected, rtol=1e-12)


def test_gates_are_drawn_a_row_a_unit(tmp_path: Path) -> None:
    gru, gdu = paper.gates()[:2]
    for row, share in ((gru, 0.04), (gdu, 0.34)):
        made = made_up.record(row.runs[0], 500, lc=500, scores={"lc": 1.0})
        seen = made_up.gates(made.config, made.id, 60, (0.0, share))
        made_up.store(tmp_path, made, gates=seen)
    known = evidence.gather(load_records(tmp_path))
    two = panels(known, "gates")
    assert [panel.title for panel in two] == ["GRU(100), trial 1", "GDU(2x35+10x3), trial 1"]
    for panel, row in zip(two, (gru, gdu), strict=True):
        (image,) = drawn(panel).images
        shown = np.asarray(image.get_array())
        seen = made_up.gates(row.runs[0].replace(backend="engine"), "", 60, (0, 0.04))
        assert shown.shape == (100, 60)
        if row is gru:
            np.testing.assert_allclose(shown.T * 100, seen["beta"])
        assert image.get_clim() == (0, 1)


def test_error_norms_are_divided_by_their_maximum() -> None:
    curves = {"GDU(4x32)": [1.0, 2.0, 4.0], "GRU(128)": [0.0, 0.0, 3.0]}
    axes = drawn(Panel("after 5 epochs", "norms", {"curves": curves}))
    found = {line.get_gid(): numbers(line.get_ydata()) for line in axes.lines}
    assert found == {"GDU(4x32)": [0.25, 0.5, 1.0], "GRU(128)": [0.0, 0.0, 1.0]}
    assert numbers(axes.lines[0].get_xdata()) == [1, 2, 3]


def test_without_runs_every_figure_says_so() -> None:
    known = evidence.gather([])
    for figure in ("adding", "temporal-order", "reber", "gates", "error-norms"):
        shown = panels(known, figure)
        assert shown
        for panel in shown:
            if panel.kind != "histogram":
                texts = [text.get_text() for text in drawn(panel).texts]
                assert "no runs yet" in texts, (figure, panel.title)


def test_a_model_has_one_colour_and_no_two_look_alike() -> None:
    """Also to readers without one of the three kinds of cones, in both schemes."""
    simulations: dict[str, Sequence[Sequence[float]]] = {  # Machado et al. 2009, severity 1.0
        "normal": np.eye(3).tolist(),
        "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
        "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                   [-0.011820, 0.042940, 0.968881]],
        "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                   [0.004733, 0.691367, 0.303900]],
    }  # fmt: skip
    for scheme in (figures.COLOURS, page.DARK):
        colours = {
            key: np.array([int(scheme[key][i : i + 2], 16) / 255 for i in (1, 3, 5)])
            for key in ("gdu", "gru", "lstm", "small")
        }
        linear = {key: value**2.2 for key, value in colours.items()}
        for name, matrix in simulations.items():
            seen = {key: lab(np.array(matrix) @ value) for key, value in linear.items()}
            for a in seen:
                for b in seen:
                    assert a == b or np.linalg.norm(seen[a] - seen[b]) > 10, (name, a, b)


def lab(linear: Any) -> Any:
    """CIELAB of linear sRGB."""
    matrix = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(matrix) @ linear.clip(0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_the_drawing_in_the_page_has_the_same_points(tmp_path: Path) -> None:
    """From the SVG's path back to numbers, by the axis' own scale."""
    steps, values = [20, 100, 1000, 10_000], [0.1, 0.4, 0.3, 1.0]
    panel = Panel(
        "L", "curves",
        {"curves": [Curve("GDU(10x10)", steps, values)], "metric": "accuracy", "limit": 10_000},
    )  # fmt: skip
    figure = figures.arrange([panel], 1, legend=False)
    svg = figures.render(figure, "svg", text=True)
    text = page.drawing(svg, "adding-0", "a label").text
    root = ElementTree.fromstring(text)
    (group,) = (g for g in root.iter("g") if g.get("data-model") == "GDU(10x10)")
    (path,) = group.iter("path")
    points = [
        tuple(map(float, pair))
        for pair in re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", path.get("d", ""))
    ]
    assert len(points) == 4
    height = float(root.get("viewBox", "").split()[3])
    box = figure.axes[0].get_window_extent()
    scale = 72 / figure.dpi
    for (x, y), step, value in zip(points, steps, values, strict=True):
        share = math.log(step / 20) / math.log(10_000 / 20)
        assert x == pytest.approx((box.x0 + share * box.width) * scale, abs=0.01)
        low, high = figure.axes[0].get_ylim()
        up = (value - low) / (high - low)
        assert height - y == pytest.approx((box.y0 + up * box.height) * scale, abs=0.01)
    assert path.get("style", "").count("var(--gdu)") == 1
    assert root.get("aria-label") == "a label"
    assert all(n.get("id", "adding-0-").startswith("adding-0-") for n in root.iter())
    links = re.findall(r'(?:href="#|url\(#)([^")]*)', text)
    ids = {node.get("id") for node in root.iter()}
    assert links
    assert set(links) <= ids


def test_files_are_the_same_for_the_same_runs() -> None:
    panel = Panel("L", "curves", {"curves": [Curve("GRU(100)", [20, 40], [1, 0.5])], "metric": "x"})
    for kind in ("svg", "pdf"):
        first, second = (figures.render(figures.arrange([panel]), kind) for _ in range(2))
        assert first == second
