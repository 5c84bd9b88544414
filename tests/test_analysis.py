"""Gates, Jacobian parts and error norms against autograd, slow loops and the equations."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from torchgdu import analysis, functional, layers, ops
from torchgdu.layers import CWRNN, GDU, GRU, LSTM, MGU, SRN, UGRNN
from torchgdu.models import SequenceModel

LAYERS: dict[str, Callable[..., Any]] = {
    "srn": lambda *a, **k: SRN(*a, **k),
    "lstm": lambda *a, **k: LSTM(*a, **k),
    "gru": lambda *a, **k: GRU(*a, **k),
    "gru-after": lambda *a, **k: GRU(*a, reset="after", **k),
    "ugrnn": lambda *a, **k: UGRNN(*a, **k),
    "mgu": lambda *a, **k: MGU(*a, **k),
    "mgu-beta": lambda *a, **k: MGU(*a, gamma="beta", **k),
    "cwrnn": lambda *a, **k: CWRNN(*a, periods=(1, 2, 3), **k),
    "gdu": lambda i, h, **k: GDU(i, "4x1+2x3x1.5+2x1x0.3", **k),
    "gdu-learnt": lambda i, h, **k: GDU(i, "4x1+2x3x1.5+2x1x0.3", learn_delta=True, **k),
}
HIDDEN = 12


def make(name: str, **options: Any) -> layers.Layer:
    torch.manual_seed(7)
    layer: layers.Layer = LAYERS[name](3, HIDDEN, dtype=torch.float64, **options)
    for parameter in layer.parameters():  # biases too: nothing may hide behind a zero
        if "weight_hh" not in dict(layer.named_parameters()):
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    if name == "cwrnn":
        layer.reset_parameters()
    return layer


def some_state(name: str, *batch: int) -> Any:
    h = torch.randn(*batch, HIDDEN, dtype=torch.float64)
    if name == "lstm":
        return h, torch.randn_like(h)
    if name == "cwrnn":
        return h, torch.randint(0, 6, batch)
    return h


@pytest.mark.parametrize("name", LAYERS)
def test_jacobian_parts_sum_to_autograds_jacobian(name: str) -> None:
    cell = make(name).cell()
    x, state = torch.randn(3, dtype=torch.float64), some_state(name)

    def whole(old: Tensor) -> Tensor:  # [s; h] for the LSTM
        hx = (old[HIDDEN:], old[:HIDDEN]) if name == "lstm" else old
        hx = (old, state[1]) if name == "cwrnn" else hx
        new: Any = cell(x, hx)
        found: Tensor = (
            torch.cat([new[1], new[0]]) if name == "lstm" else new[0] if name == "cwrnn" else new
        )
        return found

    old = (
        torch.cat([state[1], state[0]])
        if name == "lstm"
        else state[0]
        if name == "cwrnn"
        else state
    )
    expected = torch.autograd.functional.jacobian(whole, old)
    parts = analysis.jacobian_parts(cell, x, state)
    assert list(parts)[:4] == ["keep", "candidate", "alpha", "beta"]
    assert ("output" in parts) == (name == "lstm")
    total = sum(parts.values())
    torch.testing.assert_close(total, expected, atol=1e-10, rtol=0)


def test_each_jacobian_part_is_what_the_paper_calls_it() -> None:
    """GRU by hand: each part with the others' paths cut."""
    cell = make("gru").cell()
    x, s = torch.randn(3, dtype=torch.float64), some_state("gru")
    weights = cell._weights(cell._places[0])

    def gates(old: Tensor) -> functional.Step:
        return functional.step("gru", x[None], (old[None],), *weights)

    fixed = gates(s)
    alpha, beta, candidate = (v[0].detach() for v in (fixed.alpha, fixed.beta, fixed.candidate))
    expected = {
        "keep": lambda old: beta * old,
        "candidate": lambda old: alpha * gates(old).candidate[0],
        "alpha": lambda old: gates(old).alpha[0] * candidate,
        "beta": lambda old: gates(old).beta[0] * s,
    }
    parts = analysis.jacobian_parts(cell, x, s)
    for name, path in expected.items():
        jacobian = torch.autograd.functional.jacobian(path, s)
        torch.testing.assert_close(parts[name], jacobian, atol=1e-12, rtol=0)


