"""What an export refuses is refused before any work: by the model without values and the configuration alone."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.consumers import tiny
from tests.torch_flow.test_foreign import MIXES
from torch import nn

from quark.config.file_formats import FORMATS, check_caches, check_formats
from quark.config.file_formats import PROGRAMS as READERS
from quark.errors import QuarkError
from quark.torch import LLMTemplate, ModelQuantizer, export_onnx
from quark.torch.export.before_work import check_before_work
from quark.torch.export.compressed_tensors import check_before, export_compressed_tensors
from quark.torch.export.write_as import config_for, export_as
from quark.torch.files.foreign import convert
from quark.torch.quantization import Int4PerGroupSpec, QConfig, QLayerConfig

KINDS = ("mixtral", "gptj")
MORE = ("llama", "qwen3_moe", "granitemoe", "gpt_neox", "t5", "jamba", "gpt2", "glm4_moe")
FORMAT, PROGRAMS = "compressed-tensors", (None, "vllm")
SCHEMES = ("int4_wo_32", "uint4_wo_32", "fp8", "fp8_block", "int8", "nvfp4", "mxfp8", "mxfp4", "mx6", "int4_fp8")


def outcome(act: Any) -> str:
    """The sentence of a refusal; nothing: none."""
    try:
        act()
    except QuarkError as error:
        return str(error)
    return ""


def before_and_after(model: Any, config: QConfig, program: str | None, folder: Path) -> tuple[str, str]:
    """What is said before quantizing, and by the export."""
    values = {name: value.clone() for name, value in model.state_dict().items()}
    first = outcome(lambda: check_before(model, config, program))
    now = model.state_dict()
    assert now.keys() == values.keys() and all(torch.equal(now[name], value) for name, value in values.items())
    ours = ModelQuantizer(config).quantize_model(copy.deepcopy(model), [tiny.inputs_of(model)])
    return first, outcome(lambda: export_compressed_tensors(ours, folder, program=program, verify=False))


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
def test_the_same_is_said_before_and_after(kind: str, tmp_path: Path) -> None:
    """Every scheme and a cache, for transformers and for vLLM."""
    model, refused = tiny.made(kind, dict(tiny.model_types())[kind], {}), 0
    for scheme in SCHEMES:
        for program in PROGRAMS:
            template = LLMTemplate.for_model(model)
            cache = {"kv_cache_scheme": "fp8"} if scheme == "int8" and template.kv_layers_name else {}
            config = config_for(template.get_config(scheme, **cache), FORMAT, program, model.dtype)
            if outcome(lambda config=config: ModelQuantizer(config).check(model)):
                continue  # refused by the flow itself
            first, last = before_and_after(model, config, program, tmp_path / f"{scheme} {program}")
            assert first == last, (scheme, program)
            refused += bool(last)
    assert refused


class Adapter(nn.Module):
    """As peft wraps a layer: the layer inside, and a product of two narrow ones beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A, self.lora_B = nn.Linear(layer.in_features, 4), nn.Linear(4, layer.out_features)

    def merge(self) -> None:
        """Put the product into the layer."""
        with torch.no_grad():
            self.base_layer.weight += self.lora_B.weight @ self.lora_A.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both."""
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("format", ["quark", "compressed-tensors", "fp8", "awq", "gptq", "modelopt", "gguf"])
def test_adapters_that_are_not_merged_are_refused(format: str, tmp_path: Path) -> None:
    """Files had layers that nobody has a place for; in memory such a model is quantized with its adapters."""
    model = tiny.made("llama", dict(tiny.model_types())["llama"], {})
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapter(attention.q_proj)
    scheme = "fp8" if format in ("fp8", "modelopt") else "int4_wo_32"
    config = LLMTemplate.for_model(model).get_config(scheme, exclude_layers=["lm_head", "*lora*"])
    ours = ModelQuantizer(config).quantize_model(model, [tiny.inputs_of(model)])
    said = outcome(lambda: export_as(ours, tmp_path / "m", format, tmp_path))
    assert said.startswith("'model.layers.1.self_attn.q_proj' (Adapter) is an adapter around a layer"), said
    assert not (tmp_path / "m").exists()


def test_an_onnx_file_holds_adapters_that_are_not_merged(tmp_path: Path) -> None:
    """A graph has a place for layers around others."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model = nn.Sequential(Adapter(nn.Linear(64, 32)), nn.ReLU(), nn.Linear(32, 8)).eval()
    config = QConfig(QLayerConfig(weight=Int4PerGroupSpec(-1, 32).to_quantization_spec()), exclude=["*lora*"])
    ours, x = ModelQuantizer(config).quantize_model(model), torch.randn(3, 64)
    export_onnx(ours, tmp_path, x, input_names=["x"])
    (found,) = onnxruntime.InferenceSession(tmp_path / "quark_model.onnx").run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), ours(x), rtol=0, atol=1e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adapter, "forward", lambda self, x: self.base_layer(x))
        assert (ours(x) - torch.from_numpy(found)).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_onnx_is_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """Refused before the graph is traced; an imported model says the type of its values."""
    config = QConfig(QLayerConfig(weight=Int4PerGroupSpec(-1, 32).to_quantization_spec()))
    ours = ModelQuantizer(config).quantize_model(nn.Sequential(nn.Linear(64, 32)).to(dtype))
    said = outcome(lambda: export_onnx(ours, tmp_path / "m", torch.randn(3, 64)))
    assert said == f"an ONNX file computes in float32, and '0.weight' is {dtype}: quantize model.float()"
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("mix", MIXES)
def test_experts_of_several_schemes_are_refused_before_work(mix: str, kind: str, tmp_path: Path) -> None:
    """As the command line asks, with the float model."""
    model, (floats, layers) = tiny.made(kind, dict(tiny.model_types())[kind], {}), MIXES[mix]
    config = LLMTemplate.for_model(model).get_config("int4_wo_32", layer_config=layers)
    config = replace(config, exclude=[*config.exclude, *floats])
    model.save_pretrained(tmp_path)
    asked = {
        program: outcome(partial(check_before_work, model, config, FORMAT, program, tmp_path)) for program in PROGRAMS
    }
    assert "it stacks experts by one scheme, and 'model.layers" in asked[None]
    within = mix in ("an expert", "a projection", "another projection")  # of one stack, which vLLM reads as one layer
    assert asked["vllm"].startswith("vLLM reads all experts of") is within, asked["vllm"]


