"""Sizes as people write them: what is read, what is refused, what is printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membroker.vmm.sizes import GIB, MAX_BYTES, MIB, format_exact, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (5, 5),
        ("512", 512),
        (" 8 gib ", 8 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("1.5G", 3 * GIB // 2),
        ("25.6k", 25_600),
        (str(MAX_BYTES), MAX_BYTES),
    ],
)
def test_sizes_are_read(text: int | str, size: int) -> None:
    assert parse_size(text) == size


def test_each_unit_is_read() -> None:
    for power, letter in enumerate("KMGTPE", 1):
        assert parse_size(f"2{letter}iB") == 2 << (10 * power)
        assert parse_size(f"2{letter}B") == 2 * 1000**power


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "8 Gib b", "8gi", "1e9", "8,5GiB", "0.3B", "1.5", "²", "9223372036854775808", "99999999TiB", -1],
)
def test_what_is_no_size_is_refused_with_a_sentence(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"size|bytes"):
        parse_size(text)


def test_other_types_are_refused() -> None:
    for size in (True, 1.0, None, b"8GiB"):
        with pytest.raises(TypeError, match=type(size).__name__):
            parse_size(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1024, "1.0 KiB"),
        (1025, "1025 B"),
        (3 * GIB // 2, "1.5 GiB"),
        (-2 * GIB, "-2.0 GiB"),
        (GIB + 512, "1048576.5 KiB"),
        (MAX_BYTES, "9223372036854775807 B"),
    ],
)
def test_exact_sizes(size: int, text: str) -> None:
    """`format_size` has one digit after the point, whatever is left out."""
    assert format_exact(size) == text
    rounded = {1025: "1.0 KiB", GIB + 512: "1.0 GiB", MAX_BYTES: "8.0 EiB"}
    assert format_size(size) == rounded.get(size, text)


@given(st.integers(0, MAX_BYTES) | st.integers(0, 1 << 20).map(lambda granules: granules * 2 * MIB))
def test_what_is_printed_exactly_is_the_size_when_it_is_read(size: int) -> None:
    """ "2.0 GiB more does not fit, only 2.0 GiB does": what a refusal says can be asked for."""
    assert parse_size(format_exact(size)) == size