def test_lstms_output_part_is_the_output_gates_path() -> None:
    cell = make("lstm").cell()
    x, (h, c) = torch.randn(3, dtype=torch.float64), some_state("lstm")
    weights = cell._weights(cell._places[0])
    new = cell(x, (h, c))[1].detach()

    def output(old: Tensor) -> Tensor:
        step = functional.step("lstm", x[None], (old[None], c[None]), *weights)
        found: Tensor = step.gamma[0] * new.tanh()
        return found

    part = analysis.jacobian_parts(cell, x, (h, c))["output"]
    expected = torch.autograd.functional.jacobian(output, h)
    torch.testing.assert_close(part[HIDDEN:, HIDDEN:], expected, atol=1e-12, rtol=0)
    assert not part[:HIDDEN].any()
    assert not part[:, :HIDDEN].any()


def test_jacobian_parts_of_a_batch_are_those_of_its_samples() -> None:
    cell = make("lstm").cell()
    x, (h, c) = torch.randn(4, 3, dtype=torch.float64), some_state("lstm", 4)
    whole = analysis.jacobian_parts(cell, x, (h, c))
    for b in range(4):
        for name, part in analysis.jacobian_parts(cell, x[b], (h[b], c[b])).items():
            torch.testing.assert_close(whole[name][b], part)
    with pytest.raises(TypeError, match=r"not a step cell; a layer's is layer.cell"):
        analysis.jacobian_parts(make("gru"), x)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LAYERS)
def test_gates_are_those_of_the_reference(name: str) -> None:
    layer = make(name)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    gates = analysis.record_gates(layer, x)
    state: tuple[Tensor, ...] = (x.new_zeros(2, HIDDEN),)
    if name == "lstm":
        state = (*state, x.new_zeros(2, HIDDEN))
    if name == "cwrnn":
        state = (*state, torch.zeros(2, dtype=torch.int64))
    for t in range(6):
        step = functional.step(layer._kind, x[t], state, *layer._weights(layer._places[0]))
        state = step.state
        for mine, theirs in zip(gates, (step.alpha, step.beta, step.gamma), strict=True):
            assert torch.equal(mine[t], theirs)
    torch.testing.assert_close(layer(x)[0][-1], state[0])  # and they are the layer's own steps


def test_gates_of_a_packed_bidirectional_stack_are_each_sequences_own() -> None:
    layer = make("lstm", num_layers=2, bidirectional=True)
    sequences = [torch.randn(n, 3, dtype=torch.float64) for n in (4, 7, 2)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    for number, reverse in ((0, False), (0, True), (1, False), (1, True)):
        gates = analysis.record_gates(layer, packed, layer=number, reverse=reverse)
        assert gates.beta.shape == (7, 3, HIDDEN)
        for b, sequence in enumerate(sequences):
            alone = analysis.record_gates(layer, sequence, layer=number, reverse=reverse)
            for whole, own in zip(gates, alone, strict=True):
                torch.testing.assert_close(whole[: len(sequence), b], own[:, 0])
                assert whole[len(sequence) :, b].isnan().all()


def test_watching_changes_nothing_and_leaves_no_trace() -> None:
    model = SequenceModel("gru", 3, 2, hidden=5, layers=2, dropout=0.5)
    model.train()
    model.readout.eval()
    x = torch.randn(6, 2, 3)
    with analysis._watching(model) as watch:
        assert not model.rnn.training
        seen = model(x)
    assert len(watch.walks) == 2
    assert "_scan" not in vars(model.rnn)
    assert model.rnn._scan is ops.scan
    assert model.rnn.training
    assert not model.readout.training
    assert not model.rnn._forward_hooks
    assert not model.rnn._forward_pre_hooks
    torch.testing.assert_close(seen, model.eval()(x))


def test_other_threads_use_the_layer_as_ever_meanwhile() -> None:
    layer, x = GRU(3, 5), torch.randn(6, 2, 3)
    with ThreadPoolExecutor(1) as other, torch.no_grad():
        alone = layer(x)[0]
        with analysis._watching(layer) as watch:
            there = other.submit(lambda: layer(x)[0].clone()).result()
            assert not watch.walks
            with pytest.raises(RuntimeError, match="watched already"):
                other.submit(analysis.record_gates, layer, x).result()
            layer(x)
            assert len(watch.walks) == 1
        assert torch.equal(there, alone)
    assert not layer._forward_pre_hooks


def test_watching_ends_when_the_model_fails() -> None:
    layer = GRU(3, 5)
    with pytest.raises(RuntimeError):
        analysis.record_gates(layer, torch.randn(6, 2, 4))
    assert "_scan" not in vars(layer)
    assert layer.training


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "lstm"])
def test_overwrite_proportion_is_the_mean_of_alpha(name: str) -> None:
    layer = make(name)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    share = analysis.overwrite_proportion(layer, x)
    assert share.shape == (6, 2)
    if name == "srn":
        assert torch.equal(share, torch.ones_like(share))
    elif name == "cwrnn":  # periods 1, 2, 3: all, the first, the first two, the first and third …
        expected = [1, 1 / 3, 2 / 3, 2 / 3, 2 / 3, 1 / 3]
        assert share[:, 0].tolist() == pytest.approx(expected)
    elif name.startswith("gdu"):
        assert isinstance(layer, GDU)
        constant = float(layer.delta().detach().sum()) / HIDDEN
        torch.testing.assert_close(share, torch.full_like(share, constant), atol=1e-12, rtol=0)
    else:
        assert share.std() > 1e-3
    with pytest.raises(ValueError, match="two gates"):
        analysis.overwrite_proportion(make("lstm"), x)


