"""The layers against the oracle in numpy, against torch.nn, and against themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence
from typing_extensions import assert_type  # which torch needs and Python has from 3.11 on

import oracle
import torchgdu
from kinds import GROUPS, HIDDEN, KINDS, PERIODS, build, joined, parts, weights
from torchgdu import functional
from torchgdu.cells import Cell
from torchgdu.layers import Layer

every_kind = pytest.mark.parametrize("kind", KINDS)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def state(kind: str, layers: int, batch: int, clock: int = 0) -> tuple[Tensor, ...]:
    h = torch.randn(layers, batch, HIDDEN, dtype=torch.float64)
    if kind == "lstm":
        return h, torch.randn_like(h)
    return (h, torch.arange(batch) + clock) if kind == "cwrnn" else (h,)


# Values ------------------------------------------------------------------------------------------

groups_strategy = st.lists(
    st.integers(1, 5).flatmap(
        lambda m: st.tuples(st.just(m), st.integers(1, 3), st.floats(0.01 * m, 0.99 * m))
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150)
@given(
    kind=st.sampled_from([kind for kind in KINDS if kind != "gdu_learnt"]),
    description=groups_strategy,
    inputs=st.integers(1, 4),
    steps=st.integers(1, 64),
    batch=st.integers(1, 3),
    periods=st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True).map(sorted),
    bias=st.booleans(),
    reverse=st.booleans(),
    start=st.booleans(),
    clock=st.integers(0, 20),
    seed=st.integers(0, 2**31),
)
def test_equals_the_oracle(
    kind: str, description: list[Any], inputs: int, steps: int, batch: int, periods: list[int],
    bias: bool, reverse: bool, start: bool, clock: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    options: dict[str, Any] = {"bias": bias, "bidirectional": reverse}
    size: Any = description
    if kind != "gdu":
        size = len(periods) * (1 + seed % 3)
    if kind == "cwrnn":
        options["periods"] = periods
    layer = build(kind, inputs, size, **options)
    n = layer.hidden_size
    x = torch.randn(steps, batch, inputs, dtype=torch.float64)
    h = torch.randn(1 + reverse, batch, n, dtype=torch.float64)
    other = {"lstm": torch.randn_like(h), "cwrnn": torch.full((batch,), clock)}.get(kind)
    hx = None if not start else h if other is None else (h, other)
    output, hidden = layer(x, hx)
    groups = [(m, d) for m, count, d in description for _ in range(count)]
    for direction in range(1 + reverse):
        suffix = "_l0_reverse" if direction else "_l0"
        for b in range(batch):
            sequence = x[:, b].flip(0) if direction else x[:, b]
            zeros = np.zeros(n)
            expected, last, cell, _ = oracle.run(
                kind, sequence.numpy(), weights(layer, suffix),
                h[direction, b].numpy() if start else zeros,
                (other[direction, b].numpy() if other is not None and start else zeros)
                if kind == "lstm" else None,
                groups=groups, periods=periods, clock=clock if start else 0,
            )  # fmt: skip
            ours = output[:, b, direction * n : (direction + 1) * n]
            close(ours.flip(0) if direction else ours, torch.from_numpy(expected))
            close(parts(hidden)[0][direction, b], torch.from_numpy(last))
            if cell is not None:
                close(parts(hidden)[1][direction, b], torch.from_numpy(cell))
    if kind == "cwrnn":
        assert hidden[1].tolist() == [(clock if start else 0) + steps] * batch


def copied(layer: nn.RNNBase) -> torchgdu.LSTM | torchgdu.GRU:
    return (
        torchgdu.LSTM.from_torch(layer)
        if isinstance(layer, nn.LSTM)
        else torchgdu.GRU.from_torch(layer)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("form", ["padded", "packed", "unsorted"])
def test_equals_torch_in_values_and_gradients(make: Any, form: str) -> None:
    theirs = make(4, 6, num_layers=2, bidirectional=True, dtype=torch.float64)
    ours = copied(theirs)
    x = torch.randn(9, 3, 4, dtype=torch.float64)
    h = tuple(torch.randn(4, 3, 6, dtype=torch.float64) for _ in range(1 + (make is nn.LSTM)))
    lengths = torch.tensor([9, 6, 2] if form == "packed" else [2, 9, 6])

    def run(layer: Any) -> tuple[list[Tensor], list[Tensor]]:
        leaves = [value.clone().requires_grad_() for value in (x, *h)]
        input: Any = leaves[0]
        if form != "padded":
            input = pack_padded_sequence(input, lengths, enforce_sorted=form == "packed")
        output, hidden = layer(input, joined(tuple(leaves[1:])))
        data = output.data if isinstance(output, PackedSequence) else output
        loss = (data.sin() * torch.arange(12)).sum() + sum(v.cos().sum() for v in parts(hidden))
        loss.backward()
        grads = [leaf.grad for leaf in leaves] + [
            getattr(layer, f"weight_{which}_l{k}{d}").grad
            for which in ("ih", "hh") for k in (0, 1) for d in ("", "_reverse")
        ]  # fmt: skip
        bias = "bias_ih" if layer is theirs else "bias"
        grads += [getattr(layer, f"{bias}_l{k}{d}").grad for k in (0, 1) for d in ("", "_reverse")]
        return [data, *parts(hidden)], grads

    for mine, expected in zip(run(ours), run(theirs), strict=True):
        for a, b in zip(mine, expected, strict=True):
            close(a, b)


# Gradients ---------------------------------------------------------------------------------------


@every_kind
def test_gradients_are_the_derivatives(kind: str) -> None:
    size = {"gdu": "2x1+1x1x0.4+3x1x1.7", "gdu_learnt": "2x1x0.7+1x1x0.4+3x1x1.7"}.get(kind, 6)
    layer = build(kind, 2, size)
    names = [name for name, _ in layer.named_parameters()]
    start = [v.requires_grad_() for v in (torch.randn(1, 2, 6, dtype=torch.float64),) * 1]
    if kind == "lstm":
        start.append(torch.randn(1, 2, 6, dtype=torch.float64, requires_grad=True))
    x = torch.randn(4, 2, 2, dtype=torch.float64, requires_grad=True)
    values = [value.detach().clone().requires_grad_() for value in layer.parameters()]

    def run(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        hx = joined(rest[: len(start)])
        swap = dict(zip(names, rest[len(start) :], strict=True))
        output, hidden = torch.func.functional_call(layer, swap, (x, hx))
        return output, *(part for part in parts(hidden) if part.is_floating_point())

    inputs = (x, *start, *values)
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs, atol=1e-4)


def test_masked_weights_get_no_gradient() -> None:
    layer = build("cwrnn", 2)
    layer(torch.randn(7, 2, 2, dtype=torch.float64))[0].sum().backward()
    weight = layer.get_parameter("weight_hh_l0")
    size = HIDDEN // len(PERIODS)
    assert weight.grad is not None
    for k in range(len(PERIODS)):
        faster = weight[k * size : (k + 1) * size, : k * size]
        assert not faster.any()
        assert not weight.grad[k * size : (k + 1) * size, : k * size].any()
    full = sum(p.numel() for p in layer.parameters())
    assert torchgdu.parameter_count(layer) == full - 3 * size * size


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "output changed in place": lambda output, h: torch.relu_(output.mul_(2)).sin().sum(),
    "state changed in place": lambda output, h: h.mul_(3).sin().sum() + output.cos().sum(),
    "state alone": lambda output, h: h.sin().sum(),
    "last output alone": lambda output, h: output[-1].sin().sum(),
    "first output alone": lambda output, h: output[0].sin().sum(),
}


@every_kind
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_whatever_is_used_of_the_result(kind: str, loss: str) -> None:
    """Against the plain loop on copies that nothing else can touch."""
    layer = build(kind, 5, None, 2, bidirectional=True)
    x = torch.randn(6, 3, 5, dtype=torch.float64).transpose(0, 1).contiguous().transpose(0, 1)
    start = torch.randn(1, 1, HIDDEN, dtype=torch.float64, requires_grad=True)

    def gradients(keep: bool) -> tuple[Tensor, ...]:
        input = x.detach().requires_grad_()
        h: Any = start.expand(4, 3, HIDDEN)  # no memory of its own
        output, hidden = layer(input, (h, h.sin()) if kind == "lstm" else h)
        values = (output, parts(hidden)[0])
        value = LOSSES[loss](*(v.clone() if keep else v for v in values))
        wanted = [input, start, *layer.parameters()]
        return torch.autograd.grad(value, wanted, materialize_grads=True)

    found = gradients(keep=False)
    with torchgdu.use_backend("reference"):
        expected = gradients(keep=True)
    for a, b in zip(found, expected, strict=True):
        close(a, b)


@every_kind
@pytest.mark.parametrize("packed", [False, True])
def test_an_output_of_one_direction_cannot_be_changed_in_place(kind: str, packed: bool) -> None:
    """Two directions are copied together above; one is what backward reads, and torch says so."""
    layer = build(kind, 5, None, 2)
    x: Any = torch.randn(6, 3, 5, dtype=torch.float64)
    if packed:
        x = pack_padded_sequence(x, torch.tensor([6, 4, 1]))

    def gradients(change: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        output, _ = layer(x)
        output = output.data if isinstance(output, PackedSequence) else output
        return torch.autograd.grad(change(output).sin().sum(), list(layer.parameters()))

    with torchgdu.use_backend("engine"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(lambda output: F.relu(output, inplace=True))
        found = gradients(F.relu)
        again = gradients(lambda output: F.relu(output.clone(), inplace=True))
    with torchgdu.use_backend("reference"):
        expected = gradients(F.relu)
    for a, b, c in zip(found, again, expected, strict=True):
        close(a, c)
        close(b, c)


@every_kind
def test_what_is_changed_between_forward_and_backward_is_an_error_as_in_torch(kind: str) -> None:
    x = torch.randn(6, 3, 5, dtype=torch.float64)
    for layer in (nn.GRU(5, HIDDEN, dtype=torch.float64), build(kind)):
        output, _ = layer(x)
        with torch.no_grad():
            layer.get_parameter("weight_hh_l0").add_(1.0)
        if kind == "cwrnn" and not isinstance(layer, nn.GRU):
            continue  # backward holds a copy of its own: the masked one
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


# The distributor in the layer --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gdu", "gdu_learnt"])
def test_every_group_distributes_its_delta_at_every_step(kind: str) -> None:
    layer: Any = build(kind)
    extra = functional.spread(layer.delta(), torchgdu.Groups(GROUPS).sizes)
    h: functional.State = (torch.randn(3, HIDDEN, dtype=torch.float64),)
    for _ in range(50):
        x = 10 * torch.randn(3, 5, dtype=torch.float64)
        step = functional.step(
            "gdu", x, h, layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_l0, extra
        )
        sums = torch.stack(
            [part.sum(-1) for part in step.alpha.split(list(torchgdu.Groups(GROUPS).sizes), -1)], -1
        )
        close(sums, layer.delta().expand(3, -1), 1e-6)
        close(step.alpha.mean(-1), torch.full((3,), layer.overwrite_proportion[0]).double(), 1e-6)
        assert torch.equal(step.beta, 1 - step.alpha)
        h = step.state


# The nn.GRU contract -----------------------------------------------------------------------------


@every_kind
def test_packed_equals_each_sequence_by_itself(kind: str) -> None:
    layer = build(kind, 5, None, 2, bidirectional=True)
    lengths = [3, 7, 1, 7, 4]
    sequences = [torch.randn(n, 5, dtype=torch.float64) for n in lengths]
    start = state(kind, 4, len(lengths), clock=3)
    packed = pack_sequence(sequences, enforce_sorted=False)
    output, hidden = layer(packed, joined(start))
    padded, _ = nn.utils.rnn.pad_packed_sequence(output)
    for b, sequence in enumerate(sequences):
        alone = tuple(v[:, b] if v.dim() == 3 else v[b] for v in start)
        expected, last = layer(sequence, joined(alone))
        close(padded[: lengths[b], b], expected)
        for mine, theirs in zip(parts(hidden), parts(last), strict=True):
            close(mine[:, b] if mine.dim() == 3 else mine[b], theirs)
    assert output.unsorted_indices is packed.unsorted_indices


@every_kind
def test_sorted_and_unsorted_packing_agree(kind: str) -> None:
    layer = build(kind)
    sequences = [torch.randn(n, 5, dtype=torch.float64) for n in (6, 4, 1)]
    one, last = layer(pack_sequence(sequences))
    two, last_two = layer(pack_sequence(sequences, enforce_sorted=False))
    close(one.data, two.data)
    for a, b in zip(parts(last), parts(last_two), strict=True):
        close(a, b)


@every_kind
def test_reverse_is_the_flipped_input(kind: str) -> None:
    both = build(kind, bidirectional=True)
    one = build(kind)
    one.load_state_dict(
        {
            name.removesuffix("_reverse"): value
            for name, value in both.state_dict().items()
            if name.endswith("_reverse") or name == "configuration"
        }
    )
    x = torch.randn(8, 3, 5, dtype=torch.float64)
    output, hidden = both(x)
    expected, last = one(x.flip(0))
    close(output[..., HIDDEN:], expected.flip(0))
    close(parts(hidden)[0][1], parts(last)[0][0])


@every_kind
def test_batch_first_is_the_transposed_input(kind: str) -> None:
    layer = build(kind, batch_first=True)
    plain = build(kind)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(6, 3, 5, dtype=torch.float64)
    start = joined(state(kind, 1, 3))
    output, hidden = layer(x.transpose(0, 1), start)
    expected, last = plain(x, start)
    close(output.transpose(0, 1), expected)
    for a, b in zip(parts(hidden), parts(last), strict=True):
        close(a, b)


@every_kind
def test_chunks_with_carried_state_equal_the_whole(kind: str) -> None:
    layer = build(kind, 5, None, 2)
    x = torch.randn(13, 3, 5, dtype=torch.float64)
    expected, last = layer(x, joined(state(kind, 2, 3)) if kind == "lstm" else None)
    torch.manual_seed(0)
    layer = build(kind, 5, None, 2)
    x = torch.randn(13, 3, 5, dtype=torch.float64)
    hidden: Any = joined(state(kind, 2, 3)) if kind == "lstm" else None
    outputs = []
    for chunk in x.split([1, 5, 4, 3]):
        output, hidden = layer(chunk, hidden)
        outputs.append(output)
    close(torch.cat(outputs), expected)
    for a, b in zip(parts(hidden), parts(last), strict=True):
        close(a, b)


@every_kind
def test_stepping_the_cell_equals_the_layer(kind: str) -> None:
    layer = build(kind, 5, None, 2, bidirectional=True)
    x = torch.randn(9, 3, 5, dtype=torch.float64)
    bottom = build(kind, 5, None, bidirectional=True)
    bottom.load_state_dict(
        {name: v for name, v in layer.state_dict().items() if "_l0" in name}, strict=False
    )
    first, _ = bottom(x)
    output, hidden = layer(x)
    for place, (k, reverse) in enumerate([(0, False), (0, True), (1, False), (1, True)]):
        cell = layer.cell(k, reverse)
        now: Any = None
        outputs: list[Tensor] = []
        sequence = x if k == 0 else first
        for symbol in sequence.flip(0) if reverse else sequence:
            now = cell(symbol, now)
            outputs.append(parts(now)[0])
        close(parts(now)[0], parts(hidden)[0][place])
        if k == 1:
            stacked = torch.stack(outputs)
            half = output[..., HIDDEN:] if reverse else output[..., :HIDDEN]
            close(stacked.flip(0) if reverse else stacked, half)


@every_kind
def test_unbatched_and_empty_batches(kind: str) -> None:
    layer = build(kind, 5, None, 2, bidirectional=True, batch_first=True)
    x = torch.randn(6, 5, dtype=torch.float64)
    start = state(kind, 4, 1)
    output, hidden = layer(x, joined(tuple(v.squeeze(-2 if v.dim() == 3 else 0) for v in start)))
    expected, last = layer(x.unsqueeze(0), joined(start))
    close(output, expected[0])
    for a, b in zip(parts(hidden), parts(last), strict=True):
        close(a, b.squeeze(1 if b.dim() == 3 else 0))
    empty, hidden = layer(torch.zeros(0, 6, 5, dtype=torch.float64))
    theirs, last_of_theirs = nn.GRU(5, HIDDEN, 2, bidirectional=True, batch_first=True)(
        torch.zeros(0, 6, 5)
    )
    assert empty.shape == theirs.shape
    assert parts(hidden)[0].shape == last_of_theirs.shape
    empty.sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name
    assert parts(layer.cell()(torch.zeros(0, 5, dtype=torch.float64)))[0].shape == (0, HIDDEN)


def test_layers_of_different_groups() -> None:
    layer = torchgdu.GDU(3, ["10x2", "4x5x0.5"], num_layers=2)
    assert layer.hidden_size == 20
    assert layer.overwrite_proportion == (0.1, 0.125)
    assert layer.delta(1).tolist() == [0.5] * 5
    for bad, words in [
        (["10x2"], "1 groups were given for num_layers=2"),
        (["10x2", "4x4"], "layer 1 has 16 units"),
        (["10x2", "x4"], "'x4'"),
    ]:
        with pytest.raises(torchgdu.GroupsError, match=words):
            torchgdu.GDU(3, bad, num_layers=2)


def test_dropout_is_between_layers_and_in_training_only() -> None:
    layer: Any = build("gdu", 5, None, 2, dropout=0.5)
    x = torch.randn(6, 4, 5, dtype=torch.float64)
    layer.eval()
    close(layer(x)[0], layer(x)[0], 0)
    layer.train()
    torch.manual_seed(1)
    output, _ = layer(x)
    one: Any = build("gdu")
    two: Any = build("gdu", HIDDEN)
    one.load_state_dict(
        {k: v for k, v in layer.state_dict().items() if "_l1" not in k}
        | {"configuration": one.state_dict()["configuration"]}
    )
    two.load_state_dict(
        {k.replace("_l1", "_l0"): v for k, v in layer.state_dict().items() if "_l0" not in k}
        | {"configuration": two.state_dict()["configuration"]}
    )
    torch.manual_seed(1)
    close(two(torch.nn.functional.dropout(one(x)[0], 0.5))[0], output)


MISTAKES: dict[str, Callable[[Any], object]] = {
    "float input_size": lambda make: make(3.0, 4),
    "no inputs": lambda make: make(0, 4),
    "float hidden_size": lambda make: make(3, 4.0),
    "no units": lambda make: make(3, 0),
    "negative units": lambda make: make(3, -1),
    "no layers": lambda make: make(3, 4, 0),
    "float num_layers": lambda make: make(3, 4, 2.0),
    "text num_layers": lambda make: make(3, 4, "2"),
    "bias": lambda make: make(3, 4, bias=1),
    "batch_first": lambda make: make(3, 4, batch_first="yes"),
    "dropout above 1": lambda make: make(3, 4, 2, dropout=1.5),
    "dropout below 0": lambda make: make(3, 4, 2, dropout=-0.1),
    "dropout True": lambda make: make(3, 4, 2, dropout=True),
    "dropout text": lambda make: make(3, 4, 2, dropout="x"),
    "proj_size": lambda make: make(3, 4, proj_size=2),
    "unknown option": lambda make: make(3, 4, nonsense=1),
    "1-D input": lambda make: make(3, 4)(torch.zeros(3)),
    "4-D input": lambda make: make(3, 4)(torch.zeros(1, 1, 1, 3)),
    "wrong features": lambda make: make(3, 4)(torch.zeros(5, 2, 4)),
    "wrong features unbatched": lambda make: make(3, 4)(torch.zeros(5, 4)),
    "wrong dtype": lambda make: make(3, 4)(torch.zeros(5, 2, 3).double()),
    "no time": lambda make: make(3, 4)(torch.zeros(0, 2, 3)),
    "no time, batch first": lambda make: make(3, 4, batch_first=True)(torch.zeros(2, 0, 3)),
    "hx batch": lambda make: make(3, 4)(torch.zeros(5, 2, 3), torch.zeros(1, 3, 4)),
    "hx layers": lambda make: make(3, 4, 2)(torch.zeros(5, 2, 3), torch.zeros(1, 2, 4)),
    "hx units": lambda make: make(3, 4)(torch.zeros(5, 2, 3), torch.zeros(1, 2, 5)),
    "hx 2-D": lambda make: make(3, 4)(torch.zeros(5, 2, 3), torch.zeros(2, 4)),
    "hx 3-D unbatched": lambda make: make(3, 4)(torch.zeros(5, 3), torch.zeros(1, 1, 4)),
    "hx dtype": lambda make: make(3, 4)(torch.zeros(5, 2, 3), torch.zeros(1, 2, 4).double()),
    "packed 3-D": lambda make: make(3, 4)(pack_sequence([torch.zeros(5, 3, 3)])),
    "packed features": lambda make: make(3, 4)(pack_sequence([torch.zeros(5, 2)])),
    "packed hx": lambda make: make(3, 4)(pack_sequence([torch.zeros(5, 3)]), torch.zeros(1, 2, 4)),
    "no tensor": lambda make: make(3, 4)([1.0, 2.0]),
}


UNCHECKED = ("no inputs", "bias", "batch_first")
"""What ``nn.GRU`` of torch 2.6 lets pass."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_the_error_nn_gru_gives(mistake: str) -> None:
    theirs: type[Exception] | None = None
    try:
        MISTAKES[mistake](nn.GRU)
    except Exception as error:
        theirs = type(error)
    with pytest.raises(theirs or (TypeError, ValueError)) as ours:
        MISTAKES[mistake](torchgdu.GRU)
    assert str(ours.value)
    if theirs is None:
        assert mistake in UNCHECKED
        assert torch.__version__.startswith("2.6.")
    else:
        assert ours.type is theirs


