"""How the units of a GDU are divided: ``"2x35+10x3"`` parsed once into a frozen ``Groups``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

MAX_UNITS = 2**20

Run: TypeAlias = tuple[int, int] | tuple[int, int, float]

_PART = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)(?:x([0-9]+(?:\.[0-9]+)?(?:[eE]-?[0-9]+)?))?")


class GroupsError(ValueError):
    """A group description that cannot be used; the message names the part at fault."""


@dataclass(frozen=True, init=False, repr=False)
class Groups:
    """The groups of a distributor: group i has M_i units that share the overwrite rate δ_i.

    Built from a string ``SIZExCOUNT[xDELTA]`` joined by ``+``, or from ``(size, count[, delta])``
    tuples; δ is 1 when left out, and 0 < δ < SIZE always. Units stand in the order written.
    Two descriptions of the same groups are equal and hash alike.

    >>> groups = Groups("2x35+10x3")
    >>> groups.units, len(groups.sizes), groups.overwrite_proportion
    (100, 38, 0.38)
    >>> str(Groups("4x1+4x2x1.0+5x51x0.50"))
    '4x3+5x51x0.5'
    """

    sizes: tuple[int, ...]
    deltas: tuple[float, ...]

    def __init__(self, description: str | Iterable[Run] | Groups) -> None:
        if isinstance(description, Groups):
            checked = list(description.runs)
        elif isinstance(description, str):
            checked = [_parse(part, description) for part in description.split("+")]
        else:
            listed = enumerate(_listed(description), 1)
            checked = [_check(run, _shown(run, f"part {k}")) for k, run in listed]
        if not checked:
            raise GroupsError("no groups given; write for example '10x10' or [(10, 10)]")
        units = sum(size * count for size, count, _ in checked)
        if units > MAX_UNITS:
            raise GroupsError(
                f"the {len(checked)} parts make {units} units; at most {MAX_UNITS} are allowed"
            )
        object.__setattr__(self, "sizes", tuple(s for s, n, _ in checked for _ in range(n)))
        object.__setattr__(self, "deltas", tuple(d for _, n, d in checked for _ in range(n)))

    @property
    def units(self) -> int:
        """The number of units, H."""
        return sum(self.sizes)

    @property
    def overwrite_proportion(self) -> float:
        """P_α = Σδ_i / K, the constant mean of α."""
        return math.fsum(self.deltas) / self.units

    @property
    def runs(self) -> tuple[tuple[int, int, float], ...]:
        """The canonical ``(size, count, delta)`` parts, equal neighbours merged."""
        pairs = groupby(zip(self.sizes, self.deltas, strict=True))
        return tuple((size, len(list(same)), delta) for (size, delta), same in pairs)

    def __str__(self) -> str:
        """Return the canonical description, which parses back to an equal value."""
        return "+".join(
            f"{size}x{count}" if delta == 1 else f"{size}x{count}x{delta!r}"
            for size, count, delta in self.runs
        )

    def __repr__(self) -> str:
        """Return the call that builds an equal value."""
        return f"Groups({str(self)!r})"


def _parse(part: str, whole: str) -> tuple[int, int, float]:
    shown = repr(part if len(part) < 60 else part[:60] + "…")
    match = _PART.fullmatch(part)
    if match is None:
        where = f" in groups {whole!r}" if len(whole) < 200 else ""
        raise GroupsError(
            f"{shown}{where} is not SIZExCOUNT or SIZExCOUNTxDELTA "
            "(SIZE and COUNT from 1 without leading zeros, DELTA like 0.5), joined by '+'"
        )
    size, count, delta = match.groups()
    if len(size) > 7 or len(count) > 7:  # also spares int() a string of any length
        raise GroupsError(f"{shown} makes too many units; at most {MAX_UNITS} are allowed")
    return _check((int(size), int(count), float(delta or 1)), shown)


def _listed(description: Iterable[Run]) -> list[Run]:
    if not isinstance(description, Iterable):
        raise GroupsError(
            f"{_shown(description)} is no groups; write for example '10x10' or [(10, 10)]"
        )
    return list(description)


def _shown(value: object, instead: str = "a number of thousands of digits") -> str:
    """Return ``value`` as Python writes it; the longest numbers it refuses to write."""
    try:
        return repr(value)
    except ValueError:
        return instead


def _check(run: Run, shown: str) -> tuple[int, int, float]:
    if not isinstance(run, Sequence) or isinstance(run, str) or len(run) not in (2, 3):
        raise GroupsError(f"{shown} is not a (size, count) or (size, count, delta) tuple")
    size, count = run[0], run[1]
    delta = run[2] if len(run) == 3 else 1.0
    for name, value in (("size", size), ("count", count)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise GroupsError(f"{name} {_shown(value)} of {shown} is not a whole number from 1")
    if size * count > MAX_UNITS:
        units = _shown(size * count, "too many")
        raise GroupsError(f"{shown} makes {units} units; at most {MAX_UNITS} are allowed")
    if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta < size:
        hint = " (a group of one unit needs δ < 1: a leaky unit)" if size == 1 else ""
        raise GroupsError(f"δ = {_shown(delta)} of {shown} is not between 0 and {size}{hint}")
    return size, count, float(delta)
