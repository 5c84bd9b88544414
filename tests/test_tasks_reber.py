"""The embedded Reber grammar against a regular expression, and SC and LC against slow loops."""

import re
from collections import Counter, defaultdict
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from torchgdu.tasks import Batch, Reber

SYMBOLS = "BTPSXVE"

# The inner grammar once more, not as states but as an expression: after a P, or an X that has left
# the S loop, come T loops that may return through V P X; then V V or V P S.
TAIL = "(?:T*VPX)*T*V(?:V|PS)"
INNER = f"B(?:TS*X(?:S|X{TAIL})|P{TAIL})E"


def accepts(text: str, multiple: int) -> bool:
    inner = f"(?:{INNER}){{{multiple}}}"
    return re.fullmatch(f"B(?:T{inner}T|P{inner}P)E", text) is not None


LONGEST = 16
"""Inner strings are enumerated up to this length."""
LONGEST_END = 5
"""No beginning of an inner string needs more symbols than this to be finished."""


@cache
def inner_strings() -> list[str]:
    """Every inner string of at most LONGEST symbols, built from what the expression says."""

    def tails(room: int) -> list[str]:
        if room < 2:
            return []
        found = ["VV"] if room == 2 else ["VV", "VPS"]
        found += ["T" + tail for tail in tails(room - 1)]
        found += ["VPX" + tail for tail in tails(room - 3)]
        return found

    room = LONGEST - 2
    bodies = ["P" + tail for tail in tails(room - 1)]
    for loops in range(room):
        head = "T" + "S" * loops + "X"
        bodies += [head + "S", *(head + "X" + tail for tail in tails(room - len(head) - 1))]
    return ["B" + body + "E" for body in bodies if len(body) <= room]


@cache
def successors() -> dict[str, set[str]]:
    """What may follow each beginning of an inner string, by listing all that begin so."""
    follow = defaultdict(set)
    for text in inner_strings():
        for end in range(1, len(text)):
            if end <= LONGEST - LONGEST_END:
                follow[text[:end]].add(text[end])
    return dict(follow)


def decode(batch: Batch) -> list[tuple[str, list[set[str]], list[int]]]:
    """(text, legal successors, rows of the packed data) of each string in a batch."""
    assert batch.extra is not None
    symbols = batch.input.data.flatten(0, -2).argmax(1).tolist()
    targets, codes = batch.target.tolist(), batch.extra.tolist()
    if isinstance(batch.input, PackedSequence):
        sizes = batch.input.batch_sizes.tolist()
    else:
        sizes = [batch.input.shape[1]] * batch.input.shape[0]
    strings = []
    starts = np.cumsum([0, *sizes])
    for column in range(sizes[0]):
        rows = [int(starts[t]) + column for t, size in enumerate(sizes) if column < size]
        text = "".join(SYMBOLS[symbols[row]] for row in rows)
        follows = "".join(SYMBOLS[targets[row]] for row in rows)
        assert follows[:-1] == text[1:]
        text += follows[-1]
        legal = [{s for s, may in zip(SYMBOLS, codes[row], strict=True) if may} for row in rows]
        strings.append((text, legal, rows))
    return strings


def test_the_enumeration_is_the_expression_s_language() -> None:
    listed = inner_strings()
    assert len(listed) == len(set(listed))
    assert all(re.fullmatch(INNER, text) for text in listed)
    for length in range(1, 7):
        brute = {
            "B" + "".join(body) + "E"
            for body in product("TPSXV", repeat=length)
            if re.fullmatch(INNER, "B" + "".join(body) + "E")
        }
        assert brute == {text for text in listed if len(text) == length + 2}


@pytest.mark.parametrize("multiple", [1, 3, 10, 40])
def test_strings_and_their_legal_successors(multiple: int) -> None:
    task = Reber(multiple)
    strings = decode(task.test_batches()[0]) + decode(task.source(0, batch_size=300).next())
    tested = 0
    for text, legal, _ in strings:
        assert accepts(text, multiple)
        assert len(text) >= 5 * multiple + 4
        assert len(legal) == len(text) - 1
        assert legal[0] == {"T", "P"}
        assert legal[1] == {"B"}
        assert legal[-1] == {"E"}
        # Cut what stands between the outer symbols into inner strings, and look each up.
        inner = text[2:-2]
        position, read = 2, 0
        for match in re.finditer(INNER, inner):
            assert match.start() == position - 2
            for end in range(1, len(match[0])):
                if end <= LONGEST - LONGEST_END:
                    assert legal[position + end - 1] == successors()[match[0][:end]]
                    tested += 1
            position, read = position + len(match[0]), read + 1
            assert legal[position - 1] == ({"B"} if read < multiple else {text[1]})
        assert read == multiple
    assert tested > 500 * multiple


