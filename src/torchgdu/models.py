"""A recurrent stack and its read-out: what the paper trains."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchgdu import layers
from torchgdu.layers import Checkpoint, Device, GroupsLike, Init, draw

CELLS: dict[str, Callable[..., layers.Layer]] = {
    kind.__name__.lower(): kind
    for kind in (
        layers.SRN, layers.LSTM, layers.GRU, layers.UGRNN, layers.MGU, layers.CWRNN, layers.GDU,
    )
}  # fmt: skip
"""The cells by the names that the command line uses."""


class SequenceModel(nn.Module):
    """A recurrent layer ``rnn`` and a linear ``readout`` (Xavier-uniform, bias 0) on its output.

    Args:
        cell: "srn", "lstm", "gru", "ugrnn", "mgu", "cwrnn" or "gdu".
        input_size: I.
        output_size: O.
        hidden: the number of units, for every cell but the GDU.
        groups: the groups of the GDU.
        layers: how many recurrent layers are stacked.
        dropout: between the layers, in training.
        readout: answer after each sequence's "last" step or after "every" one.
        init: see ``cells.Recurrent.reset_parameters``.
        learn_delta, forget_bias, keep_bias, reset, gamma, periods: options of single cells, left
            out (None) where the cell has no such option.
        checkpoint: see ``functional.checkpoint_interval``.
        device: where the parameters are.
        dtype: their type.

    Shapes: input [T, B, I] or a ``PackedSequence``; result [B, O] for "last" (a packed sequence's
    own last step, in the order the sequences were packed in), else [T, B, O] or packed [N, O].

    >>> model = SequenceModel("gdu", 2, 1, groups="10x10")
    >>> model(torch.randn(30, 20, 2)).shape, sum(p.numel() for p in model.parameters())
    (torch.Size([20, 1]), 20701)
    """

    def __init__(
        self,
        cell: str,
        input_size: int,
        output_size: int,
        *,
        hidden: int | None = None,
        groups: GroupsLike | Sequence[GroupsLike] | None = None,
        layers: int = 1,
        dropout: float = 0.0,
        readout: Literal["last", "every"] = "last",
        init: Init = "separate",
        learn_delta: bool = False,
        forget_bias: float | None = None,
        keep_bias: float | None = None,
        reset: Literal["before", "after"] | None = None,
        gamma: Literal["alpha", "beta"] | None = None,
        periods: Iterable[int] | None = None,
        checkpoint: Checkpoint = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the layer first, then the read-out."""
        super().__init__()
        if cell not in CELLS:
            raise ValueError(f"cell={cell!r} is not one of {', '.join(CELLS)}")
        if readout not in ("last", "every"):
            raise ValueError(f"readout={readout!r} is not 'last' or 'every'")
        if (groups is None) == (cell == "gdu") or (hidden is None) == (cell != "gdu"):
            raise ValueError(f"cell={cell!r} takes {'groups' if cell == 'gdu' else 'hidden'} alone")
        options = {
            "learn_delta": learn_delta or None, "forget_bias": forget_bias, "keep_bias": keep_bias,
            "reset": reset, "gamma": gamma, "periods": periods,
        }  # fmt: skip
        given = {name: value for name, value in options.items() if value is not None}
        for name, value in given.items():
            if name not in inspect.signature(CELLS[cell]).parameters:
                raise ValueError(f"{name}={value!r} is not an option of cell={cell!r}")
        self.every = readout == "every"
        self.rnn = CELLS[cell](
            input_size, hidden if groups is None else groups, layers, dropout=dropout, init=init,
            checkpoint=checkpoint, device=device, dtype=dtype, **given,
        )  # fmt: skip
        # On the meta device nn.Linear draws no numbers, which would be others on other devices.
        self.readout = nn.Linear(self.rnn.hidden_size, output_size, device="meta", dtype=dtype)
        self.readout.to_empty(device=next(self.rnn.parameters()).device)
        draw(self.readout.weight, self.rnn.hidden_size, output_size)
        nn.init.zeros_(self.readout.bias)

    def forward(self, input: Tensor | PackedSequence) -> Tensor:
        """Return the read-out, as the class describes."""
        output, hidden = self.rnn(input)
        if not self.every:
            h_n: Tensor = hidden if isinstance(hidden, Tensor) else hidden[0]
            return self.read(h_n[-1])  # not output[-1]: the output then needs no gradient
        return self.read(output.data if isinstance(output, PackedSequence) else output)

    def read(self, state: Tensor) -> Tensor:
        """Return W s + b for ``state`` [..., H]."""
        result: Tensor = self.readout(state)
        return result
