"""The torch flow on a CUDA device: the codes and files of the CPU, and nothing is moved off the device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.torch_flow.test_registry_contract import CONFIGS, LAYERS
from tests.torch_flow.test_tuned_files import ALGORITHMS as TUNED
from torch import nn

from quark.numerics.ggml import Ggml
from quark.numerics.replay import Recording
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.algorithms import tune
from quark.torch.algorithms.equalization import run_equalization  # of convolutions; a decoder is refused
from quark.torch.algorithms.registry import ALGORITHMS
from quark.torch.export.api import export_safetensors, import_model_from_safetensors
from quark.torch.export.write_as import config_for, export_as
from quark.torch.fake_quantize import FakeQuantize
from quark.torch.files import quantize_checkpoint
from quark.torch.quantization.config.config import Int8PerTensorSpec, QConfig, QLayerConfig

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SIZES = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
IDS = torch.randint(5, 250, (4, 1, 48), generator=torch.Generator().manual_seed(1))
SCHEMES = LLMTemplate.get_supported_schemes()
FILE_SCHEMES = ("int4_wo_32", "int8_wo_per_channel", "ptpc_fp8", "mxfp4", "fp8_block")
FORMATS = [
    *(
        ("compressed-tensors", one)
        for one in ("int4_wo_32", "uint4_wo_32", "ptpc_int8", "fp8", "nvfp4", "int4_fp8_128")
    ),
    *(("awq", "uint4_wo_128"), ("gptq", "int4_wo_128"), ("fp8", "fp8"), ("fp8", "fp8_block"), ("modelopt", "nvfp4")),
    *(("onnx", one) for one in ("int4_wo_32", "fp8", "int8")),
]


def llama(dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model.to(dtype).eval()


def samples(device: str) -> list[torch.Tensor]:
    return list(IDS.to(device))


def quantized(device: str, config: QConfig) -> Any:
    return ModelQuantizer(config).quantize_model(llama().to(device), samples(device)).eval()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    device = next(model.parameters()).device
    return torch.cat([model(ids.to(device)).logits for ids in IDS]).float().cpu()


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def devices(model: nn.Module) -> set[str]:
    return {value.device.type for value in [*model.parameters(), *model.buffers()]}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def quantizers(model: nn.Module) -> Iterator[FakeQuantize]:
    return (one for one in model.modules() if isinstance(one, FakeQuantize))


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert set(one) == set(other)
    as_bytes = {k: tuple(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, other[k])) for k, a in one.items()}
    return [name for name, (a, b) in as_bytes.items() if not torch.equal(a, b)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_has_the_weights_of_the_cpu(scheme: str, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme)
    here, there = quantized("cpu", config), quantized("cuda", config)
    assert devices(there) == {"cuda"}
    exact = logits(llama())  # inputs next to a rounding boundary may differ, what the scheme loses may not
    assert error(logits(there), exact) == pytest.approx(error(logits(here), exact), rel=0.05)
    if isinstance(next(quantizers(there)).stage.format, Ggml):
        return
    for model, name in ((here, "cpu"), (there, "cuda")):
        export_safetensors(model, tmp_path / name)
    found, expected = tensors(tmp_path / "cuda"), tensors(tmp_path / "cpu")
    measured = {k for k in found if "input_scale" in k or "output_scale" in k}
    weights = [{k: v for k, v in x.items() if k not in measured} for x in (found, expected)]
    assert not differing(*weights)
    for name in measured:
        torch.testing.assert_close(found[name].float(), expected[name].float(), rtol=1e-3, atol=0)
    back = import_model_from_safetensors(llama().to("cuda"), tmp_path / "cuda")
    assert devices(back) == {"cuda"}
    assert error(logits(back), logits(there)) < 1e-5


@pytest.mark.parametrize(
    "row", [row for row in ALGORITHMS if row.run is not run_equalization], ids=lambda row: row.config.name
)
@pytest.mark.parametrize("scheme", ["int4", "w4a4"])
def test_every_algorithm_gains_what_it_gains_on_the_cpu(row: Any, scheme: str) -> None:
    config = QConfig(LAYERS[scheme][32], exclude=["lm_head"], algo_config=[CONFIGS[row.config]])
    exact = logits(llama())
    model = quantized("cuda", config)
    assert devices(model) == {"cuda"}
    there, here = (error(logits(x), exact) for x in (model, quantized("cpu", config)))
    assert there < here * 1.05 + 1e-4


@pytest.mark.parametrize("algorithm", ["gptq", "gptaq", "qronos"])
@pytest.mark.parametrize("scheme", ["int4_wo_128", "uint4_wo_128", "ptpc_fp8", "mxfp4", "nvfp4", "mx6"])
def test_columns_replayed_have_the_bits_of_columns_one_by_one(
    algorithm: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LLMTemplate.get("llama").get_config(scheme, algorithm=algorithm)
    replays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: replays.append(1) or replay(self))
    held, found = torch.cuda.memory_allocated(), quantized("cuda", config).state_dict()
    assert replays
    count = len(replays)
    with monkeypatch.context() as some:
        some.setattr(Recording, "again", lambda self, steps: steps(self.places))
        expected = quantized("cuda", config).state_dict()
    assert len(replays) == count
    assert differing(found, expected) == []
    del found, expected
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= held + (33 << 20)  # cuBLAS keeps 32 MiB for the stream of recordings


@pytest.mark.parametrize("cache", ["fp8", "int8"])
def test_caches(cache: str, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config("fp8", kv_cache_scheme=cache)
    model = quantized("cuda", config)
    export_safetensors(model, tmp_path / "out")
    back = import_model_from_safetensors(llama().to("cuda"), tmp_path / "out")
    assert error(logits(back), logits(model)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", FILE_SCHEMES)
def test_files_of_the_device_are_those_of_the_cpu(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    llama(dtype).save_pretrained(tmp_path / "source")
    config = LLMTemplate.get("llama").get_config(scheme)
    for device in ("cpu", "cuda"):
        quantize_checkpoint(tmp_path / "source", tmp_path / device, config, device=device)
    assert differing(tensors(tmp_path / "cpu"), tensors(tmp_path / "cuda")) == []


@pytest.mark.parametrize(("form", "scheme"), FORMATS)
def test_files_of_every_format_are_those_of_the_cpu(form: str, scheme: str, tmp_path: Path) -> None:
    """Every weight is read back and compared while it is written; the model is on the device."""
    config = LLMTemplate.get("llama").get_config(scheme)
    program = "vllm" if form == "compressed-tensors" else None
    dtype = torch.float32 if form == "onnx" else torch.bfloat16
    config = config_for(config, form, program, dtype)
    found = []
    for device in ("cpu", "cuda"):
        model = ModelQuantizer(config).quantize_model(llama(dtype).to(device), samples(device)).eval()
        export_as(model, tmp_path / device, form, tmp_path, program=program)
        found.append({k: v for k, v in tensors(tmp_path / device).items() if "input" not in k})
    assert not differing(*found)
    assert {path.name for path in (tmp_path / "cpu").iterdir()} == {path.name for path in (tmp_path / "cuda").iterdir()}


def blockwise() -> dict[str, QConfig]:
    """What runs blocks on samples: the algorithms of files, and static scales of layers and caches."""
    template = LLMTemplate.get("llama")
    static = {f"{scheme}, {cache}": template.get_config(scheme, kv_cache_scheme=cache) for scheme, cache in CACHED}
    return static | {
        name: replace(template.get_config(scheme), algo_config=one if isinstance(one, list) else [one])
        for name, (one, scheme) in TUNED.items()
    }


CACHED = (("fp8", None), ("fp8", "fp8"), ("int8", "int8"))


@pytest.mark.parametrize("name", blockwise())
def test_blocks_of_files_have_the_bits_of_the_model_on_the_device(name: str, tmp_path: Path) -> None:
    config, source = blockwise()[name], tmp_path / "source"
    llama(torch.bfloat16).save_pretrained(source, max_shard_size="500KB")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval().to("cuda")
    export_safetensors(ModelQuantizer(config).quantize_model(model, samples("cuda")), tmp_path / "memory")
    quantize_checkpoint(source, tmp_path / "files", config, device="cuda", samples=samples("cpu"))
    assert not differing(tensors(tmp_path / "files"), tensors(tmp_path / "memory"))


def test_the_device_holds_one_block_at_a_time(tmp_path: Path) -> None:
    peaks = []
    for blocks in (4, 16):
        sizes = {**SIZES, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": blocks}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
        source = tmp_path / f"source{blocks}"
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        settings = LLMTemplate.get("llama").get_config("int4_wo_128", algorithm="gptq")
        quantize_checkpoint(source, tmp_path / str(blocks), settings, device="cuda", samples=samples("cpu"))
        peaks.append(torch.cuda.max_memory_allocated())
    print(f"peaks on the device: {peaks}")
    assert peaks[1] < peaks[0] * 1.05


@pytest.mark.parametrize("algorithm", ["gptq", "qronos", "awq", "autoround"])
def test_the_device_holds_one_sample_at_a_time(algorithm: str, tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    settings, peaks = LLMTemplate.get("llama").get_config("int4_wo_128", algorithm=algorithm), []
    for count in (8, 40):
        windows = list(torch.randint(5, 250, (count, 1, 2048), generator=torch.Generator().manual_seed(1)))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        quantize_checkpoint(tmp_path / "source", tmp_path / str(count), settings, device="cuda", samples=windows)
        peaks.append(torch.cuda.max_memory_allocated())
    print(f"peaks on the device with 8 and 40 windows: {peaks}")  # hidden states of 32 more take 134 MB
    assert peaks[1] < peaks[0] + (16 << 20)


def test_an_interrupted_job_goes_on_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    llama(torch.bfloat16).save_pretrained(source)
    config = LLMTemplate.get("llama").get_config("int4_wo_32", algorithm="gptq")
    whole, done = tune.tune_block, []

    def broken_off(*args: Any) -> bool:
        if done:
            raise KeyboardInterrupt
        done.append(whole(*args))
        return done[0]

    with monkeypatch.context() as some:
        some.setattr(tune, "tune_block", broken_off)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(source, tmp_path / "t", config, device="cuda", samples=samples("cpu"))
    quantize_checkpoint(source, tmp_path / "t", config, device="cuda", samples=samples("cpu"))
    quantize_checkpoint(source, tmp_path / "whole", config, device="cuda", samples=samples("cpu"))
    assert not differing(tensors(tmp_path / "t"), tensors(tmp_path / "whole"))


def test_graph_mode() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, 16, 16, generator=generator)

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3),
            nn.Flatten(),
            nn.Linear(784, 10),
        ).eval()

    spec = Int8PerTensorSpec(
        observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even", is_dynamic=False
    ).to_quantization_spec()
    from quark.torch.quantization.config.type import QuantizationMode

    config = QConfig(QLayerConfig(spec, spec, spec), quant_mode=QuantizationMode.fx_graph_mode)
    outputs = {}
    for device in ("cpu", "cuda"):
        model = torch.export.export(network().to(device), (x.to(device),), strict=False).module()
        found = ModelQuantizer(config).quantize_model(model, [x.to(device)])
        outputs[device] = found(x.to(device)).detach().cpu()
    assert error(outputs["cuda"], outputs["cpu"]) < 0.02