CELL_MISTAKES: dict[str, Callable[[Any], object]] = {
    "float input_size": lambda make: make(3.0, 4),
    "float hidden_size": lambda make: make(3, 4.0),
    "unknown option": lambda make: make(3, 4, num_layers=1),
    "0-D input": lambda make: make(3, 4)(torch.tensor(1.0)),
    "3-D input": lambda make: make(3, 4)(torch.zeros(1, 1, 3)),
    "wrong features": lambda make: make(3, 4)(torch.zeros(2, 4)),
    "wider dtype": lambda make: make(3, 4)(torch.zeros(2, 3).double()),
    "half precision": lambda make: make(3, 4)(torch.zeros(2, 3).bfloat16()),
    "whole numbers": lambda make: make(3, 4)(torch.zeros(2, 3).long()),
    "hx batch": lambda make: make(3, 4)(torch.zeros(2, 3), torch.zeros(3, 4)),
    "hx units": lambda make: make(3, 4)(torch.zeros(2, 3), torch.zeros(2, 5)),
    "hx 1-D": lambda make: make(3, 4)(torch.zeros(2, 3), torch.zeros(4)),
    "hx 2-D unbatched": lambda make: make(3, 4)(torch.zeros(3), torch.zeros(1, 4)),
    "hx dtype": lambda make: make(3, 4)(torch.zeros(2, 3), torch.zeros(2, 4).double()),
}