@pytest.mark.parametrize("multiple", [1, 2, 10])
@pytest.mark.parametrize("data_seed", [0, 1])
def test_the_sets_are_disjoint_unique_and_balanced(multiple: int, data_seed: int) -> None:
    task = Reber(multiple)
    source = task.source(seed=0, data_seed=data_seed)
    assert source.steps_per_epoch == 1000
    training = [decode(source.next())[0][0] for _ in range(1000)]
    test = [text for b in task.test_batches(data_seed, 10) for text, *_ in decode(b)]
    assert len(test) == len(set(test)) == 256
    assert not set(test) & set(training)
    assert Counter(text[1] for text in test) == {"T": 128, "P": 128}
    assert Counter(text[1] for text in training) == {"T": 500, "P": 500}
    assert [len(text) for text in test] == sorted(map(len, test), reverse=True)
    again = [decode(source.next())[0][0] for _ in range(1000)]
    assert sorted(again) == sorted(training)
    assert again != training
    other = task.source(seed=9, data_seed=data_seed)
    assert Counter(decode(other.next())[0][0] for _ in range(1000)) == Counter(training)


def test_sets_differ_between_data_seeds_and_are_recorded() -> None:
    sums = [Reber(3).provenance(seed) for seed in (0, 0, 1)]
    assert sums[0] == sums[1]
    assert set(sums[0].values()).isdisjoint(sums[2].values())
    assert sums[0].keys() == {"training sha256", "test sha256"}


def test_every_choice_is_a_fair_coin() -> None:
    texts = [text for text, *_ in decode(Reber(10).batch(2_000, torch.Generator().manual_seed(0)))]
    follow: dict[str, Counter[str]] = defaultdict(Counter)
    for text in texts:
        for match in re.finditer(INNER, text[2:-2]):
            body = match[0]
            for end in range(1, len(body)):
                if len(successors().get(body[:end], ())) == 2:
                    follow[body[max(0, end - 2) : end]][body[end]] += 1
    assert sum(map(len, follow.values())) >= 20
    for context, counts in follow.items():
        if sum(counts.values()) > 100:
            assert len(counts) == 2, context
            assert stats.chisquare(list(counts.values())).pvalue > 1e-5, context


def test_the_mean_length_is_what_the_grammar_says() -> None:
    # The symbols still to come are one and those of the next state.
    half = 0.5
    moves = np.array([
        [0, half, half, 0, 0, 0],
        [0, half, 0, half, 0, 0],
        [0, 0, half, 0, half, 0],
        [0, 0, half, 0, 0, half],
        [0, 0, 0, half, 0, half],
        [0, 0, 0, 0, 0, 0],
    ])  # fmt: skip
    expected = 1 + np.linalg.solve(np.eye(6) - moves, np.ones(6))[0]
    batch = Reber(50).batch(400, torch.Generator().manual_seed(1))
    lengths = np.array([len(text) for text, *_ in decode(batch)])
    error = lengths.std() / np.sqrt(len(lengths))
    assert abs(lengths.mean() - (4 + 50 * expected)) < 4 * error


def test_fresh_batches_alternate_and_begin_with_either() -> None:
    numbers = torch.Generator().manual_seed(0)
    single = Counter(decode(Reber(1).batch(1, numbers))[0][0][1] for _ in range(200))
    assert min(single.values()) > 60
    for _ in range(5):
        assert Counter(text[1] for text, *_ in decode(Reber(1).batch(20, numbers))) == {
            "T": 10,
            "P": 10,
        }


def test_a_batch_is_what_torch_would_pack() -> None:
    batch = Reber(2).batch(9, torch.Generator().manual_seed(0))
    eye = torch.eye(7)
    texts = [text for text, *_ in decode(batch)]
    expected = pack_sequence([eye[[SYMBOLS.index(c) for c in text[:-1]]] for text in texts])
    assert isinstance(batch.input, PackedSequence)
    assert torch.equal(batch.input.data, expected.data)
    assert torch.equal(batch.input.batch_sizes, expected.batch_sizes)
    assert batch.input.sorted_indices is None


def test_one_string_needs_no_packing_and_its_loss_is_the_mean() -> None:
    batch = Reber(2).source(0).next()
    text, _, _ = decode(batch)[0]
    assert isinstance(batch.input, Tensor)
    assert batch.input.shape == (len(text) - 1, 1, 7)
    output = torch.randn(len(text) - 1, 1, 7)
    each = [-torch.log_softmax(output[t, 0], 0)[SYMBOLS.index(c)] for t, c in enumerate(text[1:])]
    loss = Reber(2).loss(output, batch.target)
    assert loss.item() == pytest.approx(float(torch.stack(each).mean()), rel=1e-5)