def test_gdus_overwrite_proportion_stays_constant_through_training() -> None:
    torch.manual_seed(0)
    model = SequenceModel("gdu", 3, 1, groups="2x3+10x1x2.5")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x = torch.randn(20, 16, 3)
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[3, :, :1])
        loss.backward()
        optimizer.step()
    share = analysis.overwrite_proportion(model, 10 * torch.randn(40, 8, 3))
    torch.testing.assert_close(share, torch.full_like(share, 5.5 / 16), atol=1e-6, rtol=0)
    alpha = analysis.record_gates(model, x).alpha
    assert alpha.std(0).max() > 0.05  # what is constant is the sum, not its parts


def test_latched_shares_count_units() -> None:
    nan = math.nan
    beta = torch.tensor([
        [[0.1, 0.1, 0.1, 0.1], [0.95, 0.0, 0.0, 0.0]],
        [[0.95, 0.91, 0.9, 0.99], [0.95, 0.95, 0.0, 0.0]],
        [[0.95, 0.89, 0.99, 0.99], [nan, nan, nan, nan]],
    ])  # fmt: skip
    gates = analysis.Gates(1 - beta, beta, torch.ones_like(beta))
    share = analysis.latched_share(gates)
    assert share[:, 0].tolist() == [0.0, 0.75, 0.75]
    assert share[:2, 1].tolist() == [0.25, 0.5]
    assert share[2, 1].isnan()
    assert analysis.always_latched_share(gates).tolist() == [0.5, 0.5]
    assert analysis.always_latched_share(gates, start=0).tolist() == [0.0, 0.25]


def slow_norms(
    layer: layers.Layer, head: Callable[[Tensor], Tensor], sequence: Tensor, target: Tensor
) -> Tensor:
    """‖∂L/∂s_τ‖ of one sample: cut after every step in turn, and go on from there."""
    cell = layer.cell()
    clock = layer._kind == "cwrnn"

    def run(state: Any, steps: Tensor) -> Any:
        for x in steps:
            state = cell(x, state)
        return state

    norms = []
    for t in range(1, len(sequence) + 1):
        state = run(None, sequence[:t])
        parts = state if isinstance(state, tuple) else (state,)
        parts = tuple(p.detach().requires_grad_(p.is_floating_point()) for p in parts)
        leaves = parts[:1] if clock else parts
        end = run(parts if len(parts) == 2 else parts[0], sequence[t:])
        loss = F.cross_entropy(head(end[0] if isinstance(end, tuple) else end), target)
        slopes = torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)
        norms.append(torch.cat(slopes).norm())
    return torch.stack(norms)


