from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch

import oracle
import torchgdu


def numpy_highway(layer: Any, x: Any, groups: list[tuple[int, float]] | None) -> Any:
    for k in range(layer.num_layers):
        w, b = (getattr(layer, f"{name}_l{k}").detach().numpy() for name in ("weight", "bias"))
        n = len(x)
        gate = w[:n] @ x + b[:n]
        t = oracle.sigmoid(gate) if groups is None else oracle.distributor(gate, groups)
        x = t * np.tanh(w[n:] @ x + b[n:]) + (1 - t) * x
    return x


@pytest.mark.parametrize(
    ("description", "groups"), [(None, None), ("2x2+4x1x2.5", [(2, 1.0), (2, 1.0), (4, 2.5)])]
)
def test_equals_the_oracle(description: Any, groups: Any) -> None:
    layer = torchgdu.Highway(8, 3, description, torch.tanh, dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64)
    for row, expected in zip(layer(x), x.numpy(), strict=True):
        np.testing.assert_allclose(
            row.detach().numpy(), numpy_highway(layer, expected, groups), atol=1e-12
        )
    assert torch.equal(layer(x[None, :, None])[0, :, 0], layer(x))
    assert torch.autograd.gradcheck(layer, x.requires_grad_())


def test_starts_by_carrying_its_input_on() -> None:
    layer: Any = torchgdu.Highway(6, 2)
    for k in range(2):
        assert getattr(layer, f"bias_l{k}").tolist() == [-1.0] * 6 + [0.0] * 6
    assert torchgdu.Highway(6, gate_bias=-3.0).get_parameter("bias_l0")[0] == -3


def test_any_activation_and_its_parameters() -> None:
    layer = torchgdu.Highway(6, 2, "2x3", torch.nn.PReLU())
    assert "activation.weight" in dict(layer.named_parameters())
    layer(torch.randn(3, 6)).sum().backward()
    assert str(torchgdu.Highway(6, 2, "2x3")) == "Highway(6, num_layers=2, groups='2x3')"
    assert str(torchgdu.Highway(6, 2)) == "Highway(6, num_layers=2)"
    plain = torchgdu.Highway(8, bias=False, activation=torch.tanh)
    assert str(plain) == "Highway(8, activation=tanh, bias=False)"
    assert "(activation): Tanh()" in str(torchgdu.Highway(8, activation=torch.nn.Tanh()))
    assert torchgdu.Highway(6, 2, ["2x3", "3x2"])(torch.zeros(1, 6)).shape == (1, 6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((6, 1, "2x2"), "4 units, size is 6"),
        ((6, 1, "2x"), "'2x'"),
        ((0,), "size must be"),
        ((6, 0), "num_layers must be"),
        ((6, 2, ["2x3"]), "1 groups were given"),
    ],
)
def test_bad_arguments(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        torchgdu.Highway(*arguments)
    with pytest.raises(ValueError, match=r"gate_bias=0\.0 has no effect"):
        torchgdu.Highway(6, groups="2x3", gate_bias=0.0)
    with pytest.raises(RuntimeError, match="Expected 6, got 5"):
        torchgdu.Highway(6)(torch.zeros(2, 5))


@pytest.mark.parametrize("groups", [None, "2x2+4x1x2.5"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_keeps_the_dtype_of_its_input(groups: Any, dtype: torch.dtype) -> None:
    layer = torchgdu.Highway(8, 3, groups, torch.tanh)
    x = torch.randn(5, 8)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x), expected, atol=0.03, rtol=0)
    output = layer.to(dtype)(x.to(dtype))
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, atol=0.03, rtol=0)
    output.sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("groups", [None, "2x2+4x1x2.5"])
def test_initial_values_saving_and_copying(groups: Any) -> None:
    layer = torchgdu.Highway(200, 2, None if groups is None else "10x20")
    bound = (6 / 400) ** 0.5
    for k in range(2):
        for gate in layer.get_parameter(f"weight_l{k}").detach().split(200):
            assert 0.99 * bound < gate.abs().max() <= bound
            assert abs(gate.std() / (bound / 3**0.5) - 1) < 0.03
    layer = torchgdu.Highway(8, 2, groups, dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    other = torchgdu.Highway(8, 2, groups, dtype=torch.float64)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(torch.load(stream, weights_only=True))
    assert torch.equal(other(x), layer(x))
    again = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(again, layer(x))
