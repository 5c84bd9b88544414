"""The options of the layers and cells, checked and brought down to one ``Choice``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from numbers import Integral
from typing import Literal, TypeAlias

from torchgdu.groups import Groups, GroupsError, Run

Init: TypeAlias = Literal["separate", "joint"]
GroupsLike: TypeAlias = str | Groups | Iterable[Run]

PERIODS = (1, 2, 4, 8)
"""The default of the CW-RNN."""


@dataclass(frozen=True)
class Choice:
    """What the options of a layer or a cell come down to."""

    cell: str
    """A name in ``ops.CELLS``."""
    hidden_size: int
    bias: bool
    init: Init
    options: Mapping[str, object]
    """The cell's own options as given, for printing; None is a default."""
    groups: tuple[Groups, ...] = ()
    """GDU: one entry a layer."""
    learn_delta: bool = False
    periods: tuple[int, ...] = ()
    start: tuple[str, float] = ("", 0.0)
    """The gate whose bias does not start at 0, and where it starts."""

    def __post_init__(self) -> None:
        """Check what all cells have in common."""
        if self.init not in ("separate", "joint"):
            raise ValueError(f"init={self.init!r} is not 'separate' or 'joint'")

    @property
    def text(self) -> str:
        """What weights must agree on to mean the same, besides their shapes."""
        if self.learn_delta:
            return "gdu learnt " + " ".join(_sizes(groups) for groups in self.groups)
        return " ".join(map(str, (self.cell, *self.groups, *self.periods)))


def _sizes(groups: Groups) -> str:
    return "+".join(f"{size}x{len(list(same))}" for size, same in groupby(groups.sizes))


def check_layers(num_layers: int) -> None:
    """Raise what ``nn.GRU`` does where this is no number of layers."""
    if not isinstance(num_layers, Integral):
        raise TypeError(f"num_layers should be of type int, got: {type(num_layers).__name__}")
    if num_layers <= 0:
        raise ValueError("num_layers must be greater than zero")


def start_of_gate(
    name: str, value: float | None, bias: bool, default: float | None = None
) -> float | None:
    """Return where a gate's bias starts; asking for it without biases is an error."""
    if value is not None and not bias:
        raise ValueError(f"{name}={value} needs bias=True: there is no bias to start there")
    return default if value is None else float(value)


def choose_srn(hidden_size: int, bias: bool, init: Init) -> Choice:
    """SRN has no options of its own."""
    return Choice("srn", hidden_size, bias, init, {})


def choose_lstm(hidden_size: int, bias: bool, init: Init, forget_bias: float | None) -> Choice:
    """LSTM: the forget gate starts with ``forget_bias``, 1 by default."""
    value = start_of_gate("forget_bias", forget_bias, bias, 1.0)
    return Choice(
        "lstm", hidden_size, bias, init, {"forget_bias": forget_bias}, start=("f", value or 0.0)
    )


def choose_gru(
    hidden_size: int, bias: bool, init: Init, reset: str, keep_bias: float | None
) -> Choice:
    """GRU: the reset gate acts before or after the matrix product; z keeps."""
    if reset not in ("before", "after"):
        raise ValueError(f"reset={reset!r} is not 'before' or 'after'")
    value = start_of_gate("keep_bias", keep_bias, bias, 0.0)
    options = {"reset": None if reset == "before" else reset, "keep_bias": keep_bias}
    cell = "gru" if reset == "before" else "gru_after"
    return Choice(cell, hidden_size, bias, init, options, start=("z", value or 0.0))


def choose_ugrnn(hidden_size: int, bias: bool, init: Init, keep_bias: float | None) -> Choice:
    """UGRNN: β = 1 − α, so the gate starts at −``keep_bias``."""
    value = start_of_gate("keep_bias", keep_bias, bias, 0.0)
    return Choice(
        "ugrnn", hidden_size, bias, init, {"keep_bias": keep_bias}, start=("alpha", -(value or 0.0))
    )


