"""The operator and the choice of who computes: every way in, and every bad call."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

import torchgdu
from kinds import KINDS, build
from scans import Scan, engine_at, loss_of
from torchgdu import functional, ops
from torchgdu.ops import backend, call, engine

scan = torch.ops.torchgdu.scan.default
every_cell = pytest.mark.parametrize("cell", functional.CELLS)


def differentiable(given: Scan) -> Scan:
    return given.map(lambda value: value.detach().requires_grad_())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine is called for, in order."""
    made: list[str] = []
    for name in ("forward", "backward"):
        usual = getattr(ops.library(), name)

        def spy(given: bytes, name: str = name, usual: Callable[[bytes], int] = usual) -> int:
            made.append(name)
            return usual(given)

        monkeypatch.setattr(ops.library(), name, spy)
    return made


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine without a compiler."""
    monkeypatch.setattr(engine, "load", lambda: "there was no compiler")
    monkeypatch.delenv("TORCHGDU_REQUIRE_ENGINE", raising=False)
    backend._missing.cache_clear()
    yield
    backend._missing.cache_clear()


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with warnings on standard error."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith("TORCHGDU")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=settings | environment
    )


# Who computes ------------------------------------------------------------------------------------


def test_the_engine_computes_unless_told_otherwise(calls: list[str]) -> None:
    given = Scan.make("gdu", 3, 2, 4)
    with torchgdu.use_backend("reference"):
        expected, _ = given.run()
        with torchgdu.use_backend("engine"):
            given.run()
        assert calls == ["forward"]
        given.run()
    assert calls == ["forward"]
    with torchgdu.use_backend("auto"):
        found, _ = given.run()
    assert calls == ["forward"] * 2
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_backward_uses_what_forward_used(calls: list[str], name: str) -> None:
    first, second = ("engine", "reference") if name == "forward" else ("reference", "engine")
    given = differentiable(Scan.make("gru", 3, 2, 4))
    with torchgdu.use_backend(first):
        output, final = given.run()
    with torchgdu.use_backend(second):
        loss_of([output, *final]).backward()
    assert calls == (["forward", "backward"] if first == "engine" else [])


def test_a_choice_holds_in_its_own_thread_and_task() -> None:
    seen: list[str] = []
    with torchgdu.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(backend.wanted()))
        thread.start()
        thread.join()
    assert seen == ["auto"]

    async def choose(name: str) -> str:
        with torchgdu.use_backend(name):
            await asyncio.sleep(0)
            return backend.wanted()

    async def both() -> list[str]:
        return list(await asyncio.gather(choose("engine"), choose("reference")))

    assert asyncio.run(both()) == ["engine", "reference"]


def test_bad_choices() -> None:
    with pytest.raises(ValueError, match="'cuda' is not one of auto, engine, reference"):
        torchgdu.use_backend("cuda")
    code = "import torch, torchgdu; torchgdu.GDU(2, '2x2')(torch.randn(3, 1, 2))"
    failed = python(code, TORCHGDU_BACKEND="fast")
    assert "TORCHGDU_BACKEND=fast is not one of auto, engine, reference" in failed.stderr
    failed = python(code, TORCHGDU_ISA="sse9")
    there = ", ".join(ops.library().supported)
    assert f"TORCHGDU_ISA=sse9: there is no such; it can be {there}" in failed.stderr


@pytest.mark.parametrize("level", ops.library().levels)
def test_variables_choose(level: str) -> None:
    if level not in ops.library().supported:
        pytest.skip(f"this processor has no {level}")
    code = "from torchgdu import ops; print(ops.available(), ops.library().instructions)"
    assert python(code, TORCHGDU_ISA=level).stdout.split() == ["engine", level]
    assert python(code, TORCHGDU_BACKEND="reference").stdout.split()[0] == "reference"


@pytest.mark.usefixtures("no_library")
def test_without_a_library_the_reference_takes_over_and_says_so_once() -> None:
    given = Scan.make("gdu", 3, 2, 4)
    with pytest.warns(UserWarning, match="without its engine.*there was no compiler"):
        found, _ = given.run()
    given.run()  # a second warning would be an error
    assert torch.equal(found, given.run(functional.scan)[0])
    with pytest.raises(RuntimeError, match="no engine here: there was no compiler"):
        torchgdu.use_backend("engine").__enter__()
    assert ops.no_engine() == "there was no compiler"


@pytest.mark.usefixtures("no_library")
def test_a_required_engine_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHGDU_REQUIRE_ENGINE", "1")
    with pytest.raises(RuntimeError, match="REQUIRE_ENGINE is set, but there is no engine"):
        Scan.make("gdu", 3, 2, 4).run()
    with torchgdu.use_backend("reference"):
        Scan.make("gdu", 3, 2, 4).run()


def test_a_library_that_is_not_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / engine.FILE).write_bytes(b"not a library")
    monkeypatch.setattr(torchgdu, "__path__", [str(tmp_path)])
    assert "it cannot be loaded" in str(engine.load.__wrapped__())
    monkeypatch.setattr(torchgdu, "__path__", [])
    assert "was not built" in str(engine.load.__wrapped__())
    monkeypatch.setattr(engine, "VERSION", 0)
    with pytest.raises(OSError, match="is of version 1, this package needs 0"):
        engine.Library(ops.library().path)


def test_where_the_engine_cannot_serve() -> None:
    x = torch.randn(3, 2, 4, device="meta")
    layer = torchgdu.GDU(4, "2x2", device="meta")
    assert layer(x)[0].device.type == "meta"
    with torchgdu.use_backend("engine"), pytest.raises(RuntimeError, match=r"not .* on meta"):
        layer(x)


# What torch does with operators ------------------------------------------------------------------


@every_cell
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(cell: str, packed: bool) -> None:
    given = Scan.make(cell, 5, 3, 4, (16,), lengths=[5, 3, 2] if packed else None, checkpoint=2)
    torch.library.opcheck(scan, differentiable(given).arguments())
    saving = torch.ops.torchgdu.scan_saving.default
    plain = given.arguments()
    # Bytes between what is saved are not written: they differ from call to call.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(saving, plain, test_utils=tests)
    output, _, c_n, saved = saving(*plain)
    wanted = [name in given.differentiable() for name in call.DIFFERENTIABLE]
    gradients = (output.cos(), None, c_n.sin() if cell == "lstm" else None)
    back = torch.ops.torchgdu.scan_backward.default
    torch.library.opcheck(back, (*plain, output, saved, *gradients, wanted))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph_with_equal_numbers(
    kind: str, dynamic: bool, calls: list[str]
) -> None:
    """Forward and backward, packed or not; further lengths included."""
    torch._dynamo.reset()
    layer = build(kind, 3)

    def run(x: Tensor, batch_sizes: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        state = layer._state(x, 2, None, True)
        weights = layer._weights(layer._places[0])
        return ops.scan(layer._kind, x, state, *weights, batch_sizes=batch_sizes, checkpoint=3)

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for packed in (False, True):
        for steps in (4, 7, 9):
            x, sizes = torch.randn(steps, 2, 3, dtype=torch.float64), None
            if packed:
                x, sizes, _, _ = pack_padded_sequence(x, torch.tensor([steps, 2]))
            pair = []
            for compute in (compiled, run):
                leaf = x.clone().requires_grad_()
                output, final = compute(leaf, sizes)
                states = [value for value in final if value.is_floating_point()]
                gradients = torch.autograd.grad(
                    loss_of([output, *states]), [leaf, *layer.parameters()]
                )
                pair.append([output, *final, *gradients])
            for found, expected in zip(*pair, strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert set(calls) == {"forward", "backward"}


@pytest.mark.parametrize("kind", ["gdu", "lstm"])  # nothing between stretches but h, and c too
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_with_automatic_checkpoints(
    kind: str, dynamic: bool | None, calls: list[str]
) -> None:
    """The root of a length that the compiler does not know."""
    torch._dynamo.reset()
    layer = build(kind, 3, None, 2, checkpoint="auto")
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for steps in (6, 9, 17, 2, 1, 30):
        x = torch.randn(steps, 2, 3, dtype=torch.float64)
        pair = []
        for compute in (compiled, layer):
            leaf = x.clone().requires_grad_()
            output, _ = compute(leaf)
            gradients = torch.autograd.grad(loss_of([output]), [leaf, *layer.parameters()])
            pair.append([output, *gradients])
        for found, expected in zip(*pair, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert set(calls) == {"forward", "backward"}


def test_automatic_checkpoints_are_a_root_apart() -> None:
    for steps in (1, 2, 15, 16, 17, 100):
        given = Scan.make("lstm", steps, 2, 3).arguments()
        saved = torch.ops.torchgdu.scan_saving(*given[:-1], call.AUTO)[3]
        root = max(1, int(steps**0.5))
        usual = torch.ops.torchgdu.scan_saving(*given[:-1], root if root < steps else 0)[3]
        assert saved.shape == usual.shape
        assert call.saved_bytes(call.Problem(*(*given[:-1], call.AUTO))) == saved.numel()


@pytest.mark.parametrize("name", ["GDU", "LSTM", "CWRNN"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("checkpoint", [None, "auto"])
def test_exports_with_a_free_length(name: str, strict: bool, checkpoint: Any) -> None:
    layer = getattr(torchgdu, name)(3, "4x3" if name == "GDU" else 12, checkpoint=checkpoint)
    steps = torch.export.Dim("steps", min=2)
    program = torch.export.export(
        layer, (torch.randn(6, 2, 3),), dynamic_shapes=({0: steps},), strict=strict
    )
    operators = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert operators.count(scan) == 1  # nothing is saved where no gradient is asked for
    for length in (2, 11):
        x = torch.randn(length, 2, 3)
        for found, expected in zip(leaves(program.module()(x)), leaves(layer(x)), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_saved_program_is_loaded_once_the_operator_is_known(tmp_path: Path) -> None:
    """By a process that has imported torchgdu.ops, and makes no layer."""
    layer = torchgdu.LSTM(3, 12)
    x = torch.randn(6, 2, 3)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "program.pt2")
    torch.save({"x": x, "output": layer(x)[0].detach()}, tmp_path / "expected.pt")
    code = (
        "import torch, torchgdu.ops\n"
        f"program = torch.export.load({str(tmp_path / 'program.pt2')!r})\n"
        f"saved = torch.load({str(tmp_path / 'expected.pt')!r})\n"
        "print(torch.equal(program.module()(saved['x'])[0], saved['output']))\n"
    )
    done = python(code)
    assert done.stdout.strip() == "True", done.stderr


def leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [v for part in value for v in leaves(part)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_the_operator(dtype: torch.dtype) -> None:
    given = Scan.make("lstm", 4, 2, 3).map(lambda value: value.float())
    expected = scan(*given.arguments())
    with torch.autocast("cpu", dtype=dtype):
        found = scan(*given.map(lambda value: value.to(torch.bfloat16)).arguments())
        wide = scan(*given.map(lambda value: value.double()).arguments())
    for a, b, c in zip(found, expected, wide, strict=True):
        assert a.dtype == dtype
        assert c.dtype == torch.float64
        torch.testing.assert_close(a.float(), b, rtol=0, atol=2e-2)
        torch.testing.assert_close(c.float(), b, rtol=0, atol=1e-5)


@every_cell
def test_first_and_second_derivatives(cell: str) -> None:
    given = differentiable(Scan.make(cell, 3, 2, 2, (2, 1), reverse=True))
    names = list(given.differentiable())

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        left = dict(zip(names, values, strict=True))
        made = replace(
            given, x=left["x"],
            state=(left["h"], left["c"]) if "c" in left else (left["h"], *given.state[1:]),
            weight_ih=left["weight_ih"], weight_hh=left["weight_hh"], bias=left["bias"],
            extra=functional.Extra(
                left.get("bias_hn"), left.get("scale"), left.get("base"), given.extra.partition
            ),
        )  # fmt: skip
        output, final = made.run()
        return (output, *(value for value in final if value.is_floating_point()))

    values = list(given.differentiable().values())
    with engine_at(ops.library().supported[-1]):
        assert torch.autograd.gradcheck(run, values, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, values, fast_mode=True)


def test_a_gradient_penalty_equals_that_of_the_reference() -> None:
    """Second derivatives where one input is made of another."""
    layer = torchgdu.GDU(3, "2x3", dtype=torch.float64)
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)

    def penalty() -> list[Tensor]:
        start = (x[0, :, :1] * torch.ones(6, dtype=torch.float64)).unsqueeze(0)
        output, _ = layer(x.tanh(), start)
        (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), [x, *layer.parameters()]))

    with torchgdu.use_backend("engine"):
        found = penalty()
    with torchgdu.use_backend("reference"):
        expected = penalty()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@every_cell
def test_many_gradients_at_once(cell: str) -> None:
    """As jacobian(vectorize=True) and is_grads_batched ask for them; against one after another."""
    given = Scan.make(cell, 3, 2, 2)
    x, weight = given.x.clone().requires_grad_(), given.weight_hh.clone().requires_grad_()
    with torchgdu.use_backend("engine"):
        output, (h_n, *_) = replace(given, x=x, weight_hh=weight).run()
    each = torch.eye(h_n.numel(), dtype=torch.float64).view(-1, *h_n.shape)
    many = (each[:, None].expand(-1, *output.shape).sin(), each)

    def gradients(way: Any, **options: Any) -> tuple[Tensor, ...]:
        results, wanted = [output, h_n], [x, weight]
        return torch.autograd.grad(results, wanted, way, retain_graph=True, **options)

    for found, *expected in zip(
        gradients(many, is_grads_batched=True),
        *(gradients(one) for one in zip(*many, strict=True)),
        strict=True,
    ):
        torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-12)

    def read(x: Tensor, weight: Tensor) -> Tensor:
        return replace(given, x=x, weight_hh=weight).run()[1][0].sin()

    def number(x: Tensor, weight: Tensor) -> Tensor:
        return read(x, weight).square().sum()

    derive: Any = torch.autograd.functional
    inputs = (given.x, given.weight_hh)
    for compute, function in ((derive.jacobian, read), (derive.hessian, number)):
        pair = (compute(function, inputs, vectorize=v) for v in (True, False))
        for found, usual in zip(*map(leaves, pair), strict=True):
            torch.testing.assert_close(found, usual, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["gdu", "lstm", "cwrnn"])
@pytest.mark.parametrize("checkpoint", [2, "auto"])
def test_transforms_do_without_checkpoints(kind: str, checkpoint: Any) -> None:
    layer = build(kind, 3, None, 2, checkpoint=checkpoint)
    x = torch.randn(6, 2, 3, dtype=torch.float64)

    def last(x: Tensor) -> Tensor:
        return layer(x)[0][-1].sin()  # type: ignore[no-any-return]

    expected = torch.autograd.functional.jacobian(last, x)
    torch.testing.assert_close(torch.func.jacrev(last)(x), expected, rtol=0, atol=1e-12)
    found = torch.func.grad(lambda x: last(x).sum())(x)
    torch.testing.assert_close(found, expected.sum((0, 1)), rtol=0, atol=1e-12)
    with torchgdu.use_backend("reference"):
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(last(leaf).sum(), leaf)
    torch.testing.assert_close(found, expected.sum((0, 1)), rtol=0, atol=1e-12)


def test_only_wanted_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    usual = ops.library().backward

    def spy(given: bytes) -> int:
        came_and_go = given[engine.PROBLEM.size :]
        seen.append(engine.GRADIENTS.unpack(came_and_go))
        return int(usual(given))

    monkeypatch.setattr(ops.library(), "backward", spy)
    given = Scan.make("gdu", 4, 2, 3)
    weight = given.weight_hh.clone().requires_grad_()
    _, (h_n,) = replace(given, weight_hh=weight).run()
    h_n.sum().backward()
    grad_output, grad_h_n, grad_c_n, *going = seen[0]
    assert grad_output == 0  # a missing gradient is not made up of zeros
    assert grad_h_n != 0
    assert grad_c_n == 0
    named = dict(zip(("x", *call.DIFFERENTIABLE[1:]), going, strict=True))
    assert [name for name, address in named.items() if address] == ["weight_hh"]


@pytest.mark.parametrize("name", call.DIFFERENTIABLE)
def test_each_gradient_alone(name: str) -> None:
    cell = {"c": "lstm", "bias_hn": "gru_after"}.get(name, "gdu")
    given = Scan.make(cell, 4, 3, 2)
    expected = given.results("all", functional.scan)[f"gradient of {name}"]
    leaf = given.differentiable()[name].clone().requires_grad_()
    named = {**given.differentiable(), name: leaf}
    alone = replace(
        given, x=named["x"], state=(named["h"], *([named["c"]] if cell == "lstm" else ())),
        weight_ih=named["weight_ih"], weight_hh=named["weight_hh"], bias=named["bias"],
        extra=functional.Extra(
            named.get("bias_hn"), named.get("scale"), named.get("base"), given.extra.partition
        ),
    )  # fmt: skip
    output, final = alone.run()
    loss_of([output, *final]).backward()
    torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-10)


def test_expanded_and_transposed_gradients() -> None:
    given = Scan.make("gdu", 4, 3, 2)
    for read in (
        lambda output: output.sum(),
        lambda output: output.mean((1, 2)).square().sum(),
        lambda output: (output.permute(2, 0, 1) * torch.arange(3)).sum(),
        lambda output: output[::2, 1:].square().sum(),
        lambda output: output.sum(2).square().sum(),
    ):
        pair = []
        for compute in (ops.scan, functional.scan):
            leaf = differentiable(given)
            read(leaf.run(compute)[0]).backward()  # type: ignore[no-untyped-call]
            pair.append([value.grad for value in leaf.differentiable().values()])
        for found, expected in zip(*pair, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_what_was_changed_after_the_forward_pass_is_noticed() -> None:
    given = differentiable(Scan.make("gdu", 4, 3, 2))
    output, _ = given.run()
    with torch.no_grad():
        given.weight_hh.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_inputs_that_are_not_what_they_seem() -> None:
    """A negated view holds other numbers than it shows; so may a tensor made under a default."""
    given = Scan.make("gdu", 4, 3, 2)
    hidden = torch.complex(torch.zeros_like(given.x), -given.x).conj().imag
    assert hidden.is_neg()
    expected, _ = given.run(functional.scan)
    for made in (given, differentiable(given)):
        found, _ = replace(made, x=hidden).run()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    cell = torchgdu.GDUCell(2, "2x2", dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(cell(hidden[0]), cell(given.x[0]), rtol=0, atol=1e-12)
        with torch.device("meta"):
            torch.testing.assert_close(given.run()[0], expected, rtol=0, atol=1e-12)
    with torch.device("meta"):
        differentiable(given).run()[0].sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_transforms_go_through_the_reference(calls: list[str]) -> None:
    given = Scan.make("gdu", 3, 2, 4)

    def last(x: Tensor) -> Tensor:
        return replace(given, x=x).run()[0][-1].sum()

    expected = replace(given, x=given.x).results("last", functional.scan)
    assert "gradient of x" in expected
    plain = torch.autograd.functional.jacobian(last, given.x)
    calls.clear()
    torch.testing.assert_close(torch.func.grad(last)(given.x), plain, rtol=0, atol=1e-12)
    many = torch.vmap(last)(torch.stack([given.x, given.x]))
    torch.testing.assert_close(many[0], last(given.x), rtol=0, atol=1e-12)
    calls.clear()
    tangent = torch.randn_like(given.x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given.x, tangent)
        forward = torch.autograd.forward_ad.unpack_dual(last(dual)).tangent
    torch.testing.assert_close(forward, (plain * tangent).sum(), rtol=0, atol=1e-12)
    assert not calls
    traced = torch.jit.trace(lambda x: replace(given, x=x).run()[0], given.x)
    found = traced(given.x * 2)
    torch.testing.assert_close(found, replace(given, x=given.x * 2).run()[0], rtol=0, atol=1e-12)
    with torchgdu.use_backend("engine"), pytest.raises(RuntimeError, match=r"no transforms"):
        torch.vmap(last)(torch.stack([given.x, given.x]))


def test_steps_without_gradients_equal_those_with(calls: list[str]) -> None:
    for cell in functional.CELLS:
        for given in (Scan.make(cell, 1, 2, 3), Scan.make(cell, 1, 1, 1, bias=False)):
            problem = (given.weight_ih, given.weight_hh, given.bias, given.extra)
            expected = functional.step(cell, given.x[0], given.state, *problem).state
            with torch.no_grad():
                found = ops.step(cell, given.x[0], given.state, *problem)
                apart = ops.step(
                    cell, given.x[0].repeat_interleave(2, -1)[:, ::2], given.state, *problem
                )
            saved = ops.step(cell, given.x[0], given.state, *problem)
            for a, b, c, d in zip(found, expected, apart, saved, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
                assert torch.equal(a, c)
                assert torch.equal(a, d)
    assert len(calls) == 3 * 2 * len(functional.CELLS)


def test_empty_batches() -> None:
    given = Scan.make("lstm", 3, 2, 4)
    empty = replace(given, x=given.x[:, :0], state=tuple(value[:0] for value in given.state)).map(
        lambda value: value.detach().requires_grad_()
    )
    output, (h_n, c_n) = empty.run()
    assert output.shape == (3, 0, 12)
    assert h_n.shape == c_n.shape == (0, 12)
    (output.sum() + c_n.sum()).backward()
    assert empty.weight_hh.grad is not None
    assert not empty.weight_hh.grad.any()


# Bad calls ---------------------------------------------------------------------------------------

NAMES = call.Problem._fields
GOOD = Scan.make("gdu", 4, 3, 2)
PACKED = Scan.make("gdu", 4, 3, 2, lengths=[4, 2, 1])
LSTM = Scan.make("lstm", 4, 3, 2)
CWRNN = Scan.make("cwrnn", 4, 3, 2)
f64 = torch.float64


def lengths(*sizes: int) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int64)


BAD: list[tuple[Scan, dict[str, Any], type[Exception], str]] = [
    (GOOD, {"cell": "gdv"}, ValueError, "cell='gdv' is not one of srn"),
    (GOOD, {"x": GOOD.x.half()}, TypeError, "x must be float32 or float64"),
    (GOOD, {"x": GOOD.x.long()}, TypeError, "x must be float32 or float64"),
    (GOOD, {"x": GOOD.x.float()}, TypeError, r"h must be .* torch.float32 .* got .* torch.float64"),
    (GOOD, {"x": GOOD.x[0]}, ValueError, r"x must be \[T, B, I\]"),
    (GOOD, {"x": GOOD.x[:, :1]}, ValueError, r"x must be \[4, 3, 2\]"),
    (GOOD, {"x": GOOD.x[:0]}, ValueError, "T=0"),
    (GOOD, {"x": GOOD.x[..., :0]}, ValueError, "I=0"),
    (GOOD, {"x": GOOD.x[..., :1]}, ValueError, r"weight_ih must be \[24, 1\]"),
    (GOOD, {"h": GOOD.state[0][0]}, ValueError, r"h \[B, H\]"),
    (GOOD, {"h": GOOD.state[0][:2]}, ValueError, "x must be"),
    (GOOD, {"h": GOOD.state[0][:, :5]}, ValueError, r"weight_ih must be \[10, 2\]"),
    (GOOD, {"h": GOOD.state[0][:, :0]}, ValueError, "H=0"),
    (GOOD, {"c": GOOD.state[0]}, ValueError, "cell='gdu' has no c"),
    (GOOD, {"clock": torch.zeros(3, dtype=torch.int64)}, ValueError, "has no clock"),
    (GOOD, {"weight_hh": GOOD.weight_hh.T}, ValueError, r"weight_hh must be \[24, 12\]"),
    (GOOD, {"weight_hh": GOOD.weight_hh.float()}, TypeError, "weight_hh must be"),
    (GOOD, {"bias": torch.zeros(12, dtype=f64)}, ValueError, r"bias must be \[24\]"),
    (GOOD, {"bias_hn": torch.zeros(12, dtype=f64)}, ValueError, "has no bias_hn"),
    (GOOD, {"scale": None}, ValueError, "cell='gdu' needs scale"),
    (GOOD, {"base": torch.zeros(3, dtype=f64)}, ValueError, r"base must be \[12\]"),
    (GOOD, {"partition": "4 2 1 4"}, ValueError, "sum to H=12, not 11"),
    (GOOD, {"partition": "14 -2"}, ValueError, "whole numbers"),
    (GOOD, {"partition": "12 0"}, ValueError, "numbers from 1"),
    (GOOD, {"partition": f"12 {2**64}"}, ValueError, "numbers from 1"),
    (GOOD, {"checkpoint": -2}, ValueError, "checkpoint=-2"),
    (LSTM, {"c": None}, ValueError, "cell='lstm' needs c"),
    (LSTM, {"partition": "12"}, ValueError, "cell='lstm' has no partition"),
    (CWRNN, {"clock": torch.zeros(3)}, TypeError, r"clock must be \[3\], torch.int64"),
    (CWRNN, {"clock": None}, ValueError, "needs clock"),
    (CWRNN, {"partition": "1 2 3 4 5"}, ValueError, "periods of equal parts"),
    (CWRNN, {"partition": ""}, ValueError, "periods of equal parts"),
    (PACKED, {"batch_sizes": lengths(3, 2, 1)}, ValueError, "be 7 symbols in all"),
    (PACKED, {"batch_sizes": lengths(2, 2, 2, 1)}, ValueError, "fall from B=3"),
    (PACKED, {"batch_sizes": lengths(3, 1, 2, 1)}, ValueError, "fall from B=3"),
    (PACKED, {"batch_sizes": lengths(3, 2, 2, 0)}, ValueError, "to at least 1"),
    (PACKED, {"batch_sizes": lengths(3, 3, 3, -2)}, ValueError, "to at least 1"),
    (PACKED, {"batch_sizes": lengths()}, ValueError, "fall from B=3"),
    (PACKED, {"batch_sizes": lengths(3, 2, 1, 1).int()}, TypeError, "batch_sizes must be"),
    (PACKED, {"batch_sizes": None}, ValueError, r"x must be \[T, B, I\]"),
]  # fmt: skip


@pytest.mark.parametrize(("good", "change", "kind", "words"), BAD)
@pytest.mark.parametrize("gradients", [False, True])
def test_bad_calls_are_errors(
    good: Scan, change: dict[str, Any], kind: type[Exception], words: str, gradients: bool
) -> None:
    given = dict(zip(NAMES, good.arguments(), strict=True)) | change
    if gradients:
        given["weight_hh"] = given["weight_hh"].clone().requires_grad_()
    with pytest.raises(kind, match=words):
        scan(*given.values())


@pytest.mark.parametrize("sizes", [(1, 2), (2, 0), (2, 2), (3, -1), (2,), ()])
@pytest.mark.parametrize("backend", ["engine", "reference"])
def test_bad_packed_input_is_an_error_whoever_computes(sizes: Any, backend: str) -> None:
    given = Scan.make("srn", 2, 2, 3)
    packed = replace(given, x=given.x[0, [0, 1, 1]], options={"batch_sizes": lengths(*sizes)})
    with torchgdu.use_backend(backend):
        with pytest.raises(ValueError, match="3 symbols in all"):
            packed.run()
        with pytest.raises(TypeError, match="batch_sizes must be"):
            replace(packed, options={"batch_sizes": lengths(2, 1).int()}).run()
        replace(packed, options={"batch_sizes": lengths(2, 1)}).run()
        for cell, k in (("lstm", 0), ("lstm", 1), ("cwrnn", 0), ("cwrnn", 1)):
            one = Scan.make(cell, 2, 2, 3)
            state = [value[:1] if k == n else value for n, value in enumerate(one.state)]
            with pytest.raises(ValueError):
                replace(one, state=tuple(state)).run()  # would be spread over the batch


def test_bad_calls_of_backward() -> None:
    plain = GOOD.arguments()
    output, h_n, c_n, saved = torch.ops.torchgdu.scan_saving(*plain)
    back = torch.ops.torchgdu.scan_backward.default
    wanted = [name in GOOD.differentiable() for name in call.DIFFERENTIABLE]

    def bad(words: str, kind: type[Exception] = ValueError, **change: Any) -> None:
        given = {
            "output": output, "saved": saved, "grad_output": None, "grad_h_n": h_n,
            "grad_c_n": None, "wanted": wanted,
        } | change  # fmt: skip
        with pytest.raises(kind, match=words):
            back(*plain, *given.values())

    bad("output must be", output=output[1:])
    bad("saved must be", saved=saved[1:])
    bad("saved must be", TypeError, saved=saved.view(torch.int8))
    bad("grad_output must be", grad_output=output[..., :1])
    bad("grad_h_n must be", TypeError, grad_h_n=h_n.float())
    bad("grad_c_n must be", grad_c_n=c_n)
    bad("9 flags, got 8", wanted=wanted[1:])
    bad("there is no c whose gradient", wanted=[True] * 9)
    found = back(*plain, output, saved, None, h_n, None, wanted)
    moved = torch.cat([saved.new_zeros(3), saved])[3:]  # on no boundary of 64 bytes
    for a, b in zip(back(*plain, output, moved, None, h_n, None, wanted), found, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="scan is the one that has gradients"):
        back(*plain, output.requires_grad_(), saved, None, h_n, None, wanted)


def test_other_devices_and_layouts_are_errors() -> None:
    given = dict(zip(NAMES, GOOD.arguments(), strict=True))
    for name in ("x", "h", "weight_hh", "scale"):
        for other in (given[name].to("meta"), given[name].to_sparse()):
            with pytest.raises((RuntimeError, NotImplementedError, TypeError, ValueError)):
                scan(*(given | {name: other}).values())


def freed(value: Tensor, offset: int) -> Tensor:
    """A tensor whose storage was given back, as sharded training does between its uses."""
    whole = torch.cat([value.flatten(), value.flatten()[:offset]])
    view = whole[offset:].view(value.shape)
    whole.untyped_storage().resize_(0)
    return view


GONE = "has no memory to read|of bounds for storage of size 0"
"""Our words, or torch's where it looks first."""


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("gradients", [False, True])
def test_memory_that_is_gone_is_an_error(offset: int, gradients: bool) -> None:
    """Its address is 0, or where a view would begin if the storage began at 0."""
    for good in (GOOD, LSTM, CWRNN, PACKED):
        given = dict(zip(NAMES, good.arguments(), strict=True))
        for name, value in given.items():
            if isinstance(value, Tensor):
                other = "bias" if name == "weight_hh" else "weight_hh"
                changed = given | {name: freed(value, offset)}
                changed[other] = changed[other].clone().requires_grad_(gradients)
                with pytest.raises(RuntimeError, match=f"{name} {GONE}"):
                    scan(*changed.values())
    plain = GOOD.arguments()
    output, h_n, _, saved = torch.ops.torchgdu.scan_saving(*plain)
    back = torch.ops.torchgdu.scan_backward.default
    wanted = [name in GOOD.differentiable() for name in call.DIFFERENTIABLE]
    for k, name in enumerate(("output", "saved", "grad_output", "grad_h_n")):
        came = [output, saved, output.sin(), h_n]
        came[k] = freed(came[k], offset)
        with pytest.raises(RuntimeError, match=f"{name} has no memory to read"):
            back(*plain, *came, None, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_gone_is_an_error_in_layers_and_cells(kind: str) -> None:
    layer = build(kind, 3)
    x, h = torch.randn(4, 2, 3, dtype=f64), torch.randn(1, 2, 12, dtype=f64)
    for gradients in (False, True):
        for gone in (freed(x, 0), freed(x, 3)):
            with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError, match=GONE):
                layer(gone)
            with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError, match=GONE):
                layer.cell()(gone[0])
        hx: Any = (freed(h, 0), h) if kind == "lstm" else freed(h, 0)
        with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError, match=GONE):
            layer(x, hx)
    cell = layer.cell()
    layer.get_parameter("bias_l0").untyped_storage().resize_(0)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            with pytest.raises(RuntimeError, match="bias has no memory to read"):
                layer(x)
            with pytest.raises(RuntimeError, match="bias has no memory to read"):
                cell(x[0])


