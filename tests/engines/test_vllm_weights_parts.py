"""The loader `--load-format membroker` with vLLM's own post-processing and a real broker, over small modules."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until

import membroker
from membroker import InvalidRequest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines installs it")

import torch
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import BaseModelLoader, base_loader
from vllm.model_executor.utils import is_weights_pre_processed

from membroker.kv.bounds import settings_from
from membroker.kv.vllm import identity, plugin, weights
from membroker.kv.vllm.settings import WeightSettings, check_shareable

pytestmark = pytest.mark.shared_daemon
ROWS = 256


class Kernel:
    """What computes with the weights of a layer, and keeps values of its own."""

    __module__ = "vllm.model_executor.kernels.linear"
    zeros = "none"


class Processing:
    """What a layer does with its weights when they are loaded."""

    def __init__(self, process: Callable[[Any], None]) -> None:
        self._process = process
        self.kernel = Kernel()

    def create_weights(self, *args: Any, **kwargs: Any) -> None: ...

    def apply(self, *args: Any, **kwargs: Any) -> Any: ...

    def process_weights_after_loading(self, layer: Any) -> None:
        assert getattr(self, "supports_pre_processed_weights", False) or not is_weights_pre_processed()
        self._process(layer)


class Method(Processing, QuantizeMethodBase):  # type: ignore[misc]
    """Processing of a layer that knows whether its weights are processed already, as some of vLLM's methods do."""

    supports_pre_processed_weights = True


class AutoGPTQLinearMethod(Processing, LinearMethodBase):  # type: ignore[misc]
    """Processing of a layer that knows nothing of processed weights, under the name of one of vLLM's."""

    __module__ = "vllm.model_executor.layers.quantization.auto_gptq"


class Small(torch.nn.Module):  # type: ignore[misc]
    """Two names for one weight, dtypes of quantized models, a weight that is not contiguous, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(ROWS, 256)
        self.head = torch.nn.Linear(256, ROWS, bias=False)
        self.head.weight = self.embed.weight
        for name, dtype in {"eight": torch.float8_e4m3fn, "packed": torch.int32, "wide": torch.bfloat16}.items():
            value = torch.nn.Parameter(torch.zeros(ROWS, 512, dtype=dtype), requires_grad=False)
            self.register_parameter(name, value)
        self.turned = torch.nn.Parameter(torch.empty(300, ROWS).t(), requires_grad=False)
        self.small = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.empty(0, 4), requires_grad=False)
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("angles", torch.arange(16.0), persistent=False)
        self.quant_method = Method(lambda layer: None)


@support_torch_compile(dynamic_arg_dims={"tokens": 0})  # type: ignore[untyped-decorator]
class Base(Small):
    """A model that vLLM would compile at its first step."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


@support_torch_compile(dynamic_arg_dims={"tokens": 0})  # type: ignore[untyped-decorator]
class Derived(Base):
    """As vLLM's Qwen3, whose base class is decorated, too: torch keeps it by two hooks."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)


def fill(model: Any) -> None:
    """What a checkpoint would set: the same values each time."""
    torch.manual_seed(3)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.randint(1, 90, value.shape).to(value.dtype))


class Files(BaseModelLoader):  # type: ignore[misc]
    """Stands for one of vLLM's loaders, and notes what it was asked for."""

    def __init__(self, load: Callable[[Any], None] = fill) -> None:
        super().__init__(LoadConfig())
        self.revisions: list[str | None] = []
        self._load = load

    @property
    def loads(self) -> int:
        return len(self.revisions)

    def download_model(self, model_config: Any) -> None: ...

    def load_weights(self, model: Any, model_config: Any) -> None:
        self.revisions.append(model_config.revision)
        self._load(model)


def a_config(**changes: Any) -> Any:
    """What vLLM knows of a small model; `changes` are attributes of whichever part has them."""
    config = VllmConfig()
    config.model_config = SimpleNamespace(
        model="org/small",
        revision=None,
        hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 256}),
        word_embeddings_untied_by_checkpoint=False,
        dtype=torch.float32,
        quantization=None,
        quantization_config=None,
        runner_type="generate",
        convert_type="none",
        model_impl="auto",
        enable_sleep_mode=False,
        enable_cumem_allocator=False,
        multimodal_config=None,
        is_moe=False,
    )
    parts = [config.model_config, config.parallel_config, config.cache_config, config.kernel_config]
    parts += [config.offload_config.uva, config]
    for name, value in changes.items():
        setattr(next(part for part in parts if hasattr(part, name)), name, value)
    return config


