"""What reads bytes, text and documents of strangers: it refuses in its own words, and nothing else ever comes out."""

from __future__ import annotations

import argparse
import json
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fuzz.corpus import FRAMES, NAMES, bent, budget, lasting
from tests.simulation.world import World
from tests.support.daemons import to_toml

from membroker.cli import commands
from membroker.cli import main as cli
from membroker.v1 import handoff_pb2 as pb
from membroker.vmm.sizes import MAX_BYTES, parse_size
from membroker.wire import frames as handoff
from membrokerd.config import quotas
from membrokerd.config.config import ConfigError, load
from membrokerd.edge import convert
from membrokerd.restart import journal
from membrokerd.restart.journal import Binding, Journal
from membrokerd.restart.takeover import rebuild_books
from membrokerd.system.device_directory import DirectoryError

pytestmark = pytest.mark.deep

# --- handoff.decode ---


def test_a_packet_is_a_frame_or_broken() -> None:
    """Arbitrary bytes, and real frames that were bent; what is decoded has a kind, and can be written again."""

    @budget(1_000)
    @given(st.one_of(bent(), st.binary(max_size=300)))
    def fuzz(data: bytes) -> None:
        try:
            frame = handoff.decode(data)
        except handoff.BrokenPacket:
            return
        assert frame.WhichOneof("kind")
        assert pb.Frame.FromString(frame.SerializeToString()) == frame or "nan" in str(frame).lower()

    for data in FRAMES:
        handoff.decode(data)
    lasting(fuzz)


# --- sizes and names ---

SIZES = st.one_of(
    st.text(max_size=40),
    st.from_regex(r"\s*\d{0,25}(\.\d{0,12})?\s*([kKmMgGtT]?[iI]?[bB]?)\s*"),
    st.integers(),
)


def test_a_size_is_bytes_or_a_value_error() -> None:
    @budget(1_000)
    @given(SIZES)
    def fuzz(size: int | str) -> None:
        try:
            found = parse_size(size)
        except ValueError:
            return
        assert 0 <= found <= MAX_BYTES

    lasting(fuzz)


QUOTA_NAMES = st.one_of(
    NAMES,
    st.from_regex(r"(tenants/)?[a-z0-9-]{0,26}(/(models/)?[a-zA-Z0-9._-]{0,99}(/[a-zA-Z0-9._-]{0,99}){0,2})?\n?"),
)


def test_the_command_lines_names_are_names_of_the_protocol() -> None:
    """What the command takes for a name the broker takes too; all else is a wrong command line, or refused."""

    @budget(1_000)
    @given(QUOTA_NAMES)
    def fuzz(text: str) -> None:
        with suppress(argparse.ArgumentTypeError):
            convert.parse_quota_name(cli._name(text))
        for parse in (convert.parse_quota_name, convert.parse_model):
            with suppress(convert.Refused):
                parse(text)

    lasting(fuzz)


def test_the_command_lines_limits_and_seconds() -> None:
    @budget(500)
    @given(st.one_of(SIZES.map(str), st.sampled_from(["none", "nan", "inf", "-0", "1e999", "0.05"])))
    def fuzz(text: str) -> None:
        for parse in (commands.limit, commands.seconds):
            with suppress(argparse.ArgumentTypeError):
                parse(text)

    lasting(fuzz)


# --- the configuration ---

CONFIGURED = (
    "driver device runtime_directory capacity host_capacity headroom gate_reserve host_driver_total settle_seconds "
    "audit_seconds model_grace_seconds max_sessions max_models_per_tenant metrics log tenants enabled address port "
    "format level limit host_limit uids owner group mode models red m1"
)
KEYS = st.sampled_from(CONFIGURED.split()) | st.text("abcz_-", min_size=1, max_size=6)
SCALARS = st.one_of(
    st.booleans(),
    st.integers(),
    st.sampled_from(
        [10**400, -(10**400), 1 << 63, 0, 2 << 20, "8GiB", "0660", "/run/x", "host", "cuda", "root", "9" * 5000]
    ),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(max_codepoint=0xFFFF, exclude_characters="\x7f", exclude_categories=["Cs"]), max_size=20),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(SCALARS, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
GOOD = b"""driver = "host"
capacity = "256MiB"
settle_seconds = 1.5
[metrics]
port = 0
[tenants.red]
limit = "64MiB"
mode = "0660"
[tenants.red.models."m.1"]
limit = 1048576
"""


FOUND = [
    "settle_seconds = 1" + "0" * 400,
    "max_sessions = 1" + "0" * 400,
    "max_sessions = " + "9" * 5_000,
    "max_sessions = 0x" + "f" * 5_000,
    "driver = " + "[" * 10_000,
    'runtime_directory = "/run/\\u0000"',
    '[tenants.red]\nowner = "a\\u0000b"',
    'device = "\u0663"\ncapacity = "\u0662MiB"',
]
"""Documents that once raised something else: numbers beyond any float, lists in each other, zeros in a path."""


def test_a_file_is_a_configuration_or_a_config_error(tmp_path: Path) -> None:
    """A document of any values, a good one that was bent, or any bytes."""
    path = tmp_path / "membrokerd.toml"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(ConfigError):
            load(path, {}, {"XDG_RUNTIME_DIR": "/run/user/1"}, 1)

    @budget(1_200)
    @given(
        st.one_of(
            st.dictionaries(KEYS, VALUES, max_size=6).map(lambda document: to_toml(document).encode()),
            bent([GOOD]),
            st.binary(max_size=200),
        )
    )
    def fuzz(data: bytes) -> None:
        read(data)

    for text in FOUND:
        read(text.encode())
    lasting(fuzz)


# --- what a predecessor left ---

BINDING = Binding("boot-1", "GPU-1")


def _record(content: bytes) -> bytes:
    return struct.pack("<II", len(content), zlib.crc32(content)) + content


HEADER = _record(b'["membroker journal",1,"boot-1","GPU-1"]')
STORY = [
    b'[[4,["red","m"],null,{"device":1048576}],[1,7,"red",2,3,"pidfd:4",false,"toy",5],[6,["red","m"],7]]',
    b'[[10,7,["red","m"],"device",2097152,8,64]]',
    b'[[11,7,[[8,3],[12,1]],"released"],[11,7,[13,2],"not made"]]',
    b"[[20,9,null]]",
]
JOURNAL = HEADER + b"".join(map(_record, STORY)) + bytes(40)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 25) | st.integers() | st.floats() | st.sampled_from(["red", "device"]),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)
WHOLE_RECORDS = st.lists(st.one_of(bent(STORY), ANY_JSON.map(lambda told: json.dumps(told).encode())), max_size=4)


