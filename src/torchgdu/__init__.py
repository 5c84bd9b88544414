"""The Grouped Distributor Unit and its relatives for PyTorch.

This is the table of contents: a name is loaded from its module when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_CONTENTS = {
    "cells": ["CWRNNCell", "GDUCell", "GRUCell", "LSTMCell", "MGUCell", "SRNCell", "UGRNNCell"],
    "config": ["ConfigError", "RunConfig"],
    "functional": [],
    "groups": ["Groups", "GroupsError"],
    "highway": ["Highway"],
    "layers": ["CWRNN", "GDU", "GRU", "LSTM", "MGU", "SRN", "UGRNN"],
    "models": ["SequenceModel"],
    "ops": ["use_backend"],
    "parameters": ["parameter_count"],
    "records": ["Record", "load_records"],
    "tasks": [],
    "train": ["load"],
}
_HOME = {name: module for module, names in _CONTENTS.items() for name in names}

__all__ = sorted([*_HOME, *_CONTENTS])


def __getattr__(name: str) -> Any:
    if name in _CONTENTS:
        return import_module(f"torchgdu.{name}")
    if name in _HOME:
        return getattr(import_module(f"torchgdu.{_HOME[name]}"), name)
    if name == "__version__":
        return import_module("importlib.metadata").version("torchgdu")
    raise AttributeError(f"module 'torchgdu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:  # the same names for type checkers and editors
    from torchgdu import functional as functional
    from torchgdu import ops as ops
    from torchgdu import tasks as tasks
    from torchgdu import train as train
    from torchgdu.cells import CWRNNCell as CWRNNCell
    from torchgdu.cells import GDUCell as GDUCell
    from torchgdu.cells import GRUCell as GRUCell
    from torchgdu.cells import LSTMCell as LSTMCell
    from torchgdu.cells import MGUCell as MGUCell
    from torchgdu.cells import SRNCell as SRNCell
    from torchgdu.cells import UGRNNCell as UGRNNCell
    from torchgdu.config import ConfigError as ConfigError
    from torchgdu.config import RunConfig as RunConfig
    from torchgdu.groups import Groups as Groups
    from torchgdu.groups import GroupsError as GroupsError
    from torchgdu.highway import Highway as Highway
    from torchgdu.layers import CWRNN as CWRNN
    from torchgdu.layers import GDU as GDU
    from torchgdu.layers import GRU as GRU
    from torchgdu.layers import LSTM as LSTM
    from torchgdu.layers import MGU as MGU
    from torchgdu.layers import SRN as SRN
    from torchgdu.layers import UGRNN as UGRNN
    from torchgdu.models import SequenceModel as SequenceModel
    from torchgdu.ops import use_backend as use_backend
    from torchgdu.parameters import parameter_count as parameter_count
    from torchgdu.records import Record as Record
    from torchgdu.records import load_records as load_records
    from torchgdu.train import load as load