@pytest.mark.parametrize("name", LAYERS)
def test_error_norms_equal_a_slow_loop(name: str) -> None:
    layer, head = make(name), nn.Linear(HIDDEN, 4, dtype=torch.float64)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory, self.head = layer, head

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(self.memory(x)[0][-1])
            return found

    x, target = torch.randn(7, 5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    norms = analysis.error_norms(Model(), x, target)
    slow = torch.stack([slow_norms(layer, head, x[:, b], target[b]) for b in range(5)], 1)
    torch.testing.assert_close(norms, slow.mean(1), atol=1e-12, rtol=1e-9)
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("readout", ["last", "every"])
def test_error_norms_of_packed_sequences_are_those_of_each(readout: Any) -> None:
    torch.manual_seed(3)
    model = SequenceModel("lstm", 3, 4, hidden=6, readout=readout, dtype=torch.float64)
    sequences = [torch.randn(n, 3, dtype=torch.float64) for n in (4, 7, 2)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    target = torch.tensor([1, 3, 0])
    full = target
    if readout == "every":  # only each sequence's last target counts
        pairs = zip(sequences, target, strict=True)
        rows = pack_sequence([k.expand(len(s)) for s, k in pairs], enforce_sorted=False)
        full = rows.data
    norms = analysis.error_norms(model, packed, full)
    each = [
        slow_norms(model.rnn, model.readout, s, k) for s, k in zip(sequences, target, strict=True)
    ]
    for t in range(7):
        there = torch.stack([own[t] for own in each if len(own) > t])
        torch.testing.assert_close(norms[t], there.mean(), atol=1e-12, rtol=1e-9)


def test_error_norms_of_a_step_in_the_middle_and_of_squared_errors() -> None:
    model = SequenceModel("gru", 3, 2, hidden=5, readout="every")
    x, target = torch.randn(9, 4, 3), torch.randn(9, 4, 2)
    norms = analysis.error_norms(
        model, x, target, loss=lambda out, wanted: (out[5] - wanted[5]).square().sum(1)
    )
    # The answer at step 5 does not pass through the state as it is fed on from there.
    assert (norms[:5] > 0).all()
    assert not norms[5:].any()
    last = analysis.error_norms(model, x, target)  # by default the last step's
    whole = analysis.error_norms(
        model, x, target, loss=lambda out, wanted: (out[-1] - wanted[-1]).square().mean(1)
    )
    torch.testing.assert_close(last, whole)
    assert last[-1] > 0


def test_what_cannot_be_told_apart_is_an_error() -> None:
    x, target = torch.randn(5, 2, 3), torch.tensor([0, 1])

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = GRU(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.rnn(self.rnn(x)[0])[0][-1]
            return found

    with pytest.raises(ValueError, match="Linear has none of torchgdu's layers"):
        analysis.error_norms(nn.Linear(3, 3), x, target)
    with pytest.raises(ValueError, match="has 2 layers in it: 0, 1"):
        analysis.error_norms(nn.Sequential(GRU(3, 3), GDU(3, "3x1")), x, target)
    with pytest.raises(ValueError, match="used its layer 2 times"):
        analysis.error_norms(Twice(), x, target)
    with pytest.raises(ValueError, match="layer=2: there are 2"):
        analysis.record_gates(GRU(3, 3, 2), x, layer=2)
    with pytest.raises(ValueError, match="one direction only"):
        analysis.record_gates(GRU(3, 3, 2), x, reverse=True)
    model = SequenceModel("gru", 3, 2, hidden=5)
    with pytest.raises(ValueError, match="one loss for each of the 2 samples"):
        analysis.error_norms(model, x, target, loss=F.cross_entropy)


def test_plots_show_what_was_computed() -> None:
    pytest.importorskip("matplotlib")
    model = SequenceModel("gdu", 3, 2, groups="5x2")
    x, target = torch.randn(8, 2, 3), torch.tensor([0, 1])
    gates = analysis.record_gates(model, x)
    (image,) = analysis.plot_gates(gates, sample=1).images
    torch.testing.assert_close(
        torch.tensor(image.get_array(), dtype=torch.float32), gates.beta[:, 1].T
    )
    norms = analysis.error_norms(model, x, target)
    (line,) = analysis.plot_error_norms({"GDU": norms}).lines
    drawn = torch.tensor(line.get_ydata(), dtype=torch.float32)
    torch.testing.assert_close(drawn, norms / norms.max())
    assert isinstance(pack_sequence([x[:, 0]]), PackedSequence)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"torchgdu\[plot\]"):
        analysis.plot_error_norms(torch.ones(3))
