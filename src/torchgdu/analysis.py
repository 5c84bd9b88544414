"""How a trained layer handles its memory: gates, Jacobian parts, and how far back errors reach.

Everything works on any of the seven layers, alone or inside a model of one's own. The steps are
those of ``functional``, which keeps every gate; the engine, which is proven equal, does not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from torchgdu import figures, functional
from torchgdu.cells import Cell
from torchgdu.layers import Layer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Input: TypeAlias = Tensor | PackedSequence
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]

LATCHED = 0.9
"""A unit whose β is above this keeps what it holds."""


class Gates(NamedTuple):
    """The gates of every step, each [T, B, H], NaN after the end of a packed sequence."""

    alpha: Tensor
    """α_t, the share of the candidate that is written."""
    beta: Tensor
    """β_t, the share of the old state that is kept."""
    gamma: Tensor
    """What the candidate reads the old state through; for the LSTM o_t, read by the next step."""


def record_gates(model: nn.Module, input: Input, *, layer: int = 0, reverse: bool = False) -> Gates:
    """Return α, β and γ of every step that ``model(input)`` makes.

    Args:
        model: one of the seven layers, or a model with exactly one of them in it.
        input: whatever the model takes.
        layer: which of stacked layers.
        reverse: the backward direction of a bidirectional layer; step t is still symbol t.

    >>> import torchgdu
    >>> gates = record_gates(torchgdu.GDU(3, "5x4"), torch.randn(7, 2, 3))
    >>> gates.beta.shape
    torch.Size([7, 2, 20])
    """
    with torch.no_grad(), _watching(model) as watch:
        model(input)
    walk = watch.of(layer, reverse)
    return Gates(*(walk.padded([getattr(s, name) for s in walk.steps]) for name in Gates._fields))


def overwrite_proportion(
    model: nn.Module, input: Input, *, layer: int = 0, reverse: bool = False
) -> Tensor:
    """Return P_α over time, [T, B]: the mean of α over the units. Constant for a GDU.

    Defined where β = 1 − α; the LSTM sets its two gates apart, so it is an error there.
    """
    if find_layer(model)._kind == "lstm":
        raise ValueError(
            "the LSTM has no overwrite proportion: its α and β are two gates, not one and the rest"
        )
    return record_gates(model, input, layer=layer, reverse=reverse).alpha.mean(-1)


def latched_share(gates: Gates, threshold: float = LATCHED) -> Tensor:
    """Return the share of units with β above ``threshold`` at each step, [T, B]."""
    share = (gates.beta > threshold).to(gates.beta.dtype).mean(-1)
    return share.masked_fill(gates.beta.isnan().any(-1), float("nan"))


def always_latched_share(gates: Gates, threshold: float = LATCHED, start: int = 1) -> Tensor:
    """Return the share of units with β above ``threshold`` at every step from ``start`` on, [B].

    The steps after a packed sequence's end do not count.
    """
    beta = gates.beta[start:]
    return ((beta > threshold) | beta.isnan()).all(0).to(beta.dtype).mean(-1)


def jacobian_parts(
    cell: Cell, x: Tensor, h: Tensor | tuple[Tensor, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the parts whose sum is the Jacobian of one step, entry [i, j] = ∂s_t[i]/∂s_{t−1}[j].

    keep = diag(β), candidate = diag(α)·∂s̄/∂s, alpha = diag(s̄)·∂α/∂s, beta = diag(s)·∂β/∂s.
    For the LSTM the state is [s; h]: each part's lower rows are its upper ones through
    o ⊙ tanh(s_t), and a fifth part, *output*, holds tanh(s_t)·∂o_t/∂h_{t−1}.

    Args:
        cell: a step cell, such as ``layer.cell(0)``.
        x: [I], or [B, I] for parts [B, H, H].
        h: the state as the cell takes it; zeros when left out.

    >>> import torchgdu
    >>> parts = jacobian_parts(torchgdu.GDUCell(3, "2x2"), torch.randn(3), torch.randn(4))
    >>> list(parts), parts["keep"].shape
    (['keep', 'candidate', 'alpha', 'beta'], torch.Size([4, 4]))
    """
    if not isinstance(cell, Cell):
        raise TypeError(
            f"{type(cell).__name__} is not a step cell; a layer's is layer.cell(layer=0)"
        )
    batched = x.dim() == 2
    rows = x if batched else x.unsqueeze(0)
    state = cell._state(rows, len(rows), h, batched)
    weights = cell._weights(cell._places[0])
    parts = [_parts(cell._kind, row, s, weights) for row, *s in zip(rows, *state, strict=True)]
    return {
        name: torch.stack([part[name] for part in parts]) if batched else parts[0][name]
        for name in parts[0]
    }


_Weights: TypeAlias = tuple[Tensor, Tensor, Tensor | None, functional.Extra]