def test_a_journal_is_a_story_or_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bent ones, and such whose records are whole and say anything; what is read can be written, and is the same."""
    path = tmp_path / "journal"
    monkeypatch.setattr(journal, "RESERVE_BYTES", 4_096)  # to write and read a MiB of zeros takes longer than the rest

    @budget(700)
    @given(
        st.one_of(
            bent([JOURNAL]),
            st.binary(max_size=200),
            WHOLE_RECORDS.map(lambda records: HEADER + b"".join(map(_record, records))),
            bent(STORY).map(lambda header: _record(header) + JOURNAL),
        )
    )
    @example(JOURNAL)
    def fuzz(data: bytes) -> None:
        path.write_bytes(data)
        one = Journal(path, BINDING)
        story, sentences = one.read(list)
        assert path.exists() or (not story and len(sentences) == 1)
        assert len(list(tmp_path.iterdir())) <= 5
        one.begin(story)
        assert one.append(story)
        one.close()
        assert Journal(path, BINDING).read(list) == (story * 2, [])

    lasting(fuzz)


def test_flipped_bits_are_told_and_kept(tmp_path: Path) -> None:
    """Anywhere in the journal of a busy daemon: the books are right, or the file is kept and a sentence says so."""
    whole = tmp_path / "whole"
    world = World(7)
    written = Journal(whole, BINDING)
    written.begin([])
    for number in range(400):
        seen = len(world.history)
        world.turn(number)
        assert written.append(world.history[seen:])
    written.close()
    data = whole.read_bytes().rstrip(b"\0") + bytes(200)
    books, sentences = Journal(whole, BINDING).read(rebuild_books)
    assert books.facts
    assert not sentences
    path = tmp_path / "state" / "journal"
    path.parent.mkdir()
    heads = [at for at in range(len(data)) if data.startswith(b"[[", at + 8)]

    @budget(700)
    @given(
        st.lists(st.integers(0, 8 * len(data) - 1), min_size=1, max_size=8)
        | st.tuples(st.sampled_from(heads), st.integers(0, 63)).map(lambda place: [8 * place[0] + place[1]])
    )
    def fuzz(bits: list[int]) -> None:
        bent = bytearray(data)
        for bit in bits:
            bent[bit // 8] ^= 1 << bit % 8
        path.unlink(missing_ok=True)
        path.write_bytes(bent)
        found, sentences = Journal(path, BINDING).read(rebuild_books)
        if sentences:
            (sentence,) = sentences
            assert Path(sentence.rpartition(" ")[2]).read_bytes() == bent
        else:
            assert found == books
        assert len(list(path.parent.iterdir())) <= 5

    lasting(fuzz)


def test_a_file_is_quotas_or_a_home_error(tmp_path: Path) -> None:
    path = tmp_path / "quotas.toml"

    @budget(700)
    @given(
        st.one_of(
            bent([GOOD, GOOD[GOOD.index(b"[tenants") :]]),
            st.binary(max_size=200),
            st.dictionaries(KEYS, VALUES, max_size=6).map(lambda document: to_toml(document).encode()),
            st.dictionaries(KEYS, VALUES).map(lambda tenants: to_toml({"tenants": tenants}).encode()),
        )
    )
    def fuzz(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(DirectoryError):
            found = quotas.read(path)
            quotas.write(path, found)
            assert quotas.read(path) == found

    lasting(fuzz)
