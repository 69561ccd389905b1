"""PyTorch over the host driver: modules in segments, with a real daemon."""

from __future__ import annotations

import re
import threading
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


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
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


def test_a_tie_is_stored_once(model: Model) -> None:
    """And says so as safetensors' own `save_model` does; what is not persistent stays out."""
    with adapter.publish_module(model, "weights", Tied(), metadata={"step": "9"}) as segment:
        index = segment.index()
        assert set(index) == {"embed.weight", "block.weight", "block.bias", "scale", "nothing", "steps"}
        assert index.metadata == {
            "format": "pt",
            "step": "9",
            "again.weight": "block.weight",
            "again.bias": "block.bias",
            "head.weight": "embed.weight",
        }


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


def test_two_views_of_the_same_bytes_that_read_them_differently(client: Client, model: Model) -> None:
    """A conjugate and its imaginary part are views that torch negates as it reads: no bytes of their own."""
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    module = torch.nn.Module()
    for name, view in (("up", numbers.imag), ("down", numbers.conj().imag), ("z", numbers), ("c", numbers.conj())):
        module.register_buffer(name, view)
    assert module.down.is_neg()
    adapter.publish_module(model, "weights", module).close()
    with client.attach("weights") as segment:
        adapter.attach_module(segment, module)
    assert (module.up.tolist(), module.down.tolist()) == ([2.0, -4.0], [-2.0, 4.0])
    assert (module.z.tolist(), module.c.tolist()) == ([1 + 2j, 3 - 4j], [1 - 2j, 3 + 4j])


def test_fp8_is_aligned(client: Client, model: Model) -> None:
    """Small scales stand before fp8 weights in the format; each tensor begins at 256 bytes all the same."""
    module = torch.nn.Module()
    for number in range(3):
        module.register_parameter(f"scale{number}", torch.nn.Parameter(torch.tensor(1.0 + number)))
        weight = torch.randn(65, 65 + number).to(torch.float8_e4m3fn)
        module.register_parameter(f"w{number}", torch.nn.Parameter(weight, requires_grad=False))
    published = {key: bytes_of(value) for key, value in module.named_parameters()}
    adapter.publish_module(model, "weights", module).close()
    with client.attach("weights") as segment:
        index = segment.index()
        assert {info.offset % 256 for info in index.values()} == {0}
        assert set(index) == set(published), "what fills the gaps is nobody's"
        adapter.attach_module(segment, module)
    assert {key: bytes_of(value) for key, value in module.named_parameters()} == published
    assert module.w1.dtype == torch.float8_e4m3fn


def test_it_is_a_safetensors_file(model: Model) -> None:
    """The reference reads the segment's bytes as `load_model` would: every tensor, and the names that are tied."""
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed here")
    original = Tied(torch.bfloat16)
    with adapter.publish_module(model, "weights", original) as segment:
        image = segment.read(0, segment.index().size)
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
        (lambda: torch.nn.parameter.UninitializedParameter(), "has no memory yet"),
        (lambda: torch.zeros(4, dtype=torch.complex128), "which safetensors does not have"),
        (lambda: torch.zeros(4, 4).to_sparse(), "only plain tensors"),
        (lambda: torch.zeros(2).as_subclass(Wrapped), "only plain tensors"),
    ],
)
def test_what_cannot_be_published(daemon: Daemon, model: Model, client: Client, value: Any, message: str) -> None:
    module = torch.nn.Module()
    made = value()
    if isinstance(made, torch.nn.Parameter):
        module.register_parameter("odd", made)
    else:
        module.register_buffer("odd", made)
    with pytest.raises(membroker.InvalidRequest, match=f"odd .*{message}"):
        adapter.publish_module(model, "weights", module)
    assert not client.segments()
    assert daemon.books().lent_bytes == 0


@pytest.mark.parametrize("name", ["a!", "!", "a\0b", "!x"])
def test_a_name_beside_those_of_the_gaps_is_a_modules_own(client: Client, model: Model, name: str) -> None:
    """Also one that is sorted between a tensor and the gap after it. The name of a gap is refused."""
    module = torch.nn.Module()
    for number, (each, size) in enumerate((("a", 1), (name, 5001), ("b", 6000))):
        module.register_buffer(each, torch.full((size,), number, dtype=torch.uint8))
    published = {key: bytes_of(value) for key, value in module.named_buffers()}
    adapter.publish_module(model, "weights", module).close()
    with client.attach("weights") as segment:
        assert {info.offset % 256 for info in segment.index().values()} == {0}
        adapter.attach_module(segment, module)
    assert {key: bytes_of(value) for key, value in module.named_buffers()} == published
    module.register_buffer("!17", torch.zeros(5000))
    with pytest.raises(membroker.InvalidRequest, match="'!17'"):
        adapter.publish_module(model, "others", module)


def test_what_is_still_being_written_is_not_attached(model: Model) -> None:
    with model.create_segment("raw", "2MiB") as segment, pytest.raises(membroker.InvalidRequest, match="seal it first"):
        adapter.attach_module(segment, Tied())


def test_other_threads_build_as_always() -> None:
    """`without_weights` is one thread's: a server that builds something else meanwhile gets its weights."""
    made: list[Any] = []
    with adapter.without_weights():
        thread = threading.Thread(target=lambda: made.append(torch.nn.Linear(2, 2)))
        thread.start()
        thread.join()
        mine = torch.nn.Linear(2, 2)
    assert mine.weight.is_meta
    assert not made[0].weight.is_meta
    assert not torch.nn.Linear(2, 2).weight.is_meta
