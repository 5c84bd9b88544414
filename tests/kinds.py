"""Every kind of layer under one name, and their weights as the oracle takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import torchgdu
from torchgdu.layers import Layer

GROUPS = "2x1+1x2x0.5+4x1x2.5+4x1"
PERIODS = (1, 2, 3)
HIDDEN = 12

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "srn": (torchgdu.SRN, {}),
    "lstm": (torchgdu.LSTM, {}),
    "gru": (torchgdu.GRU, {}),
    "gru_after": (torchgdu.GRU, {"reset": "after"}),
    "ugrnn": (torchgdu.UGRNN, {}),
    "mgu": (torchgdu.MGU, {}),
    "mgu_beta": (torchgdu.MGU, {"gamma": "beta"}),
    "cwrnn": (torchgdu.CWRNN, {"periods": PERIODS}),
    "gdu": (torchgdu.GDU, {}),
    "gdu_learnt": (torchgdu.GDU, {"learn_delta": True}),
}


def build(kind: str, input_size: int = 5, size: Any = None, *args: Any, **options: Any) -> Layer:
    """A layer in float64, its biases filled too, so that nothing is hidden by a zero."""
    make, own = KINDS[kind]
    if size is None:
        size = GROUPS if make is torchgdu.GDU else HIDDEN
    layer: Layer = make(input_size, size, *args, **{"dtype": torch.float64, **own, **options})
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("bias"):
                parameter.uniform_(-0.5, 0.5)
    return layer


def parts(hidden: Any) -> tuple[Tensor, ...]:
    """A state as a tuple, whatever the kind."""
    return (hidden,) if isinstance(hidden, Tensor) else tuple(hidden)


def joined(state: tuple[Tensor, ...]) -> Any:
    return state[0] if len(state) == 1 else state


def weights(layer: torch.nn.Module, suffix: str) -> dict[str, NDArray[Any]]:
    names = ("weight_ih", "weight_hh", "bias", "bias_hn")
    found = {name: getattr(layer, name + suffix, None) for name in names}
    return {
        name: np.asarray(value.detach().numpy())
        for name, value in found.items()
        if value is not None
    }
