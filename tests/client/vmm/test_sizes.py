"""Sizes as people write them: what is read, what is refused, what is printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membroker.vmm.sizes import GIB, MAX_BYTES, MIB, format_exact, format_size, is_power_of_two, parse_size, round_up


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (5, 5),
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("8GiB", 8 * GIB),
        (" 8 gib ", 8 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("0.5MiB", MIB // 2),
        ("500MB", 500_000_000),
        ("1TiB", 1 << 40),
        ("2KiB", 2048),
        ("3PiB", 3 << 50),
        ("1 EiB", 1 << 60),
        ("2PB", 2 * 10**15),
        ("1EB", 10**18),
        ("8Gi", 8 * GIB),
        ("1.5G", 3 * GIB // 2),
        ("1.5g", 1_500_000_000),
        ("25.6k", 25_600),
        ("1K", 1024),
        ("2Ti", 2 << 40),
        (MAX_BYTES, MAX_BYTES),
        (str(MAX_BYTES), MAX_BYTES),
    ],
)
def test_sizes_are_read(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "8 Gib b", "-1", "8gi", "1e9", "8,5GiB", "0.3B", "1.5", "²", "9223372036854775808", "99999999TiB"],
)
def test_what_is_no_size_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|bytes"):
        parse_size(text)


@pytest.mark.parametrize("size", [-1, MAX_BYTES + 1])
def test_numbers_that_the_wire_cannot_carry_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="between 0"):
        parse_size(size)


@pytest.mark.parametrize("size", [True, 1.0, None, b"8GiB"])
def test_other_types_are_refused(size: object) -> None:
    with pytest.raises(TypeError, match=type(size).__name__):
        parse_size(size)  # type: ignore[arg-type]


@given(st.integers(0, 1 << 50), st.sampled_from([1, 4096, 2 * MIB, 64 * MIB, 3]))
def test_rounding_up_is_the_smallest_multiple(size: int, granularity: int) -> None:
    rounded = round_up(size, granularity)
    assert rounded % granularity == 0
    assert size <= rounded < size + granularity


def test_powers_of_two() -> None:
    assert [value for value in range(-4, 17) if is_power_of_two(value)] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (48 * MIB, "48.0 MiB"),
        (8 * GIB, "8.0 GiB"),
        (-2 * GIB, "-2.0 GiB"),
        (MAX_BYTES, "8.0 EiB"),
    ],
)
def test_sizes_are_printed_as_people_read_them(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, 1 << 40), st.sampled_from(["KiB", "MiB", "B"]))
def test_a_whole_number_of_units_is_exact(number: int, unit: str) -> None:
    factor = {"B": 1, "KiB": 1024, "MiB": MIB}[unit]
    assert parse_size(f"{number} {unit}") == number * factor


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1025, "1025 B"),
        (3 * GIB // 2, "1.5 GiB"),
        (2 * GIB, "2.0 GiB"),
        (2 * GIB - 2 * MIB, "2046.0 MiB"),
        (128 * GIB - 2 * MIB, "131070.0 MiB"),
        (-2 * GIB, "-2.0 GiB"),
        (GIB + 512, "1048576.5 KiB"),
        (MAX_BYTES, "9223372036854775807 B"),
    ],
)
def test_exact_sizes(size: int, text: str) -> None:
    assert format_exact(size) == text


@given(st.integers(0, MAX_BYTES) | st.integers(0, 1 << 20).map(lambda granules: granules * 2 * MIB))
def test_what_is_printed_exactly_is_the_size_when_it_is_read(size: int) -> None:
    """ "2.0 GiB more does not fit, only 2.0 GiB does": what a refusal says can be asked for."""
    assert parse_size(format_exact(size)) == size