@every_cell
@pytest.mark.parametrize("gradients", [False, True])
def test_tensors_that_stand_for_others(cell: str, gradients: bool) -> None:
    """Zeros that are nowhere, and what functionalization wraps: torch knows what they hold."""
    given = Scan.make(cell, 3, 2, 4)
    zeros = [torch._efficientzerotensor(v.shape, dtype=v.dtype) for v in given.state]
    assert zeros[0]._is_zerotensor()
    weight = given.weight_hh.clone().requires_grad_(gradients)
    made = replace(given, weight_hh=weight)
    expected, _ = replace(made, state=tuple(map(torch.zeros_like, given.state))).run(
        functional.scan
    )
    output, final = replace(made, state=tuple(zeros)).run()
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    if gradients:
        states = [value for value in final if value.is_floating_point()]
        nothing = torch._efficientzerotensor(states[0].shape, dtype=f64)
        (found,) = torch.autograd.grad(
            [output, states[0]], weight, [output.cos(), nothing], retain_graph=True
        )
        (usual,) = torch.autograd.grad(expected, weight, expected.cos())
        torch.testing.assert_close(found, usual, rtol=0, atol=1e-12)
    wrapped = torch._to_functional_tensor(given.x)
    assert torch._is_functional_tensor(wrapped)
    found = torch._from_functional_tensor(replace(made, x=wrapped).run()[0])
    torch.testing.assert_close(found, made.run(functional.scan)[0], rtol=0, atol=1e-12)
    one = (given.weight_ih, weight, given.bias, given.extra)
    with torch.set_grad_enabled(gradients):
        found = ops.step(cell, given.x[0], tuple(zeros), *one)[0]
        torch.testing.assert_close(found, expected[0], rtol=0, atol=1e-12)


