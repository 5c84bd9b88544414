"""Initial values, saving and loading, and everything else a module's parameters go through."""

from __future__ import annotations

import copy
import hashlib
import io
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchgdu
from kinds import GROUPS, HIDDEN, KINDS, PERIODS, build, parts

every_kind = pytest.mark.parametrize("kind", KINDS)
X = torch.arange(30, dtype=torch.float64).reshape(3, 2, 5).sin()


def same(one: nn.Module, two: nn.Module) -> bool:
    a, b = one(X), two(X)
    return torch.equal(a[0], b[0]) and torch.equal(parts(a[1])[0], parts(b[1])[0])


# Initial values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["separate", "joint"])
@pytest.mark.parametrize("kind", ["lstm", "gru", "mgu", "gdu"])
def test_each_gate_is_xavier_uniform(kind: str, init: str) -> None:
    inputs, units = 30, 200
    make, own = KINDS[kind]
    layer = make(inputs, "10x20" if kind == "gdu" else units, init=init, **own)
    fan = {"weight_ih_l0": inputs, "weight_hh_l0": units}
    for name, fan_in in fan.items():
        for gate in getattr(layer, name).detach().split(units):
            bound = math.sqrt(6 / ((fan_in if init == "separate" else inputs + units) + units))
            assert gate.abs().max() <= bound
            assert gate.abs().max() > 0.99 * bound
            assert abs(gate.std() / (bound / math.sqrt(3)) - 1) < 0.03
            assert abs(gate.mean()) < 4 * bound / math.sqrt(gate.numel())


def test_biases_start_where_they_should() -> None:
    assert not torchgdu.GDU(3, "2x2").get_parameter("bias_l0").any()
    assert torchgdu.LSTM(3, 2).get_parameter("bias_l0").tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert not torchgdu.LSTM(3, 2, forget_bias=0.0).get_parameter("bias_l0").any()
    gru = torchgdu.GRU(3, 2, keep_bias=2.0, reset="after")
    assert gru.get_parameter("bias_l0").tolist() == [0, 0, 2, 2, 0, 0]
    assert not gru.get_parameter("bias_hn_l0").any()
    assert torchgdu.UGRNN(3, 2, keep_bias=2.0).get_parameter("bias_l0").tolist() == [-2, -2, 0, 0]
    assert torchgdu.MGUCell(3, 2, keep_bias=2.0).get_parameter("bias").tolist() == [-2, -2, 0, 0]


@pytest.mark.parametrize(
    ("make", "cell"),
    [(torchgdu.GRU, "gru"), (torchgdu.UGRNN, "ugrnn"), (torchgdu.MGU, "mgu")],
)
def test_keep_bias_is_where_beta_starts(make: Any, cell: str) -> None:
    layer = make(3, 4, keep_bias=math.log(9))
    step = torchgdu.functional.step(
        cell, torch.zeros(1, 3), (torch.zeros(1, 4),),
        layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_l0,
    )  # fmt: skip
    torch.testing.assert_close(step.beta, torch.full((1, 4), 0.9))


def test_seeded_alike_everywhere() -> None:
    """The bytes of a GDU's weights for seed 0: the same on every platform, device and dtype."""
    torch.manual_seed(0)
    layer = torchgdu.GDU(3, "10x2", num_layers=2, bidirectional=True)
    digest = hashlib.sha256()
    for parameter in layer.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    assert digest.hexdigest()[:16] == "5388fb0c711f2b2d"
    torch.manual_seed(0)
    double = torchgdu.GDU(3, "10x2", num_layers=2, bidirectional=True, dtype=torch.float64)
    for a, b in zip(layer.parameters(), double.parameters(), strict=True):
        assert torch.equal(a.double(), b)


def test_a_layer_on_the_meta_device_draws_nothing() -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        layer = torchgdu.GDU(3, "10x2")
    assert layer.get_parameter("weight_ih_l0").is_meta
    layer.cell()
    after = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(1))


@every_kind
def test_reset_parameters_draws_anew(kind: str) -> None:
    torch.manual_seed(7)
    first = build(kind)
    before = {name: value.clone() for name, value in first.state_dict().items()}
    torch.manual_seed(7)
    first.reset_parameters()
    for name, value in first.state_dict().items():
        if not name.startswith("bias"):
            assert torch.equal(value, before[name]), name
    first.reset_parameters()
    assert not torch.equal(first.state_dict()["weight_ih_l0"], before["weight_ih_l0"])


# Saving and loading ------------------------------------------------------------------------------


