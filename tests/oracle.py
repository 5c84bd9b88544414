"""A second implementation in numpy, float64, written from the equations one unit group at a time.

It shares nothing with the package: no torch, no code, other loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def sigmoid(v: Array) -> Array:
    return np.where(v >= 0, 1 / (1 + np.exp(-np.abs(v))), 1 - 1 / (1 + np.exp(-np.abs(v))))


def distributor(v: Array, groups: Sequence[tuple[int, float]]) -> Array:
    """α for one vector of logits; ``groups`` are (M, δ) in the order of the units."""
    alpha, at = np.empty_like(v), 0
    for m, delta in groups:
        part = v[at : at + m]
        e = np.exp(part - part.max())
        d = e / e.sum()
        if delta <= 1:
            alpha[at : at + m] = delta * d
        else:
            alpha[at : at + m] = (m - delta) / (m - 1) * d + (delta - 1) / (m - 1)
        at += m
    assert at == len(v)
    return alpha


def run(
    cell: str,
    x: Array,
    weights: Mapping[str, Array],
    h: Array,
    c: Array | None = None,
    *,
    groups: Sequence[tuple[int, float]] = (),
    periods: Sequence[int] = (),
    clock: int = 0,
) -> tuple[Array, Array, Array | None, Array]:
    """One sequence x [T, I] from h [H]: outputs [T, H], last h, last c, α at every step [T, H]."""
    n = len(h)

    def affine(row: int, inputs: Array, state: Array) -> Array:
        rows = slice(row * n, (row + 1) * n)
        result: Array = weights["weight_ih"][rows] @ inputs + weights["weight_hh"][rows] @ state
        return result + weights["bias"][rows] if "bias" in weights else result

    outputs, alphas = [], []
    alpha: Array
    for t, symbol in enumerate(x):
        if cell == "srn":
            alpha = np.ones(n)
            h = np.tanh(affine(0, symbol, h))
        elif cell == "cwrnn":
            size = n // len(periods)
            old, h, alpha = h, h.copy(), np.zeros(n)
            for k, period in enumerate(periods):
                if (clock + t) % period == 0:
                    mine = slice(k * size, (k + 1) * size)
                    seen = old.copy()
                    seen[: k * size] = 0  # slower groups do not read faster ones
                    h[mine] = np.tanh(affine(0, symbol, seen)[mine])
                    alpha[mine] = 1
        elif cell == "lstm":
            assert c is not None
            i, f, o = (sigmoid(affine(row, symbol, h)) for row in (0, 1, 3))
            c = f * c + i * np.tanh(affine(2, symbol, h))
            h, alpha = o * np.tanh(c), i
        elif cell in ("gru", "gru_after"):
            r, z = sigmoid(affine(0, symbol, h)), sigmoid(affine(1, symbol, h))
            if cell == "gru":
                candidate = np.tanh(affine(2, symbol, r * h))
            else:
                product = weights["weight_hh"][2 * n :] @ h + weights.get("bias_hn", 0)
                candidate = np.tanh(affine(2, symbol, np.zeros(n)) + r * product)
            h, alpha = z * h + (1 - z) * candidate, 1 - z
        elif cell in ("mgu", "mgu_beta"):
            f = sigmoid(affine(0, symbol, h))
            gamma = f if cell == "mgu" else 1 - f
            h, alpha = (1 - f) * h + f * np.tanh(affine(1, symbol, gamma * h)), f
        else:
            gate = affine(0, symbol, h)
            alpha = sigmoid(gate) if cell == "ugrnn" else distributor(gate, groups)
            h = (1 - alpha) * h + alpha * np.tanh(affine(1, symbol, h))
        outputs.append(h)
        alphas.append(alpha)
    return np.array(outputs), h, c, np.array(alphas)
