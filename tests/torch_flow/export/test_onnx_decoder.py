"""Language models as ONNX files: with and without a cache, on ONNX Runtime, tokens and logits those of torch."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.consumers import tiny
from tests.torch_flow.export.networks import llama
from tests.torch_flow.export.programs import loaded_by
from tests.torch_flow.export.test_reload import layer
from tests.torch_flow.models import TwoLayers, data
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # benchmarks/ is not installed

from benchmarks.pinned import pinned

from quark.config.file_formats import works
from quark.errors import ConfigError, ModelError
from quark.torch import LLMTemplate, ModelQuantizer, export_onnx
from quark.torch.config.schemes import NAMES
from quark.torch.config.schemes import scheme as scheme_of
from quark.torch.export.genai import check_runs, write_config
from quark.torch.export.onnx_decoder import check_kinds, past_of
from quark.torch.export.write_as import config_for
from quark.torch.quantization.config.config import (
    FP8E4M3PerTensorSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerGroupSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    Uint4PerGroupSpec,
    Uint8PerTensorSpec,
)

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")  # torch's exporter needs it
transformers = pytest.importorskip("transformers")
CHANNEL = Int8PerChannelSpec(0, symmetric=True)
SCHEMES = {
    "int4 groups": layer(Int4PerGroupSpec(-1, 32)),
    "uint4 groups": layer(Uint4PerGroupSpec(-1, 32)),
    "int8 groups": layer(Int8PerGroupSpec(-1, 32)),
    "int8 channels": layer(CHANNEL),
    "a8w8": layer(CHANNEL, Int8PerTensorSpec()),
    "au8w8": layer(CHANNEL, Uint8PerTensorSpec()),
    "a8w8 tensors": layer(Int8PerTensorSpec(), Int8PerTensorSpec()),
    "fp8": layer(FP8E4M3PerTensorSpec(), FP8E4M3PerTensorSpec()),
    "mxfp4": layer(OCP_MXFP4Spec(-1)),
}
BITS4 = ("int4 groups", "uint4 groups")
NEVER = 255  # a token that ends texts, and that no test writes
SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 128}
GROUPED = {**WIDE, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "OPTForCausalLM": {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256},
    "GPTNeoXForCausalLM": WIDE,
    "PhiForCausalLM": WIDE,
    "FalconForCausalLM": SIZES,
    "Qwen3ForCausalLM": HEADS,
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma3ForCausalLM": {**HEADS, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}


def quantized(model: nn.Module, scheme: str) -> nn.Module:
    torch.manual_seed(1)
    samples = [{"input_ids": torch.randint(3, 256, (2, 16))} for _ in range(3)]
    return ModelQuantizer(QConfig(SCHEMES[scheme], exclude=["lm_head"])).quantize_model(model, samples)


def session(folder: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    return ort.InferenceSession(str(folder / "quark_model.onnx"), options)


class Decoder:
    """The file, one call after the other, with its cache."""

    def __init__(self, run: ort.InferenceSession, rows: int) -> None:
        self.run, self.names = run, [value.name for value in run.get_inputs()]
        self.past = [np.zeros((rows, value.shape[1], 0, value.shape[3]), np.float32) for value in run.get_inputs()[2:]]
        self.length = 0

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        self.length += ids.shape[1]
        mask = np.ones((len(ids), self.length), np.int64)
        logits, *self.past = self.run.run(None, dict(zip(self.names, (ids, mask, *self.past), strict=True)))
        return logits


def near(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


@torch.no_grad()
def check_cached(model: nn.Module, folder: Path) -> None:
    """Logits of a prompt, of a second part behind it, and the tokens of a greedy continuation."""
    export_onnx(model, folder, (torch.arange(3, 11)[None],), use_cache=True)
    run = session(folder)
    assert [value.name for value in run.get_inputs()[:3]] == ["input_ids", "attention_mask", "past_key_values.0.key"]
    assert [value.name for value in run.get_outputs()[:3]] == ["logits", "present.0.key", "present.0.value"]
    ids = torch.randint(3, 256, (3, 9), generator=torch.Generator().manual_seed(5))
    whole = model(input_ids=ids).logits.numpy()
    decoder = Decoder(run, 3)
    parts = [decoder(ids[:, :4].numpy()), decoder(ids[:, 4:5].numpy()), decoder(ids[:, 5:].numpy())]
    assert near(np.concatenate(parts, 1), whole)
    expected = model.generate(ids[:1], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 9:]
    decoder, row, found = Decoder(run, 1), ids[:1].numpy(), []
    for _ in range(6):
        row = decoder(row)[:, -1:].argmax(-1)
        found.append(int(row[0, 0]))
    assert found == expected.tolist()
    check_genai(model, folder, ids[:1], whole[:1, -1], expected.tolist())


def check_genai(model: nn.Module, folder: Path, ids: torch.Tensor, logits: np.ndarray, tokens: list[int]) -> None:
    """The same by onnxruntime-genai, which knows the graph by its configuration only."""
    genai = pytest.importorskip("onnxruntime_genai")
    model.config.eos_token_id = model.generation_config.eos_token_id = NEVER
    write_config(model, folder, folder / "quark_model.onnx")
    program = genai.Model(str(folder))
    settings = genai.GeneratorParams(program)
    settings.set_search_options(max_length=ids.shape[1] + len(tokens), do_sample=False, repetition_penalty=1.0)
    generator = genai.Generator(program, settings)
    generator.append_tokens(ids.numpy().astype(np.int32))
    assert near(generator.get_logits()[0], logits)
    while not generator.is_done():
        generator.generate_next_token()
    assert list(generator.get_sequence(0))[ids.shape[1] :] == tokens


def test_a_model_with_its_cache(tmp_path: Path) -> None:
    model = quantized(llama(num_hidden_layers=1), "int4 groups")
    check_cached(model, tmp_path)
    assert model.config.use_cache is True
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert kinds["MatMulNBits"] == 7  # the layers, in the runtime's kernel for 4 bits
    assert kinds["DequantizeLinear"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(scheme: str, tmp_path: Path) -> None:
    check_cached(quantized(llama(), scheme), tmp_path)
    loaded_by("ONNX", f"{scheme}, a Llama model with its cache", "onnxruntime")
    loaded_by("ONNX", f"{scheme}, a Llama model with its cache", "onnxruntime-genai")


ROUNDING = [name for name in NAMES if scheme_of(name).input_tensors is not None and works(name, "onnx", None)]


@pytest.mark.parametrize(
    "scheme", [pytest.param(name, marks=() if name == "int4_wa_64" else pytest.mark.slow) for name in ROUNDING]
)
def test_every_quantizer_of_inputs_makes_what_torch_makes_of_the_same_numbers(scheme: str, tmp_path: Path) -> None:
    """Values half-way between codes fall by the last bit, and logits part by a third: not a fault, and no measure."""
    ids = torch.randint(3, 256, (2, 15), generator=torch.Generator().manual_seed(1))
    model = llama(num_hidden_layers=1, hidden_size=128, intermediate_size=256)
    config = config_for(LLMTemplate.for_model(model).get_config(scheme), "onnx", None, torch.float32)
    ModelQuantizer(config).quantize_model(model, [ids])
    export_onnx(model, tmp_path, (ids,), use_cache=True)
    _, worst, held = pinned(model, tmp_path / "quark_model.onnx", ids)
    assert worst == 0 and held < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4 groups", "a8w8"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name: str, scheme: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    check_cached(quantized(kind(kind.config_class(**ARCHITECTURES[name])).eval(), scheme), tmp_path)
    loaded_by("ONNX", f"{scheme}, {name} with its cache", "onnxruntime")


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("scheme", [*BITS4, "a8w8"])
def test_without_a_cache(scheme: str, tmp_path: Path) -> None:
    model = quantized(llama(), scheme)
    ids = torch.randint(3, 256, (2, 7))
    varies = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    export_onnx(model, tmp_path, (ids,), input_names=["ids"], output_names=["logits"], dynamic_shapes=(varies,))
    run = session(tmp_path)
    assert [value.name for value in run.get_outputs()] == ["logits"]
    for shape in ((2, 7), (1, 1), (3, 12)):
        ids = torch.randint(3, 256, shape)
        assert near(run.run(None, {"ids": ids.numpy()})[0], model(ids).logits.numpy())


@pytest.mark.slow
def test_a_quantized_cache(tmp_path: Path) -> None:
    spec = QLayerConfig(output_tensors=FP8E4M3PerTensorSpec().to_quantization_spec())
    config = QConfig(
        SCHEMES["int8 channels"],
        exclude=["lm_head"],
        kv_cache_quant_config={"*k_proj": spec, "*v_proj": spec},
        kv_cache_post_rope=True,
    )
    torch.manual_seed(1)
    samples = [{"input_ids": torch.randint(3, 256, (2, 16))} for _ in range(3)]
    check_cached(ModelQuantizer(config).quantize_model(llama(), samples), tmp_path)


def test_what_has_no_cache_is_refused(tmp_path: Path) -> None:
    network = ModelQuantizer(QConfig(SCHEMES["int8 channels"])).quantize_model(TwoLayers().eval(), data())
    ids = torch.arange(3, 11)[None]
    with pytest.raises(ModelError, match="TwoLayers is not a decoder of transformers"):
        export_onnx(network, tmp_path / "m", (ids,), use_cache=True)
    model = quantized(llama(), "int8 channels")
    with pytest.raises(ConfigError, match="input_args must be token ids"):
        export_onnx(model, tmp_path / "m", (torch.rand(1, 4),), use_cache=True)
    with pytest.raises(ConfigError, match="leave input_names, output_names and dynamic_shapes out"):
        export_onnx(model, tmp_path / "m", (ids,), use_cache=True, input_names=["ids"])
    with pytest.raises(ConfigError, match="axis 0 of argument 0 varies, and input_args has the size 1"):
        export_onnx(model, tmp_path / "m", (ids,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert not (tmp_path / "m").exists()
    assert model.config.use_cache is True


def test_recurrent_states_are_no_cache_of_keys_and_values() -> None:
    kind = transformers.MambaForCausalLM
    config = kind.config_class(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    with pytest.raises(ModelError, match=r"use_cache: .*export it without use_cache"):
        past_of(kind(config).eval(), torch.arange(5)[None])


class Asks(nn.Module):
    """What it computes depends on a value, which a graph cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum().item() > 0 else x