def _parts(kind: str, x: Tensor, state: list[Tensor], weights: _Weights) -> dict[str, Tensor]:
    """Return the parts for one sample, x [I] and the state [H]."""
    lstm = kind == "lstm"
    read = state[0].detach()  # what the gates read: h of the LSTM, s of all others
    kept = (state[1] if lstm else state[0]).detach()

    def gates(read: Tensor) -> tuple[Tensor, ...]:
        now = tuple(part.unsqueeze(0) for part in (read, *(v.detach() for v in state[1:])))
        step = functional.step(kind, x.detach().unsqueeze(0), now, *weights)
        return tuple(v.squeeze(0) for v in (step.candidate, step.alpha, step.beta, step.gamma))

    candidate, alpha, beta, output = (v.detach() for v in gates(read))
    slopes = torch.autograd.functional.jacobian(gates, read)
    d_candidate, d_alpha, d_beta, d_output = slopes
    parts = {
        "keep": torch.diag(beta),
        "candidate": alpha[:, None] * d_candidate,
        "alpha": candidate[:, None] * d_alpha,
        "beta": kept[:, None] * d_beta,
    }
    if not lstm:
        return parts
    # s_t depends on s_{t−1} by the keep path alone, on h_{t−1} by the three others.
    zeros = torch.zeros_like(parts["keep"])
    new = torch.tanh(beta * kept + alpha * candidate)
    through = (output * (1 - new.square()))[:, None]
    upper = {
        name: torch.cat([part, zeros] if name == "keep" else [zeros, part], 1)
        for name, part in parts.items()
    }
    whole = {name: torch.cat([part, through * part]) for name, part in upper.items()}
    last = torch.cat([zeros, new[:, None] * d_output], 1)
    return whole | {"output": torch.cat([torch.zeros_like(last), last])}


def error_norms(
    model: nn.Module,
    input: Input,
    target: Tensor,
    *,
    loss: Loss | None = None,
    layer: int = 0,
    reverse: bool = False,
) -> Tensor:
    """Return ‖∂L/∂s_τ‖ for every step τ, [T], from one backward pass.

    s_τ is the state as fed to step τ + 1 (after a sequence's last step, as its final state and
    last output), for the LSTM s and h as independent inputs. The norm is over units, for each
    sample of its own loss, then the mean over the samples that reach τ.

    Args:
        model: one of the seven layers, or a model with exactly one of them in it.
        input: whatever the model takes.
        target: what the loss takes.
        loss: from (output, target) to one loss a sample, [B]. By default cross-entropy for
            whole-number targets and the squared error for others, of each sequence's last output.
        layer: which of stacked layers.
        reverse: the backward direction of a bidirectional layer.
    """
    with torch.enable_grad(), _watching(model) as watch:
        output = model(input)
    walk = watch.of(layer, reverse)
    if loss is None:
        output, target = _last(output, target, input, watch.module.batch_first)
        loss = _own_loss
    losses = loss(output, target)
    if losses.dim() != 1 or len(losses) != walk.samples:
        raise ValueError(
            f"loss gave {tuple(losses.shape)}; one loss for each of the {walk.samples} samples is "
            'needed (reduction="none", and a single step of a model that answers at every one)'
        )
    taps = [tap for step in walk.taps for tap in step]
    slopes = iter(torch.autograd.grad(losses.sum(), taps, materialize_grads=True))
    norms = [torch.cat([next(slopes) for _ in step], -1).norm(dim=-1) for step in walk.taps]
    return torch.stack([norm.mean() for norm in norms])


