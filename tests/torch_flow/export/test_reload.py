"""What is evaluated is what is written and read: identical logits for every scheme, by our reader and transformers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from tests.torch_flow.export.networks import IDS, Mixed, llama, logits
from tests.torch_flow.export.programs import loaded_by
from tests.torch_flow.export.schemes import every, scaled
from torch import nn

from quark.errors import ConfigError, ModelError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.export.api import export_safetensors, import_model_from_safetensors, unpack
from quark.torch.export.before_work import check_before_work
from quark.torch.fake_quantize import parts
from quark.torch.quantization.config.config import (
    DataTypeSpec,
    FP4PerGroupSpec,
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    MX6Spec,
    OCP_MXFP4Spec,
    ProgressiveSpec,
    QConfig,
    QLayerConfig,
    ScaleQuantSpec,
    Uint4PerGroupSpec,
    Uint8PerTensorSpec,
)

transformers = pytest.importorskip("transformers")
SCHEMES, SCALED = every(), scaled()
#: Of what differs in type, granularity, symmetry and time alone: every third here, the rest with the slow tests.
QUICK = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SCALED and place % 3 > 0))
    for place, name in enumerate(SCHEMES)
]


def layer(weight: DataTypeSpec, inputs: DataTypeSpec | None = None) -> QLayerConfig:
    activation = None if inputs is None else inputs.to_quantization_spec()
    return QLayerConfig(weight=weight.to_quantization_spec(), input_tensors=activation)


def nvfp4(dynamic: bool) -> ScaleQuantSpec:
    return ScaleQuantSpec(FP4PerGroupSpec(-1, 16, is_dynamic=dynamic), FP8E4M3PerTensorSpec())


LLM = {
    "int4": layer(Int4PerGroupSpec(-1, 32)),
    "uint4": layer(Uint4PerGroupSpec(-1, 32)),
    "int8": layer(Int8PerTensorSpec(), Int8PerTensorSpec()),
    "uint8 activations": layer(Int8PerChannelSpec(0, symmetric=True), Uint8PerTensorSpec()),
    "int8 channels": layer(Int8PerChannelSpec(0), Int8PerChannelSpec(-1)),
    "fp8": layer(FP8E4M3PerTensorSpec(), FP8E4M3PerTensorSpec()),
    "ptpc_fp8": layer(FP8E4M3PerChannelSpec(0), FP8E4M3PerChannelSpec(1, is_dynamic=True)),
    "mxfp4": layer(OCP_MXFP4Spec(-1, False), OCP_MXFP4Spec(-1, True)),
    "nvfp4": layer(nvfp4(False), nvfp4(True)),
    "int4_fp8": layer(
        ProgressiveSpec(FP8E4M3PerTensorSpec(), Int4PerChannelSpec(0)), FP8E4M3PerTensorSpec(is_dynamic=True)
    ),
    "mx6": layer(MX6Spec(-1), MX6Spec(-1)),
}
CACHE = {
    name: QLayerConfig(output_tensors=FP8E4M3PerTensorSpec().to_quantization_spec()) for name in ("*k_proj", "*v_proj")
}


@pytest.fixture(autouse=True)
def quiet_transformers() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)


def quantized(model: nn.Module, config: QConfig) -> nn.Module:
    return ModelQuantizer(config).quantize_model(model, [IDS])


@pytest.mark.parametrize("name", QUICK)
@torch.no_grad()
def test_every_scheme_of_every_layer_comes_back(name: str, tmp_path: Path) -> None:
    config = QLayerConfig(weight=SCHEMES[name])
    model = quantized(Mixed(), QConfig(config, layer_type_quant_config={nn.Embedding: config}))
    expected = model(IDS)
    for weight_format in ("real_quantized", "fake_quantized")[: 1 if "dynamic" in name else 2]:
        export_safetensors(model, tmp_path / weight_format, weight_format=weight_format)
        again = import_model_from_safetensors(Mixed(), tmp_path / weight_format)
        assert torch.equal(again(IDS), expected)
        assert type(again.conv).__name__ == "QuantConv2d"
    export_safetensors(ModelQuantizer.freeze(model), tmp_path / "frozen")
    assert torch.equal(import_model_from_safetensors(Mixed(), tmp_path / "frozen")(IDS), expected)


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {  # network, shape of its input, channels at
    "linear": (lambda: nn.Linear(10, 6), (2, 4, 10), -1),
    "gpt2": (lambda: transformers.pytorch_utils.Conv1D(6, 10), (2, 4, 10), -1),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 9), 1),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 8, 9), 1),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3), (2, 4, 5, 8, 9), 1),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3), (2, 4, 8, 9), 1),
}


@pytest.mark.parametrize("slot", ["input_tensors", "output_tensors"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [-1, 0, 1, 2])
@torch.no_grad()
def test_static_scales_of_activations_come_back_or_are_refused(axis: int, kind: str, slot: str, tmp_path: Path) -> None:
    """A layer knows its channels; how long the other axes are is chosen by inputs, and no file can tell it."""
    make, shape, channels = KINDS[kind]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    spec = Int8PerChannelSpec(axis).to_quantization_spec()
    config = QConfig(replace(layer(Int8PerTensorSpec()), **{slot: spec}))
    network = nn.Sequential(make()).eval()
    refused = pytest.raises(ConfigError, match=rf"{slot} of '0': no file holds .* per channel \(axis {channels}\)")
    with nullcontext() if axis == channels else refused:
        check_before_work(network, config, "quark", None, tmp_path)
    model = ModelQuantizer(config).quantize_model(network, [x])
    with nullcontext() if axis == channels else refused:
        export_safetensors(model, tmp_path / "m")
        assert torch.equal(import_model_from_safetensors(nn.Sequential(make()), tmp_path / "m")(x), model(x))
    assert axis == channels or not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", LLM)
def test_transformers_and_our_reader_give_the_logits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = quantized(llama(dtype), QConfig(LLM[name], exclude=["lm_head"], kv_cache_quant_config=CACHE))
    expected = logits(model)
    export_safetensors(model, tmp_path / "m", max_shard_size=30_000)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    theirs, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype="auto", output_loading_info=True
    )
    assert not any(found.values())
    assert torch.equal(logits(theirs), expected)
    loaded_by("quark", name, "transformers")
    ours = import_model_from_safetensors(llama(dtype), tmp_path / "m")
    assert torch.equal(logits(ours), expected)
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "m")), expected)
    export_safetensors(ours, tmp_path / "again", max_shard_size=30_000)
    for path in (tmp_path / "m").glob("*.safetensors"):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    assert torch.equal(logits(unpack(ours)), expected)
    export_safetensors(ours, tmp_path / "unpacked")
    assert torch.equal(logits(import_model_from_safetensors(llama(dtype), tmp_path / "unpacked")), expected)


GGML = [name for name in LLMTemplate.get_supported_schemes() if name in GGMLQuantizationType.__members__]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*LLMTemplate.get_supported_schemes()} - {*GGML}))
def test_every_named_scheme_is_loaded_by_transformers(name: str, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(name)
    model = quantized(llama(hidden_size=128), config)
    export_safetensors(model, tmp_path / "m")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert torch.equal(logits(theirs), logits(model))
    loaded_by("quark", f"scheme {name}", "transformers")
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "m")), logits(model))


@pytest.mark.slow
@pytest.mark.parametrize("name", GGML)
def test_types_of_gguf_are_not_written_in_another_format(name: str, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(name)
    model = quantized(llama(hidden_size=256, intermediate_size=256), config)
    with pytest.raises(ConfigError, match=f"{name} is a type of GGUF.*--format gguf"):
        export_safetensors(model, tmp_path / "m")
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("name", ["int4", "fp8"])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_model_stays_as_it_is(name: str, frozen: bool, tmp_path: Path) -> None:
    model = quantized(llama(), QConfig(LLM[name], exclude=["lm_head"]))
    if frozen:
        model = ModelQuantizer.freeze(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected, config = logits(model), model.config.to_dict()
    export_safetensors(model, tmp_path / "m")
    assert model.config.to_dict() == config
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits(import_model_from_safetensors(llama(), tmp_path / "m")), expected)


def test_weights_of_quantized_embeddings_are_no_longer_tied(tmp_path: Path) -> None:
    model = quantized(llama(tie=True), QConfig(LLM["int4"]))
    export_safetensors(model, tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["tie_word_embeddings"] is False
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(logits(import_model_from_safetensors(llama(tie=True), tmp_path / "m")), logits(model))


def test_tied_float_weights_are_stored_once(tmp_path: Path) -> None:
    model = quantized(llama(tie=True), QConfig(LLM["int4"], exclude=["lm_head"]))
    export_safetensors(model, tmp_path / "m")
    file = (tmp_path / "m" / "model.safetensors").read_bytes()
    assert b"model.embed_tokens.weight" in file
    assert b"lm_head.weight" not in file
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(logits(import_model_from_safetensors(llama(tie=True), tmp_path / "m")), logits(model))


@pytest.mark.parametrize("after_rope", [False, True])
def test_caches_come_back(after_rope: bool, tmp_path: Path) -> None:
    config = QConfig(
        LLM["int4"], kv_cache_quant_config=CACHE, kv_cache_group=["*k_proj", "*v_proj"], kv_cache_post_rope=after_rope
    )
    model = quantized(llama(), config)
    export_safetensors(model, tmp_path / "m")
    again = import_model_from_safetensors(llama(), tmp_path / "m")
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(again.generate(IDS, max_new_tokens=5), model.generate(IDS, max_new_tokens=5))


def test_attention_probabilities_come_back(tmp_path: Path) -> None:
    config = QConfig(LLM["int4"], softmax_quant_spec=FP8E4M3PerTensorSpec().to_quantization_spec())
    model = llama()
    model.set_attn_implementation("eager")
    model = quantized(model, config)
    export_safetensors(model, tmp_path / "m")
    assert b"self_attn.prob_output_scale" in (tmp_path / "m" / "model.safetensors").read_bytes()[:20000]
    again = import_model_from_safetensors(None, tmp_path / "m")
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(ConfigError, match="transformers cannot load"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")


def test_a_network_with_another_head_comes_back_as_itself(tmp_path: Path) -> None:
    """With parts inside attention, which transformers cannot load: the class is what ``architectures`` names."""
    shape = llama().config.to_dict() | {"pad_token_id": 0, "num_labels": 3, "attn_implementation": "eager"}
    made = transformers.LlamaForSequenceClassification._from_config(transformers.LlamaConfig(**shape)).eval()
    config = QConfig(LLM["int4"], softmax_quant_spec=FP8E4M3PerTensorSpec().to_quantization_spec())
    model = quantized(made, config)
    export_safetensors(model, tmp_path / "m")
    again = import_model_from_safetensors(None, tmp_path / "m")
    assert logits(again).shape == (2, 3) and torch.equal(logits(again), logits(model))


def test_bias_and_output_come_back(tmp_path: Path) -> None:
    int8 = Int8PerTensorSpec().to_quantization_spec()
    model = quantized(Mixed(), QConfig(QLayerConfig(weight=int8, bias=int8, output_tensors=int8, input_tensors=int8)))
    export_safetensors(model, tmp_path / "m")
    again = import_model_from_safetensors(Mixed(), tmp_path / "m")
    assert again.fc.bias.dtype == torch.int8
    assert torch.equal(again(IDS), model(IDS))


def test_what_no_sample_reached_stays_float(tmp_path: Path) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, both: bool = False) -> torch.Tensor:
            return self.b(self.a(x)) if both else self.a(x)

    model = Branch().eval()
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    quantizer = ModelQuantizer(QConfig(LLM["int8"]))
    model = quantizer.quantize_model(model, [x])
    assert quantizer.unreached
    export_safetensors(model, tmp_path / "m")
    again = import_model_from_safetensors(Branch(), tmp_path / "m")
    assert torch.equal(again(x, both=True), model(x, both=True))


@pytest.mark.parametrize("mode", ["fp8", "awq"])
def test_custom_modes_come_back(mode: str, tmp_path: Path) -> None:
    cache = CACHE if mode == "fp8" else {}
    name = "fp8" if mode == "fp8" else "int4"
    config = QConfig(LLM[name], exclude=["lm_head"], kv_cache_quant_config=cache, kv_cache_post_rope=bool(cache))
    model = quantized(llama(), config)  # caches where the readers of this format quantize
    export_safetensors(model, tmp_path / "m", custom_mode=mode)
    described = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == mode
    names = (tmp_path / "m" / "model.safetensors").read_bytes()[:20000]
    expected = [b"self_attn.k_scale", b"self_attn.v_scale"] if mode == "fp8" else [b".qweight", b".qzeros", b".scales"]
    assert all(part in names for part in expected)
    assert torch.equal(logits(import_model_from_safetensors(llama(), tmp_path / "m")), logits(model))
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "m")), logits(model))


def test_modes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = quantized(llama(), QConfig(LLM["int8"]))
    for mode in ("fp8", "awq"):
        with pytest.raises(ConfigError, match=f"custom_mode '{mode}' does not fit"):
            export_safetensors(model, tmp_path / mode, custom_mode=mode)
        assert not (tmp_path / mode).exists()
    with pytest.raises(ConfigError, match="Did you mean 'quark'"):
        export_safetensors(model, tmp_path / "x", custom_mode="quak")


def test_a_compact_model_keeps_its_codes_when_it_is_cast(tmp_path: Path) -> None:
    model = quantized(llama(), QConfig(LLM["int4_fp8"], exclude=["lm_head"]))
    export_safetensors(model, tmp_path / "m")
    again = import_model_from_safetensors(llama(), tmp_path / "m")
    codes = again.model.layers[0].mlp.up_proj._parameters["weight"].clone()
    scale = again.model.layers[0].mlp.up_proj.weight_scale_2.clone()
    half = logits(again.bfloat16())
    up = again.model.layers[0].mlp.up_proj
    assert torch.equal(up._parameters["weight"], codes)
    assert torch.equal(up.weight_scale_2, scale)
    assert half.dtype == torch.bfloat16
    assert torch.cosine_similarity(half.float().flatten(), logits(model).flatten(), dim=0) > 0.99


def test_files_beside_the_source_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    llama().save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("hello")
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    model = quantized(model, QConfig(LLM["int4"]))
    export_safetensors(model, tmp_path / "m")
    assert (tmp_path / "m" / "chat_template.jinja").read_text() == "hello"
    there = {path.name for path in (tmp_path / "m").iterdir()}
    assert there == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"
    }  # fmt: skip


def test_files_of_a_model_of_the_hub_are_copied_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "hub" / "models--someone--tiny"
    source = hub / "snapshots" / "abc123"
    llama().save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = quantized(llama(), QConfig(LLM["int4"]))
    for name, there in (("someone/tiny", True), ("someone/other", False), ("/gone/away/for/good", False)):
        model.config._name_or_path = name
        export_safetensors(model, tmp_path / name.replace("/", "-"))
        assert (tmp_path / name.replace("/", "-") / "tokenizer.json").exists() == there


def test_heads_that_transformers_leaves_in_the_file_are_carried_over(tmp_path: Path) -> None:
    class Predicting(transformers.LlamaForCausalLM):
        _keys_to_ignore_on_load_unexpected = (r"^mtp.*",)

    source = tmp_path / "source"
    llama().save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    head = {"mtp.layers.0.weight": torch.randn(4, 3, dtype=torch.bfloat16), "mtp.norm.weight": torch.ones(3)}
    save_file({**tensors, **head, "other.weight": torch.ones(2)}, source / "model.safetensors", {"format": "pt"})
    model = quantized(Predicting.from_pretrained(source), QConfig(LLM["int4"]))
    export_safetensors(model, tmp_path / "m")
    written = load_file(tmp_path / "m" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in head.items())
    assert "other.weight" not in written
    again = import_model_from_safetensors(Predicting(model.config), tmp_path / "m")
    assert torch.equal(logits(again), logits(model))


def test_a_float_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not quantized"):
        export_safetensors(llama(), tmp_path / "m")
    with pytest.raises(ModelError, match="is quantized already"):
        model = quantized(llama(), QConfig(LLM["int4"]))
        export_safetensors(model, tmp_path / "m")
        import_model_from_safetensors(model, tmp_path / "m")


@pytest.mark.parametrize("name", ["fp8", "int4_fp8"])
def test_the_quantizer_of_a_stored_weight_has_the_scales_of_the_original(name: str, tmp_path: Path) -> None:
    """Of two stages the file has the quotient of both scales."""
    model = quantized(Mixed(), QConfig(LLM[name]))
    export_safetensors(model, tmp_path / "m")
    again = import_model_from_safetensors(Mixed(), tmp_path / "m")
    made = again.fc.weight_quantizer.quantizer(again.fc.weight)
    for own, one in zip(parts(model.fc.weight_quantizer), parts(made), strict=True):
        torch.testing.assert_close(one.scale.squeeze(), own.scale.squeeze(), rtol=1e-6, atol=0)


class Decoder(nn.Module):
    """A decoder layer of torch, which reads its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.layer(x, x))