def test_the_clock_of_a_step_is_looked_at() -> None:
    cell = torchgdu.CWRNNCell(3, 4, periods=(1, 3))
    x, h, clock = torch.randn(2, 3), torch.randn(2, 4), torch.tensor([1, 2])
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            for bad in (clock.to("meta"), freed(clock, 0), freed(clock, 1)):
                with pytest.raises((RuntimeError, TypeError), match=r"on meta|has no memory"):
                    cell(x, (h, bad))
            zero = torch._efficientzerotensor((2,), dtype=torch.int64)
            expected = cell(x, (h, torch.zeros(2, dtype=torch.int64)))
            for a, b in zip(cell(x, (h, zero)), expected, strict=True):
                assert torch.equal(a, b)
            apart = torch.tensor([1, 9, 2, 9])[::2]
            assert torch.equal(cell(x, (h, apart))[0], cell(x, (h, clock))[0])


def test_overlapping_inputs_are_read_as_they_are() -> None:
    """Nothing is written but what is returned, so inputs may share their memory."""
    shared = torch.randn(24, 12, dtype=f64)
    given = replace(
        GOOD, weight_hh=shared, weight_ih=shared[:, 3:5], bias=shared[:, 0],
        state=(shared[:3],), x=shared.as_strided((4, 3, 2), (1, 2, 1)),
    )  # fmt: skip
    expected, found = given.run(functional.scan)[0], given.run()[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_sizes_beyond_any_memory_are_errors() -> None:
    """T·B·H beyond 2^31, 2^63: from one number, expanded."""
    small = Scan.make("srn", 1, 1, 1)
    for steps in (2**40, 2**60):
        with pytest.raises((RuntimeError, MemoryError)):
            replace(small, x=torch.zeros(1, 1, 1, dtype=f64).expand(steps, 1, 1)).run()


@pytest.mark.slow
def test_more_than_two_to_the_31_numbers() -> None:
    """Places of numbers are counted with 64 bits."""
    steps = 2**31 // 64 // 8 + 16
    x = torch.zeros(1, 1, 1).expand(steps, 8, 1)
    layer = torchgdu.SRN(1, 64)
    with torch.no_grad(), torchgdu.use_backend("engine"):
        output, h_n = layer(x)
        expected, _ = layer(x[:200])
    assert output.numel() > 2**31
    torch.testing.assert_close(output[-1], expected[-1])
    torch.testing.assert_close(output[-1], h_n[0])


def test_a_refusal_of_the_engine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.library(), "forward", lambda given: engine.NO_MEMORY)
    with pytest.raises(MemoryError, match="no memory"):
        GOOD.run()
    monkeypatch.setattr(ops.library(), "forward", lambda given: 2)
    with pytest.raises(RuntimeError, match="refused the call"):
        GOOD.run()
