"""The engine against the reference: values, gradients, bits, threads, and what it takes to run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchgdu
from scans import Compute, Scan, engine_at, loss_of, poisoned
from torchgdu import functional, ops
from torchgdu.tasks import Adding

LEVELS = ops.library().levels
SUPPORTED = ops.library().supported
every_cell = pytest.mark.parametrize("cell", functional.CELLS)
every_level = pytest.mark.parametrize("level", LEVELS)


def need(level: str) -> None:
    if level not in SUPPORTED:
        pytest.skip(f"this processor has no {level}")


def laid_out(value: Tensor, how: str) -> Tensor:
    """The same numbers [T, B, I] lying differently in memory."""
    if how == "batch first":
        return value.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "rows apart":
        return torch.cat([value, torch.full_like(value, float("nan"))], -1)[..., : value.size(-1)]
    if how == "columns apart":
        return value.repeat_interleave(2, -1)[..., ::2]
    if how == "one row for all":
        return value[:, :1].contiguous().expand(value.shape)
    return value


LAYOUTS = ["contiguous", "batch first", "rows apart", "columns apart", "one row for all"]


# 1. Values and gradients -------------------------------------------------------------------------


@every_cell
@settings(max_examples=40)
@given(data=st.data())
def test_equals_the_reference(cell: str, data: st.DataObject) -> None:
    """float64 to 1e-10; float32 no further off than four times the reference in float32."""
    batch = data.draw(st.integers(1, 7), "batch")
    steps = data.draw(st.sampled_from([1, 2, 3, 9, 17, 64]), "steps")
    call = Scan.make(
        cell, steps, batch, data.draw(st.sampled_from([1, 2, 5, 19]), "inputs"),
        tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5), "groups")),
        bias=data.draw(st.booleans(), "bias"),
        lengths=data.draw(
            st.none() | st.lists(st.integers(1, steps), min_size=batch, max_size=batch), "lengths"
        ),
        reverse=data.draw(st.booleans(), "reverse"),
        checkpoint=data.draw(st.none() | st.integers(1, steps + 1), "checkpoint"),
        seed=data.draw(st.integers(0, 2**31), "seed"),
    )  # fmt: skip
    if "batch_sizes" not in call.options:
        call = replace(call, x=laid_out(call.x, data.draw(st.sampled_from(LAYOUTS), "layout")))
    loss = data.draw(st.sampled_from(["all", "last", "state"]), "loss")
    level = data.draw(st.sampled_from(SUPPORTED), "level")
    threads = data.draw(st.sampled_from([1, 2, 3, batch + 2]), "threads")
    expected = call.results(loss, functional.scan)
    narrow = call.map(lambda value: value.float())
    usual = narrow.results(loss, functional.scan)
    with engine_at(level, threads), poisoned():
        found, single = call.results(loss), narrow.results(loss)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        error = (found[name] - value).abs().max()
        assert error < 1e-10, f"{name}: {error}"
    for gradients in (False, True):
        names = [k for k, v in expected.items() if v.is_floating_point()]
        names = [name for name in names if ("gradient" in name) == gradients]
        exact = torch.cat([expected[name].flatten() for name in names])
        error, allowed = (
            (torch.cat([v[name].flatten() for name in names]).double() - exact).norm()
            for v in (single, usual)
        )
        # A reference nearer than rounding every number once is right by luck: no measure.
        least = torch.finfo(torch.float32).eps / 2 * exact.norm()
        assert error <= 4 * max(allowed, least), f"{names}: {error}, the reference {allowed}"


@every_cell
@every_level
@pytest.mark.parametrize("units", [1, 7, 16, 33, 130])
def test_every_size_of_state(cell: str, level: str, units: int) -> None:
    """Below, at and above every width of a register and of a panel."""
    need(level)
    call = Scan.make(cell, 3, 2, 3, (units,))
    if cell not in ("gdu", "cwrnn"):
        rows = len(functional.CELLS[cell].rows)
        call = replace(
            call, state=tuple(torch.randn(2, units, dtype=torch.float64) for _ in call.state),
            weight_ih=torch.randn(rows * units, 3, dtype=torch.float64) / 3,
            weight_hh=torch.randn(rows * units, units, dtype=torch.float64) / units**0.5,
            bias=torch.randn(rows * units, dtype=torch.float64),
            extra=functional.Extra(torch.randn(units, dtype=torch.float64))
            if cell == "gru_after" else functional.PLAIN,
        )  # fmt: skip
    expected = call.results("all", functional.scan)
    with engine_at(level), poisoned():
        found = call.results()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=name)


# 2. Bits -----------------------------------------------------------------------------------------


@every_cell
@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("packed", [False, True])
def test_bits_repeat_and_threads_do_not_change_the_forward_ones(
    cell: str, level: str, dtype: torch.dtype, packed: bool
) -> None:
    need(level)
    lengths = [20, 19, 11, 11, 10, 8, 7, 6, 5, 3, 1] if packed else None
    call = Scan.make(cell, 20, 11, 5, lengths=lengths).map(lambda value: value.to(dtype))

    def bits(threads: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        with engine_at(level, threads):
            found = call.results()
        forward = {name: value for name, value in found.items() if "gradient" not in name}
        return forward, found

    alone = bits(1)[0]
    for threads in (1, 2, 3, 16):
        forward, everything = bits(threads)
        assert all(torch.equal(forward[name], value) for name, value in alone.items())
        again = bits(threads)[1]
        assert all(torch.equal(again[name], value) for name, value in everything.items())


# 3. What is not finite, or large -----------------------------------------------------------------


def spoilt(given: Scan, name: str, value: float) -> Scan:
    """The same call with one number of one argument changed; of what has a batch, in row 3."""

    def change(tensor: Tensor) -> Tensor:
        if tensor is not given.differentiable()[name]:
            return tensor
        changed = tensor.clone()
        changed[{"x": (2, 3, 1), "h": (3, 4), "c": (3, 4)}.get(name, (changed.size(0) // 3,))] = (
            value
        )
        return changed

    return given.map(change)


def with_gradients(given: Scan, of_output: Tensor, compute: Compute | None) -> dict[str, Tensor]:
    """Values, and the gradients that this gradient of the output makes."""
    given = given.map(lambda v: v.detach().requires_grad_())
    output, final = given.run(compute)
    inputs = given.differentiable()
    gradients = torch.autograd.grad(output, list(inputs.values()), of_output, allow_unused=True)
    found = {"output": output, **{f"final {k}": v for k, v in enumerate(final)}}
    found |= {
        f"gradient of {k}": v for k, v in zip(inputs, gradients, strict=True) if v is not None
    }
    return {name: v.detach() for name, v in found.items()}


PER_SEQUENCE = {
    "output": 1, "final 0": 0, "final 1": 0, "gradient of x": 1, "gradient of h": 0,
    "gradient of c": 0,
}  # fmt: skip
"""Which dimension is the batch."""


@every_cell
@every_level
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_spreads_as_in_the_reference(
    cell: str, level: str, value: float, dtype: torch.dtype
) -> None:
    """From wherever it stands; of a sequence in its own, the neighbours keep their bits."""
    need(level)
    clean = Scan.make(cell, 6, 5, 3).map(lambda v: v.to(dtype))
    ones = torch.ones_like(clean.run()[0])
    dirty = ones.clone()
    dirty[1, 3, 2] = value
    cases = [(name, spoilt(clean, name, value), ones) for name in clean.differentiable()]
    cases.append(("gradient", clean, dirty))
    others = torch.tensor([0, 1, 2, 4])
    with engine_at(level):
        usual = with_gradients(clean, ones, None)
    for place, call, of_output in cases:
        expected = with_gradients(call, of_output, functional.scan)
        with engine_at(level):
            found = with_gradients(call, of_output, None)
            with torch.no_grad():
                assert torch.equal(call.run()[0].isnan(), expected["output"].isnan()), place
        for name, theirs in expected.items():
            ours, told = found[name], f"{name}, {value} in {place}"
            if place == "gradient":  # d·(c − s) is infinite where d·c − d·s has become NaN
                assert torch.equal(ours.isfinite(), theirs.isfinite()), told
                assert (ours.isnan() <= theirs.isnan()).all(), told
                ours = torch.where(ours.isinf() & theirs.isnan(), theirs, ours)
            assert torch.equal(ours.isnan(), theirs.isnan()), told
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True, msg=told)
            if place in ("x", "h", "c", "gradient") and name in PER_SEQUENCE:
                dim = PER_SEQUENCE[name]
                kept = (v.index_select(dim, others) for v in (ours, usual[name]))
                assert torch.equal(*kept), told


@every_cell
@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_logits_stay_finite(cell: str, level: str, dtype: torch.dtype) -> None:
    need(level)
    call = Scan.make(cell, 5, 3, 4)
    assert call.bias is not None
    signs = torch.where(torch.arange(call.bias.numel()) % 3 == 0, 1e4, -1e4).double()
    call = replace(call, bias=signs).map(lambda value: value.to(dtype))
    expected = call.results("all", functional.scan)
    with engine_at(level):
        found = call.results()
    for name, value in found.items():
        assert value.isfinite().all(), name
        # In float32 neighbours of a logit of 1e4 are 1e-3 apart.
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4, msg=name)


@every_cell
def test_gradients_of_ten_thousand_steps_are_finite(cell: str) -> None:
    call = Scan.make(cell, 10_000, 2, 3, checkpoint=100).map(lambda value: value.float())
    with engine_at(SUPPORTED[-1]):
        found = call.results("last")
    for name, value in found.items():
        assert value.isfinite().all(), name


# 5. Training -------------------------------------------------------------------------------------


def curve(backend: str, dtype: torch.dtype, steps: int) -> list[float]:
    """The losses of training a GDU on the adding problem."""
    torch.manual_seed(0)
    source = Adding(100).source(0, 0, 20)
    model = torchgdu.SequenceModel("gdu", 2, 1, groups="10x10", dtype=dtype)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    with torchgdu.use_backend(backend):
        for _ in range(steps):
            batch = source.next()
            loss = torch.nn.functional.mse_loss(
                model(torch.as_tensor(batch.input).to(dtype)),
                torch.as_tensor(batch.target).to(dtype),
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("dtype", "steps", "tolerance"), [(torch.float64, 300, 1e-6), (torch.float32, 20, 1e-4)]
)
def test_learns_by_the_reference_s_curve(dtype: torch.dtype, steps: int, tolerance: float) -> None:
    found, expected = curve("engine", dtype, steps), curve("reference", dtype, steps)
    assert found[-1] != found[0]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < tolerance


# Threads and processes ---------------------------------------------------------------------------


def test_calls_from_several_threads_at_once() -> None:
    calls = [Scan.make(cell, 50, 4, 3, seed=k) for k, cell in enumerate(functional.CELLS)] * 3
    with engine_at(SUPPORTED[-1], 2):
        expected = [call.results() for call in calls]
        found: list[dict[str, Tensor]] = [{} for _ in calls]

        def work(k: int) -> None:
            for _ in range(5):
                found[k] = calls[k].results()

        threads = [threading.Thread(target=work, args=(k,)) for k in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for a, b in zip(found, expected, strict=True):
        assert all(torch.equal(a[name], value) for name, value in b.items())


def test_other_python_threads_run_meanwhile() -> None:
    layer = torchgdu.GDU(8, "8x32")
    x = torch.randn(2000, 64, 8)
    took: list[float] = []

    def work() -> None:
        start = time.monotonic()
        with torch.no_grad(), torchgdu.use_backend("engine"):
            layer(x)
        took.append(time.monotonic() - start)

    thread = threading.Thread(target=work)
    longest, last = 0.0, time.monotonic()
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    assert longest < took[0] / 2


def test_forked_processes_compute_too() -> None:
    """As data loaders' workers do, after threads have been in use."""
    call = Scan.make("gdu", 30, 6, 3)
    code = (
        "import os, sys, warnings; import torch; sys.path.insert(0, 'tests')\n"
        "from scans import Scan, engine_at; from torchgdu import ops\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"  # Python's own, on forking
        "call = Scan.make('gdu', 30, 6, 3)\n"
        "with engine_at(ops.library().supported[-1], 2):\n"
        "    expected = call.run()[0]\n"
        "    child = os.fork()\n"
        "    same = torch.equal(call.run()[0], expected)\n"
        "    if child == 0: os._exit(0 if same else 1)\n"
        "    _, status = os.waitpid(child, 0)\n"
        "    assert same and status == 0, status\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=root)
    assert call.x.size(0) == 30


@every_cell
def test_threads_may_change_between_forward_and_backward(cell: str) -> None:
    call = Scan.make(cell, 9, 5, 3)
    expected = call.results("all", functional.scan)["gradient of weight_hh"]
    weight = call.weight_hh.clone().requires_grad_()
    with engine_at(SUPPORTED[-1], 3):
        output, final = replace(call, weight_hh=weight).run()
        torch.set_num_threads(1)
        states = [value for value in final if value.is_floating_point()]
        loss_of([output, *states]).backward()
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=1e-10)