@pytest.mark.parametrize(
    ("made", "shape"),
    [
        (lambda: nn.Linear(8, 4), (2, 8)),
        (lambda: nn.Conv2d(2, 4, 3), (1, 2, 6, 6)),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), (2, 3, 8)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True, activation="gelu"), (2, 3, 8)),
        (Decoder, (2, 3, 8)),
    ],
    ids=["one layer", "one convolution", "encoder", "encoder layer", "decoder layer"],
)
def test_a_layer_alone_and_fused_layers_of_torch_come_back(
    made: Callable[[], nn.Module], shape: tuple[int, ...], tmp_path: Path
) -> None:
    """A model that is one layer has no name; the fused kernel of an encoder would read past its quantized layers."""
    torch.manual_seed(0)
    model, again, x = made().eval(), made().eval(), torch.randn(shape)
    spec = Int8PerTensorSpec().to_quantization_spec()
    config = QConfig(global_quant_config=QLayerConfig(input_tensors=spec, weight=spec))
    ModelQuantizer(config).quantize_model(model, [x])
    export_safetensors(model, tmp_path)
    assert not [name for name in load_file(tmp_path / "model.safetensors") if name.startswith(".")]
    import_model_from_safetensors(again, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(x), model(x), rtol=1e-5, atol=1e-6)
