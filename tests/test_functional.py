"""The specification itself: the distributor, δ, and how the plain loop spends time and memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import oracle
from kinds import KINDS, build
from torchgdu import Groups, GroupsError, functional
from torchgdu.functional import KINK, affine, distribute, learnt_delta

sizes_and_deltas = st.lists(
    st.integers(1, 6).flatmap(
        lambda m: st.tuples(
            st.just(m), st.integers(1, 3), st.floats(0, m, exclude_min=True, exclude_max=True)
        )
    ),
    min_size=1,
    max_size=5,
)


@given(sizes_and_deltas, st.integers(0, 2**31))
def test_distributor_equals_the_oracle_and_sums_to_delta(description: Any, seed: int) -> None:
    groups = Groups(description)
    logits = 5 * torch.randn(7, groups.units, dtype=torch.float64, generator=seeded(seed))
    alpha = distribute(logits, groups)
    for row, expected in zip(alpha, logits.numpy(), strict=True):
        pairs = list(zip(groups.sizes, groups.deltas, strict=True))
        np.testing.assert_allclose(row.numpy(), oracle.distributor(expected, pairs), atol=1e-12)
    for part, delta in zip(alpha.split(list(groups.sizes), -1), groups.deltas, strict=True):
        assert (part.sum(-1) - delta).abs().max() < 1e-6
    mean = alpha.mean(-1)
    torch.testing.assert_close(mean, torch.full_like(mean, groups.overwrite_proportion))
    assert (alpha >= 0).all()
    assert (alpha <= 1 + 1e-12).all()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_large_logits_and_infinities() -> None:
    alpha = distribute(torch.tensor([1e4, -1e4, 0.0, 1e4, 1e4, -1e4]), "3x2x1.5")
    torch.testing.assert_close(
        alpha, torch.tensor([0.75 + 0.25, 0.25, 0.25, 0.375 + 0.25, 0.375 + 0.25, 0.25])
    )
    inf = float("inf")
    logits = torch.tensor([0.0, -inf, 0.0, -inf, -inf, -inf], requires_grad=True)
    alpha = distribute(logits, "3x2")
    assert alpha[:3].tolist() == [0.5, 0.0, 0.5]
    assert alpha[3:].isnan().all()
    (gradient,) = torch.autograd.grad(alpha[:3].square().sum(), logits)
    assert gradient[:3].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_leading_dimensions_are_kept(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 4, 6, dtype=dtype)
    alpha = distribute(logits, "2x3")
    assert alpha.dtype == dtype
    assert alpha.shape == logits.shape
    assert torch.equal(distribute(logits[1, 2], "2x3"), alpha[1, 2])
    assert distribute(torch.zeros(0, 6), "2x3").shape == (0, 6)


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="do not end in the 6 units of '2x3'"):
        distribute(torch.zeros(2, 5), "2x3")
    with pytest.raises(ValueError, match="do not end"):
        distribute(torch.tensor(0.0), "2x3")
    with pytest.raises(ValueError, match="one entry for each of 3 groups"):
        distribute(torch.zeros(6), "2x3", torch.ones(2))
    with pytest.raises(GroupsError):
        distribute(torch.zeros(6), "2x")


@pytest.mark.parametrize("value", [-1.0, 0.0, 4.0, 5.0, float("nan"), float("inf")])
def test_a_delta_that_no_group_can_distribute_is_an_error(value: float) -> None:
    delta = torch.tensor([0.5, 1.0, value])
    for each in (delta, delta.bfloat16(), delta.double().requires_grad_()):
        with pytest.raises(ValueError, match=r"delta\[2\] = .* between 0 and 4, the group's size"):
            distribute(torch.zeros(3, 8), "2x2+4x1", each)
    distribute(torch.zeros(3, 8, device="meta"), "2x2+4x1", delta.to("meta"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_delta_where_nobody_can_look_at_it() -> None:
    """Compiled, traced and transformed: the same numbers, and no look."""
    logits = torch.randn(3, 8, dtype=torch.float64)
    delta = torch.tensor([0.5, 1.0, 2.5], dtype=torch.float64)

    def run(delta: Tensor) -> Tensor:
        return distribute(logits, "2x2+4x1", delta)

    expected = run(delta)
    slope = torch.autograd.functional.jacobian(run, delta)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for found in (
        compiled(delta),
        torch.jit.trace(run, delta)(delta),
        make_fx(run, tracing_mode="real")(delta)(delta),
        torch.vmap(run)(delta.expand(2, 3))[1],
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.func.jacrev(run)(delta), slope, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_round_delta(dtype: torch.dtype) -> None:
    """0.999·M is M in half precision, and (M − δ)/(M − 1) would be 0."""
    logits = torch.zeros(200, dtype=dtype)
    logits[0] = -float("inf")
    alpha = distribute(logits, "200x1x199.9")
    assert alpha.dtype == dtype
    expected = (199.9 - 1) / 199
    torch.testing.assert_close(alpha[0].double().item(), expected, rtol=0, atol=3e-3)
    delta = torch.tensor([1.003])
    base = torch.tensor(0.003 / 199)  # lost where 1.003 is 1
    found = distribute(logits, "200x1", delta)[0]
    torch.testing.assert_close(found, base.to(dtype), rtol=0.02, atol=0)
    given = distribute(logits, "200x1", delta.to(dtype))
    assert given.dtype == dtype
    assert torch.equal(given, distribute(logits, "200x1", delta.to(dtype).float()))
    written = distribute(logits, "200x1x1.003")
    assert torch.equal(written, distribute(logits, "200x1", delta))


def test_gradient_of_logits_and_delta() -> None:
    logits = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    delta = torch.tensor([0.4, 0.7, 2.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v, d: distribute(v, "1x1x0.4+4x2", d), (logits, delta))


# δ -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [2, 3, 10, 100])
def test_both_branches_agree_at_one(m: int) -> None:
    d = torch.softmax(torch.randn(m, dtype=torch.float64), 0)
    one = torch.tensor([1.0], dtype=torch.float64)
    sizes = torch.tensor([m])
    scale, base = affine(one, sizes)
    upper = (m - one) / (m - 1) * d + (one - 1) / (m - 1)
    torch.testing.assert_close(scale * d + base, upper, atol=1e-15, rtol=0)
    just_above = one + 2 * KINK * m
    assert affine(just_above, sizes)[1] > 0
    scale, base = affine(just_above, sizes)
    torch.testing.assert_close(scale * d + base, upper, atol=1e-5 * m, rtol=0)


@pytest.mark.parametrize("m", [2, 7])
def test_at_the_kink_the_derivative_is_d(m: int) -> None:
    logits = torch.randn(m, dtype=torch.float64)
    d = logits.softmax(0)
    for inside in (0.0, 0.9 * KINK * m):  # the same branch up to 1 + 1e-6·M
        delta = torch.tensor([1.0 + inside], dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(
            lambda value: distribute(logits, [(m, 1)], value), delta
        )
        torch.testing.assert_close(jacobian[:, 0], d)
    step = 1e-6
    below = distribute(logits, [(m, 1)], torch.tensor([1.0 - step], dtype=torch.float64))
    at = distribute(logits, [(m, 1)], torch.tensor([1.0], dtype=torch.float64))
    torch.testing.assert_close((at - below) / step, d, atol=1e-8, rtol=0)


def test_learnt_delta_of_one_moves_both_ways() -> None:
    for target in (0.5, 2.0):
        layer: Any = build("gdu_learnt", 3, "4x3")
        optimizer = torch.optim.Adam([layer.rho_l0], 0.1)
        for _ in range(60):
            optimizer.zero_grad()
            (layer.delta() - target).square().sum().backward()
            optimizer.step()
        assert (layer.delta() - target).abs().max() < 0.05


def test_learnt_delta_is_kept_inside() -> None:
    sizes = torch.tensor([4, 4, 1])
    rho = torch.tensor([100.0, -100.0, 0.0], dtype=torch.float64)
    expected = torch.tensor([4 * (1 - 1e-6), 4e-6, 0.5], dtype=torch.float64)
    torch.testing.assert_close(learnt_delta(rho, sizes), expected, rtol=1e-12, atol=0)
    assert learnt_delta(rho.bfloat16(), sizes)[0] < 4


# The loop ----------------------------------------------------------------------------------------


class Volume(TorchDispatchMode):
    """How many numbers all operations write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.written += sum(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))
        return result