@pytest.mark.parametrize(
    "error", [TypeError("a"), ValueError("a"), AttributeError("a"), IndexError("a"), RuntimeError("a")]
)
def test_what_a_model_says_of_tokens_alone_is_one_sentence(error: Exception) -> None:
    """Pictures and sound that are missing, a cache of another kind: whatever the model itself raises."""

    class Needs(nn.Module):
        config = transformers.LlamaConfig()

        def forward(self, **_: Any) -> None:
            raise error

    with pytest.raises(ModelError, match=r"Needs does not run on token ids with a cache .*\(a\); export it without"):
        past_of(Needs(), torch.arange(3)[None])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), list(tiny.model_types()), ids=lambda text: text)
def test_every_model_type_runs_or_is_refused_for_genai(name: str, kind: str) -> None:
    try:
        model = tiny.made(name, kind, {})
    except Exception as error:
        pytest.skip(f"no small model of this type can be made: {type(error).__name__}")
    with suppress(ModelError):
        check_runs(model)


def test_layers_that_keep_more_than_keys_and_values_are_refused() -> None:
    """Every kind of layer of transformers' caches: those of DeepSeek V4 keep states of compressors, others indices."""
    import transformers.models.deepseek_v4.modeling_deepseek_v4  # noqa: F401 - it has kinds of its own
    from transformers import cache_utils

    def kinds(kind: type) -> set[type]:
        return {kind}.union(*(kinds(one) for one in kind.__subclasses__()))

    plain = {cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer}
    found = {kind for kind in kinds(cache_utils.CacheLayerMixin) if not inspect.isabstract(kind)}
    assert found > plain and len(found) > 8
    for kind in found:
        if kind in plain:
            check_kinds(nn.Linear(1, 1), [object.__new__(kind)])
            continue
        with pytest.raises(ModelError, match=f"layer 0 of Linear keeps a {kind.__name__}, which is not keys"):
            check_kinds(nn.Linear(1, 1), [object.__new__(kind)])


def test_what_the_exporter_cannot_trace_is_one_sentence(tmp_path: Path) -> None:
    model = ModelQuantizer(QConfig(layer(CHANNEL))).quantize_model(Asks().eval())
    with pytest.raises(ModelError, match="Asks: torch's exporter cannot write it: ") as caught:
        export_onnx(model, tmp_path, torch.ones(2, 32))
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())