@pytest.fixture
def start(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that starts an engine's model as vLLM does. An engine ends with the last reference to it."""
    monkeypatch.setenv("MEMBROKER_ENDPOINT", str(daemon.endpoint()))

    def load(build: Callable[..., Any] = Small, files: Files | None = None, compiling: Any = None, **extra: Any) -> Any:
        def initialize(vllm_config: Any, **_keywords: Any) -> Any:
            return build(vllm_config=vllm_config) if compiling else build()

        inner = files or Files()
        monkeypatch.setattr(weights, "get_model_loader", lambda _config: inner)
        for module in (weights, base_loader):
            monkeypatch.setattr(module, "initialize_model", initialize)
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # as vLLM's workers do it on a CPU
        config = a_config(**{"compilation_config": compiling} if compiling else {})
        loader = weights.Loader(LoadConfig(load_format="membroker", model_loader_extra_config=extra))
        return loader.load_model(config, config.model_config)

    yield load
    gc.collect()


def segments(daemon: Daemon) -> list[Any]:
    """Return all segments. The claim of an engine that has loaded is one until the driver's thread has closed it."""
    with membroker.connect(daemon.endpoint(), observer=True) as client:
        return [(one.state, one.sessions) for one in client.segments()]


def test_a_model_that_vllm_would_compile_is_in_memory_once(daemon: Daemon, start: Callable[..., Any]) -> None:
    """Torch keeps the models that are served, and not the first engine's own copy."""
    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.DYNAMO_TRACE_ONCE))
    hooks = torch._dynamo.convert_frame._bytecode_hooks
    with set_current_vllm_config(config):
        served = {start(Derived, compiling=config.compilation_config) for _ in range(2)}
    assert {hook.__self__ for hook in hooks.values()} == served
    until(lambda: segments(daemon) == [("sealed", 2)])
    hooks.clear()


def test_the_second_engine_maps_what_the_first_has_loaded(daemon: Daemon, start: Callable[..., Any]) -> None:
    """Every dtype, tied names, what a loader has put on a parameter; and each engine has buffers that it can write.

    A write to a large weight would end the process, so the kernel is asked: they lie in read-only shared mappings.
    """
    expected, files = Small(), Files()
    fill(expected)
    first, second = start(files=files), start(files=files)
    assert files.loads == 1
    until(lambda: segments(daemon) == [("sealed", 2)])
    for model in (first, second):
        for (name, value), (_, wanted) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
            assert (value.dtype, value.stride()) == (wanted.dtype, wanted.stride()), name
            assert torch.equal(value.float(), wanted.float()), name
        assert model.head.weight is model.embed.weight
        assert model.scale == expected.scale
        assert torch.equal(model.angles, expected.angles)
        model.scale.fill_(5.0)
        model.angles.fill_(5.0)
        assert {_mode(value.data_ptr()) for value in (model.eight, model.packed, model.wide)} == {"r--s"}
    with membroker.connect(daemon.endpoint(), observer=True) as client:
        books = client.model_status("org/small").books["device"]
        assert books.used_bytes == books.segment_bytes == client.segments()[0].size_bytes
    del first, model
    gc.collect()
    until(lambda: segments(daemon) == [("sealed", 1)])
    assert torch.equal(second.wide, expected.wide), "the first engine's end is not the segment's"
    del second, value
    gc.collect()
    until(lambda: segments(daemon) == [])


