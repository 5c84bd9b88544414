"""One of two processes that train together: python ddp_worker.py RANK DIRECTORY."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn

import torchgdu


def train(wrap: Callable[[nn.Module], Any], rows: slice) -> nn.Module:
    """Ten steps of a GDU with learnt δ and a CW-RNN on the ``rows`` of a fixed batch."""
    torch.manual_seed(0)
    plain = nn.ModuleList(
        [
            torchgdu.GDU(3, "2x2+4x1", learn_delta=True, dtype=torch.float64),
            torchgdu.CWRNN(8, 4, periods=(1, 2), dtype=torch.float64),
        ]
    )

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = plain

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)[0]
            return x

    model = wrap(Stack())
    x = torch.randn(9, 8, 3, dtype=torch.float64)
    target = torch.randn(9, 8, 4, dtype=torch.float64)
    optimizer = torch.optim.Adam(plain.parameters(), 0.01)
    for _ in range(10):
        optimizer.zero_grad()
        (model(x[:, rows]) - target[:, rows]).square().mean().backward()
        optimizer.step()
    return plain


def main(rank: int, directory: str) -> None:
    """Join the other process over gloo, train on half of the batch, save the weights."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2
    )
    trained = train(nn.parallel.DistributedDataParallel, slice(4 * rank, 4 * rank + 4))
    torch.save(trained.state_dict(), f"{directory}/{rank}.pt")
    distributed.barrier()  # or the one that leaves first may abort the other
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
