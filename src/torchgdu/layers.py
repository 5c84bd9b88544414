"""The sequence layers: drop-in for ``nn.GRU`` in everything but the names of their parameters.

Each runs ``num_layers`` layers of one cell along time, in one direction or both. The equations are
in ``functional``, the parameters in ``parameters``; what is here is the way ``nn.GRU`` treats
shapes, packed sequences, states and dropout.

Shapes: input [T, B, I], [B, T, I] with ``batch_first``, [T, I] unbatched, or a ``PackedSequence``.
Output likewise with D·H in place of I, D = 2 if bidirectional. States h, c: [L·D, B, H] ([L·D, H]
unbatched); the clock of a CW-RNN: int64 [B], the same for all layers and directions.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from torchgdu import cells, ops, options
from torchgdu.ops import Checkpoint
from torchgdu.options import Choice, GroupsLike, Init
from torchgdu.parameters import (
    AnyHidden,
    Device,
    Hidden,
    Pair,
    Place,
    Recurrent,
    draw,
    hidden,
    parameter_count,
)

__all__ = [
    "CWRNN",
    "GDU",
    "GRU",
    "LSTM",
    "MGU",
    "SRN",
    "UGRNN",
    "Checkpoint",
    "Device",
    "GroupsLike",
    "Init",
    "Layer",
    "draw",
    "parameter_count",
]

AnyInput = TypeVar("AnyInput", Tensor, PackedSequence)
AnyLayer = TypeVar("AnyLayer", bound="Layer")


if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault

    AnyCell = WithDefault("AnyCell", bound=cells.Cell, covariant=True, default=cells.Cell)
else:
    AnyCell = TypeVar("AnyCell")


class Layer(Recurrent, Generic[AnyCell, AnyHidden]):
    """What the seven layers have in common."""

    cell_type: type[AnyCell]

    def __init__(
        self, choice: Choice, input_size: int, num_layers: int, batch_first: bool,
        dropout: float, bidirectional: bool, device: Device, dtype: torch.dtype | None,
        checkpoint: Checkpoint, proj_size: int,
    ) -> None:  # fmt: skip
        """Check the arguments as ``nn.GRU`` does, in its words."""
        options.check_layers(num_layers)
        number = isinstance(dropout, numbers.Number) and not isinstance(dropout, bool)
        if not number or not 0 <= dropout <= 1:
            raise ValueError(
                "dropout should be a number in range [0, 1] representing the probability of an "
                "element being zeroed"
            )
        if dropout > 0 and num_layers == 1:
            warnings.warn(
                "dropout option adds dropout after all but last recurrent layer, so non-zero "
                f"dropout expects num_layers greater than 1, but got dropout={dropout} and "
                f"num_layers={num_layers}",
                stacklevel=3,
            )
        for name, flag in (("bias", choice.bias), ("batch_first", batch_first)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} should be of type bool, got: {type(flag).__name__}")
        if proj_size != 0:
            raise ValueError("proj_size is not supported: it must be 0")
        ops.checkpoint_interval(checkpoint, 1)
        directions = ("", "_reverse") if bidirectional else ("",)
        places = [
            (k, input_size if k == 0 else len(directions) * choice.hidden_size, f"_l{k}{direction}")
            for k in range(num_layers)
            for direction in directions
        ]
        super().__init__(choice, input_size, places, device, dtype)
        self.num_layers = num_layers
        self.bias = choice.bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bool(bidirectional)
        self.proj_size = 0
        self.checkpoint = checkpoint

    def forward(self, input: AnyInput, hx: Hidden | None = None) -> tuple[AnyInput, AnyHidden]:
        """Return the last layer's output at every step and every layer's state after the last.

        Args:
            input: [T, B, I], [B, T, I] with ``batch_first``, [T, I] unbatched, or a
                ``PackedSequence``, sorted or not.
            hx: the initial state, zeros when left out: h [L·D, B, H] ([L·D, H] unbatched); the LSTM
                takes (h, c), the CW-RNN h or (h, clock) with the clock int64 [B] ([] unbatched).

        Returns:
            The output, like the input with D·H in place of I (D = 2 if bidirectional), and the
            state like ``hx``, each sequence's after its own last step.
        """
        if isinstance(input, PackedSequence):
            x, batch_sizes, order, restore = input
            self._check_input(x, 2)
            state = self._state(x, int(batch_sizes[0]), hx, True, len(self._places))
            if order is not None:
                state = _permute(state, order)
            x, state = self._run(x, state, batch_sizes)
            if restore is not None:
                state = _permute(state, restore)
            return PackedSequence(x, batch_sizes, order, restore), hidden(state)
        if input.dim() not in (2, 3):
            raise ValueError(
                f"{type(self).__name__}: Expected input to be 2D or 3D, got {input.dim()}D instead"
            )
        batched = input.dim() == 3
        swap = batched and self.batch_first
        x = input.transpose(0, 1) if swap else input if batched else input.unsqueeze(1)
        self._check_input(x, 3)
        if x.size(0) == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        state = self._state(x, x.size(1), hx, batched, len(self._places))
        x, state = self._run(x, state, None)
        if not batched:
            return x.squeeze(1), hidden([part.squeeze(part.dim() - 2) for part in state])
        return x.transpose(0, 1) if swap else x, hidden(state)

    _scan = staticmethod(ops.scan)
    """What runs along a sequence. ``analysis`` puts in its place, for one layer and a while, what
    does the same and keeps every step."""

    def _run(
        self, x: Tensor, state: ops.State, batch_sizes: Tensor | None
    ) -> tuple[Tensor, ops.State]:
        """Run all layers over ``x`` [T, B, I] or packed [N, I]."""
        finals = []
        outputs: list[Tensor] = []
        for k, place in enumerate(self._places):
            reverse = self.bidirectional and k % 2 == 1
            if not reverse and k > 0:
                x = _join(outputs)
                outputs = []
                if self.dropout and self.training:
                    x = F.dropout(x, self.dropout)
            start = tuple(part[k] if part.dim() == 3 else part for part in state)
            output, final = self._scan(
                self._kind, x, start, *self._weights(place),
                batch_sizes=batch_sizes, reverse=reverse, checkpoint=self.checkpoint,
            )  # fmt: skip
            outputs.append(output)
            finals.append(final)
        parts = zip(*finals, strict=True)
        return _join(outputs), tuple(
            part[0] if part[0].dim() == 1 else torch.stack(part) if len(part) > 1 else part[0][None]
            for part in parts
        )

    def _check_input(self, x: Tensor, dims: int) -> None:
        dtype = self._weight(self._places[0].weight_ih).dtype
        if x.dtype != dtype and not ops.autocasting(x.device.type):
            raise ValueError(
                f"RNN input dtype ({x.dtype}) does not match weight dtype ({dtype}). "
                f"Convert input: input.to({dtype}), or convert model: model.to({x.dtype})"
            )
        if x.dim() != dims:
            raise RuntimeError(f"input must have {dims} dimensions, got {x.dim()}")
        if x.size(-1) != self.input_size:
            raise RuntimeError(
                "input.size(-1) must be equal to input_size. "
                f"Expected {self.input_size}, got {x.size(-1)}"
            )

    def cell(self, layer: int = 0, reverse: bool = False) -> AnyCell:
        """Return the step cell that shares the parameters of one layer and direction."""
        return self.cell_type.sharing(self, self._place(layer, reverse))

    def _place(self, layer: int, reverse: bool) -> Place:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer={layer} is not one of the {self.num_layers} layers from 0")
        if reverse and not self.bidirectional:
            raise IndexError("reverse=True needs bidirectional=True")
        return self._places[layer * (1 + self.bidirectional) + reverse]

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        """The parameters, one list for each layer and direction."""
        return [
            [getattr(self, name) for name in place[1:6] if getattr(self, name) is not None]
            for place in self._places
        ]

    def flatten_parameters(self) -> None:
        """Do nothing; ``nn.GRU`` has it."""

    def extra_repr(self) -> str:
        """Return the arguments that differ from their defaults."""
        defaults = {
            "num_layers": 1,
            "bias": True,
            "batch_first": False,
            "dropout": 0.0,
            "bidirectional": False,
            "checkpoint": None,
        }
        shown = [
            f"{name}={getattr(self, name)!r}"
            for name, default in defaults.items()
            if getattr(self, name) != default
        ]
        return ", ".join([self._options(), *shown])


def _join(outputs: Sequence[Tensor]) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs), -1)


def _permute(state: ops.State, order: Tensor) -> ops.State:
    """Reorder the batch of h and c, [L·D, B, H], or of the clock, [B]."""
    return tuple(part.index_select(1 if part.dim() == 3 else 0, order) for part in state)


class SRN(Layer[cells.SRNCell, Tensor]):
    """Elman network: h_t = tanh(W x_t + U h_{t-1} + b).

    >>> output, h_n = SRN(3, 4)(torch.randn(5, 2, 3))
    """

    cell_type = cells.SRNCell

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False,
        device: Device = None, dtype: torch.dtype | None = None, *, init: Init = "separate",
        checkpoint: Checkpoint = None, proj_size: int = 0,
    ) -> None:  # fmt: skip
        """Make an SRN."""
        super().__init__(
            options.choose_srn(hidden_size, bias, init), input_size, num_layers, batch_first,
            dropout, bidirectional, device, dtype, checkpoint, proj_size,
        )  # fmt: skip


class LSTM(Layer[cells.LSTMCell, Pair]):
    """Long short-term memory: c_t = f ⊙ c_{t-1} + i ⊙ g, h_t = o ⊙ tanh(c_t).

    i, f, o = σ(W x_t + U h_{t-1} + b), g = tanh(W x_t + U h_{t-1} + b); rows (i, f, g, o) as in
    torch, no peepholes. Takes and returns (h, c).

    >>> output, (h_n, c_n) = LSTM(3, 4)(torch.randn(5, 2, 3))
    """

    cell_type = cells.LSTMCell

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False,
        device: Device = None, dtype: torch.dtype | None = None, *,
        forget_bias: float | None = None, init: Init = "separate",
        checkpoint: Checkpoint = None, proj_size: int = 0,
    ) -> None:  # fmt: skip
        """Make an LSTM; the bias of f starts at ``forget_bias``, 1 by default."""
        super().__init__(
            options.choose_lstm(hidden_size, bias, init, forget_bias), input_size, num_layers,
            batch_first, dropout, bidirectional, device, dtype, checkpoint, proj_size,
        )  # fmt: skip

    @classmethod
    def from_torch(cls, lstm: nn.LSTM) -> LSTM:
        """Return the same layer with the weights of a trained ``nn.LSTM``.

        >>> theirs = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
        >>> x = torch.randn(5, 2, 3)
        >>> torch.allclose(LSTM.from_torch(theirs)(x)[0], theirs(x)[0], atol=1e-6)
        True
        """
        if not isinstance(lstm, nn.LSTM):
            raise TypeError(f"from_torch takes an nn.LSTM, got {type(lstm).__name__}")
        if lstm.proj_size:
            raise ValueError(f"proj_size={lstm.proj_size} is not supported")
        return _like(cls, lstm)


class GRU(Layer[cells.GRUCell, Tensor]):
    """Gated recurrent unit: h_t = z ⊙ h_{t-1} + (1 − z) ⊙ n, rows (r, z, n) as in torch.

    r, z = σ(W x_t + U h_{t-1} + b). ``reset="before"`` (the original publication):
    n = tanh(W x_t + U (r ⊙ h_{t-1}) + b). ``reset="after"`` (``nn.GRU``):
    n = tanh(W x_t + b + r ⊙ (U h_{t-1} + b_hn)), with b_hn in ``bias_hn_l0``.

    >>> output, h_n = GRU(3, 4, reset="after")(torch.randn(5, 2, 3))
    """

    cell_type = cells.GRUCell

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False,
        device: Device = None, dtype: torch.dtype | None = None, *,
        reset: Literal["before", "after"] = "before", keep_bias: float | None = None,
        init: Init = "separate", checkpoint: Checkpoint = None, proj_size: int = 0,
    ) -> None:  # fmt: skip
        """Make a GRU; the bias of z starts at ``keep_bias``, 0 by default."""
        super().__init__(
            options.choose_gru(hidden_size, bias, init, reset, keep_bias), input_size, num_layers,
            batch_first, dropout, bidirectional, device, dtype, checkpoint, proj_size,
        )  # fmt: skip

    @classmethod
    def from_torch(cls, gru: nn.GRU) -> GRU:
        """Return the same layer, ``reset="after"``, with the weights of a trained ``nn.GRU``.

        >>> theirs = nn.GRU(3, 4, num_layers=2, bidirectional=True)
        >>> x = torch.randn(5, 2, 3)
        >>> torch.allclose(GRU.from_torch(theirs)(x)[0], theirs(x)[0], atol=1e-6)
        True
        """
        if not isinstance(gru, nn.GRU):
            raise TypeError(f"from_torch takes an nn.GRU, got {type(gru).__name__}")
        return _like(cls, gru, reset="after")


class UGRNN(Layer[cells.UGRNNCell, Tensor]):
    """Update-gate RNN: h_t = (1 − α) ⊙ h_{t-1} + α ⊙ tanh(W x_t + U h_{t-1} + b).

    α = σ(W x_t + U h_{t-1} + b); rows (α, candidate).

    >>> output, h_n = UGRNN(3, 4)(torch.randn(5, 2, 3))
    """

    cell_type = cells.UGRNNCell

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False,
        device: Device = None, dtype: torch.dtype | None = None, *,
        keep_bias: float | None = None, init: Init = "separate",
        checkpoint: Checkpoint = None, proj_size: int = 0,
    ) -> None:  # fmt: skip
        """Make a UGRNN; β = 1 − α starts at σ(``keep_bias``)."""
        super().__init__(
            options.choose_ugrnn(hidden_size, bias, init, keep_bias), input_size, num_layers,
            batch_first, dropout, bidirectional, device, dtype, checkpoint, proj_size,
        )  # fmt: skip


class MGU(Layer[cells.MGUCell, Tensor]):
    """Minimal gated unit: h_t = (1 − f) ⊙ h_{t-1} + f ⊙ tanh(W x_t + U (γ ⊙ h_{t-1}) + b).

    f = σ(W x_t + U h_{t-1} + b); rows (f, candidate). γ = f with ``gamma="alpha"`` (the original
    publication), γ = 1 − f with ``gamma="beta"`` (as the GDU paper writes it).

    >>> output, h_n = MGU(3, 4, gamma="beta")(torch.randn(5, 2, 3))
    """

    cell_type = cells.MGUCell

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False,
        device: Device = None, dtype: torch.dtype | None = None, *,
        gamma: Literal["alpha", "beta"] = "alpha", keep_bias: float | None = None,
        init: Init = "separate", checkpoint: Checkpoint = None, proj_size: int = 0,
    ) -> None:  # fmt: skip
        """Make an MGU; β = 1 − f starts at σ(``keep_bias``)."""
        super().__init__(
            options.choose_mgu(hidden_size, bias, init, gamma, keep_bias), input_size, num_layers,
            batch_first, dropout, bidirectional, device, dtype, checkpoint, proj_size,
        )  # fmt: skip


class CWRNN(Layer[cells.CWRNNCell, Pair]):
    """Clockwork RNN: h_t = tanh(W x_t + U h_{t-1} + b) in the groups whose period divides t.

    The others keep h_{t-1}. The first symbol has t = 0. Group k is the k-th equal slice of the
    units and reads groups of the same or a longer period; the other entries of ``weight_hh`` are 0,
    get no gradient and do not count as parameters. Takes h or (h, clock) and returns (h, clock):
    the clock, int64 [B], is the number of symbols that each sequence has had; a bare h starts at 0.

    >>> output, (h_n, clock) = CWRNN(3, 8, periods=(1, 4))(torch.randn(5, 2, 3))
    >>> clock
    tensor([5, 5])
    """

    cell_type = cells.CWRNNCell

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False,
        device: Device = None, dtype: torch.dtype | None = None, *,
        periods: Iterable[int] = options.PERIODS, init: Init = "separate",
        checkpoint: Checkpoint = None, proj_size: int = 0,
    ) -> None:  # fmt: skip
        """Make a CW-RNN of the given periods, ascending."""
        super().__init__(
            options.choose_cwrnn(hidden_size, bias, init, periods), input_size, num_layers,
            batch_first, dropout, bidirectional, device, dtype, checkpoint, proj_size,
        )  # fmt: skip


class GDU(Layer[cells.GDUCell, Tensor]):
    """Grouped Distributor Unit: h_t = (1 − α) ⊙ h_{t-1} + α ⊙ tanh(W x_t + U h_{t-1} + b).

    α = ζ(W x_t + U h_{t-1} + b; {δ_i, M_i}): in group i of M_i units a softmax distributes the
    constant δ_i (``functional.distribute``); rows (α, candidate). ``groups`` is a string such as
    ``"2x35+10x3"``, a ``Groups``, (size, count[, δ]) tuples, or a list of these, one entry a layer.

    >>> layer = GDU(8, "2x35+10x3", num_layers=2, bidirectional=True, batch_first=True)
    >>> output, h_n = layer(torch.randn(4, 300, 8))
    >>> output.shape, h_n.shape
    (torch.Size([4, 300, 200]), torch.Size([4, 4, 100]))
    """

    cell_type = cells.GDUCell

    def __init__(
        self, input_size: int, groups: GroupsLike | Sequence[GroupsLike], num_layers: int = 1,
        bias: bool = True, batch_first: bool = False, dropout: float = 0.0,
        bidirectional: bool = False, device: Device = None, dtype: torch.dtype | None = None, *,
        learn_delta: bool = False, init: Init = "separate", checkpoint: Checkpoint = None,
        proj_size: int = 0,
    ) -> None:  # fmt: skip
        """Make a GDU; with ``learn_delta`` every group's δ is trained, starting as given."""
        super().__init__(
            options.choose_gdu(groups, bias, init, learn_delta, num_layers), input_size, num_layers,
            batch_first, dropout, bidirectional, device, dtype, checkpoint, proj_size,
        )  # fmt: skip

    def delta(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """Return δ of every group of one layer and direction, [groups].

        >>> GDU(3, "4x2+5x1x0.5").delta()
        tensor([1.0000, 1.0000, 0.5000])
        """
        return self._delta(self._place(layer, reverse))

    @property
    def overwrite_proportion(self) -> tuple[float, ...]:
        """P_α = Σδ / K of each layer and direction, in the order of ``h_n``."""
        return tuple(self._proportion(place) for place in self._places)


def _like(make: type[AnyLayer], theirs: nn.RNNBase, **own: Any) -> AnyLayer:
    """Return a layer with torch's weights; of its two biases ours is the sum, but for GRU's n.

    It is made without numbers, so none are drawn that nobody would see, and its dropout is set
    afterwards: torch has said what there is to say of it.
    """
    like = theirs.weight_ih_l0
    assert isinstance(like, Tensor)
    names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "bidirectional")
    given = {name: getattr(theirs, name) for name in names}
    ours = make(**given, **own, device="meta", dtype=like.dtype).to_empty(device=like.device)
    ours.dropout = float(theirs.dropout)
    for place in ours._places:
        for name in (place.weight_ih, place.weight_hh):
            _fill(ours, name, [getattr(theirs, name)], _trained(theirs, name))
        if ours.bias:
            suffix = place.bias.removeprefix("bias")
            bias_ih, bias_hh = (getattr(theirs, name + suffix) for name in ("bias_ih", "bias_hh"))
            trained = [_trained(theirs, name + suffix) for name in ("bias_ih", "bias_hh")]
            if isinstance(ours, GRU):
                kept, inner = bias_hh.split([2 * ours.hidden_size, ours.hidden_size])
                _fill(ours, place.bias_hn, [inner], trained[1])
                bias_hh = torch.cat([kept, torch.zeros_like(inner)])
            _fill(ours, place.bias, [bias_ih, bias_hh], any(trained))
    return ours.train(theirs.training)


def _trained(theirs: nn.RNNBase, name: str) -> bool:
    """Return whether torch trains this weight, itself or what it is computed from."""
    parameter = theirs._parameters.get(name)
    return parameter is None or parameter.requires_grad


def _fill(ours: Layer, name: str, values: Sequence[Tensor], trained: bool) -> None:
    parameter = ours.get_parameter(name).requires_grad_(trained)
    with torch.no_grad():
        parameter.copy_(sum(values[1:], values[0]))