def volume(kind: str, steps: int, packed: bool) -> int:
    layer = build(kind, 5)
    place = layer._places[0]
    x = torch.randn(steps, 3, 5, dtype=torch.float64)
    sizes = None
    if packed:
        lengths = torch.tensor([steps, steps // 2, 1])
        x, sizes, _, _ = torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
    start = layer._state(x, 3, None, True)
    mode = Volume()
    with mode:
        output, _ = functional.scan(
            layer._kind, x, start, *layer._weights(place), batch_sizes=sizes
        )
        output.sum().backward()
    return mode.written


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_work_grows_linearly(kind: str, packed: bool) -> None:
    small, large = volume(kind, 64, packed), volume(kind, 256, packed)
    assert large < 4.2 * small


def saved(checkpoint: int | None, steps: int) -> int:
    """Bytes that the reference keeps for backward, each storage once."""
    x = torch.randn(steps, 4, 3)
    h = torch.zeros(4, 20, requires_grad=True)
    w, u = torch.randn(40, 3, requires_grad=True), torch.randn(40, 20, requires_grad=True)
    extra = functional.spread(torch.ones(4), (5, 5, 5, 5))
    kept: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        result = functional.scan("gdu", x, (h,), w, u, extra=extra, checkpoint=checkpoint)
    assert result[0].requires_grad
    return sum(kept.values())


def test_memory_grows_linearly_and_checkpoints_save_it() -> None:
    assert saved(None, 800) < 2.1 * saved(None, 400)
    assert saved(20, 400) < saved(None, 400) / 5


@pytest.mark.parametrize(
    ("given", "steps", "expected"),
    [(None, 9, None), ("auto", 100, 10), ("auto", 1, 1), ("auto", 0, 1), (7, 100, 7)],
)
def test_checkpoint_intervals(given: Any, steps: int, expected: int | None) -> None:
    assert functional.checkpoint_interval(given, steps) == expected


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "all"])
def test_bad_checkpoint_intervals(bad: Any) -> None:
    with pytest.raises(ValueError, match="checkpoint="):
        functional.checkpoint_interval(bad, 10)