def _mode(address: int) -> str:
    """Return how the mapping is protected that an address lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, mode, *_ = line.split()
        begin, end = (int(part, 16) for part in where.split("-"))
        if begin <= address < end:
            return mode
    raise AssertionError("nothing is mapped there")


def test_a_branch_that_has_moved_is_another_model(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone pushes new weights to Hugging Face while an engine serves the old ones. The next engine has the new ones.

    Each loads the commit in its segment's name: the branch may move again before it has downloaded the weights.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    files, engines = Files(), []
    for commit in ("a" * 40, "b" * 40):
        (snapshot := tmp_path / "models--org--small" / "snapshots" / commit).mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")  # as vLLM reads it before
        (branch := snapshot.parents[1] / "refs" / "main").parent.mkdir(exist_ok=True)
        branch.write_text(commit)
        engines += [start(files=files), start(files=files)]
    assert files.revisions == ["a" * 40, "b" * 40]


def test_an_engine_takes_no_memory_for_weights_while_another_one_loads(
    daemon: Daemon, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three start at once: only one builds a model with memory, and the others wait before they build theirs."""
    loaded: list[bool] = []
    may_load = threading.Event()

    def build() -> Any:
        loaded.append(may_load.is_set())
        return Small()

    def load(model: Any) -> None:
        assert may_load.wait(DEADLINE_SECONDS)
        fill(model)

    files, models = Files(load), []
    threads = [threading.Thread(target=lambda: models.append(start(build, files))) for _ in range(3)]
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level("INFO", "vllm"):
        for one in threads:
            one.start()
        until(lambda: loaded and caplog.text.count("for the engine that loads") == 2)
    may_load.set()
    for one in threads:
        one.join(DEADLINE_SECONDS)
    assert (files.loads, loaded, len(models)) == (1, [False, True, True, True], 3), "one more than is kept"
    until(lambda: segments(daemon) == [("sealed", 3)])
    assert all(torch.equal(models[0].wide, one.wide) for one in models)


def captured() -> Any:
    """As kernels do it: a view that is no tensor of the module."""
    model = Small()
    model.views = [model.wide.view(-1)]
    return model


def write(layer: Any) -> None:
    layer.wide[3:5] = 1.0


def write_out(layer: Any) -> None:
    torch.add(layer.wide.data, 1, out=layer.wide.data)


def repack(layer: Any) -> None:
    for name in ("eight", "packed", "wide"):
        value = getattr(layer, name)
        setattr(layer, name, torch.nn.Parameter(value.data.clone(), requires_grad=False))
    layer.embed.weight = layer.head.weight = torch.nn.Parameter(torch.zeros(1))


def lazily() -> Any:
    model = Small()
    model.wide = torch.nn.UninitializedParameter()
    return model


def quantized(process: Callable[[Any], None], method: type[Any] = AutoGPTQLinearMethod) -> Callable[[], Any]:
    def build() -> Any:
        model = Small()
        model.quant_method = method(process)
        return model

    return build


def compile_kernel(layer: Any) -> None:
    layer.quant_method.kernel.run = lambda: None


class Unknown(AutoGPTQLinearMethod):
    """A method of which nobody knows what it changes."""