def _own_loss(output: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        return F.mse_loss(output, target.view_as(output), reduction="none").flatten(1).mean(1)
    return F.cross_entropy(output, target, reduction="none")


def _last(output: Tensor, target: Tensor, input: Input, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return each sequence's last output, [B, O], in the order in which the samples were given."""
    if isinstance(input, PackedSequence):
        if len(output) != len(input.data) or len(output) == int(input.batch_sizes[0]):
            return output, target
        sizes = input.batch_sizes
        begins = sizes.cumsum(0) - sizes
        lengths = torch.tensor([int((sizes > b).sum()) for b in range(int(sizes[0]))])
        rows = begins[lengths - 1] + torch.arange(len(lengths))
        if input.unsorted_indices is not None:
            rows = rows[input.unsorted_indices.cpu()]
        return output[rows], target[rows]
    if output.dim() == 3:
        return (output[:, -1], target[:, -1]) if batch_first else (output[-1], target[-1])
    return output, target


def plot_gates(gates: Gates | Tensor, *, sample: int = 0, axes: Axes | None = None) -> Axes:
    """Draw β of one sample as a heat map, a column a step and a row a unit. Needs ``plot``."""
    beta = gates.beta if isinstance(gates, Gates) else gates
    image = beta[:, sample] if beta.dim() == 3 else beta
    image = image[~image.isnan().any(-1)]
    return figures.heat_map(image.T.tolist(), figures.axes() if axes is None else axes)


def plot_error_norms(
    norms: Tensor | Mapping[str, Tensor], *, normalise: bool = True, axes: Axes | None = None
) -> Axes:
    """Draw one curve a model, each divided by its maximum as in the paper. Needs ``plot``."""
    curves = norms if isinstance(norms, Mapping) else {"": norms}
    values = {name: curve.tolist() for name, curve in curves.items()}
    return figures.norm_curves(
        values, figures.axes() if axes is None else axes, normalise=normalise
    )


def find_layer(model: nn.Module) -> Layer:
    """Return the one recurrent layer in ``model``; none or several is an error."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Layer)}
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has none of torchgdu's layers (SRN, LSTM, GRU, UGRNN, MGU, "
            "CWRNN, GDU) in it; one of torch.nn loads with LSTM.from_torch or GRU.from_torch"
        )
    raise ValueError(
        f"{type(model).__name__} has {len(found)} layers in it: {', '.join(found)}; "
        "keep the one to look at, or stack them as num_layers of one"
    )


class _Walk:
    """One layer and direction along a sequence: its steps, and the states as fed to the next."""

    def __init__(self, lengths: list[int], order: Tensor | None) -> None:
        self.lengths = lengths
        self.samples = lengths[0] if lengths else 0
        self.order = order
        self.steps: list[functional.Step] = []
        self.taps: list[list[Tensor]] = []

    def padded(self, values: list[Tensor]) -> Tensor:
        """Return [T, B, H] of one [B_t, H] a step, in the order in which the samples came."""
        full = [
            F.pad(value, (0, 0, 0, self.samples - len(value)), value=float("nan"))
            for value in values
        ]
        whole = torch.stack(full)
        return whole if self.order is None else whole.index_select(1, self.order)


class _Watch:
    """What the scans of a layer did while it was being watched."""

    def __init__(self, module: Layer) -> None:
        self.module = module
        self.walks: list[_Walk] = []
        self.order: Tensor | None = None

    def of(self, layer: int, reverse: bool) -> _Walk:
        """Return the walk of one layer and direction."""
        places = len(self.module._places)
        if len(self.walks) != places:
            raise ValueError(
                f"the model used its layer {len(self.walks) / places:g} times; once is needed"
            )
        directions = 2 if self.module.bidirectional else 1
        if not 0 <= layer < places // directions:
            raise ValueError(f"layer={layer}: there are {places // directions}, counted from 0")
        if reverse and directions == 1:
            raise ValueError("reverse=True: the layer has one direction only")
        return self.walks[layer * directions + reverse]

    def scan(
        self, cell: str, x: Tensor, state: functional.State, weight_ih: Tensor, weight_hh: Tensor,
        bias: Tensor | None = None, extra: functional.Extra = functional.PLAIN, *,
        batch_sizes: Tensor | None = None, reverse: bool = False, checkpoint: int | None = None,
    ) -> tuple[Tensor, functional.State]:  # fmt: skip
        """Do what ``functional.scan`` does, one visible step at a time."""
        lengths = [x.size(1)] * x.size(0) if batch_sizes is None else batch_sizes.tolist()
        symbols = (x.flatten(0, 1) if batch_sizes is None else x).split(lengths)
        walk = _Walk(lengths, self.order)
        outputs: list[Tensor] = []
        for t in reversed(range(len(lengths))) if reverse else range(len(lengths)):
            now, waiting = zip(*(v.tensor_split([lengths[t]]) for v in state), strict=True)
            step = functional.step(cell, symbols[t], now, weight_ih, weight_hh, bias, extra)
            fed = tuple(value.clone() for value in step.state)
            last = t == 0 if reverse else t == len(lengths) - 1
            go_on = 0 if last else lengths[t] if reverse else lengths[t + 1]
            outputs.append(torch.cat([step.state[0][:go_on], fed[0][go_on:]]))
            walk.steps.append(step)
            walk.taps.append([value for value in fed if value.is_floating_point()])
            state = tuple(map(torch.cat, zip(fed, waiting, strict=True)))
        if reverse:
            for each in (outputs, walk.steps, walk.taps):
                each.reverse()
        self.walks.append(walk)
        output = torch.cat(outputs)
        return (output.unflatten(0, x.shape[:2]) if batch_sizes is None else output), state


@contextlib.contextmanager
def _watching(model: nn.Module) -> Iterator[_Watch]:
    """Watch the model's one layer: while it runs, its scans are made step by step.

    Dropout is off meanwhile. Other threads' use of the layer is left alone.
    """
    module = find_layer(model)
    if "_scan" in vars(module):
        raise RuntimeError("the layer is being watched already, by another thread")
    watch, thread, usual = _Watch(module), threading.get_ident(), module._scan

    def before(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        given = args[0] if args else kwargs.get("input")
        watch.order = given.unsorted_indices if isinstance(given, PackedSequence) else None

    def scan(*args: Any, **kwargs: Any) -> Any:
        mine = threading.get_ident() == thread
        return (watch.scan if mine else usual)(*args, **kwargs)

    training = [part for part in model.modules() if part.training]
    hook = module.register_forward_pre_hook(before, with_kwargs=True)
    model.eval()
    module._scan = scan
    try:
        yield watch
    finally:
        del module._scan
        hook.remove()
        for part in training:
            part.training = True