@pytest.mark.parametrize(
    ("name", "cache"), [("int4_wo_32", None), ("int8", None), ("fp8", "fp8_per_head"), ("fp8", "int8_per_token")]
)
def test_convert_refuses_for_a_program_what_quantize_refuses(name: str, cache: str | None, tmp_path: Path) -> None:
    """Of experts, of caches, of every format: in the same words; and what quantize writes of weights, it writes."""
    model, refused = tiny.made("mixtral", "MixtralForCausalLM", {}), 0
    model.save_pretrained(tmp_path / "source")
    config = LLMTemplate.for_model(model).get_config(name, kv_cache_scheme=cache)
    ours = ModelQuantizer(config).quantize_model(copy.deepcopy(model), [tiny.inputs_of(model)])
    export_as(ours, tmp_path / "q", "quark", tmp_path)
    for format, program in itertools.product([one for one in FORMATS if one not in ("gguf", "onnx")], READERS):
        asked = config_for(config, format, program, model.dtype)

        def ask(asked: Any = asked, format: str = format, program: str = program) -> None:
            check_formats([name], format, program)
            check_caches(cache, format, program)
            check_before_work(model, asked, format, program, tmp_path / "source")

        said = outcome(ask)
        told = outcome(partial(convert, tmp_path / "q", tmp_path / f"{format} {program}", format, program))
        assert told == said or (cache and not said), (format, program)
        refused += bool(said)
    assert refused > len(FORMATS)


@pytest.mark.parametrize(("kind", "fused"), [("llama", False), ("phi3", True), ("gpt_neox", True)])
def test_caches_that_transformers_does_not_load_in_the_quark_format(kind: str, fused: bool, tmp_path: Path) -> None:
    """Written until now, and refused by transformers when it loads them."""
    model = tiny.made(kind, dict(tiny.model_types())[kind], {})
    config = LLMTemplate.for_model(model).get_config("int8_wo_per_channel", kv_cache_scheme="fp8")
    config = config_for(config, "quark", "transformers", model.dtype)
    said = outcome(lambda: check_before_work(model, config, "quark", "transformers", tmp_path))
    assert said.startswith("transformers does not load caches") is fused
    ours = ModelQuantizer(config).quantize_model(model, [tiny.inputs_of(model)])
    export_as(ours, tmp_path / "m", "quark", tmp_path, program="transformers")
    assert bool(outcome(lambda: type(model).from_pretrained(tmp_path / "m"))) is fused