@every_kind
def test_round_trips(kind: str, tmp_path: Path) -> None:
    layer = build(kind, 5, None, 2, bidirectional=True)
    assert same(copy.deepcopy(layer), layer)

    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    other = build(kind, 5, None, 2, bidirectional=True)
    assert not same(other, layer)
    other.load_state_dict(torch.load(stream, weights_only=True))
    assert same(other, layer)

    path = tmp_path / "layer.safetensors"
    safetensors.torch.save_model(layer, str(path))
    other = build(kind, 5, None, 2, bidirectional=True)
    safetensors.torch.load_model(other, str(path))
    assert same(other, layer)

    with torch.device("meta"):
        other = build(kind, 5, None, 2, bidirectional=True)
    other.load_state_dict(layer.state_dict(), assign=True)
    assert same(other, layer)

    cell = layer.cell(1, True)
    again = copy.deepcopy(cell)
    again.load_state_dict(cell.state_dict())
    assert "weight_hh" in cell.state_dict()


MEANINGS: dict[str, Any] = {
    "gdu 4x3": lambda: torchgdu.GDU(5, "4x3"),
    "gdu 3x4": lambda: torchgdu.GDU(5, "3x4"),
    "gdu 4x3x0.5": lambda: torchgdu.GDU(5, "4x3x0.5"),
    "gdu learnt 4x3": lambda: torchgdu.GDU(5, "4x3", learn_delta=True),
    "gdu learnt 2x2+8x1": lambda: torchgdu.GDU(5, "2x2+8x1", learn_delta=True),
    "ugrnn": lambda: torchgdu.UGRNN(5, 12),
    "mgu": lambda: torchgdu.MGU(5, 12),
    "mgu_beta": lambda: torchgdu.MGU(5, 12, gamma="beta"),
    "gru": lambda: torchgdu.GRU(5, 12, bias=False),
    "gru_after": lambda: torchgdu.GRU(5, 12, bias=False, reset="after"),
    "srn": lambda: torchgdu.SRN(5, 12),
    "cwrnn 1 2 4": lambda: torchgdu.CWRNN(5, 12, periods=(1, 2, 4)),
    "cwrnn 1 2 3": lambda: torchgdu.CWRNN(5, 12, periods=(1, 2, 3)),
    "highway": lambda: torchgdu.Highway(12),
    "highway 4x3": lambda: torchgdu.Highway(12, groups="4x3"),
    "highway 4x3x0.5": lambda: torchgdu.Highway(12, groups="4x3x0.5"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("wrap", [False, True])
def test_weights_of_other_meaning_are_refused(strict: bool, wrap: bool) -> None:
    for saved, make in MEANINGS.items():
        for wanted, other in MEANINGS.items():
            source, target = make(), other()
            if wrap:
                source, target = nn.Sequential(source), nn.Sequential(target)
            before = {k: v.clone() for k, v in target.state_dict().items()}
            if saved == wanted:
                target.load_state_dict(source.state_dict(), strict=strict)
                continue
            with pytest.raises(RuntimeError, match="configuration") as error:
                target.load_state_dict(source.state_dict(), strict=strict)
            assert f"saved under '{saved}'" in str(error.value)
            assert f"else under '{wanted}'" in str(error.value)
            for name, value in target.state_dict().items():
                assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)])
def test_an_averaged_model_can_be_saved(average: Any) -> None:
    """Averaging its buffers makes another text of the bytes that say what the weights mean."""
    for make in (lambda: torchgdu.GDU(5, "4x3"), lambda: torchgdu.Highway(5, 2)):
        source, other = make(), make()
        averaged = AveragedModel(source, multi_avg_fn=average, use_buffers=True)
        for _ in range(3):
            averaged.update_parameters(source)
        saved = averaged.module.state_dict()
        assert bytes(saved["configuration"].tolist()) in (b"gdu 4x3", b"highway")
        other.load_state_dict(saved)
        for name, value in source.named_parameters():
            torch.testing.assert_close(other.get_parameter(name), value)


def test_a_state_without_numbers_is_loaded_as_torch_does() -> None:
    with torch.device("meta"):
        source = torchgdu.GDU(5, "4x3")
    target = torchgdu.GDU(5, "4x3")
    target.load_state_dict(source.state_dict(), assign=True)
    assert all(parameter.is_meta for parameter in target.parameters())


def test_a_learnt_delta_is_loaded_whatever_it_started_from() -> None:
    one = torchgdu.GDU(5, "4x3x0.5", learn_delta=True)
    two = torchgdu.GDU(5, "4x3", learn_delta=True)
    two.load_state_dict(one.state_dict())
    torch.testing.assert_close(two.delta(), torch.full((3,), 0.5))