@pytest.mark.parametrize("mistake", CELL_MISTAKES)
def test_mistakes_get_the_error_nn_gru_cell_gives(mistake: str) -> None:
    with pytest.raises(Exception) as theirs:
        CELL_MISTAKES[mistake](nn.GRUCell)
    with pytest.raises(Exception) as ours:
        CELL_MISTAKES[mistake](torchgdu.GRUCell)
    assert ours.type is theirs.type
    assert str(ours.value)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_clock_is_whole_numbers_whatever_the_precision(autocast: bool) -> None:
    layer = torchgdu.CWRNN(3, 4, periods=(1, 2))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, hidden = layer(torch.zeros(5, 3), (torch.zeros(1, 4), torch.tensor(7)))
        assert hidden[1].dtype == torch.int64
        assert hidden[1].item() == 12
        for x, h, clock in [
            (torch.zeros(5, 3), torch.zeros(1, 4), torch.tensor(7.0)),
            (torch.zeros(5, 2, 3), torch.zeros(1, 2, 4), torch.zeros(2)),
        ]:
            with pytest.raises(RuntimeError, match=r"clock is torch\.float32, not torch\.int64"):
                layer(x, (h, clock))
    with pytest.raises(RuntimeError, match=r"h is torch\.int64, not torch\.float32"):
        layer(torch.zeros(5, 3), torch.zeros(1, 4, dtype=torch.int64))


