from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import torchgdu
from torchgdu import SequenceModel, parameter_count

COUNTS = [
    ("adding", 2, 1, {"lstm": 41301, "gru": 31001, "10x10": 20701, "10x1": 271}, 100),
    ("temporal order", 6, 8, {"lstm": 43608, "gru": 32908, "10x10": 22208}, 100),
    ("mERG", 7, 7, {"lstm": 43907, "gru": 33107, "2x35+10x3": 22307}, 100),
    ("pMNIST", 1, 10, {"lstm": 67850, "gru": 51210, "4x32": 34570, "5x25": 33010}, 128),
    ("pMNIST", 1, 10, {
        "lstm": 266762, "gru": 200714, "4x64": 134666, "4x62": 126490, "5x51": 133630
    }, 256),
]  # fmt: skip


@pytest.mark.parametrize(("task", "inputs", "outputs", "counts", "hidden"), COUNTS)
def test_parameter_counts_of_the_paper(
    task: str, inputs: int, outputs: int, counts: dict[str, int], hidden: int
) -> None:
    for name, expected in counts.items():
        model = (
            SequenceModel("gdu", inputs, outputs, groups=name)
            if "x" in name
            else SequenceModel(name, inputs, outputs, hidden=hidden)
        )
        assert parameter_count(model) == expected, (task, name)


@pytest.mark.parametrize("cell", ["srn", "lstm", "gru", "ugrnn", "mgu", "cwrnn", "gdu"])
def test_answers_come_from_each_sequences_own_steps(cell: str) -> None:
    size: dict[str, Any] = {"groups": "4x2"} if cell == "gdu" else {"hidden": 8}
    torch.manual_seed(1)
    last = SequenceModel(cell, 3, 2, layers=2, **size)
    torch.manual_seed(1)
    every = SequenceModel(cell, 3, 2, layers=2, readout="every", **size)
    sequences = [torch.randn(n, 3) for n in (2, 6, 4)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    alone = [every(sequence[:, None])[:, 0] for sequence in sequences]
    torch.testing.assert_close(last(packed), torch.stack([answer[-1] for answer in alone]))
    answers = packed._replace(data=every(packed))
    padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(answers)
    for k, answer in enumerate(alone):
        torch.testing.assert_close(padded[: lengths[k], k], answer)
    x = torch.randn(5, 4, 3)
    torch.testing.assert_close(last(x), every(x)[-1])
    assert every(x).shape == (5, 4, 2)


def test_the_readout_starts_as_documented() -> None:
    model = SequenceModel("gru", 3, 50, hidden=100)
    bound = (6 / 150) ** 0.5
    assert not model.readout.bias.any()
    assert 0.99 * bound < model.readout.weight.abs().max() <= bound
    torch.manual_seed(4)
    one = SequenceModel("gdu", 3, 2, groups="2x2", dtype=torch.float64)
    torch.manual_seed(4)
    two = SequenceModel("gdu", 3, 2, groups="2x2")
    assert torch.equal(one.readout.weight, two.readout.weight.double())


def test_options_reach_the_layer() -> None:
    model: Any = SequenceModel(
        "lstm", 3, 2, hidden=4, layers=2, dropout=0.25, forget_bias=0.5, init="joint",
        checkpoint="auto",
    )  # fmt: skip
    assert str(model.rnn) == (
        "LSTM(3, 4, forget_bias=0.5, init='joint', num_layers=2, dropout=0.25, checkpoint='auto')"
    )
    assert SequenceModel("gdu", 3, 2, groups=["2x2", "4x1"], layers=2).rnn.hidden_size == 4
    learnt: Any = SequenceModel("gdu", 3, 2, groups="2x2", learn_delta=True).rnn
    assert learnt.rho_l0.requires_grad
    assert (
        str(SequenceModel("gru", 3, 2, hidden=4, reset="after").rnn) == "GRU(3, 4, reset='after')"
    )
    periods = SequenceModel("cwrnn", 3, 2, hidden=4, periods=(1, 3)).rnn
    assert isinstance(periods, torchgdu.CWRNN)


@pytest.mark.parametrize(
    ("cell", "options", "words"),
    [
        ("gdv", {"hidden": 4}, "cell='gdv' is not one of srn, lstm, gru"),
        ("gdu", {}, "takes groups"),
        ("gdu", {"hidden": 4}, "takes groups"),
        ("gdu", {"groups": "2x2", "hidden": 4}, "takes groups alone"),
        ("gru", {"groups": "2x2"}, "takes hidden"),
        (
            "gru",
            {"hidden": 4, "forget_bias": 1.0},
            "forget_bias=1.0 is not an option of",
        ),
        ("lstm", {"hidden": 4, "learn_delta": True}, "learn_delta=True is not an option"),
        ("lstm", {"hidden": 4, "periods": (1, 2)}, "periods=.* is not an option"),
        ("gdu", {"groups": "2x2", "gamma": "beta"}, "gamma='beta' is not an option"),
        ("gru", {"hidden": 4, "readout": "first"}, "readout='first'"),
    ],
)
def test_options_of_other_cells_are_errors(cell: str, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SequenceModel(cell, 3, 2, **options)
