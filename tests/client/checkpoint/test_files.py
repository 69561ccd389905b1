"""What is on a disk under the name of a checkpoint: found, or said to be what it is. No broker is asked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tests.support.processes import descriptors

from membroker.checkpoint import InvalidCheckpoint, open_checkpoint
from membroker.errors import InvalidRequest
from membroker.safetensors import write_index

A, B = {"a": np.arange(3, dtype="f4")}, {"b": np.ones((2, 2), "i8"), "c": np.zeros((0, 4), "u1")}


def save(path: Path, arrays: dict[str, Any], **metadata: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(arrays, path, metadata or None)
    return path


def shards(directory: Path) -> Path:
    """A checkpoint of two shards and its index, as transformers writes it; returns the index."""
    save(directory / "model-00001-of-00002.safetensors", A, format="pt", part="1")
    save(directory / "model-00002-of-00002.safetensors", B, format="pt", part="2")
    places = {name: f"model-0000{1 + (name != 'a')}-of-00002.safetensors" for name in "abc"}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 44}, "weight_map": places}))
    return index


def names_in(path: Path) -> list[str]:
    with open_checkpoint(path) as checkpoint:
        return list(checkpoint.tensors)


@pytest.fixture(autouse=True)
def no_file_stays_open() -> Any:
    before = descriptors()
    yield
    assert descriptors() == before


class TestFound:
    def test_a_file(self, tmp_path: Path) -> None:
        path = save(tmp_path / "model.safetensors", {**A, **B}, step="7")
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.shapes == {"a": ("F32", (3,)), "b": ("I64", (2, 2)), "c": ("U8", (0, 4))}
            assert checkpoint.metadata == {"step": "7"}
            assert checkpoint.size == 44
            assert "3 tensors, 44 B" in repr(checkpoint)

    def test_an_index_its_directory_and_shards_without_one(self, tmp_path: Path) -> None:
        index = shards(tmp_path)
        save(tmp_path / "consolidated.safetensors", A)  # Mistral's second copy, which the index does not name
        assert names_in(index) == names_in(tmp_path) == ["a", "b", "c"]
        with open_checkpoint(tmp_path) as checkpoint:
            assert checkpoint.metadata == {"format": "pt"}, "what the shards say differently is left out"
        (tmp_path / "consolidated.safetensors").unlink()
        index.unlink()
        assert names_in(tmp_path) == ["a", "b", "c"]

    def test_the_cache_of_hugging_face(self, tmp_path: Path) -> None:
        """Names in a snapshot are links to blobs that have no name; `refs/main` says which snapshot is meant."""
        home = tmp_path / "models--meta--llama"
        snapshot = home / "snapshots" / "0123abc"
        shards(snapshot)
        (home / "blobs").mkdir()
        for number, file in enumerate(sorted(snapshot.iterdir())):
            file.rename(home / "blobs" / str(number))
            file.symlink_to(Path("../../blobs") / str(number))
        assert names_in(snapshot) == names_in(home) == names_in(snapshot / "model.safetensors.index.json")
        (home / "snapshots" / "older").mkdir()
        with pytest.raises(InvalidRequest, match="2 versions: name one of those in"):
            open_checkpoint(home)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text("0123abc\n")
        assert names_in(home) == ["a", "b", "c"]
        (home / "refs" / "main").write_text("../../../etc")
        with pytest.raises(InvalidRequest, match="name one of those"):
            open_checkpoint(home)
        (home / "blobs" / "1").unlink()
        with pytest.raises(InvalidCheckpoint, match=r"model-00002-of-00002\.safetensors, is missing: download it"):
            open_checkpoint(snapshot)
        with pytest.raises(InvalidCheckpoint, match=r"is a link to \.\./\.\./blobs/1, which is missing: download"):
            open_checkpoint(snapshot / "model-00002-of-00002.safetensors")


SOMETHING_ELSE = {
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 49\n", "run `git lfs pull`"),
    "html": (b"\n<!DOCTYPE html>\n<html><body>Please log in</body></html>", "a web page"),
    "zip": (b"PK\3\4" + bytes(60), "a zip archive, as torch.save writes"),
    "pickle": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "a pickle"),
    "json": (b'{"architectures": ["LlamaForCausalLM"]}', "JSON, and not weights"),
    "zeros": (bytes(4096), "a download that has only begun"),
    "empty": (b"", "it is empty"),
    "noise": (b"\xfe" * 64, "more than 16777216"),
    "a brace is missing": ((4).to_bytes(8, "little") + b"[1] ", "not with a brace"),
}


@pytest.mark.parametrize(("content", "says"), SOMETHING_ELSE.values(), ids=SOMETHING_ELSE)
def test_a_file_that_is_something_else(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    for named in (path, tmp_path):
        with pytest.raises(InvalidCheckpoint, match=says) as raised:
            open_checkpoint(named)
        assert str(path) in str(raised.value)


class TestCutOff:
    def test_at_any_byte(self, tmp_path: Path) -> None:
        path = save(tmp_path / "model.safetensors", {**A, **B})
        whole = path.read_bytes()
        for size in range(8, len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(InvalidCheckpoint, match=r"is cut off: .* there: download it again"):
                open_checkpoint(path)
        path.write_bytes(whole + b"more")
        with pytest.raises(InvalidCheckpoint, match="4 bytes follow its last tensor"):
            open_checkpoint(path)

    def test_a_header_that_lies(self, tmp_path: Path) -> None:
        """It promises 2^62 bytes, or a header of 100 MB: nothing is allocated for a promise."""
        path = tmp_path / "model.safetensors"
        header, _ = write_index({"a": ("U8", (1 << 62,))})
        path.write_bytes(header + bytes(9))
        with pytest.raises(InvalidCheckpoint, match="is cut off: "):
            open_checkpoint(path)
        path.write_bytes((15_000_000).to_bytes(8, "little") + b"{" * 64)
        with pytest.raises(InvalidCheckpoint, match="is cut off: its header has 15000000 bytes, and 64 are there"):
            open_checkpoint(path)


def changed(index: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(index.read_text())
    change(document)
    index.write_text(json.dumps(document))


class TestIndex:
    def test_a_shard_is_missing(self, tmp_path: Path) -> None:
        index = shards(tmp_path)
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(InvalidCheckpoint, match="has 2 shards, and shard 2, model-00002"):
            open_checkpoint(index)
        index.unlink()
        with pytest.raises(InvalidCheckpoint, match="of 2 shards, and shard 2, model-00002"):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize("place", ["../secret.safetensors", "/etc/x.safetensors", 7])
    def test_it_names_only_files_beside_it(self, tmp_path: Path, place: object) -> None:
        index = shards(tmp_path / "model")
        save(tmp_path / "secret.safetensors", {"s": np.ones(1, "u1")})
        changed(index, lambda document: document["weight_map"].update(s=place))
        with pytest.raises(InvalidCheckpoint, match="which is no file beside it"):
            open_checkpoint(index)

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b"[]", "it has no weight_map"),
            (b'{"weight_map": {}}', "it has no weight_map"),
            (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "a name is there twice"),
            (b"[" * 100_000, "not an index of shards"),
            (SOMETHING_ELSE["git lfs"][0], "run `git lfs pull`"),
        ],
    )
    def test_what_is_no_index(self, tmp_path: Path, content: bytes, says: str) -> None:
        index = tmp_path / "model.safetensors.index.json"
        index.write_bytes(content)
        with pytest.raises(InvalidCheckpoint, match=says):
            open_checkpoint(index)


class TestDirectory:
    def test_one_name_in_two_files(self, tmp_path: Path) -> None:
        save(tmp_path / "adapter.safetensors", A)
        save(tmp_path / "model.safetensors", A)
        with pytest.raises(InvalidCheckpoint, match="both have the tensor 'a'"):
            open_checkpoint(tmp_path)

    def test_other_formats_only(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(InvalidCheckpoint, match=r"has no file that ends with \.safetensors$"):
            open_checkpoint(tmp_path)
        (tmp_path / "pytorch_model.bin").write_bytes(b"PK\3\4")
        with pytest.raises(InvalidCheckpoint, match=r"it has pytorch_model\.bin"):
            open_checkpoint(tmp_path)

    def test_what_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match="No such file or directory"):
            open_checkpoint(tmp_path / "missing")
        with pytest.raises(InvalidRequest, match="null"):
            open_checkpoint("a\0b")
        os.mkfifo(tmp_path / "pipe.safetensors")
        with pytest.raises(InvalidRequest, match="not a regular file"):
            open_checkpoint(tmp_path)