def test_errors_name_the_sizes() -> None:
    """The words of ``nn.GRU``, with the name of the part in place of "hidden" where it helps."""
    x = torch.zeros(5, 2, 3)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: torchgdu.GDU(3, "2x2")(x, torch.zeros(1, 3, 4)),
         "Expected hidden size of h (1, 2, 4), got [1, 3, 4]"),
        (lambda: torchgdu.LSTM(3, 4)(x, (torch.zeros(1, 2, 4), torch.zeros(1, 2, 5))),
         "Expected hidden size of c (1, 2, 4), got [1, 2, 5]"),
        (lambda: torchgdu.CWRNN(3, 4)(x, (torch.zeros(1, 2, 4), torch.zeros(3).long())),
         "Expected hidden size of clock (2,), got [3]"),
        (lambda: torchgdu.GDU(3, "2x2")(x, torch.zeros(2, 4)),
         "For batched 3-D input, h should be 3-D but got 2-D tensor"),
        (lambda: torchgdu.GDU(3, "2x2")(x[..., :2]),
         "input.size(-1) must be equal to input_size. Expected 3, got 2"),
        (lambda: torchgdu.GDU(3, "2x2")(x[:0]),
         "Expected sequence length to be larger than 0 in RNN"),
        (lambda: torchgdu.GDU(3, "2x2")(x.double()),
         "RNN input dtype (torch.float64) does not match weight dtype (torch.float32). "
         "Convert input: input.to(torch.float32), or convert model: model.to(torch.float64)"),
        (lambda: torchgdu.GDU(3, "2x2", num_layers=0), "num_layers must be greater than zero"),
        (lambda: torchgdu.GDU(3, "2x2", num_layers=2.0),  # type: ignore[arg-type]
         "num_layers should be of type int, got: float"),
        (lambda: torchgdu.GDU(0, "2x2"), "input_size must be greater than zero"),
    ]  # fmt: skip
    for call, words in calls:
        with pytest.raises((RuntimeError, TypeError, ValueError)) as error:
            call()
        assert str(error.value) == words


