from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchgdu import Groups, GroupsError
from torchgdu.groups import MAX_UNITS, Run


def test_reads_sizes_and_deltas_in_written_order() -> None:
    groups = Groups("2x2+10x1x0.5+3x1x2.5")
    assert groups.sizes == (2, 2, 10, 3)
    assert groups.deltas == (1.0, 1.0, 0.5, 2.5)
    assert groups.units == 17
    assert groups.overwrite_proportion == pytest.approx(5.0 / 17, abs=0)


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("10x10", "10x10"),
        ("2x35+10x3", "2x35+10x3"),
        ("4x1+4x2", "4x3"),
        ("4x1x1+4x2x1.0", "4x3"),
        ("5x51x0.50", "5x51x0.5"),
        ("5x1x5e-1+5x1x0.5", "5x2x0.5"),
        ("4x1+5x1+4x1", "4x1+5x1+4x1"),
        ("3x1x1E-7", "3x1x1e-07"),
        ("3x1x00000.3", "3x1x0.3"),
    ],
)
def test_canonical_form(written: str, canonical: str) -> None:
    groups = Groups(written)
    assert str(groups) == canonical
    again = Groups(canonical)
    assert again == groups
    assert hash(again) == hash(groups)
    assert eval(repr(groups), {"Groups": Groups}) == groups


def test_tuples_mean_what_strings_mean() -> None:
    assert Groups([(2, 35), (10, 3)]) == Groups("2x35+10x3")
    assert Groups(iter([(5, 51, 0.5)])) == Groups("5x51x0.5")
    assert Groups(Groups("3x2x0.25")) == Groups("3x2x0.25")
    assert Groups("3x2") != Groups("3x1+3x1x0.5")
    assert Groups("3x1+2x1") != Groups("2x1+3x1")


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        ("2x", "'2x'"),
        ("0x3", "'0x3'"),
        ("3x0", "'3x0'"),
        ("4x2x4.0", "'4x2x4.0'"),
        ("4x2x0", "'4x2x0'"),
        ("4x2x0.0e5", "'4x2x0.0e5'"),
        ("1x5", "'1x5'"),
        ("1x5x1.0", "'1x5x1.0'"),
        ("", "''"),
        ("2x3+", "''"),
        ("2x3++4x1", "''"),
        ("٣x2", "'٣x2'"),
        ("2x３", "'2x３'"),
        ("01x2", "'01x2'"),
        ("2x01", "'2x01'"),
        (" 2x3", "' 2x3'"),
        ("2x3\n", r"'2x3\n'"),
        ("2X3", "'2X3'"),
        ("2x3x", "'2x3x'"),
        ("2x3x.5", "'2x3x.5'"),
        ("2x3x1.", "'2x3x1.'"),
        ("2x3x-1", "'2x3x-1'"),
        ("2x3x1e+0", "'2x3x1e+0'"),
        ("2x3xnan", "'2x3xnan'"),
        ("2x3xinf", "'2x3xinf'"),
        ("2x3x1_0", "'2x3x1_0'"),
        ("2x3x1e999", "'2x3x1e999'"),
        ("2x3x1e-999", "'2x3x1e-999'"),
        ("10x10+2x1048576", "'2x1048576'"),
        ("9" * 5000 + "x1", "9"),
        ("2x3x" + "9" * 5000, "9"),
        ("2097152x1", "'2097152x1'"),
        ("2x524288+2x524288", "2097152 units"),
    ],
)
def test_bad_strings_name_the_part_at_fault(bad: str, part: str) -> None:
    with pytest.raises(GroupsError) as error:
        Groups(bad)
    assert part in str(error.value)
    assert len(str(error.value)) < 500


def test_the_limit_itself_is_allowed() -> None:
    assert Groups(f"{MAX_UNITS}x1").units == MAX_UNITS
    assert Groups("2x262144+2x262144").units == MAX_UNITS


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [(2,)],
        [(2, 3, 1.0, 4)],
        [(0, 3)],
        [(3, 0)],
        [(2.0, 3)],
        [(True, 3)],
        [("2", 3)],
        [(4, 2, 4.0)],
        [(4, 2, float("nan"))],
        [(4, 2, "0.5")],
        [(1, 5)],
        ["2x3"],
        (10, 10),
        5,
        None,
        b"2x3",
    ],
)
def test_bad_tuples(bad: object) -> None:
    with pytest.raises(GroupsError):
        Groups(bad)  # type: ignore[arg-type]


HUGE = 10**5000  # more digits than Python writes


def test_numbers_too_long_to_write_are_told_by_their_place() -> None:
    bad: list[tuple[Any, str]] = [
        ([(2, 3), (HUGE, 1)], "part 2 makes too many units"),
        ([(1, HUGE)], "part 1 makes too many units"),
        ([(-HUGE, 1)], "size .* of part 1 is not a whole number"),
        ([(3, 1, HUGE)], "of part 1 is not between 0 and 3"),
        ([(2, 3), (2**21, 1)], r"\(2097152, 1\) makes 2097152 units"),
        (HUGE, "is no groups"),
    ]
    for description, words in bad:
        with pytest.raises(GroupsError, match=words):
            Groups(description)


def test_frozen_and_portable() -> None:
    groups = Groups("2x35+10x3x0.5")
    with pytest.raises(AttributeError):
        groups.sizes = (1,)  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(groups)) == copy.deepcopy(groups) == groups


runs = st.lists(
    st.integers(1, 9).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.integers(1, 5),
            st.floats(0, size, exclude_min=True, exclude_max=True),
        )
    ),
    min_size=1,
    max_size=6,
)


@given(runs)
def test_every_valid_description_survives_a_round_trip(description: list[Run]) -> None:
    groups = Groups(description)
    again = Groups(str(groups))
    assert again == groups
    assert str(again) == str(groups)
    assert again.sizes == tuple(size for size, count, *_ in description for _ in range(count))


@settings(max_examples=1500)
@given(
    st.one_of(
        st.text(),
        st.text("0123456789x+.eE- _١", max_size=14),
        st.from_regex(
            r"[0-9]{1,3}x[0-9]{1,3}(x[0-9]\.[0-9]{1,2})?(\+[0-9]x[0-9])*", fullmatch=True
        ),
    )
)
@example("1x1x1e-320")
@example("3x1x0.30000000000000004")
def test_every_string_parses_or_raises_the_one_error(text: str) -> None:
    try:
        groups = Groups(text)
    except GroupsError:
        return
    assert Groups(str(groups)) == groups
