"""The step cells: one step of a recurrence at a time, in the words of ``nn.GRUCell``.

The equations are in ``functional``, the parameters in ``parameters``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from torchgdu import ops, options
from torchgdu.options import Choice, GroupsLike, Init
from torchgdu.parameters import AnyHidden, Device, Hidden, Pair, Place, Recurrent, hidden

Own = TypeVar("Own", bound="Cell")


class Cell(Recurrent, Generic[AnyHidden]):
    """One step of a cell at a time; parameters are named as in a layer, without the suffix.

    Shapes: input [B, I] or [I]; h, c [B, H] or [H]; clock int64 [B] or []; all results like these.
    """

    def __init__(
        self, choice: Choice, input_size: int, device: Device, dtype: torch.dtype | None
    ) -> None:
        """Make the one place, without a suffix."""
        super().__init__(choice, input_size, [(0, input_size, "")], device, dtype)

    @classmethod
    def sharing(cls: type[Own], layer: Recurrent, place: Place) -> Own:
        """Return a cell whose parameters are those of ``layer`` at ``place``."""
        shared = {
            name: getattr(layer, full)
            for name, full in zip(Place._fields[1:6], place[1:6], strict=True)
        }
        for name, value in shared.items():
            if not isinstance(value, nn.Parameter | None):
                raise TypeError(f"a parametrized {name} cannot be shared with a cell")
        groups = layer._choice.groups[place.layer : place.layer + 1]
        cell = cls.__new__(cls)
        weight = shared["weight_ih"]
        Cell.__init__(
            cell, replace(layer._choice, groups=groups), weight.size(1), "meta", weight.dtype
        )
        for name, value in shared.items():
            setattr(cell, name, value)
        cell._place_constants()
        return cell

    def forward(self, input: Tensor, hx: Hidden | None = None) -> AnyHidden:
        """Return the next state, from ``hx`` or from zeros.

        Shapes: input [B, I] or [I]; h, c [B, H] or [H]; clock int64 [B] or []. The LSTM takes and
        returns (h, c); the CW-RNN takes h or (h, clock) and returns (h, clock).
        """
        if input.dim() not in (1, 2):
            raise ValueError(
                f"{type(self).__name__}: Expected input to be 1D or 2D, got {input.dim()}D instead"
            )
        if input.size(-1) != self.input_size:
            raise RuntimeError(
                f"input has inconsistent input_size: got {input.size(-1)}, "
                f"expected {self.input_size}"
            )
        dtype = getattr(self, self._places[0].weight_ih).dtype
        if input.dtype != dtype and not ops.autocasting(input.device.type):
            raise RuntimeError(
                f"input and weights must have the same dtype, but got {input.dtype} and {dtype}"
            )
        batched = input.dim() == 2
        x = input if batched else input.unsqueeze(0)
        state = self._state(x, x.size(0), hx, batched)
        new = ops.step(self._kind, x, state, *self._weights(self._places[0]))
        if not batched:
            new = tuple(part.squeeze(0) for part in new)
        result: AnyHidden = hidden(new)
        return result

    def extra_repr(self) -> str:
        """Return the arguments that differ from their defaults."""
        return self._options() + ("" if self._choice.bias else ", bias=False")


class SRNCell(Cell[Tensor]):
    """One step of an Elman network: h' = tanh(W x + U h + b).

    >>> SRNCell(3, 4)(torch.randn(2, 3)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, init: Init = "separate",
    ) -> None:  # fmt: skip
        """Make an SRN cell."""
        super().__init__(options.choose_srn(hidden_size, bias, init), input_size, device, dtype)


