"""The parameters of layers and cells: names, initial values, constants, and what loading checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from torchgdu import ops
from torchgdu.groups import Groups
from torchgdu.options import Choice, describe_groups

Device: TypeAlias = torch.device | str | int | None
Pair: TypeAlias = tuple[Tensor, Tensor]
Hidden: TypeAlias = Tensor | Pair

if TYPE_CHECKING:  # with a default, which Python learns in 3.13: a bare Layer is one of any kind
    from typing_extensions import TypeVar as WithDefault

    AnyHidden = WithDefault("AnyHidden", bound=Hidden, covariant=True, default=Any)
else:
    AnyHidden = TypeVar("AnyHidden")
"""The state that a cell returns: h, or for the LSTM and the CW-RNN a pair."""

_HALF = (torch.float16, torch.bfloat16)


@torch.no_grad()
def draw(weight: Tensor, fan_in: int, fan_out: int) -> None:
    """Fill ``weight`` Xavier-uniformly, with the same numbers on every platform and device.

    The numbers are drawn in float32 by torch's CPU generator, then rounded to the weight's dtype. A
    weight on the meta device holds no numbers, so none are drawn.
    """
    if weight.is_meta:
        return
    bound = math.sqrt(6 / (fan_in + fan_out))
    drawn = torch.rand(weight.shape, dtype=torch.float32, device="cpu")
    weight.copy_(drawn.mul_(2 * bound).sub_(bound))  # two operations: no fused rounding anywhere


def distributor_constants(groups: Groups, suffix: str) -> dict[str, Tensor]:
    """Return the constants of a distributor of fixed δ, one entry a unit."""
    extra = ops.spread(torch.tensor(groups.deltas, dtype=torch.float64), groups.sizes)
    assert extra.scale is not None
    assert extra.base is not None
    return {"scale" + suffix: extra.scale, "base" + suffix: extra.base}


class Configured(nn.Module):
    """A module whose constants follow its parameters, and that refuses weights of other meaning.

    What the weights mean is saved with them as the buffer ``configuration``, a short text as bytes.
    """

    configuration: Tensor

    def configure(self, text: str, constants: Callable[[], Mapping[str, Tensor]]) -> None:
        """Register ``constants`` (built on the CPU, in float64) and the text, as buffers."""
        self._text = text
        with torch.device("cpu"):
            self._constants = dict(constants())
            self._constants["configuration"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        self._place_constants()

    def _place_constants(self) -> None:
        like = next(self.parameters())
        dtype = torch.float32 if like.dtype in _HALF else like.dtype
        for name, value in self._constants.items():
            placed = value.to(like.device, dtype if value.is_floating_point() else None, copy=True)
            self.register_buffer(name, placed, persistent=name == "configuration")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._place_constants()  # from float64: rounding once, whatever the way to this dtype
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # Not the buffer: what averages the buffers of a model averages this text too.
        text = self._constants["configuration"].to(self.configuration.device, copy=True)
        destination[prefix + "configuration"] = text

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(prefix + "configuration")
        if saved is not None and not saved.is_meta:
            text = bytes(saved.to(torch.uint8).tolist()).decode(errors="replace")
            if text != self._text:
                rest[-1].append(
                    f"{prefix}configuration: the weights were saved under '{text}' "
                    f"and mean something else under '{self._text}'"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._place_constants()  # assign=True may have moved the parameters


class Place(NamedTuple):
    """The names of one layer's and direction's parameters and constants."""

    layer: int
    weight_ih: str
    weight_hh: str
    bias: str
    bias_hn: str
    rho: str
    scale: str
    base: str
    sizes: str


class Recurrent(Configured):
    """The parameters of one kind of cell, once for each layer and direction."""

    input_size: int
    hidden_size: int

    def __init__(
        self,
        choice: Choice,
        input_size: int,
        places: Iterable[tuple[int, int, str]],
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        """Take ``places`` as (layer, its number of inputs, the suffix of its names)."""
        for name, size in (("input_size", input_size), ("hidden_size", choice.hidden_size)):
            if not isinstance(size, int):
                raise TypeError(f"{name} should be of type int, got: {type(size).__name__}")
            if size <= 0:
                raise ValueError(f"{name} must be greater than zero")
        super().__init__()
        self._choice = choice
        self._kind = choice.cell
        self.input_size = input_size
        self.hidden_size = units = choice.hidden_size
        self._places = []
        rows = len(ops.CELLS[choice.cell].rows) * units
        for layer, inputs, suffix in places:
            place = Place(layer, *(name + suffix for name in Place._fields[1:]))
            shapes: dict[str, tuple[int, ...] | None] = {
                place.weight_ih: (rows, inputs),
                place.weight_hh: (rows, units),
                place.bias: (rows,) if choice.bias else None,
                place.bias_hn: (units,) if choice.bias and self._kind == "gru_after" else None,
                place.rho: (len(choice.groups[layer].sizes),) if choice.learn_delta else None,
            }
            for name, shape in shapes.items():
                empty = None if shape is None else torch.empty(shape, device=device, dtype=dtype)
                self.register_parameter(name, None if empty is None else nn.Parameter(empty))
            self._places.append(place)
        self.configure(choice.text, self._all_constants)
        self.reset_parameters()

    def _all_constants(self) -> dict[str, Tensor]:
        choice = self._choice
        constants: dict[str, Tensor] = {}
        if choice.periods:
            constants["blocked"] = ~ops.clockwork_mask(choice.periods, choice.hidden_size)
        for place in self._places if choice.groups else ():
            groups = choice.groups[place.layer]
            if choice.learn_delta:
                constants[place.sizes] = torch.tensor(groups.sizes)
            else:
                constants |= distributor_constants(groups, place.scale.removeprefix("scale"))
        return constants

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights, Xavier-uniform for each gate; biases 0; ρ from the given δ.

        With ``init="separate"`` a gate's [H, I] and [H, H] are drawn each on its own; with
        ``"joint"`` as parts of the joined [H, I + H].
        """
        units, joint = self.hidden_size, self._choice.init == "joint"
        gate, value = self._choice.start
        self._only_parameters()
        for place in self._places:
            weight_ih, weight_hh = getattr(self, place.weight_ih), getattr(self, place.weight_hh)
            for weight in (weight_ih, weight_hh):
                draw(weight, weight_ih.size(1) + units if joint else weight.size(1), units)
            if self._choice.periods:
                weight_hh.masked_fill_(self.blocked, 0)
            for name in (place.bias, place.bias_hn):
                if getattr(self, name) is not None:
                    getattr(self, name).zero_()
            if gate and self._choice.bias:
                row = ops.CELLS[self._kind].rows.index(gate)
                getattr(self, place.bias)[row * units : (row + 1) * units] = value
            if self._choice.learn_delta:
                groups = self._choice.groups[place.layer]
                logit = [math.log(d / (m - d)) for d, m in zip(groups.deltas, groups.sizes)]  # noqa: B905
                getattr(self, place.rho).copy_(torch.tensor(logit, dtype=torch.float64))

    def _only_parameters(self) -> None:
        """Refuse to fill what is computed from something else: it would have no effect."""
        for name in (name for place in self._places for name in place[1:6]):
            if not isinstance(getattr(self, name), nn.Parameter | None):
                raise RuntimeError(
                    f"{name} is parametrized and cannot be drawn anew; "
                    "remove the parametrization first"
                )

    def _weights(self, place: Place) -> tuple[Tensor, Tensor, Tensor | None, ops.Extra]:
        """Return what ``ops`` takes; looked up at each call, so that parametrizations count."""
        weight_ih, weight_hh = self._weight(place.weight_ih), self._weight(place.weight_hh)
        extra = ops.PLAIN
        if self._choice.groups:
            sizes = self._choice.groups[place.layer].sizes
            if self._choice.learn_delta:
                extra = ops.spread(self._delta(place), sizes)
            else:
                scale, base = self._buffers[place.scale], self._buffers[place.base]
                extra = ops.Extra(None, scale, base, sizes)
        elif self._choice.periods:
            weight_hh = weight_hh.masked_fill(self.blocked, 0)
            extra = ops.Extra(partition=self._choice.periods)
        elif self._kind == "gru_after":
            extra = ops.Extra(bias_hn=self._weight(place.bias_hn))
        return weight_ih, weight_hh, self._weight(place.bias), extra

    def _weight(self, name: str) -> Any:
        parameters = self._parameters  # ten times as fast as getattr
        return parameters[name] if name in parameters else getattr(self, name)

    def _delta(self, place: Place) -> Tensor:
        if self._choice.learn_delta:
            return ops.learnt_delta(getattr(self, place.rho), getattr(self, place.sizes))
        like = getattr(self, place.scale)
        return torch.tensor(
            self._choice.groups[place.layer].deltas, dtype=like.dtype, device=like.device
        )

    def _proportion(self, place: Place) -> float:
        if self._choice.learn_delta:
            return float(self._delta(place).detach().double().sum()) / self.hidden_size
        return self._choice.groups[place.layer].overwrite_proportion

    def _state(
        self, x: Tensor, batch: int, hx: Hidden | None, batched: bool, *lead: int
    ) -> ops.State:
        """Return the checked initial state: h and c [*lead, B, H], the clock [B]."""
        units = self.hidden_size
        parts = ops.CELLS[self._kind].states
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: ((batch,), torch.int64) if name == "clock" else ((*lead, batch, units), x.dtype)
            for name in parts
        }
        if hx is None:
            zeros = (x.new_zeros(wanted["h"][0]),) * len(parts)
            return zeros if parts[-1] != "clock" else (zeros[0], _new_clock(x, batch))
        given = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        if batched and len(given) == len(parts):  # all is well, seen fast: a cell is called often
            pairs = zip(given, wanted.values(), strict=True)
            if all(isinstance(v, Tensor) and (v.shape, v.dtype) == w for v, w in pairs):
                return given
        bare = parts[-1] == "clock" and len(given) == 1
        if not all(isinstance(part, Tensor) for part in given) or len(given) + bare != len(parts):
            raise TypeError(f"{type(self).__name__}: hx must be {' and '.join(parts)}")
        for name, part in zip(parts, given, strict=False):
            dims = (1 if name == "clock" else 2 + len(lead)) - (not batched)
            kind, n = ("batched", 2 + len(lead)) if batched else ("unbatched", 1 + len(lead))
            if part.dim() != dims:
                raise RuntimeError(
                    f"For {kind} {n}-D input, {name} should be {dims}-D "
                    f"but got {part.dim()}-D tensor"
                )
        if not batched:
            given = tuple(
                part.unsqueeze(-1 if name == "clock" else -2)
                for name, part in zip(parts, given, strict=False)
            )
        for name, part in zip(parts, given, strict=False):
            size, dtype = wanted[name]
            if part.shape != size:
                raise RuntimeError(f"Expected hidden size of {name} {size}, got {list(part.shape)}")
            free = name != "clock" and ops.autocasting(x.device.type)
            if part.dtype != dtype and not free:
                raise RuntimeError(
                    f"Input and hidden tensors are not the same dtype: {name} is {part.dtype}, "
                    f"not {dtype}"
                )
        return (*given, _new_clock(x, batch)) if bare else given

    def _options(self) -> str:
        """Return the cell's own options as a call would have them, starting with its size."""
        groups = self._choice.groups
        first = describe_groups(groups) if groups else self.hidden_size
        shown = [f"{k}={v!r}" for k, v in self._choice.options.items() if v is not None]
        if self._choice.init != "separate":
            shown.append(f"init={self._choice.init!r}")
        return ", ".join([f"{self.input_size}, {first}", *shown])


def hidden(state: Sequence[Tensor]) -> Any:
    """Return a state as a user gets it: h, or a pair."""
    return state[0] if len(state) == 1 else (state[0], state[1])


def _new_clock(x: Tensor, batch: int) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=x.device).expand(batch)


def parameter_count(module: nn.Module) -> int:
    """Return the number of trained parameters, without the masked entries of CW-RNNs.

    >>> from torchgdu import GDU
    >>> parameter_count(GDU(2, "10x10"))
    20600
    """
    count = sum(p.numel() for p in module.parameters() if p.requires_grad)
    for part in module.modules():
        if isinstance(part, Recurrent) and part._choice.periods:
            trained = sum(getattr(part, p.weight_hh).requires_grad for p in part._places)
            count -= trained * int(part.get_buffer("blocked").sum())
    return count
