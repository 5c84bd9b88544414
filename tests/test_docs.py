"""The documentation: every link leads somewhere, every example runs, every name exists."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest
import typer.main

import torchgdu
from torchgdu.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    found = _BLOCK.findall(page.read_text("utf-8"))
    return [text for language, text in found if language in languages]


def prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), target
            continue
        path, _, anchor = target.partition("#")
        goal = page.parent / path if path else page
        assert goal.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(goal), f"{page.name} links to {target}"


@every_page
def test_every_example_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page, in order, as one program: ``python`` runs, ``pycon`` is compared."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for number, (language, text) in enumerate(_BLOCK.findall(page.read_text("utf-8"))):
        if language == "python":
            exec(compile(text, f"{page.name}, block {number}", "exec"), names)
        elif language == "pycon":
            test = doctest.DocTestParser().get_doctest(text, names, page.name, str(page), 0)
            runner.run(test, clear_globs=False)
            names.update(test.globs)
        else:
            assert language in ("", "bibtex"), f"{page.name} has a block of {language!r}"
    assert runner.summarize(verbose=False).failed == 0


def commands() -> Iterator[tuple[Path, list[str]]]:
    """Every line of a plain block that calls torchgdu."""
    for page in PAGES:
        for block in blocks(page, ""):
            for line in block.splitlines():
                words = shlex.split(line, comments=True) if line.startswith("torchgdu") else []
                if words:
                    yield page, words[1:]


def test_every_command_exists() -> None:
    """Known by the command line, with these options and values; nothing is run."""
    found = list(commands())
    assert len(found) > 10
    for page, words in found:
        command: Any = typer.main.get_command(app)
        path, rest = "torchgdu", [word.partition("|")[0] for word in words]
        while hasattr(command, "commands"):
            assert rest, f"{page.name}: {path} needs a command"
            assert rest[0] in command.commands, f"{page.name}: {path} has no command {rest[0]}"
            path = f"{path} {rest[0]}"
            command = command.commands[rest.pop(0)]
        command.make_context(path, rest)


def test_make_has_the_targets_that_are_named() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        text = page.read_text("utf-8")
        named = re.findall(r"(?:^|`)make ([a-z-]+)(?=`|\s+#|$)", text, re.MULTILINE)
        assert set(named) <= targets, page.name


def tables(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The cells of every table row, each with the second-level heading that it is under."""
    heading = ""
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("|") and not line.startswith("|--"):
            yield heading, [cell.strip() for cell in line.strip("|").split(" | ")]


def arguments(call: str) -> set[str]:
    """The names in the parentheses of ``f(a, b=(1, 2))``."""
    inside = re.sub(r"\([^()]*\)", "", call.partition("(")[2].rpartition(")")[0])
    return {part.partition("=")[0].strip() for part in inside.split(",") if part.strip()}


def test_the_reference_names_what_exists() -> None:
    seen: set[str] = set()
    owners: Mapping[str, Any] = {"layer": torchgdu.GDU(3, "2x2")}
    for heading, cells in tables(ROOT / "docs" / "reference.md"):
        module = importlib.import_module(heading)
        for name in re.findall(r"`([^`]+)`", cells[0]):
            path = name.partition("(")[0]
            first, _, rest = path.partition(".")
            if first == "layer" and "(" in name and not rest:
                continue  # how a layer is called
            owner = owners.get(first, module)
            if not hasattr(owner, first) and hasattr(owners["layer"], path):
                continue  # an attribute of every layer
            target = getattr(owner, first) if owner is module else owner
            target = getattr(target, rest) if rest else target
            if "(" in name:
                missing = arguments(name) - set(inspect.signature(target).parameters)
                assert not missing, f"{heading}: {name} takes no {missing}"
            seen.add(path if owner is module else "")
    text = (ROOT / "docs" / "reference.md").read_text("utf-8")
    for name in torchgdu.__all__:
        assert name in seen or f"`torchgdu.{name}`" in text, f"{name} is not in the reference"


def test_every_place_has_its_row() -> None:
    """The second table of docs/layout.md: what is there, and nothing that is not."""
    page = (ROOT / "docs" / "layout.md").read_text("utf-8").partition("Beside the package")[2]
    rows = re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    for name in named:
        assert (ROOT / name).exists(), name
    ours = ("csrc", "docs", "tests", "benchmarks", "results")
    places = {f"{name}/" for name in ours if (ROOT / name).is_dir()}
    assert places <= named, f"docs/layout.md has no row for {places - named}"
    checked = (ROOT / "pyproject.toml").read_text("utf-8").partition("[tool.mypy]")[2]
    for name in ours:
        if any((ROOT / name).glob("*.py")):
            assert f'"{name}"' in checked.partition("[[")[0], f"mypy does not check {name}"


def test_every_dependency_has_its_reason() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text("utf-8").lower()
    named = {re.match(r"[\w-]+", line) for line in requires("torchgdu") or []}
    names = {match[0].lower() for match in named if match} - {"torchgdu"}
    assert {"torch", "numpy", "pytest"} <= names
    for name in names:
        assert name in page, f"docs/dependencies.md does not say why {name}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    for page in PAGES:
        if page.parent == ROOT / "docs" and page.name != "index.md":
            assert f"({page.name})" in index, page.name


def test_one_version_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    assert torchgdu.__version__ == version("torchgdu")
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [version("torchgdu")]
    assert re.findall(r"version += \{(.+)\}", readme) == [version("torchgdu")]
    assert f"## {version('torchgdu')}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_paper_is_cited_alike() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8").partition("preferred-citation:")[2]
    entry = (ROOT / "README.md").read_text("utf-8").partition("@article")[2].partition("\n}")[0]
    for part in ("title", "journal", "year"):
        (said,) = re.findall(rf"^  {part}: (.+)$", citation, re.MULTILINE)
        assert re.search(rf"{part} += \{{{re.escape(said)}\}}", entry), part
    authors = re.findall(r"family-names: (.+)\n +given-names: (.+)", citation)
    assert " and ".join(f"{last}, {first}" for last, first in authors) in entry


def test_types_are_shipped() -> None:
    assert os.path.exists(os.path.join(os.path.dirname(torchgdu.__file__), "py.typed"))
