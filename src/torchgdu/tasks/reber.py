"""The multi-embedded Reber grammar: remember one symbol over many strings, and count them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence, pad_sequence

from torchgdu.tasks.base import (
    Batch,
    EpochSource,
    Readout,
    Scorer,
    Settings,
    Source,
    Span,
    Task,
    check_whole,
    generator,
    right,
)

SYMBOLS = "BTPSXVE"
TRAINING_STRINGS = 1000
TEST_STRINGS = 256

B, T, P, S, X, V, E = range(7)
PAD = 7
END = 6
# What each state of the inner automaton may say, and where that leads; both with probability 1/2.
MOVES = (
    ((T, 1), (P, 2)),
    ((S, 1), (X, 3)),
    ((T, 2), (V, 4)),
    ((X, 2), (S, 5)),
    ((P, 3), (V, 5)),
    ((E, END), (E, END)),
    ((PAD, END), (PAD, END)),
)
_SAYS = torch.tensor([[symbol for symbol, _ in moves] for moves in MOVES], dtype=torch.uint8)
_LEADS = torch.tensor([[state for _, state in moves] for moves in MOVES])
# Sets of symbols are bits: B is 1, T is 2, P is 4 and so on.
_LEGAL = torch.tensor([2**a | 2**b for (a, _), (b, _) in MOVES], dtype=torch.uint8)


class Strings(NamedTuple):
    """Strings one after another: `symbols` and the `legal` successors (bits) of each, `lengths`."""

    symbols: Tensor
    legal: Tensor
    lengths: Tensor

    def separate(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(symbols, legal) of each string."""
        lengths = self.lengths.tolist()
        return zip(self.symbols.split(lengths), self.legal.split(lengths), strict=True)


