"""Highway layers, with the classic gate or with the distributor in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchgdu import ops
from torchgdu.options import GroupsLike, describe_groups, groups_of_layers
from torchgdu.parameters import Configured, Device, distributor_constants, draw


class Highway(Configured):
    """Highway layers: y = T ⊙ H(x) + (1 − T) ⊙ x, with H(x) = activation(W x + b).

    T = σ(W_T x + b_T), whose bias starts at ``gate_bias`` (−1) so that a layer first passes its
    input on; with ``groups`` T = ζ(W_T x + b_T; {δ_i, M_i}), the distributor. ``weight_l0``
    [2·size, size] has the rows (T, H). Shapes: [..., size] in and out.

    >>> Highway(20, num_layers=3, groups="10x2")(torch.randn(4, 7, 20)).shape
    torch.Size([4, 7, 20])
    """

    def __init__(
        self,
        size: int,
        num_layers: int = 1,
        groups: GroupsLike | Sequence[GroupsLike] | None = None,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        *,
        gate_bias: float | None = None,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make ``num_layers`` highway layers of ``size`` units."""
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            raise ValueError("size must be a whole number greater than zero")
        if not isinstance(num_layers, int) or num_layers <= 0:
            raise ValueError("num_layers must be greater than zero")
        if gate_bias is not None and (groups is not None or not bias):
            why = "a distributor does not change with it" if bias else "there is no bias"
            raise ValueError(f"gate_bias={gate_bias} has no effect: {why}")
        self._groups = None if groups is None else groups_of_layers(groups, num_layers)
        if self._groups is not None and self._groups[0].units != size:
            raise ValueError(
                f"groups '{self._groups[0]}' have {self._groups[0].units} units, size is {size}"
            )
        super().__init__()
        self.size, self.num_layers, self.activation = size, num_layers, activation
        self.gate_bias = -1.0 if gate_bias is None else float(gate_bias)
        for k in range(num_layers):
            weight = torch.empty(2 * size, size, device=device, dtype=dtype)
            self.register_parameter(f"weight_l{k}", nn.Parameter(weight))
            zeros = torch.zeros(2 * size, device=device, dtype=dtype)
            self.register_parameter(f"bias_l{k}", nn.Parameter(zeros) if bias else None)
        self.configure(" ".join(map(str, ("highway", *(self._groups or ())))), self._constants_of)
        self.reset_parameters()

    def _constants_of(self) -> dict[str, Tensor]:
        constants: dict[str, Tensor] = {}
        for k, groups in enumerate(self._groups or ()):
            constants |= distributor_constants(groups, f"_l{k}")
        return constants

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights, Xavier-uniform for each of the two matrices of a layer; biases 0."""
        for k in range(self.num_layers):
            draw(getattr(self, f"weight_l{k}"), self.size, self.size)
            bias = getattr(self, f"bias_l{k}")
            if bias is not None:
                bias.zero_()
                if self._groups is None:
                    bias[: self.size] = self.gate_bias

    def forward(self, input: Tensor) -> Tensor:
        """Return y, [..., size]."""
        if input.size(-1) != self.size:
            raise RuntimeError(
                f"input.size(-1) must be equal to size. Expected {self.size}, got {input.size(-1)}"
            )
        for k in range(self.num_layers):
            extra = ops.PLAIN
            if self._groups is not None:
                scale, base = getattr(self, f"scale_l{k}"), getattr(self, f"base_l{k}")
                extra = ops.Extra(scale=scale, base=base, partition=self._groups[k].sizes)
            weight, bias = getattr(self, f"weight_l{k}"), getattr(self, f"bias_l{k}")
            input = ops.highway(input, weight, bias, extra, self.activation)
        return input

    def extra_repr(self) -> str:
        """Return the arguments that differ from their defaults."""
        shown = [str(self.size)]
        if self.num_layers != 1:
            shown.append(f"num_layers={self.num_layers}")
        if self._groups is not None:
            shown.append(f"groups={describe_groups(self._groups)}")
        elif self.gate_bias != -1:
            shown.append(f"gate_bias={self.gate_bias}")
        if self.activation is not torch.relu and not isinstance(self.activation, nn.Module):
            name = getattr(self.activation, "__name__", repr(self.activation))
            shown.append(f"activation={name}")
        if self.bias_l0 is None:
            shown.append("bias=False")
        return ", ".join(shown)