def test_lstm_and_cwrnn_states_are_checked() -> None:
    x = torch.zeros(5, 2, 3)
    h = torch.zeros(1, 2, 4)
    for hx in [(h, torch.zeros(1, 2, 5)), (h, torch.zeros(1, 3, 4)), (h, torch.zeros(2, 4))]:
        with pytest.raises(RuntimeError):
            nn.LSTM(3, 4)(x, hx)
        with pytest.raises(RuntimeError):
            torchgdu.LSTM(3, 4)(x, hx)
    for bad in (h, (h,), (h, h, h), (h, None)):
        with pytest.raises(TypeError, match="h and c"):
            torchgdu.LSTM(3, 4)(x, bad)
    for clock in (torch.zeros(3, dtype=torch.int64), torch.zeros(2), torch.zeros(1, 2).long()):
        with pytest.raises(RuntimeError, match="clock"):
            torchgdu.CWRNN(3, 4, periods=(1, 2))(x, (h, clock))
    with pytest.raises(TypeError, match="hx must be h"):
        torchgdu.GDU(3, "2x2")(x, (h, h))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torchgdu.LSTM(3, 4, bias=False, forget_bias=1.0), "forget_bias=1.0 needs bias"),
        (lambda: torchgdu.GRU(3, 4, bias=False, keep_bias=1.0), "keep_bias=1.0 needs bias"),
        (lambda: torchgdu.GRU(3, 4, reset="never"), "reset='never'"),  # type: ignore[arg-type]
        (lambda: torchgdu.MGU(3, 4, gamma="x"), "gamma='x'"),  # type: ignore[arg-type]
        (lambda: torchgdu.SRN(3, 4, init="x"), "init='x'"),  # type: ignore[arg-type]
        (lambda: torchgdu.SRN(3, 4, checkpoint=0), "checkpoint=0"),
        (lambda: torchgdu.CWRNN(3, 6), "hidden_size=6 is not divisible by the 4 periods"),
        (lambda: torchgdu.CWRNN(3, 6, periods=(2, 1)), "not ascending"),
        (lambda: torchgdu.CWRNN(3, 6, periods=()), "not ascending"),
        (lambda: torchgdu.CWRNN(3, 6, periods=(0, 1)), "not ascending"),
        (lambda: torchgdu.CWRNN(3, 4, periods=(2**63,)), "periods is 2.63 or more"),
        (lambda: torchgdu.CWRNN(3, 4, periods=(10**5000, 1)), "periods is 2.63 or more"),
        (lambda: torchgdu.CWRNN(3, -3), "hidden_size must be greater than zero"),
        (lambda: torchgdu.CWRNN(3, 0), "hidden_size must be greater than zero"),
        (lambda: torchgdu.GDU(3, "1x5"), "leaky unit"),
        (lambda: torchgdu.LSTM.from_torch(nn.LSTM(3, 4, proj_size=2)), "proj_size=2"),
    ],
)
def test_bad_options_are_named(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_one_period_is_written_as_several() -> None:
    assert str(torchgdu.CWRNN(3, 4, periods=[2])) == "CWRNN(3, 4, periods=(2,))"
    with pytest.raises(TypeError, match="periods=2 are not several"):
        torchgdu.CWRNN(3, 4, periods=2)  # type: ignore[arg-type]


def test_layer_and_direction_of_a_cell_are_checked() -> None:
    layer = torchgdu.GDU(3, "2x2")
    with pytest.raises(IndexError, match="layer=1"):
        layer.cell(1)
    with pytest.raises(IndexError, match="bidirectional"):
        layer.cell(0, True)
    with pytest.raises(TypeError, match=r"nn\.GRU, got LSTM"):
        torchgdu.GRU.from_torch(nn.LSTM(3, 4))  # type: ignore[arg-type]


def test_dropout_of_a_single_layer_warns_as_torch_does() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nn.GRU(3, 4, dropout=0.5)
        torchgdu.GDU(3, "2x2", dropout=0.5)
        torchgdu.GDU(3, "2x2", num_layers=2, dropout=0.5)
    theirs, ours = caught
    assert str(ours.message) == str(theirs.message)
    assert ours.category is theirs.category
    assert ours.filename == __file__


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_from_torch(make: Any, num_layers: int, bidirectional: bool, bias: bool) -> None:
    theirs = make(4, 6, num_layers, bias, True, bidirectional=bidirectional).eval()
    ours = copied(theirs)
    assert not ours.training
    assert ours.batch_first
    x = torch.randn(3, 20, 4)
    for mine, expected in zip(ours(x), theirs(x), strict=True):
        for a, b in zip(parts(mine), parts(expected), strict=True):
            close(a, b, 1e-6)
    assert copied(theirs.double()).get_parameter("weight_ih_l0").dtype == torch.float64


@pytest.mark.parametrize(("make", "ours"), [(nn.LSTM, torchgdu.LSTM), (nn.GRU, torchgdu.GRU)])
def test_from_torch_takes_over_and_leaves_alone(make: Any, ours: Any) -> None:
    """What is frozen stays so, no random number is drawn, nothing is said twice."""
    with pytest.warns(UserWarning, match="dropout option"):
        theirs = make(3, 4, dropout=0.5)
    before = torch.get_rng_state()
    assert ours.from_torch(theirs).dropout == 0.5  # a second warning would be an error
    assert torch.equal(torch.get_rng_state(), before)
    assert ours.from_torch(theirs.to("meta")).get_parameter("weight_ih_l0").is_meta
    theirs = make(3, 4)
    theirs.weight_hh_l0.requires_grad_(False)
    theirs.bias_hh_l0.requires_grad_(False)
    flags = {k: v.requires_grad for k, v in ours.from_torch(theirs).named_parameters()}
    inner = {"bias_hn_l0": False} if make is nn.GRU else {}
    assert flags == {"weight_ih_l0": True, "weight_hh_l0": False, "bias_l0": True, **inner}
    theirs.bias_ih_l0.requires_grad_(False)
    assert not ours.from_torch(theirs).get_parameter("bias_l0").requires_grad
    nn.utils.parametrizations.weight_norm(theirs, "weight_hh_l0")
    computed = ours.from_torch(theirs)
    assert computed.weight_hh_l0.requires_grad
    close(computed.weight_hh_l0, theirs.weight_hh_l0)


def test_descriptions() -> None:
    shown: dict[str, nn.Module] = {
        "GDU(8, '2x35+10x3', num_layers=2, batch_first=True, bidirectional=True)": torchgdu.GDU(
            8, "2x35+10x3", num_layers=2, bidirectional=True, batch_first=True
        ),
        "GDU(3, ['10x2', '4x5x0.5'], learn_delta=True, num_layers=2)": torchgdu.GDU(
            3, ["10x2", "4x5x0.5"], 2, learn_delta=True
        ),
        "LSTM(3, 4, forget_bias=0.0, init='joint')": torchgdu.LSTM(
            3, 4, forget_bias=0.0, init="joint"
        ),
        "GRU(3, 4, reset='after', bias=False)": torchgdu.GRU(3, 4, bias=False, reset="after"),
        "UGRNN(3, 4, keep_bias=2.0)": torchgdu.UGRNN(3, 4, keep_bias=2.0),
        "MGU(3, 4, gamma='beta')": torchgdu.MGU(3, 4, gamma="beta"),
        "CWRNN(3, 4, periods=(1, 2), checkpoint='auto')": torchgdu.CWRNN(
            3, 4, periods=(1, 2), checkpoint="auto"
        ),
        "SRN(3, 4)": torchgdu.SRN(3, 4),
        "CWRNN(3, 8)": torchgdu.CWRNN(3, 8, periods=[1, 2, 4, 8]),
        "GDUCell(3, '2x2', bias=False)": torchgdu.GDUCell(3, "2x2", bias=False),
    }
    for text, layer in shown.items():
        assert str(layer) == text
        again = eval(f"torchgdu.{text}", {"torchgdu": torchgdu})
        assert {k: v.shape for k, v in again.state_dict().items()} == {
            k: v.shape for k, v in layer.state_dict().items()
        }


def test_a_type_checker_knows_what_comes_back() -> None:
    x = torch.randn(5, 2, 3)
    gdu, lstm, clockwork = torchgdu.GDU(3, "2x2"), torchgdu.LSTM(3, 4), torchgdu.CWRNN(3, 4)
    assert_type(gdu.forward(x), tuple[Tensor, Tensor])
    assert_type(gdu.forward(pack_sequence([x[:, 0]])), tuple[PackedSequence, Tensor])
    assert_type(lstm.forward(x), tuple[Tensor, tuple[Tensor, Tensor]])
    assert_type(clockwork.forward(x), tuple[Tensor, tuple[Tensor, Tensor]])
    assert_type(gdu.cell(), torchgdu.GDUCell)
    assert_type(gdu.cell().forward(x[0]), Tensor)
    assert_type(lstm.cell(), torchgdu.LSTMCell)
    assert_type(lstm.cell().forward(x[0]), tuple[Tensor, Tensor])
    layers: list[Layer] = [gdu, lstm, clockwork]
    cells = [assert_type(layer.cell(), Cell) for layer in layers]
    assert [type(cell) for cell in cells] == [layer.cell_type for layer in layers]


def test_what_else_nn_gru_has() -> None:
    layer = torchgdu.GRU(3, 4, 2, bidirectional=True, reset="after")
    assert layer.proj_size == 0
    assert layer.flatten_parameters() is None  # type: ignore[func-returns-value]
    ids = [id(weight) for place in layer.all_weights for weight in place]
    assert ids == [id(weight) for weight in layer.parameters()]
    assert [len(place) for place in layer.all_weights] == [4] * 4
    for name in ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout"):
        assert getattr(layer, name) == getattr(nn.GRU(3, 4, 2, bidirectional=True), name)


# Dtypes, memory, compilation ---------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("length", [1, 23])
def test_half_precision_and_autocast_compute_in_float32(kind: str, length: int) -> None:
    layer = build(kind, dtype=torch.float32)
    x = torch.randn(length, 3, 5)
    expected, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        output, hidden = layer(x)
        again, _ = layer(x.bfloat16(), hidden)
    assert output.dtype == again.dtype == torch.bfloat16
    close(output, expected.bfloat16(), 0.01)
    output.float().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all()
    half = layer.bfloat16()
    output, _ = half(x.bfloat16())
    assert output.dtype == torch.bfloat16
    close(output.float(), expected, 0.1)


@every_kind
def test_a_cell_under_autocast_goes_on_from_its_own_state(kind: str) -> None:
    layer = build(kind, dtype=torch.float32)
    cell, x = layer.cell(), torch.randn(4, 3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = layer(x)
        now: Any = None
        for symbol, output in zip(x, expected, strict=True):
            now = cell(symbol, now)
            assert parts(now)[0].dtype == torch.bfloat16
            close(parts(now)[0].float(), output.float(), 0.02)


@every_kind
def test_compiles_into_one_graph(kind: str) -> None:
    torch._dynamo.reset()
    layer = build(kind, bidirectional=True)
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    output, hidden = compiled(x)
    expected, last = layer(x)
    close(output, expected)
    close(parts(hidden)[0], parts(last)[0])
    (mine,) = torch.autograd.grad(output.sum(), x)
    (theirs,) = torch.autograd.grad(expected.sum(), x)
    close(mine, theirs)


@pytest.mark.parametrize("kind", ["lstm", "cwrnn", "gdu_learnt"])  # a pair, a clock, no state but h
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
def test_compiles_packed_sequences_cells_and_several_layers(kind: str) -> None:
    torch._dynamo.reset()
    layer = build(kind, 5, None, 2, bidirectional=True)
    packed = pack_sequence(
        [torch.randn(n, 5, dtype=torch.float64) for n in (2, 3, 1)], enforce_sorted=False
    )
    compiled = torch.compile(layer, backend="aot_eager")
    output, hidden = compiled(packed)
    expected, last = layer(packed)
    close(output.data, expected.data)
    for a, b in zip(parts(hidden), parts(last), strict=True):
        close(a, b)
    cell = layer.cell(0)
    x = torch.randn(3, 5, dtype=torch.float64)
    step = torch.compile(cell, backend="aot_eager", fullgraph=True)
    close(parts(step(x, cell(x)))[0], parts(cell(x, cell(x)))[0])


@every_kind
@pytest.mark.parametrize("packed", [False, True])
def test_checkpoints_change_no_value(kind: str, packed: bool) -> None:
    x: Any = torch.randn(11, 2, 5, dtype=torch.float64)
    if packed:
        x = pack_padded_sequence(x, torch.tensor([6, 11]), enforce_sorted=False)
    results = []
    for checkpoint in (None, "auto", 1, 4, 100):
        torch.manual_seed(3)
        layer = build(kind, 5, None, 2, bidirectional=True, checkpoint=checkpoint)
        output, hidden = layer(x)
        values = output.data if isinstance(output, PackedSequence) else output
        (values.sin().sum() + parts(hidden)[0].sum()).backward()
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        results.append([values, *parts(hidden), *gradients])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            close(a, b)


@every_kind
def test_shapes_on_the_meta_device(kind: str) -> None:
    torch.manual_seed(5)
    layer = build(kind, 5, None, 2, device="meta", bidirectional=True)
    x = torch.randn(4, 3, 5, dtype=torch.float64, device="meta")
    output, hidden = layer(x)
    assert output.shape == (4, 3, 2 * HIDDEN)
    assert parts(hidden)[0].shape == (4, 3, HIDDEN)
    torch.manual_seed(5)
    expected = build(kind, 5, None, 2, bidirectional=True)
    torch.manual_seed(5)
    layer.to_empty(device="cpu").reset_parameters()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("bias"):
                parameter.uniform_(-0.5, 0.5)
    for (name, a), (_, b) in zip(
        layer.state_dict().items(), expected.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name
