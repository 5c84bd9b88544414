"""The paper's tasks: data, loss, metrics and chance levels. No model."""

from collections.abc import Callable
from functools import partial

from torchgdu.tasks.adding import Adding
from torchgdu.tasks.base import (
    Accuracy,
    Batch,
    EpochSource,
    FreshSource,
    Scorer,
    Settings,
    Source,
    Span,
    Task,
    generator,
)
from torchgdu.tasks.idx import DataError, DataMissing
from torchgdu.tasks.mnist import SequentialMNIST
from torchgdu.tasks.reber import Reber
from torchgdu.tasks.temporal_order import TemporalOrder

TASKS: dict[str, Callable[..., Task]] = {
    "adding": Adding,
    "temporal-order": TemporalOrder,
    "reber": Reber,
    "mnist": partial(SequentialMNIST, permuted=False),
    "pmnist": partial(SequentialMNIST, permuted=True),
}
"""What builds each task, by its name on the command line."""

__all__ = [
    "TASKS",
    "Accuracy",
    "Adding",
    "Batch",
    "DataError",
    "DataMissing",
    "EpochSource",
    "FreshSource",
    "Reber",
    "Scorer",
    "SequentialMNIST",
    "Settings",
    "Source",
    "Span",
    "Task",
    "TemporalOrder",
    "generator",
]
