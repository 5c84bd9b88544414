"""The report: a page that needs nothing else, figures, tables, and what is said of each run."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

import made_up
from browser import Browser, browser
from torchgdu import evidence, paper, report
from torchgdu.config import ConfigError
from torchgdu.paper import Row
from torchgdu.records import Record, RunCorrupt, load_records, write_failure

pytest.importorskip("matplotlib")


def read(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def quick(out: Path) -> list[Record]:
    """The quick profile, with one run each diverged, failed, under way and missing."""
    rows = paper.rows("quick", ["adding"])
    lstm, gru, gdu = rows
    made = [
        made_up.record(lstm.runs[0], None, metrics=[{"step": 20, "mse": 0.17}], parameters=41_301),
        made_up.record(lstm.runs[1], None, status="diverged", step=80),
        made_up.record(gru.runs[0], 400, metrics=[{"step": 400, "mse": 0.001}]),
        made_up.record(gdu.runs[0], None, status="interrupted", step=60),
    ]
    for each in made:
        made_up.store(out, each)
    write_failure(out, gru.runs[1], "its worker died 3 times")
    return load_records(out)


def test_every_run_is_on_the_page_whatever_became_of_it(tmp_path: Path) -> None:
    page = report.write(quick(tmp_path / "runs"), tmp_path / "report")
    text = re.sub(r"<[^>]*>", "", page.read_text("utf-8"))
    assert "1 stopped at 3,000, 1 diverged" in text
    assert "1 failed" in text
    assert "trial 2 (its worker died 3 times)" in text
    assert "1 under way, 1 missing" in text
    states = {
        (row["model"], row["seed"]): row["state"]
        for row in read(tmp_path / "report/tables/runs.csv")
        if row["figure"] == "adding"
    }
    assert states == {
        ("LSTM(100)", "0"): "limit",
        ("LSTM(100)", "1"): "diverged",
        ("GRU(100)", "0"): "solved",
        ("GRU(100)", "1"): "failed",
        ("GDU(10x10)", "0"): "unfinished",
        ("GDU(10x10)", "1"): "missing",
    }


def test_quick_runs_judge_nothing(tmp_path: Path) -> None:
    page = report.write(quick(tmp_path / "runs"), tmp_path / "report").read_text("utf-8")
    for word in ("reproduced", "not enough runs", 'id="verdicts"', "Rule:"):
        assert word not in page
    assert not (tmp_path / "report/tables/claims.csv").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on the paper profile as it might go: long runs rare, some bad, some missing."""
    base = tmp_path_factory.mktemp("whole")

    def missing(row: Row, seed: int) -> bool:
        return (row.late and seed >= 2) or row.model.startswith("GDU(5x")

    made_up.story(base / "runs", paper.rows("paper"), missing)
    rows = {(r.panel, r.name): r for r in paper.adding()}
    diverged = rows["L = 5000", "LSTM(100)"].runs[3]
    made_up.store(base / "runs", made_up.record(diverged, None, status="diverged", step=40))
    write_failure(base / "runs", rows["L = 5000", "GRU(100)"].runs[2], "its worker died 3 times")
    return report.write(load_records(base / "runs"), base / "report", problems=["one is <bad>"])


def words(page: Path) -> str:
    text = re.sub(r"<(script|style).*?</\1>", "", page.read_text("utf-8"), flags=re.DOTALL)
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text)))


