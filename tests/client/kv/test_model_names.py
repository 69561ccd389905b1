"""The broker's name for what an engine serves: no two models get one name, and one model always gets the same."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from membroker.ext import names
from membroker.kv.model_names import model_name

COMMIT = "0123456789abcdef" * 2


def test_a_name_that_the_broker_allows_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators have it in their configuration. A directory of that name changes nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen/Qwen3-8B").mkdir(parents=True)
    for served in ("Qwen/Qwen3-8B", "_a.b-c", "m" * names.MAX_NAME_CHARACTERS):
        assert model_name(served) == served


def test_any_other_name_keeps_its_last_part_and_gets_a_digest() -> None:
    for served, name in (
        ("通义千问", "model-25efd95f"),
        ("/no/such/my model", "my-model-"),
        ("s3://bucket/llama/", "llama-"),
        ("x" * 200, "x" * 87 + "-"),
        ("\udcff\0", "model-"),
    ):
        assert model_name(served).startswith(name)
        assert names.valid_model(model_name(served))


def test_different_names_stay_different() -> None:
    """Nearly all of these 20,000 names have a character that the broker does not allow, or are too long."""
    random_ = random.Random(7)
    letters = "ab/-. _é千问文心\U0001f642"
    made = {"".join(random_.choices(letters, k=random_.randint(1, 120))) for _ in range(20_000)}
    served = {name for name in made if not os.path.exists(name)}  # "/." is "/"
    found = {model_name(one) for one in served}
    assert len(found) == len(served)
    assert all(map(names.valid_model, found))


@pytest.mark.parametrize(
    ("folder", "name"),
    [("models--Qwen--Qwen3-8B", "Qwen/Qwen3-8B"), ("models--gpt2", "gpt2"), ("models--a--b--c", "a/b--c")],
)
def test_a_snapshot_in_the_cache_of_hugging_face_is_that_model(folder: str, name: str, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / folder / "snapshots" / COMMIT
    assert model_name(str(snapshot)) == name, "in a container it may not be at this path"
    snapshot.mkdir(parents=True)
    link = tmp_path / "current model"
    link.symlink_to(snapshot)
    assert {model_name(str(path)) for path in (snapshot, f"{snapshot}/", link)} == {name}
    assert model_name(str(snapshot / "onnx")).startswith("onnx-"), "a part of it is something else"


def test_one_path_with_other_checkpoints_is_other_models(tmp_path: Path) -> None:
    """In Kubernetes each container has its model at /mnt/models. Fine-tuned models have the same names and sizes."""
    mounted, weights = tmp_path / "models", bytearray(1 << 20)
    mounted.mkdir()
    found = [model_name(str(mounted))]
    for change in ("config.json", "model.safetensors", "other.safetensors"):
        (mounted / change).write_bytes(weights)
        found.append(model_name(str(mounted)))
    weights[500_000:600_000] = b"x" * 100_000
    (mounted / "model.safetensors").write_bytes(weights)
    found.append(model_name(str(mounted)))
    assert len(set(found)) == 5
    assert all(name.startswith("models-") for name in found)
    os.utime(mounted / "model.safetensors", ns=(1, 1))
    (mounted / "README.md").write_text("a page, and no part of the model")
    assert model_name(str(mounted)) == model_name(f"{mounted}/.") == found[-1], "it was downloaded again"
    assert model_name(str(mounted / "model.safetensors")).startswith("model.safetensors-")