def slowly(results: list[tuple[Tensor, Batch]]) -> dict[str, float]:
    """SC, LC and both, one comparison at a time."""
    sc, lc, both = [], [], []
    for output, batch in results:
        flat = output.reshape(-1, 7).tolist()
        for text, legal, rows in decode(batch):
            good = []
            for allowed, row in zip(legal, rows, strict=True):
                fine = True
                for i, one in enumerate(SYMBOLS):
                    for j, other in enumerate(SYMBOLS):
                        if one in allowed and other not in allowed:
                            fine = fine and flat[row][i] > flat[row][j]
                good.append(fine)
            before_last = len(text) - 2  # the index of this symbol; it is predicted one earlier
            lc.append(good[before_last - 1])
            sc.append(all(ok for t, ok in enumerate(good) if t != before_last - 1))
            both.append(all(good))
    shares = {"sc": sc, "lc": lc, "both": both}
    return {name: sum(values) / len(values) for name, values in shares.items()}


def guesses(batch: Batch, numbers: torch.Generator, spread: int) -> Tensor:
    """Whole-numbered outputs, mostly right, with many ties."""
    assert batch.extra is not None
    noise = torch.randint(0, 10, batch.extra.shape, generator=numbers).clamp(min=spread) - spread
    return batch.extra.float() * 2 - (noise > 0) * torch.randint(
        0, 4, batch.extra.shape, generator=numbers
    )


@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("spread", [0, 8, 9])
def test_sc_and_lc_agree_with_slow_loops(batch_size: int, spread: int) -> None:
    task = Reber(1)
    numbers = torch.Generator().manual_seed(batch_size * 100 + spread)
    batches = task.test_batches(3, batch_size)[: max(1, 64 // batch_size)]
    results = [(guesses(batch, numbers, spread), batch) for batch in batches]
    expected = slowly(results)
    assert task.score(results) == pytest.approx(expected, abs=1e-12)
    if spread == 8 and batch_size == 64:
        assert all(0 < value < 1 for value in expected.values())


def test_failed_names_criteria_that_cannot_be_met_any_more() -> None:
    task = Reber(1)
    numbers = torch.Generator().manual_seed(0)
    seen = set()
    for seed in range(10):
        results = [(guesses(batch, numbers, 8), batch) for batch in task.test_batches(seed, 8)]
        final = task.reached(task.score(results))
        scorer = task.scorer()
        assert scorer.failed == frozenset()
        for output, batch in results:
            before = scorer.failed
            scorer.add(output, batch)
            assert before <= scorer.failed
            assert not any(final[name] for name in scorer.failed)
            # What is not named is still met by all that was added.
            so_far = task.reached(scorer.scores())
            assert scorer.failed == {name for name, met in so_far.items() if not met}
            seen.add(scorer.failed)
    assert {frozenset({"lc", "solved"}), frozenset({"sc", "solved"})} & seen
    assert frozenset({"sc", "lc", "solved"}) in seen


def scored(change: str) -> dict[str, float]:
    task = Reber(3)
    results = []
    for batch in task.test_batches(0, 50):
        assert batch.extra is not None
        output = batch.extra.float()
        for text, _, rows in decode(batch):
            at = rows[len(text) - 3]
            if change == "guess T":
                output[at] = torch.eye(7)[SYMBOLS.index("T")]
            elif change == "T and P tie":
                output[at] = torch.eye(7)[[1, 2]].sum(0)
            elif change == "one symbol wrong":
                output[rows[1]] = 0
            elif change == "nan":
                output[rows[1], 0] = float("nan")
        results.append((output, batch))
    return task.score(results)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("nothing", (1.0, 1.0, 1.0)),
        ("guess T", (1.0, 0.5, 0.5)),
        ("T and P tie", (1.0, 0.0, 0.0)),
        ("one symbol wrong", (0.0, 1.0, 0.0)),
        ("nan", (0.0, 1.0, 0.0)),
    ],
)
def test_known_answers(change: str, expected: tuple[float, float, float]) -> None:
    scores = scored(change)
    assert (scores["sc"], scores["lc"], scores["both"]) == expected
    sc, lc = (value == 1.0 for value in expected[:2])
    assert Reber(3).reached(scores) == {"sc": sc, "lc": lc, "solved": sc and lc}


def test_describe_shows_the_strings_in_brackets() -> None:
    lines = Reber(3).describe(5).splitlines()[1:]
    for line in lines:
        text, length, _ = line.split()
        plain = text.replace("(", "").replace(")", "")
        assert accepts(plain, 3)
        assert len(plain) == int(length)
        assert text.count("(B") == text.count("E)") == 3
    assert "…" in Reber(10).describe(1)


def test_training_lengths_are_those_of_an_epoch_of_batches() -> None:
    task = Reber(multiple=2)
    source = task.source(seed=3)
    seen = Counter(len(source.next().target) + 1 for _ in range(1000))
    assert Counter(task.training_lengths()) == seen
