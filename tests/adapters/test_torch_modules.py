"""PyTorch over the host driver: modules in segments, with a real daemon."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.support.daemons import Daemon, until
from tests.support.garbage import collect
from tests.support.tensors import bytes_of

import membroker
from membroker import Client, Model

torch = pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
adapter = pytest.importorskip("membroker.adapters.torch")

pytestmark = pytest.mark.shared_daemon


class Tied(torch.nn.Module):  # type: ignore[misc]
    """Two names for one weight, a shared block, a buffer that is kept, one that is not, and one of each odd kind."""

    def __init__(self, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16, dtype=dtype)
        self.block = torch.nn.Linear(16, 16, dtype=dtype)
        self.again = self.block
        self.head = torch.nn.Linear(16, 32, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=dtype))
        self.nothing = torch.nn.Parameter(torch.empty(0, 4, dtype=dtype))
        self.register_buffer("steps", torch.tensor(7, dtype=torch.int64))
        self.register_buffer("angles", torch.arange(16, dtype=torch.float32), persistent=False)

    def forward(self, tokens: Any) -> Any:
        inner = self.again(torch.relu(self.block(self.embed(tokens)))) * self.scale
        return self.head(inner + self.angles.to(inner.dtype))


class Wrapped(torch.Tensor):  # type: ignore[misc]
    """A tensor that is more than its bytes, as quantized ones are."""


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_published_and_attached(client: Client, model: Model, name: str) -> None:
    """A module on the meta device answers exactly as the one that was published; what was tied is tied."""
    dtype = getattr(torch, name)
    torch.manual_seed(1)
    original, tokens = Tied(dtype), torch.arange(32).view(4, 8)
    adapter.publish_module(model, "weights", original).close()
    with adapter.without_weights():
        copy = Tied(dtype)
    assert all(parameter.is_meta for parameter in copy.parameters())
    with client.attach("weights") as segment:
        assert adapter.attach_module(segment, copy) is copy
    assert torch.equal(copy(tokens), original(tokens))
    assert copy.head.weight is copy.embed.weight
    assert copy.again is copy.block
    assert copy.steps.item() == 7
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    assert [key for key, _ in copy.named_parameters()] == [key for key, _ in original.named_parameters()]


def test_what_shares_memory_is_stored_once(client: Client, model: Model) -> None:
    """Two parameters over the same bytes come back so; what overlaps in part comes back whole."""
    module = torch.nn.Module()
    base = torch.arange(8.0)
    module.one, module.two = torch.nn.Parameter(base), torch.nn.Parameter(base)
    module.part = torch.nn.Parameter(base[2:6])
    module.turned = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    with adapter.publish_module(model, "weights", module) as segment:
        assert set(segment.index()) == {"one", "part", "turned"}
    with client.attach("weights") as segment:
        adapter.attach_module(segment, module)
    assert module.one.data_ptr() == module.two.data_ptr()
    assert module.part.tolist() == [2.0, 3.0, 4.0, 5.0]
    assert module.turned.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_it_is_a_safetensors_file(model: Model) -> None:
    """The reference reads the segment's bytes as `load_model` would: every tensor, and the names that are tied."""
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed here")
    original = Tied(torch.bfloat16)
    with adapter.publish_module(model, "weights", original, metadata={"step": "9"}) as segment:
        image = segment.read(0, segment.index().size)
        ties = {"again.weight": "block.weight", "again.bias": "block.bias", "head.weight": "embed.weight"}
        assert segment.index().metadata == {"format": "pt", "step": "9", **ties}
    found = {key: value for key, value in safetensors.load(image).items() if not re.fullmatch("![0-9]+", key)}
    assert len(found) == 6
    assert all(torch.equal(value, original.state_dict()[key]) for key, value in found.items())


