"""Words, tables and drawings as one HTML page that needs nothing else. Knows no runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import TypeAlias
from xml.etree import ElementTree

from torchgdu import figures

DARK = {
    "paper": "#14181d", "card": "#1b2027", "ink": "#e6eaef", "soft": "#bcc5cf", "faint": "#8f9ba9",
    "grid": "#313943", "link": "#7ab8f0", "gdu": "#5cabeb", "gru": "#f2914f", "lstm": "#38bd9b",
    "ugrnn": "#dbb04a", "small": "#e08cc4", "other": "#a3adb9", "yes": "#6fb6f2", "no": "#f59a63",
    "half": "#dfbd5c", "open": "#a3adb9",
}  # fmt: skip
"""The dark scheme; the light one is in the page itself."""

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


@dataclass(frozen=True)
class Html:
    """Text that is HTML already; everything else is escaped."""

    text: str

    def __add__(self, other: Cell) -> Html:
        """Return this and what follows."""
        return Html(self.text + html(other).text)


Cell: TypeAlias = "str | Html"


_TOGETHER = re.compile(r"(?<=\b\w) (?== )|(?<==) (?=\S)|(?<=\d) (?=of \d|%)|(?<=\d of) (?=\d)")


def html(part: Cell) -> Html:
    """Return the part as HTML; no line breaks inside "n = 5", "4 of 5" or "91 %"."""
    return part if isinstance(part, Html) else Html(_TOGETHER.sub("\xa0", escape(part)))


def tag(name: str, *parts: Cell, **attributes: str | None) -> Html:
    """Return an element; ``class_`` and the like lose their underscore, others become dashes.

    >>> tag("p", "1 < 2", class_="note", data_model="GDU").text
    '<p class="note" data-model="GDU">1 &lt; 2</p>'
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{said}>{''.join(html(part).text for part in parts)}</{name}>")


def join(parts: Iterable[Cell], between: str = "\n") -> Html:
    """Return the parts one after another."""
    return Html(between.join(html(part).text for part in parts))


def table(
    head: Sequence[str],
    body: Iterable[Sequence[Cell] | str],
    numbers: str = "",
    kind: str | None = None,
) -> Html:
    """Return a table that scrolls by itself where it is too wide.

    - `body`: rows; a string is a heading of the rows after it.
    - `numbers`: one letter a column, "n" for numbers, which are set to the right.
    """
    classes = [("n" if letter == "n" else None) for letter in numbers.ljust(len(head))]

    def row(cells: Sequence[Cell] | str) -> Html:
        if isinstance(cells, str):
            return tag("tr", tag("th", cells, colspan=str(len(head)), scope="rowgroup"),
                       class_="group")  # fmt: skip
        first = tag("th", cells[0], scope="row")
        rest = (tag("td", c, class_=k) for c, k in zip(cells[1:], classes[1:], strict=True))
        return tag("tr", first, *rest)

    heads = (tag("th", h, class_=k, scope="col") for h, k in zip(head, classes, strict=True))
    whole = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *map(row, body)),
                class_=kind)  # fmt: skip
    return tag("div", whole, class_="wide")


def chip(kind: str, mark: str, words: str) -> Html:
    """Return words with a mark, in the colour of their kind: neither alone carries the meaning."""
    return tag("span", tag("span", mark, aria_hidden="true"), words, class_=f"chip {kind}")


def swatch(model: str) -> Html:
    """Return the colour of a model, as a ring for a variant."""
    kind = "swatch ring" if "," in model else "swatch"
    return tag("span", class_=kind, style=f"color:var(--{figures.colour_of(model)})")


def line(model: str) -> Html:
    """Return the line by which a model is drawn."""
    dash = ' stroke-dasharray="4 1.5"' if "," in model else ""
    return Html(
        '<svg viewBox="0 0 26 8" aria-hidden="true"><path d="M0 4h26" stroke-width="2.4"'
        f'{dash} stroke="var(--{figures.colour_of(model)})"/></svg>'
    )


def drawing(svg: bytes, name: str, label: str) -> Html:
    """Return a figure that lives in the page: its colours are the page's, its names its own."""
    root = ElementTree.fromstring(svg)
    for parent in root.iter():
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}title")):
                parent.remove(child)
    for node in root.iter():
        node.tag = node.tag.removeprefix(f"{{{SVG}}}")
        if href := node.attrib.pop(f"{{{XLINK}}}href", None):
            node.set("href", f"#{name}-{href[1:]}" if href.startswith("#") else href)
        mark = node.attrib.pop("id", None)
        if mark and node.tag == "g" and _is_model(mark):
            model, *kind = mark.split("|")
            node.set("data-model", model)
            if kind:
                node.set("data-kind", " ".join(kind))
        elif mark:
            node.set("id", f"{name}-{mark}")
        for key, value in node.attrib.items():
            node.set(key, re.sub(r"url\(#", f"url(#{name}-", value))
    for key in ("width", "height"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", label)
    text = ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)
    for key, colour in {**figures.COLOURS, **figures.SHADES}.items():
        text = text.replace(colour, f"var(--{key})")
    return Html(re.sub(r"'DejaVu Sans'", "var(--font)", text))


def _is_model(mark: str) -> bool:
    return figures.colour_of(mark) != "other"


def page(title: str, body: Html) -> str:
    """Return the whole page."""
    template = Template(files("torchgdu").joinpath("page.html").read_text("utf-8"))
    values = "".join(f" --{key}: {value};" for key, value in DARK.items())
    rule = f"color-scheme: dark;{values}"
    asked = 'screen and (prefers-color-scheme: dark) { :root:not([data-scheme="light"])'
    dark = (
        f"@media {asked} {{ {rule} }} }}\n"
        f'@media screen {{ :root[data-scheme="dark"] {{ {rule} }} }}'
    )
    return template.substitute(title=escape(title), body=body.text, dark=dark)
