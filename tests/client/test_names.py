"""The one grammar of names, which the daemon, the library and the command share (`membroker.wire.names`)."""

from __future__ import annotations

from pathlib import Path

from membroker.wire import names

ROOT = Path(__file__).parents[2]


def test_names_of_one_part() -> None:
    for name in ("m", "0", "llama-3.1_8b", "Qwen3-8B", "_private", "a" * 96):
        assert names.valid_segment(name) is names.valid_model(name) is True, name
    for name in ("a" * 97, "", "-m", ".m", "a b", "m\n", "é", "٣"):
        assert names.valid_segment(name) is names.valid_model(name) is False, name


def test_names_of_two_parts_are_for_models_alone() -> None:
    valid = "Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "segments/segments", "a/" + "b" * 94
    for name in valid:
        assert (names.valid_model(name), names.valid_segment(name)) == (True, False), name
    for name in ("a/" + "b" * 95, "a/", "/a", "a//b", "a/../b", "a/..", "a/-", "a/b/c", "a/b\n"):
        assert (names.valid_model(name), names.valid_segment(name)) == (False, False), name


def test_a_tenants_name_is_also_a_directorys() -> None:
    for name, valid in zip(
        ("red", "0-", "a" * 63, "a" * 64, "-a", "Red", "red\n"), [True] * 3 + [False] * 4, strict=True
    ):
        assert names.valid_tenant(name) is valid, name
        assert (names.parse_tenant(f"tenants/{name}") == name) is valid, name


def test_resource_names_have_one_meaning() -> None:
    """A model may be called `segments`, and have a slash in its name: its segments are still told from other models."""
    assert names.parse_model("tenants/red/models/Qwen/segments") == ("red", "Qwen/segments")
    assert names.parse_segment("tenants/red/models/Qwen/segments") is None
    assert names.parse_segment("tenants/red/models/Qwen/segments/weights") == ("red", "Qwen", "weights")
    assert names.parse_model("tenants/red/models/Qwen/segments/weights") is None
    assert names.parse_segment("tenants/red/models/a/segments/segments/w") == ("red", "a/segments", "w")
    assert names.parse_segment("tenants/red/models/-/segments/w") == ("red", "-", "w")
    assert names.parse_model("tenants/red/models/-") is None


def test_sessions() -> None:
    assert names.parse_session(names.session_name(0x1C0000000001)) == 0x1C0000000001
    for wrong in ("1c0000000001", "sessions/", "sessions/1C", "sessions/1c\n", "sessions/" + "1" * 17):
        assert names.parse_session(wrong) is None
