"""How `membroker segments` reads the name of a segment."""

from __future__ import annotations

import pytest

from membroker.cli.segment_name import SegmentPath


def test_names_are_read_as_people_write_them() -> None:
    assert str(SegmentPath.parse("weights")) == "weights"
    assert str(SegmentPath.parse("llama-7b/weights.v2")) == "llama-7b/weights.v2"
    whole = "tenants/uid-1000/models/m/segments/w"
    assert str(SegmentPath.parse("uid-1000/m/w")) == str(SegmentPath.parse(whole)) == whole
    assert SegmentPath.parse("models/segments") == SegmentPath("", "models", "segments")
    for text in ("", "/", "a/", "/b", "a//b", "A/b/c/d", "a/b/c/d/e", "x" * 97, "a b", "a\n"):
        with pytest.raises(ValueError, match="is not SEGMENT"):
            SegmentPath.parse(text)


def test_three_parts_begin_with_the_tenant_of_the_endpoint_or_with_the_models_name() -> None:
    """What `membroker segments` prints can be pasted, and so can what Hugging Face calls a model."""
    for text, at_red in [
        ("Qwen/Qwen3-8B/weights", "Qwen/Qwen3-8B/weights"),
        ("meta/llama/weights", "meta/llama/weights"),
        ("red/llama/weights", "tenants/red/models/llama/segments/weights"),
        ("red/Qwen/Qwen3-8B/weights", "tenants/red/models/Qwen/Qwen3-8B/segments/weights"),
        ("blue/Qwen/Qwen3-8B/weights", "tenants/blue/models/Qwen/Qwen3-8B/segments/weights"),
        ("tenants/blue/models/m/segments/w", "tenants/blue/models/m/segments/w"),
        ("tenants/red/models/a/segments/segments/w", "tenants/red/models/a/segments/segments/w"),
    ]:
        assert str(SegmentPath.parse(text).within("tenants/red")) == at_red