# Memory ------------------------------------------------------------------------------------------

GROWTH = """
import torch, torchgdu
from torchgdu.bench import grown
def show(steps, batch, units, train, **options):
    layer = torchgdu.GDU(2, f"8x{units // 8}", **options)
    x = torch.randn(steps, batch, 2)
    def run():
        with torch.set_grad_enabled(train):
            output, h_n = layer(x)
            if train:
                h_n.sum().backward()
    print(steps * batch * units * 4 / 2**20, grown(run))
torch.set_num_threads(2)
with torchgdu.use_backend("engine"):
    for train in (False, True):  # what is loaded once
        show(10, 2, 64, train)
"""


def growth(code: str) -> list[float]:
    """Output and growth of ``code`` after GROWTH, in a process of its own, in MiB."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH + code], check=True, capture_output=True, text=True
    )
    return [float(word) for word in done.stdout.split()[4:]]


def test_without_gradients_memory_is_the_output() -> None:
    output, grown = growth("    show(100_000, 4, 64, False)")
    assert output > 90
    assert grown < output + 16


def test_checkpoints_save_memory() -> None:
    output, grown = growth("    show(100_000, 4, 64, True, checkpoint='auto')")
    assert grown < output + 32  # everything: 3 × output


@pytest.mark.slow
def test_a_million_steps_train_in_less_than_a_gibibyte() -> None:
    output, grown = growth("    show(1_000_000, 4, 64, True, checkpoint='auto')")
    given = 1_000_000 * 4 * 2 * 4 / 2**20
    assert grown - output - given < 1024


def test_a_view_with_the_batch_first_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    usual = ops.library().forward

    def spy(given: bytes) -> int:
        seen.append(given)
        return int(usual(given))

    monkeypatch.setattr(ops.library(), "forward", spy)
    layer = torchgdu.GDU(3, "2x2", batch_first=True)
    x = torch.randn(5, 7, 3)
    with torchgdu.use_backend("engine"):
        layer(x)
    assert x.data_ptr().to_bytes(8, sys.byteorder) in seen[0]