# What happens to a module ------------------------------------------------------------------------


def test_constants_are_exact_in_every_dtype() -> None:
    layer: Any = torchgdu.GDU(5, "3x4x1.3")
    exact = torch.tensor((3 - 1.3) / 2, dtype=torch.float64)
    there_and_back = copy.deepcopy(layer).bfloat16().half().double()
    for module, dtype in ((layer, torch.float32), (there_and_back, torch.float64)):
        assert torch.equal(module.scale_l0, exact.to(dtype).expand(12))
    assert layer.half().scale_l0.dtype == torch.float32
    assert layer.state_dict().keys() == {"weight_ih_l0", "weight_hh_l0", "bias_l0", "configuration"}


@every_kind
def test_cells_share_the_layers_parameters(kind: str) -> None:
    layer = build(kind, 5, None, 2, bidirectional=True)
    cell: Any = layer.cell(1, reverse=True)
    shared = dict(cell.named_parameters())
    for name, value in shared.items():
        assert value is layer.get_parameter(f"{name}_l1_reverse")
    x = torch.randn(2, 2 * HIDDEN, dtype=torch.float64)
    before = parts(cell(x))[0]
    with torch.no_grad():
        layer.get_parameter("weight_ih_l1_reverse").mul_(2)
    assert not torch.equal(parts(cell(x))[0], before)
    parts(cell(x))[0].sum().backward()
    assert layer.get_parameter("weight_ih_l1_reverse").grad is not None


@every_kind
def test_parametrizations_count(kind: str) -> None:
    layer: Any = build(kind)
    expected = build(kind)
    expected.load_state_dict(layer.state_dict())

    class Double(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return 2 * value

    parametrize.register_parametrization(layer, "weight_hh_l0", Double())
    assert not same(layer, expected)
    with torch.no_grad():
        expected.get_parameter("weight_hh_l0").mul_(2)
    assert same(layer, expected)
    with pytest.raises(TypeError, match="parametrized weight_hh"):
        layer.cell()
    layer(X)[0].sum().backward()
    assert layer.parametrizations.weight_hh_l0.original.grad is not None
    assert same(copy.deepcopy(layer), expected)
    with pytest.raises(RuntimeError, match="weight_hh_l0 is parametrized and cannot be drawn anew"):
        layer.reset_parameters()
    parametrize.remove_parametrizations(layer, "weight_hh_l0")
    assert same(layer, expected)


@every_kind
def test_clipping_and_functional_call(kind: str) -> None:
    layer = build(kind)
    layer(X)[0].square().sum().backward()
    total = nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
    assert total > 1e-3
    norms = [p.grad.norm() for p in layer.parameters() if p.grad is not None]
    torch.testing.assert_close(torch.stack(norms).norm(), torch.tensor(1e-3).double())
    other = build(kind)
    swapped = torch.func.functional_call(layer, dict(other.named_parameters()), (X,))
    assert torch.equal(swapped[0], other(X)[0])
    swapped = torch.func.functional_call(layer, other.state_dict(), (X,))
    assert torch.equal(swapped[0], other(X)[0])


@every_kind
def test_vmap_over_an_ensemble(kind: str) -> None:
    models = [build(kind) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)

    def one(p: Any, b: Any) -> torch.Tensor:
        output: torch.Tensor = torch.func.functional_call(models[0], (p, b), (X,))[0]
        return output

    outputs = torch.func.vmap(one)(parameters, buffers)
    for output, model in zip(outputs, models, strict=True):
        torch.testing.assert_close(output, model(X)[0])


def test_distributed_data_parallel_equals_one_process(tmp_path: Path) -> None:
    """Two gloo processes, half of the batch each, against one process with the whole batch."""
    worker = Path(__file__).with_name("ddp_worker.py")
    processes = [
        subprocess.Popen([sys.executable, str(worker), str(rank), str(tmp_path)])
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    sys.path.insert(0, str(worker.parent))
    import ddp_worker

    expected = ddp_worker.train(lambda model: model, slice(None)).state_dict()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_counts_leave_out_what_is_frozen_or_masked() -> None:
    layer = build("cwrnn", 5, None, 2, bidirectional=True)
    slice_of = HIDDEN // len(PERIODS)
    everything = sum(p.numel() for p in layer.parameters())
    assert torchgdu.parameter_count(layer) == everything - 4 * 3 * slice_of**2
    layer.requires_grad_(False)
    assert torchgdu.parameter_count(layer) == 0
    assert torchgdu.parameter_count(torchgdu.GDU(5, GROUPS)) == 24 * (5 + 12 + 1)