class LSTMCell(Cell[Pair]):
    """One step of an LSTM: c' = f ⊙ c + i ⊙ g, h' = o ⊙ tanh(c'); takes and returns (h, c).

    i, f, o = σ(W x + U h + b) and g = tanh(W x + U h + b), rows (i, f, g, o) as in torch.

    >>> h, c = LSTMCell(3, 4)(torch.randn(2, 3))
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, forget_bias: float | None = None,
        init: Init = "separate",
    ) -> None:  # fmt: skip
        """Make an LSTM cell; the bias of f starts at ``forget_bias``, 1 by default."""
        choice = options.choose_lstm(hidden_size, bias, init, forget_bias)
        super().__init__(choice, input_size, device, dtype)


class GRUCell(Cell[Tensor]):
    """One step of a GRU: h' = z ⊙ h + (1 − z) ⊙ n, rows (r, z, n).

    n = tanh(W x + U (r ⊙ h) + b), or W x + b + r ⊙ (U h + b_hn) inside with ``reset="after"``.

    >>> GRUCell(3, 4, reset="after")(torch.randn(2, 3)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, reset: Literal["before", "after"] = "before",
        keep_bias: float | None = None, init: Init = "separate",
    ) -> None:  # fmt: skip
        """Make a GRU cell; the bias of z starts at ``keep_bias``, 0 by default."""
        choice = options.choose_gru(hidden_size, bias, init, reset, keep_bias)
        super().__init__(choice, input_size, device, dtype)


class UGRNNCell(Cell[Tensor]):
    """One step of a UGRNN: h' = (1 − α) ⊙ h + α ⊙ tanh(W x + U h + b), α = σ(W x + U h + b).

    >>> UGRNNCell(3, 4)(torch.randn(2, 3)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, keep_bias: float | None = None,
        init: Init = "separate",
    ) -> None:  # fmt: skip
        """Make a UGRNN cell; β = 1 − α starts at σ(``keep_bias``)."""
        super().__init__(
            options.choose_ugrnn(hidden_size, bias, init, keep_bias), input_size, device, dtype
        )


class MGUCell(Cell[Tensor]):
    """One step of an MGU: h' = (1 − f) ⊙ h + f ⊙ tanh(W x + U (γ ⊙ h) + b), f = σ(W x + U h + b).

    γ = f with ``gamma="alpha"`` (the original publication), 1 − f with ``"beta"`` (the GDU paper).

    >>> MGUCell(3, 4, gamma="beta")(torch.randn(2, 3)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, gamma: Literal["alpha", "beta"] = "alpha",
        keep_bias: float | None = None, init: Init = "separate",
    ) -> None:  # fmt: skip
        """Make an MGU cell; β = 1 − f starts at σ(``keep_bias``)."""
        choice = options.choose_mgu(hidden_size, bias, init, gamma, keep_bias)
        super().__init__(choice, input_size, device, dtype)


class CWRNNCell(Cell[Pair]):
    """One step of a clockwork RNN; takes h or (h, clock), returns (h, clock + 1).

    Group k is the k-th equal slice of the units. It becomes tanh(W x + U h + b) when its period
    divides the clock, and stays otherwise. It reads groups of the same or a longer period.

    >>> h, clock = CWRNNCell(3, 8, periods=(1, 4))(torch.randn(2, 3))
    >>> clock
    tensor([1, 1])
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, periods: Iterable[int] = options.PERIODS,
        init: Init = "separate",
    ) -> None:  # fmt: skip
        """Make a CW-RNN cell of the given periods, ascending."""
        super().__init__(
            options.choose_cwrnn(hidden_size, bias, init, periods), input_size, device, dtype
        )


class GDUCell(Cell[Tensor]):
    """One step of a Grouped Distributor Unit: h' = (1 − α) ⊙ h + α ⊙ tanh(W x + U h + b).

    α = ζ(W x + U h + b; {δ_i, M_i}), the distributor (``functional.distribute``): in each group it
    sums to δ_i.

    >>> GDUCell(3, "5x2")(torch.randn(2, 3)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self, input_size: int, groups: GroupsLike, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, learn_delta: bool = False, init: Init = "separate",
    ) -> None:  # fmt: skip
        """Make a GDU cell; with ``learn_delta`` every group's δ is trained, starting as given."""
        super().__init__(
            options.choose_gdu(groups, bias, init, learn_delta), input_size, device, dtype
        )

    def delta(self) -> Tensor:
        """Return δ of every group, [groups]."""
        return self._delta(self._places[0])

    @property
    def overwrite_proportion(self) -> float:
        """P_α = Σδ / K."""
        return self._proportion(self._places[0])