@pytest.mark.parametrize(
    ("build", "says"),
    [
        pytest.param(quantized(write, Method), r"writes to a weight of \[2, 512\]", id="written in place"),
        pytest.param(quantized(write_out, Method), r"writes to a weight of \[256, 512\]", id="an output"),
        pytest.param(quantized(repack, Method), "repacks the weights .* a copy of each engine's own", id="repacked"),
        pytest.param(captured, r"keeps weights in views .*, which cannot be shared", id="a hidden view of a weight"),
        pytest.param(lazily, "wide is a UninitializedParameter that is quantized", id="without memory"),
        pytest.param(quantized(lambda _: None, Unknown), "layer <root>: Unknown does not support", id="unknown"),
        pytest.param(quantized(compile_kernel), "makes a function of the weights of .*kernel.run", id="a function"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_the_first_engine(
    build: Callable[[], Any], says: str, daemon: Daemon, start: Callable[..., Any]
) -> None:
    """One sentence at the start, and no segment is left: never a wrong token, and no crash."""
    files = Files()
    with pytest.raises(InvalidRequest, match=says):
        start(build, files)
    assert files.loads == (0 if "Unin" in says or "Unknown" in says else 1), "what is known before is said before"
    gc.collect()
    until(lambda: segments(daemon) == [])


def aliased() -> Any:
    """As layers with a convolution do it: a buffer that is a view of a weight."""
    model = Small()
    model.register_buffer("alias", model.wide.view(-1), persistent=False)
    return model


def change_all(model: Any) -> None:
    """What loaders do besides: another parameter object, a flag, and a constant."""
    fill(model)
    model.wide = torch.nn.Parameter(model.wide.data.clone(), requires_grad=False)
    model.register_buffer("alias", model.wide.view(-1), persistent=False)
    model.has_own_head = True
    model.table.mul_(2)


def test_what_loading_leaves_is_in_every_engine(daemon: Daemon, start: Callable[..., Any]) -> None:
    """Tensors that share memory still do, also with a weight, and a tensor that is no buffer has its contents."""

    def build() -> Any:
        model = aliased()
        model.table = torch.arange(4.0)
        model.fixed = torch.zeros(3, device="cpu")
        return model

    for model in (start(build, Files(change_all)), start(build, Files(change_all))):
        assert model.alias.data_ptr() == model.wide.data_ptr()
        assert model.has_own_head is True
        assert model.table.tolist() == [0.0, 2.0, 4.0, 6.0]
        model.table.add_(1)


def quantize(layer: Any) -> None:
    """What kernels do with weights: turn, pad, take away, keep a workspace, and note what they did."""
    layer.wide = torch.nn.Parameter(layer.wide.data.t(), requires_grad=False)
    del layer.packed
    layer.small = None
    layer.workspace = torch.zeros(8, dtype=torch.int32)
    layer.bias_of_inputs = None
    layer.quant_method.kernel.zeros = "w_zp"
    layer.quant_method.kernel.scales = layer.wide[:2].float()
    layer.computes = layer.quant_method.kernel


def test_layers_that_know_nothing_of_processed_weights_are_followed(daemon: Daemon, start: Callable[..., Any]) -> None:
    """All that processing has changed is taken over, and it does not run again. A workspace is each engine's own."""
    models = [start(quantized(quantize)) for _ in range(3)]
    for model in models:
        assert (model.wide.shape, model.wide.stride()) == ((512, ROWS), (1, 512))
        assert not hasattr(model, "packed")
        assert model.small is None
        assert model.bias_of_inputs is None
        assert model.computes is model.quant_method.kernel
        assert model.computes.zeros == "w_zp"
        assert torch.equal(model.quant_method.kernel.scales, models[0].wide[:2].float())
        assert not model.workspace.any(), "another engine's"
        model.workspace.fill_(7)
    until(lambda: segments(daemon) == [("sealed", 3)])


def test_weights_are_not_taken_over_for_another_kernel(start: Callable[..., Any]) -> None:
    """Its layout is another one. vLLM chooses kernels by more than what is in the segment's name."""

    class Other(Kernel):
        __module__ = Kernel.__module__

    def build() -> Any:
        model = quantized(quantize)()
        model.quant_method.kernel = Other()
        return model

    first = start(quantized(quantize))
    with pytest.raises(InvalidRequest, match="GPTQLinearMethod Other here and AutoGPTQLinearMethod Kernel there"):
        start(build)
    assert first.wide[0, 0] > 0


def test_layers_that_know_of_processed_weights_restore_what_they_have_besides(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They see the values, know that these are processed, and have what the first engine has noted on its kernel."""

    def process(layer: Any) -> None:
        if not is_weights_pre_processed():
            layer.wide = torch.nn.Parameter(layer.wide.t(), requires_grad=False)
            layer.quant_method.kernel.width = layer.wide.shape[0]
        layer.largest = layer.wide.max().item()

    monkeypatch.setattr(Method, "__module__", "vllm.model_executor.layers.quantization.fp8")
    models = [start(quantized(process, Method)) for _ in range(2)]
    for model in models:
        assert (model.wide.shape, model.quant_method.kernel.width) == ((512, ROWS), 512)
        assert model.largest == models[0].wide.max()


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"lod_format": "auto"}, "'lod_format', and membroker knows: load_format, extra_config, model, wait, keep"),
        ({"load_format": "membroker"}, "one of vLLM's own"),
        ({"model": "a/b/c"}, "a/b/c"),
        ({"wait": 100_000}, "at most 86400 seconds"),
        ({"extra_config": []}, "an object"),
    ],
)
def test_settings_are_checked(extra: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(says)):
        settings_from("--model-loader-extra-config", extra, WeightSettings)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"enable_eplb": True}, "leave --enable-eplb out"),
        ({"weight_transfer_config": object()}, "leave --weight-transfer-config out"),
        ({"enable_sleep_mode": True}, "leave --enable-sleep-mode out"),
        ({"cpu_offload_gb": 4}, "leave --cpu-offload-gb"),
    ],
)
def test_engines_that_write_to_their_weights_are_refused(changes: dict[str, Any], says: str) -> None:
    check_shareable(a_config())
    with pytest.raises(InvalidRequest, match=says):
        check_shareable(a_config(**changes))


class TestNames:
    def name(self, settings: WeightSettings | None = None, prefix: str = "", **changes: Any) -> str:
        config = a_config(**changes)
        return identity.digest_of(config, identity.pinned(config.model_config), settings or WeightSettings(), prefix)

    def test_all_that_decides_the_bytes_is_in_the_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also which experts a rank has, and whether a model that sees is built without its eyes."""
        other = SimpleNamespace(to_dict=lambda: {"hidden_size": 128})
        names = [
            self.name(),
            self.name(WeightSettings(load_format="dummy")),
            self.name(WeightSettings(extra_config={"num_threads": 2})),
            self.name(prefix="draft"),
            self.name(model="org/other"),
            self.name(revision="v2"),
            self.name(hf_config=other),
            self.name(dtype=torch.bfloat16),
            self.name(quantization="fp8"),
            self.name(rank=1, tensor_parallel_size=2),
            self.name(tensor_parallel_size=2),
            self.name(runner_type="pooling"),
            self.name(enable_expert_parallel=True),
            self.name(moe_backend="marlin"),
            self.name(cache_dtype="fp8"),
            self.name(kv_cache_dtype_skip_layers=["3"]),
            self.name(is_moe=True, lora_config=object()),
            self.name(enable_expert_parallel=True, expert_placement_strategy="round_robin"),
            self.name(enable_expert_parallel=True, expert_placement_strategy="round_robin", all2all_backend="nixl_ep"),
            self.name(multimodal_config=MultiModalConfig()),
            self.name(multimodal_config=MultiModalConfig(limit_per_prompt={"image": 0})),
            self.name(multimodal_config=MultiModalConfig(language_model_only=True)),
            self.name(multimodal_config=MultiModalConfig(mm_encoder_tp_mode="data")),
        ]
        few, more = (MultiModalConfig(limit_per_prompt={"image": number}) for number in (1, 2))
        assert self.name(multimodal_config=few) == self.name(multimodal_config=more)
        assert self.name(lora_config=object()) == names[0], "adapters lie beside the weights"
        monkeypatch.setattr("vllm.__version__", "0.32.1")
        names.append(self.name())
        monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
        names.append(self.name())
        monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
        names.append(self.name())
        assert len(set(names)) == len(names)
        assert self.name(WeightSettings(keep=True, wait=3.0, model="mine")) == names[-1], "these change no byte"

    def test_a_checkpoint_that_is_written_again_is_another(self, tmp_path: Path) -> None:
        """The same path and size, but another time; what is no weight does not matter."""
        file = tmp_path / "model.safetensors"
        file.write_bytes(b"weights")
        os.utime(file, ns=(1, 1))
        before = self.name(model=str(tmp_path))
        (tmp_path / "log").write_text("a line")
        assert self.name(model=str(tmp_path)) == before != self.name(model=str(file))
        os.utime(file, ns=(2, 2))
        assert self.name(model=str(tmp_path)) != before

    def test_a_model_in_an_image_is_known_by_its_bytes(self, tmp_path: Path) -> None:
        """A new image has another fine-tuned model at the same path. Such builds give all files the same time."""
        names = []
        for step in (b"first", b"second", b"first"):
            for shard in range(3):
                file = tmp_path / f"model-{shard}.safetensors"
                file.write_bytes(b"the same header" + hashlib.shake_256(step + bytes([shard])).digest(1 << 20))
                os.utime(file, ns=(0, 0))
            names.append(self.name(model=str(tmp_path)))
        assert names[0] == names[2] != names[1]


def test_a_vllm_that_cannot_have_the_loader_starts_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM calls every plugin at its start, and an exception would end it."""
    monkeypatch.setitem(sys.modules, "membroker.kv.vllm.weights", None)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    plugin.register()
    assert "--load-format membroker is not available with this vLLM" in caplog.text