@dataclass(frozen=True)
class Reber(Task):
    """Predict every next symbol of `B (T|P) (Reber string)×m (the same T|P) E`.

    For example ``BT(BPVVE)(BTSXSE)(BTXXVVE)TE`` where m = `multiple` is 3; the shortest string
    has 5m + 4 symbols. 7 one-hot inputs and outputs in the order BTPSXVE; cross-entropy with the
    symbol that did follow, mean over all predictions. One string a step; 1000 training strings
    in a new order each epoch; 256 test strings that are unique and not among them. T and P
    alternate over the strings of a set.

    A prediction is right when the smallest output of a legal successor is above the largest of
    an illegal one. The metrics are shares of test strings: `lc` with the symbol before last
    right, `sc` with all others right, `both` with all right.

    >>> task = Reber(multiple=10)
    >>> batch = task.batch(20, torch.Generator().manual_seed(0))
    >>> batch.input.data.shape[1], batch.extra.sum(1).unique().tolist()
    (7, [1, 2])
    """

    multiple: int = 10

    def __post_init__(self) -> None:
        """Refuse what is not a count of inner strings."""
        check_whole("multiple", self.multiple, 1)

    name = "reber"
    input_size = len(SYMBOLS)
    output_size = len(SYMBOLS)
    primary = "both"
    higher_is_better = True

    @property
    def readout(self) -> Readout:
        """The model answers at every step."""
        return "every"

    @property
    def chance(self) -> dict[str, float]:
        """Guessing T or P as the symbol before last is right half of the time."""
        return {"sc": 0.0, "lc": 0.5, "both": 0.0}

    @property
    def goal(self) -> dict[str, float]:
        """Solved when every prediction in every test string is right."""
        return {"sc": 1.0, "lc": 1.0, "both": 1.0}

    @property
    def settings(self) -> Settings:
        """One string a step, Adam 0.0003, all 256 tested every 20 steps, at most 300 epochs."""
        return Settings(
            batch_size=1,
            learning_rate=0.0003,
            test_every=Span(20),
            limit=Span(300, "epochs"),
            test_size=TEST_STRINGS,
            test_batch_size=TEST_STRINGS,
        )

    def batch(self, size: int, generator: torch.Generator | None = None) -> Batch:
        """`size` fresh strings; T and P alternate, starting with either."""
        first = int(torch.randint(0, 2, (), generator=generator))
        return _pack(list(_draw(self.multiple, size, generator, first).separate()))

    def source(self, seed: int, data_seed: int = 0, batch_size: int | None = None) -> Source:
        """The training strings of `data_seed`, in orders of `seed`."""
        training, _ = _sets(self.multiple, data_seed)
        size = self.settings.batch_size if batch_size is None else batch_size
        return _StringSource(training, size, generator(self.name, "order", seed))

    def test_batches(self, data_seed: int = 0, batch_size: int | None = None) -> Sequence[Batch]:
        """The test strings of `data_seed`, longest first over all batches."""
        _, test = _sets(self.multiple, data_seed)
        size = self.settings.test_batch_size if batch_size is None else batch_size
        check_whole("batch size", size, 1)
        longest_first = sorted(test.separate(), key=lambda string: -len(string[0]))
        return [_pack(longest_first[i : i + size]) for i in range(0, len(longest_first), size)]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy, mean over all predictions."""
        return torch.nn.functional.cross_entropy(output.flatten(0, -2), target)

    def scorer(self) -> Scorer:
        """Shares of strings."""
        return _Criteria()

    def reached(self, scores: Mapping[str, float]) -> dict[str, bool]:
        """SC and LC, and solved when both are met at the same time."""
        sc, lc = scores["sc"] == 1.0, scores["lc"] == 1.0
        return {"sc": sc, "lc": lc, "solved": sc and lc}

    def describe(self, count: int = 3, data_seed: int = 0) -> str:
        """Test strings with their inner strings in brackets."""
        _, test = _sets(self.multiple, data_seed)
        lines = [f"{count} of {TEST_STRINGS} test strings, {self.multiple} Reber strings in each:"]
        for symbols, _ in islice(test.separate(), count):
            text = "".join(SYMBOLS[s] for s in symbols.tolist())
            inner = [f"({part}E)" for part in text[2:-2].split("E")[:-1]]
            if len(inner) > 4:
                inner[2:-1] = ["…"]
            lines.append(f"  {text[:2]}{''.join(inner)}{text[-2:]}   {len(text)} symbols")
        return "\n".join(lines)

    def training_lengths(self, data_seed: int = 0) -> list[int]:
        """The length of every training string."""
        training, _ = _sets(self.multiple, data_seed)
        lengths: list[int] = training.lengths.tolist()
        return lengths

    def provenance(self, data_seed: int = 0) -> dict[str, object]:
        """Checksums of the two sets."""
        sets = zip(("training", "test"), _sets(self.multiple, data_seed), strict=True)
        return {f"{name} sha256": _checksum(strings) for name, strings in sets}


def _draw(multiple: int, count: int, generator: torch.Generator | None, first: int = 0) -> Strings:
    """`count` strings at once; T and P alternate, beginning with T where `first` is 0."""
    check_whole("batch size", count, 1)
    state = torch.zeros(count * multiple, dtype=torch.int64)
    symbols, legal = [torch.full_like(state, B, dtype=torch.uint8)], [_LEGAL[state]]
    while bool((state != END).any()):
        choice = torch.randint(0, 2, state.shape, generator=generator)
        symbols.append(_SAYS[state, choice])
        state = _LEADS[state, choice]
        legal.append(_LEGAL[state])
    inner = torch.stack(symbols, 1).view(count, multiple, -1)
    after = torch.stack(legal, 1).view(count, multiple, -1)

    outer = (T + (torch.arange(count) + first) % 2).to(torch.uint8)
    # An inner E is followed by the next string's B, and by the outer symbol after the last one.
    follows = torch.full((count, multiple), 1 << B, dtype=torch.uint8)
    follows[:, -1] = 2**outer
    after = torch.where(inner == E, follows.unsqueeze(2), after)

    def column(value: int | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=torch.uint8).expand(count).unsqueeze(1)

    rows = torch.cat([column(B), column(outer), inner.flatten(1), column(outer), column(E)], 1)
    choices = [column(1 << T | 1 << P), column(1 << B), after.flatten(1), column(1 << E), column(0)]
    there = rows != PAD
    return Strings(rows[there], torch.cat(choices, 1)[there], there.sum(1))


@lru_cache(maxsize=4)
def _sets(multiple: int, data_seed: int) -> tuple[Strings, Strings]:
    """The training and the test set."""
    numbers = generator("reber", "sets", multiple, data_seed)
    training = _draw(multiple, TRAINING_STRINGS, numbers)
    seen = {symbols.numpy().tobytes() for symbols, _ in training.separate()}
    chosen: dict[int, list[tuple[Tensor, Tensor]]] = {T: [], P: []}
    while min(map(len, chosen.values())) < TEST_STRINGS // 2:
        for symbols, legal in _draw(multiple, TEST_STRINGS, numbers).separate():
            key, half = symbols.numpy().tobytes(), chosen[int(symbols[1])]
            if key not in seen and len(half) < TEST_STRINGS // 2:
                seen.add(key)
                half.append((symbols, legal))
    test = [string for pair in zip(chosen[T], chosen[P], strict=True) for string in pair]
    return training, Strings(
        symbols=torch.cat([symbols for symbols, _ in test]),
        legal=torch.cat([legal for _, legal in test]),
        lengths=torch.tensor([len(symbols) for symbols, _ in test]),
    )


def _checksum(strings: Strings) -> str:
    text = bytes(SYMBOLS, "ascii")
    lines = (bytes(text[s] for s in symbols.tolist()) for symbols, _ in strings.separate())
    return hashlib.sha256(b"\n".join(lines)).hexdigest()


def _pack(strings: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    """Strings as one batch, longest first: a tensor where they are equally long, or packed."""
    ordered = sorted(strings, key=lambda string: -len(string[0]))
    steps = torch.tensor([len(symbols) - 1 for symbols, _ in ordered])
    symbols = pad_sequence([symbols for symbols, _ in ordered])
    legal = pad_sequence([legal for _, legal in ordered])
    there = torch.arange(len(symbols) - 1).unsqueeze(1) < steps
    input = torch.nn.functional.one_hot(symbols[:-1][there].long(), len(SYMBOLS)).float()
    target = symbols[1:][there].long()
    extra = (legal[:-1][there].unsqueeze(1) >> torch.arange(len(SYMBOLS))) % 2 == 1
    if bool(there.all()):
        return Batch(input.view(*there.shape, -1), target, extra)
    return Batch(PackedSequence(input, there.sum(1)), target, extra)


class _StringSource(EpochSource):
    """Batches of one string are made once, since making one costs as much as training on it."""

    def __init__(self, strings: Strings, batch_size: int, numbers: torch.Generator) -> None:
        super().__init__(len(strings.lengths), batch_size, numbers)
        self._strings = list(strings.separate())
        self._single = [_pack([s]) for s in self._strings] if batch_size == 1 else None

    def take(self, index: Tensor) -> Batch:
        if self._single is not None:
            return self._single[int(index)]
        return _pack([self._strings[i] for i in index.tolist()])


class _Criteria(Scorer):
    def __init__(self) -> None:
        self._sc = self._lc = self._both = self._count = 0

    def add(self, output: Tensor, batch: Batch) -> None:
        assert batch.extra is not None
        good = right(output.flatten(0, -2), batch.extra)
        if isinstance(batch.input, PackedSequence):
            packed = PackedSequence(good, batch.input.batch_sizes)
            # What is not there is right.
            good, steps = pad_packed_sequence(packed, padding_value=True)
        else:
            good = good.view(batch.input.shape[:2])
            steps = torch.full((good.shape[1],), len(good))
        place = (steps - 2).to(good.device).unsqueeze(0)  # the prediction of the symbol before last
        lc = good.gather(0, place)[0]
        both = good.all(0)
        sc = good.scatter(0, place, True).all(0)
        self._sc += int(sc.sum())
        self._lc += int(lc.sum())
        self._both += int(both.sum())
        self._count += good.shape[1]

    def scores(self) -> dict[str, float]:
        shares = {"sc": self._sc, "lc": self._lc, "both": self._both}
        return {name: good / self._count for name, good in shares.items()}

    @property
    def failed(self) -> frozenset[str]:
        missed = {"sc": self._sc < self._count, "lc": self._lc < self._count}
        missed["solved"] = any(missed.values())
        return frozenset(name for name, miss in missed.items() if miss)