def test_each_figure_and_table_is_a_file_too(whole: Path) -> None:
    names = {str(path.relative_to(whole.parent)) for path in whole.parent.rglob("*.*")}
    drawn = ("adding", "temporal-order", "reber", "gates", "error-norms")
    assert names == {
        "index.html",
        *(f"figures/{name}.{kind}" for name in drawn for kind in ("svg", "pdf")),
        *(f"tables/{name}.csv" for name in ("runs", "summary", "pmnist", "claims")),
    }
    for name in drawn:
        ElementTree.parse(whole.parent / "figures" / f"{name}.svg")
        pdf = (whole.parent / "figures" / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF-")
        assert pdf.rstrip().endswith(b"%%EOF")
    assert whole.stat().st_size < 3_000_000


def test_every_claim_has_its_verdicts_and_numbers(whole: Path) -> None:
    text = words(whole)
    known = evidence.gather(load_records(whole.parent.parent / "runs"))
    for judged in known.judged:
        assert text.count(judged.claim.statement) >= 2  # in the overview and at its figure
        assert judged.claim.rule in text
        for check in judged.checks:
            for piece in check.evidence.split(" · "):
                assert piece in text
    table = {
        (row["claim"], row["LSTM start"], row["length"]): row
        for row in read(whole.parent / "tables/claims.csv")
    }
    assert len(table) == sum(len(judged.checks) for judged in known.judged)
    for judged in known.judged:
        for check in judged.checks:
            row = table[judged.claim.statement, judged.variant, check.panel]
            assert (row["verdict"], row["evidence"]) == (judged.verdict, check.evidence)
    overview = whole.read_text("utf-8").split('id="verdicts"')[1].split("</section>")[0]
    counts = Counter(
        re.findall(r"</span>(reproduced|not reproduced|mixed|not enough runs)<", overview)
    )
    assert counts == Counter(judged.verdict for judged in known.judged)


def test_numbers_on_the_page_and_in_the_tables_are_the_records(whole: Path) -> None:
    runs = read(whole.parent / "tables/runs.csv")
    assert len(runs) == sum(row.trials for row in paper.rows("paper"))
    place = ("adding", "L = 200", "GRU(100)")
    gru = [r for r in runs if (r["figure"], r["panel"], r["model"]) == place]
    steps = sorted(float(r["solved"]) for r in gru)
    assert len(steps) == 5
    shown = f"{steps[2]:,.0f} ({steps[1]:,.0f} to {steps[3]:,.0f}), 5 of 5"
    assert shown.replace(" (", "  (") in words(whole).replace(" (", "  (")
    (row,) = (
        r for r in read(whole.parent / "tables/summary.csv")
        if (r["figure"], r["panel"], r["model"]) == place
    )  # fmt: skip
    assert [float(row[k]) for k in ("lower quartile", "median", "upper quartile")] == steps[1:4]
    assert (row["trials wanted"], row["trials"], row["met"], row["best"]) == (
        "5", "5", "5", str(steps[0]),
    )  # fmt: skip
    (failed,) = (r for r in runs if r["state"] == "failed")
    assert failed["failure"] == "its worker died 3 times"
    assert failed["solved"] == "nan"


def test_what_is_missing_bad_or_uncertain_is_said(whole: Path) -> None:
    text = words(whole)
    assert "one is <bad>" in text
    assert "GRU(100): trial 3 (its worker died 3 times)" in text
    assert "5 stopped at 10,000" in text
    assert "2 missing" in text
    assert "printed in the paper as GDU(4x62)" in text
    assert "Revision 0123456789: " in text
    assert "Semantics 1" in text
    for control in ("UGRNN(100), α bias −ln 9", "GRU(100), z bias ln 9"):
        assert control in text
    assert "Strongest, and used everywhere else: LSTM: separate, forget bias 1" in text
    assert "author's start" in text


def test_pmnist_has_the_papers_numbers_beside_ours(whole: Path) -> None:
    rows = {(r["model"], r["variant"]): r for r in read(whole.parent / "tables/pmnist.csv")}
    for model, (thousands, accuracy) in paper.PMNIST.items():
        row = rows[model, ""]
        assert float(row["thousand parameters"]) == thousands
        assert float(row["paper accuracy"]) == pytest.approx(accuracy / 100)
        assert (float(row["mean accuracy"] or "nan") > 0.85) is (not model.startswith("GDU(5x"))
    text = words(whole)
    assert "134.7 94.7" in text


def test_records_decide_the_page_to_the_byte(tmp_path: Path) -> None:
    found = quick(tmp_path / "runs")
    first = report.write(found, tmp_path / "a").read_bytes()
    assert report.write(reversed(found), tmp_path / "b").read_bytes() == first


def test_a_damaged_run_is_left_out_and_named(tmp_path: Path) -> None:
    good, bad = (r for r in quick(tmp_path / "runs") if r.config.cell == "lstm")
    assert good.path is not None
    assert bad.path is not None
    lines = good.path / "metrics.jsonl"
    lines.write_bytes(lines.read_bytes()[:-5])
    (bad.path / "record.json").write_text("{")
    errors: list[RunCorrupt] = []
    found = load_records(tmp_path / "runs", errors=errors)
    page = report.write(found, tmp_path / "report", problems=list(map(str, errors)))
    text = words(page)
    assert f"Left out: {lines} is not what the run wrote" in text
    assert f"{bad.path} holds a record that cannot be read" in text
    assert "1 under way, 1 missing" in text  # of GDU, as before
    assert "2 missing" in text  # both of the LSTM


def test_the_command_names_the_page(tmp_path: Path) -> None:
    quick(tmp_path / "runs")
    done = run_command("report", str(tmp_path / "runs"), "-o", str(tmp_path / "report"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "report/index.html")
    assert "stopped at 3,000" in words(tmp_path / "report/index.html")
    nowhere = run_command("report", str(tmp_path / "nothing"))
    assert nowhere.returncode == 2
    assert nowhere.stderr == f"Error: no such directory: {tmp_path / 'nothing'}\n"
    unknown = run_command("report", str(tmp_path / "runs"), "--profile", "fast")
    assert unknown.returncode == 2
    assert "--profile: 'fast' is not one of quick, paper" in unknown.stderr


def test_the_command_without_matplotlib_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    quick(tmp_path / "runs")
    done = run_command("report", str(tmp_path / "runs"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 5
    assert done.stderr == "Error: drawing needs matplotlib: pip install 'torchgdu[plot]'\n"


def run_command(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    code = "from torchgdu.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True, text=True, env={**os.environ, **more}, timeout=120,
    )  # fmt: skip


def test_without_any_run_there_is_a_page_that_says_so(tmp_path: Path) -> None:
    text = words(report.write([], tmp_path))
    assert "0 of" in text
    assert "no runs yet" in text


def test_unknown_profiles_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fast' is not one of quick, paper"):
        report.write([], tmp_path, profile="fast")


def test_without_matplotlib_the_extra_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'torchgdu\[plot\]'"):
        report.write([], tmp_path / "report")
    assert not (tmp_path / "report").exists()


# --- In a real browser -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("needs chromium and chromedriver")
    with browser() as found:
        yield found


@pytest.mark.slow
def test_the_page_opens_from_disk_and_asks_for_nothing(tab: Browser, whole: Path) -> None:
    alone = whole.parent.parent / "alone.html"
    alone.write_bytes(whole.read_bytes())
    tab.requests()
    tab.size(1200, 900)
    tab.media()
    tab.open(alone)
    asked = [url for url in tab.requests() if not url.startswith("data:")]
    assert asked == [alone.resolve().as_uri()]
    assert tab.log("browser") == []
    assert tab.run("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.slow
def test_every_figure_is_visible_and_has_ink(tab: Browser, whole: Path) -> None:
    tab.size(1200, 900)
    tab.media()
    tab.open(whole)
    shown = tab.run("""
        return [...document.querySelectorAll('.panels svg')].map(svg => {
            const box = svg.getBoundingClientRect();
            const shapes = [...svg.querySelectorAll('path, use, image, text')].filter(
                each => each.getBoundingClientRect().height + each.getBoundingClientRect().width);
            return [svg.getAttribute('aria-label'), box.width, box.height, shapes.length];
        })
    """)
    assert len(shown) == 4 + 4 + 4 + 2 + 2
    for label, width, height, shapes in shown:
        assert width > 400, label
        assert height > 250, label
        assert shapes > 20, label
    colours = tab.run("""
        return [...document.querySelectorAll('[data-model="GDU(10x10)"] path')].map(
            path => getComputedStyle(path).stroke)
    """)
    assert set(colours) == {"rgb(0, 103, 177)"}


@pytest.mark.slow
def test_toggles_change_colours_trials_and_models(tab: Browser, whole: Path) -> None:
    tab.size(1200, 900)
    tab.media()
    tab.open(whole)
    paper_colour = "return getComputedStyle(document.documentElement).backgroundColor"
    light = tab.run(paper_colour)
    tab.click("#scheme")
    dark = tab.run(paper_colour)
    assert light != dark
    assert tab.run("return document.getElementById('scheme').textContent") == "Light colours"
    tab.click("#scheme")
    assert tab.run(paper_colour) == light
    tab.media(scheme="dark")  # without a choice the page follows the system
    tab.open(whole)
    assert tab.run(paper_colour) == dark
    tab.media()

    def visible(selector: str) -> int:
        found = tab.run(f"""
            return [...document.querySelectorAll('{selector}')].filter(
                each => getComputedStyle(each).display != 'none').length
        """)
        assert isinstance(found, int)
        return found

    trials = '[data-kind~="trial"]'
    every = visible(trials)
    assert every > 50
    tab.click("#trials")
    assert visible(trials) == 0
    assert visible('#adding [data-model="GDU(10x10)"]:not([data-kind], button)') == 4
    tab.click("#trials")
    assert visible(trials) == every

    gdu = '#adding [data-model="GDU(10x10)"]:not(button):not([data-kind~="trial"])'
    before, elsewhere = visible(gdu), visible(gdu.replace("adding", "temporal-order"))
    assert before
    assert elsewhere
    tab.click('#adding button[data-model="GDU(10x10)"]')
    assert visible(gdu) == 0
    assert visible(gdu.replace("GDU(10x10)", "GRU(100)"))
    assert visible(gdu.replace("adding", "temporal-order")) == elsewhere
    tab.click('#adding button[data-model="GDU(10x10)"]')
    assert visible(gdu) == before


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 360, 768, 1200])
def test_no_width_makes_the_page_scroll_sideways(tab: Browser, whole: Path, width: int) -> None:
    tab.size(width, 800, mobile=width < 700)
    tab.media()
    tab.open(whole)
    assert tab.run("return document.documentElement.scrollWidth") <= width
    out = tab.run(f"""
        return [...document.querySelectorAll('body *')].filter(each =>
            !each.closest('.wide, svg') && each.getBoundingClientRect().right > {width} + 1
        ).map(each => each.outerHTML.slice(0, 80))
    """)
    assert out == []
    sizes = tab.run("return [...document.querySelectorAll('p, td, li')].map("
                    "each => parseFloat(getComputedStyle(each).fontSize))")  # fmt: skip
    assert min(sizes) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_the_page(tab: Browser, whole: Path, scheme: str) -> None:
    """WCAG AA: a contrast of 4.5 for text, 3 for lines."""
    tab.size(1200, 900)
    tab.media(scheme=scheme)
    tab.open(whole)
    names = ("paper", "ink", "soft", "faint", "link", "yes", "no", "half", "open")
    lines = ("gdu", "gru", "lstm", "small", "other", "ugrnn")
    style = "getComputedStyle(document.documentElement)"
    values = tab.run(
        f"return {[*names, *lines]}.map(n => {style}.getPropertyValue('--' + n).trim())"
    )
    colours = dict(zip((*names, *lines), values, strict=True))

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for name in (*names[1:], *lines):
        pair = sorted((light(colours[name]), light(colours["paper"])))
        contrast = (pair[1] + 0.05) / (pair[0] + 0.05)
        assert contrast >= (3 if name in lines else 4.5), (name, contrast)


@pytest.mark.slow
def test_printing_is_light_and_opens_what_is_folded(tab: Browser, whole: Path) -> None:
    tab.media(scheme="dark")
    tab.open(whole)
    tab.click("#scheme")
    tab.click("#scheme")
    tab.media("print", "dark")
    ink = tab.run("return getComputedStyle(document.documentElement).color")
    assert ink == "rgb(27, 36, 48)"
    tab.run("dispatchEvent(new Event('beforeprint'))")
    assert tab.run("return document.querySelectorAll('details:not([open])').length") == 0
    assert tab.run("return getComputedStyle(document.querySelector('.tools')).display") == "none"
    pdf = tab.pdf()
    assert pdf.startswith(b"%PDF-")
    assert len(pdf) > 100_000
    tab.media()