def test_the_weights_outlive_the_segment_and_the_client(daemon: Daemon, model: Model) -> None:
    """A module keeps what it computes with; one copy stands there, charged once, until both are done with it."""
    original, tokens = Tied(), torch.arange(8).view(1, 8)
    adapter.publish_module(model, "weights", original).close()
    lent = daemon.books().lent_bytes
    copies = []
    for _ in range(3):
        reader = membroker.connect(daemon.endpoint())
        copies.append(adapter.attach_module(reader.attach("weights"), Tied()))
        reader.close()
    collect()
    assert daemon.books().lent_bytes == lent
    assert len(daemon.sessions()) == 4
    assert all(torch.equal(copy(tokens), original(tokens)) for copy in copies)
    copies.clear()
    collect()
    until(lambda: len(daemon.sessions()) == 1)


def test_what_does_not_fit_changes_nothing(client: Client, model: Model) -> None:
    adapter.publish_module(model, "weights", Tied()).close()
    other = Tied(torch.bfloat16)
    other.embed = torch.nn.Embedding(33, 16)
    before = dict(other.named_parameters())
    with client.attach("weights") as segment:
        for strict in (True, False):
            with pytest.raises(membroker.InvalidRequest, match=r"embed\.weight .*\[33, 16\] .*\[32, 16\]"):
                adapter.attach_module(segment, other, strict)
    assert dict(other.named_parameters()) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda module: module.to(torch.bfloat16), r"is torch\.bfloat16 in the module and torch\.float32"),
        (lambda module: delattr(module, "scale"), "scale is not in the module"),
        (lambda module: setattr(module, "extra", torch.nn.Linear(2, 2)), r"extra\.weight is not in the segment"),
        (lambda module: module.to("meta"), r"angles is in no segment.*without_weights"),
    ],
)
def test_strict(client: Client, model: Model, change: Any, message: str) -> None:
    """What a strict attach refuses, a lenient one leaves as it is."""
    adapter.publish_module(model, "weights", Tied()).close()
    module = Tied()
    change(module)
    with client.attach("weights") as segment:
        with pytest.raises(membroker.InvalidRequest, match=message):
            adapter.attach_module(segment, module)
        adapter.attach_module(segment, module, strict=False)
        assert module.block.weight.dtype == torch.float32
        assert not module.block.weight.is_meta


def test_a_module_ties_what_the_file_stores_once(client: Client, model: Model) -> None:
    """A checkpoint from elsewhere leaves a tied name out and says nothing: the module's own tie finds it.

    A tensor named "" stands for no parameter that the file lacks.
    """
    untied, module = Tied(), torch.nn.Module()
    module.embed, module.head = untied.embed, untied.head
    with model.create_segment("weights", "2MiB") as segment:
        index = segment.lay_out({"embed.weight": ("F32", (32, 16)), "": ("F32", (2, 2))})
        segment.write(index["embed.weight"].offset, bytes_of(untied.embed.weight))
        segment.seal()
        with pytest.raises(membroker.InvalidRequest, match=r"v .* w "):
            adapter.attach_module(segment, torch.nn.ParameterDict({"w": torch.ones(2, 2), "v": torch.ones(2, 2)}))
    with client.attach("weights") as segment:
        adapter.attach_module(segment, module, strict=False)
    assert module.head.weight is module.embed.weight


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: torch.empty(4, device="meta"), "has no memory yet"),
        (lambda: torch.zeros(4, dtype=torch.complex128), "which safetensors does not have"),
        (lambda: torch.zeros(4, 4).to_sparse(), "only plain tensors"),
        (lambda: torch.zeros(2).as_subclass(Wrapped), "only plain tensors"),
    ],
)
def test_what_cannot_be_published(daemon: Daemon, model: Model, client: Client, value: Any, message: str) -> None:
    module = torch.nn.Module()
    module.register_buffer("odd", value())
    with pytest.raises(membroker.InvalidRequest, match=f"odd .*{message}"):
        adapter.publish_module(model, "weights", module)
    assert not client.segments()
    assert daemon.books().lent_bytes == 0