def choose_mgu(
    hidden_size: int, bias: bool, init: Init, gamma: str, keep_bias: float | None
) -> Choice:
    """MGU: β = 1 − f, so the gate starts at −``keep_bias``; the candidate reads γ ⊙ s."""
    if gamma not in ("alpha", "beta"):
        raise ValueError(f"gamma={gamma!r} is not 'alpha' or 'beta'")
    value = start_of_gate("keep_bias", keep_bias, bias, 0.0)
    options = {"gamma": None if gamma == "alpha" else gamma, "keep_bias": keep_bias}
    cell = "mgu" if gamma == "alpha" else "mgu_beta"
    return Choice(cell, hidden_size, bias, init, options, start=("f", -(value or 0.0)))


def choose_cwrnn(hidden_size: int, bias: bool, init: Init, periods: Iterable[int]) -> Choice:
    """CW-RNN: one equal slice of the units for each period."""
    if not isinstance(periods, Iterable):
        raise TypeError(f"periods={periods!r} are not several; write for example (1, 2, 4, 8)")
    periods = tuple(periods)
    if any(isinstance(p, int) and p >= 2**63 for p in periods):
        raise ValueError(f"one of {len(periods)} periods is 2^63 or more, which no clock reaches")
    whole = all(isinstance(p, int) and not isinstance(p, bool) and p > 0 for p in periods)
    if not periods or not whole or any(a >= b for a, b in pairwise(periods)):
        raise ValueError(f"periods={periods} are not ascending whole numbers from 1")
    if isinstance(hidden_size, int) and hidden_size > 0 and hidden_size % len(periods):
        raise ValueError(
            f"hidden_size={hidden_size} is not divisible by the {len(periods)} periods {periods}"
        )
    options = {"periods": None if periods == PERIODS else periods}
    return Choice("cwrnn", hidden_size, bias, init, options, periods=periods)


def choose_gdu(
    groups: GroupsLike | Sequence[GroupsLike],
    bias: bool,
    init: Init,
    learn_delta: bool,
    num_layers: int = 1,
) -> Choice:
    """GDU: the groups say how many units there are."""
    each = groups_of_layers(groups, num_layers)
    options = {"learn_delta": learn_delta or None}
    return Choice(
        "gdu", each[0].units, bias, init, options, groups=each, learn_delta=bool(learn_delta)
    )


def groups_of_layers(
    groups: GroupsLike | Sequence[GroupsLike], num_layers: int
) -> tuple[Groups, ...]:
    """Return the groups of each layer.

    A list whose entries are strings, ``Groups`` or lists has one entry a layer; anything else,
    a list of ``(size, count[, delta])`` tuples included, describes every layer.

    >>> groups_of_layers([(2, 35), (10, 3)], 1)
    (Groups('2x35+10x3'),)
    >>> groups_of_layers(["10x10", "5x20"], 2)
    (Groups('10x10'), Groups('5x20'))
    """
    check_layers(num_layers)
    if not isinstance(groups, (list, tuple)) or any(isinstance(entry, tuple) for entry in groups):
        return (Groups(groups),) * num_layers  # type: ignore[arg-type]
    if len(groups) != num_layers:
        raise GroupsError(f"{len(groups)} groups were given for num_layers={num_layers}")
    each = tuple(map(Groups, groups))
    for layer, entry in enumerate(each):
        if entry.units != each[0].units:
            raise GroupsError(
                f"layer {layer} has {entry.units} units in '{entry}', "
                f"layer 0 has {each[0].units} in '{each[0]}'; every layer needs the same number"
            )
    return each


def describe_groups(each: Sequence[Groups]) -> str:
    """Return the groups of all layers as code: one string where all are equal, else a list."""
    texts = [str(groups) for groups in each]
    return repr(texts[0] if len(set(texts)) == 1 else texts)
