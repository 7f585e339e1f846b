"""Conditions of the exports with each of their parts true and false, and formulas against what they are defined as."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.onnx_flow import models
from tests.torch_flow.export.networks import llama
from tests.torch_flow.export.test_layout import quantizer_for
from torch import nn

from quark.config import file_formats as formats
from quark.errors import ConfigError, ModelError
from quark.numerics.ggml import GGML
from quark.numerics.granularity import Block2D, Channel, Group
from quark.torch import ModelQuantizer
from quark.torch.experts import UnfusedExperts
from quark.torch.export import (
    card,
    compressed_caches,
    compressed_tensors,
    custom_modes,
    decoded,
    described,
    gguf_tensors,
    gguf_wordpiece,
    gptq,
    huggingface,
    layout,
    loader,
    model_files,
    onnx_verify,
    original,
    places,
    skeleton,
    stacked_blocks,
    state,
    stored,
    transformers_reads,
    verify,
    write_as,
)
from quark.torch.export.config.config import JsonExporterConfig
from quark.torch.quantization.config.config import (
    FP4PerGroupSpec,
    FP8E4M3PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    ScaleQuantSpec,
)
from quark.torch.quantization.config.config import QTensorConfig as Spec
from quark.torch.quantization.config.type import Dtype, QSchemeType, ScaleType
from quark.torch.quantized_layer import quantized_layers

GROUPS = {"qscheme": QSchemeType.per_group, "ch_axis": -1, "group_size": 32}
BOTH = (True, False)
NVFP4 = ScaleQuantSpec(FP4PerGroupSpec(-1, 16), FP8E4M3PerTensorSpec())


def drawn(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).standard_normal(shape).astype(np.float32))


# ---- what is told, and what is left out ------------------------------------------------------------------------------


def test_a_card_names_who_reads_and_who_was_tried_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not who reads no such file at all, and not who was never tried."""
    reads, fails, never, untried = list(formats.PROGRAMS)[:4]
    rows = {
        reads: formats.Row("int4", "awq", reads, True, "a run"),
        fails: formats.Row("int4", "awq", fails, False, "its loader"),
        never: formats.Row(formats.ANY, "awq", never, False, "its documents"),
    }
    monkeypatch.setattr(card, "row_of", lambda scheme, format, program: rows.get(program))
    made = SimpleNamespace(scheme="int4", format="awq", not_for={}, readers=())
    told = card.uses(made, tmp_path)  # type: ignore[arg-type]
    made.not_for = {reads: "this model"}
    other = card.uses(made, tmp_path)  # type: ignore[arg-type]
    titles = {name: formats.PROGRAMS[name].title for name in formats.PROGRAMS}
    assert f"Not for {titles[reads]}: this model." in other and f"{titles[reads]} (a run):" not in other
    assert f"{titles[reads]} (a run):" in told and f"Not for {titles[fails]}: its loader." in told
    made.readers = (untried,)
    assert f"{titles[untried]}:\n" in card.uses(made, tmp_path)  # type: ignore[arg-type]
    assert "its documents" not in told and f"Not for {titles[untried]}" not in told


@pytest.mark.parametrize(("output", "config", "named", "behind"), list(itertools.product(BOTH, BOTH, BOTH, BOTH)))
def test_outputs_that_go_to_a_cache_before_rope(
    output: bool, config: bool, named: bool, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer = quantizer_for(FP8E4M3PerTensorSpec(is_dynamic=False).to_quantization_spec(), drawn(4, 8))
    layer = SimpleNamespace(output_quantizer=quantizer if output else None)
    monkeypatch.setattr(compressed_caches, "quantized_layers", lambda model: [("a.k_proj", layer)])
    monkeypatch.setattr(compressed_caches, "cache_quantizers", lambda model: [])
    monkeypatch.setattr(compressed_caches, "is_cached", lambda name, config: named)
    given: Any = SimpleNamespace(
        kv_cache_quant_config={"*k_proj": 1} if config else {}, kv_cache_per_head=False, kv_cache_post_rope=behind
    )
    found = compressed_caches.caches_of(nn.Module(), given)
    assert list(found) == (["a.k_scale"] if output and config and named and not behind else [])


@pytest.mark.parametrize("reached", list(itertools.product(BOTH, BOTH)))
@pytest.mark.parametrize("calibrated", list(itertools.product(BOTH, BOTH)))
def test_an_input_without_a_scale_that_it_needs_stays_float(
    reached: tuple[bool, bool], calibrated: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [
        SimpleNamespace(stage=SimpleNamespace(calibrated=static), scale=torch.ones(()) if seen else None)
        for seen, static in zip(reached, calibrated, strict=True)
    ]
    monkeypatch.setattr(huggingface, "parts", lambda quantizer: quantizer)
    monkeypatch.setattr(huggingface, "candidate", lambda name, layer: name)
    spec = FP8E4M3PerTensorSpec(is_dynamic=False).to_quantization_spec()
    monkeypatch.setattr(huggingface, "choose", lambda name, config: (config.global_quant_config, ""))
    layer: Any = SimpleNamespace(quantizers=lambda: [("input_tensors", stages)])
    found = huggingface.without_unreached("a", layer, QConfig(QLayerConfig(weight=spec, input_tensors=spec)))
    missing = any(static and not seen for seen, static in zip(reached, calibrated, strict=True))
    assert (found is not None) is missing
    assert found is None or (found.input_tensors is None and found.weight is not None)


@pytest.mark.parametrize("pair", list(itertools.product([None, "float", "quantized"], repeat=2)), ids=str)
def test_a_tie_ends_where_one_side_is_quantized(
    pair: tuple[str | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def side(kind: str | None) -> nn.Module | None:
        if kind is None:
            return None
        spec = Spec(Dtype.int8, qscheme=QSchemeType.per_tensor)
        slots = {"weight": spec} if kind == "quantized" else {"input_tensors": FP8E4M3PerTensorSpec(is_dynamic=True)}
        given = {name: one if isinstance(one, Spec) else one.to_quantization_spec() for name, one in slots.items()}
        model = ModelQuantizer(QConfig(QLayerConfig(**given))).quantize_model(nn.Sequential(nn.Linear(4, 4)), None)
        return model[0]

    inside, outside = map(side, pair)
    model: Any = SimpleNamespace(get_output_embeddings=lambda: outside)
    monkeypatch.setattr(model_files, "word_embeddings", lambda model: inside)
    assert model_files.is_untied(model) is ("quantized" in pair)


@pytest.mark.parametrize(("format", "symmetric"), list(itertools.product(["pack-quantized", "int-quantized"], BOTH)))
def test_only_packed_weights_have_no_place_for_zero_points(
    format: str, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("blocks", "experts", "ties", "conversions", "values", "inputs"):
        monkeypatch.setattr(transformers_reads, other, lambda *given: None)
    scheme = SimpleNamespace(weights=SimpleNamespace(symmetric=symmetric), input_activations=None)
    given: Any = ({"fc": scheme}, {"fc": SimpleNamespace(value=format)})
    why = transformers_reads.why_not(nn.Module(), *given, SimpleNamespace(), {})  # type: ignore[arg-type]
    assert (why is not None) is (format == "pack-quantized" and not symmetric)


@pytest.mark.parametrize("program", ["vllm", "transformers", None])
def test_vllm_has_one_scale_for_the_inputs_of_all_experts(program: str | None) -> None:
    config = QConfig(QLayerConfig(weight=FP8E4M3PerTensorSpec(is_dynamic=False).to_quantization_spec()))
    found = write_as.config_for(config, "quark", program, torch.bfloat16)
    assert found.sync_moe_expert_input_amax is (program == "vllm")


@pytest.mark.parametrize("scheme", [None, "fp8"])
@pytest.mark.parametrize("program", [None, *formats.PROGRAMS])
@pytest.mark.parametrize("format", formats.FORMATS)
def test_a_cache_is_refused_where_it_is_asked_for_and_a_program_lacks_it(
    scheme: str | None, program: str | None, format: str
) -> None:
    row = formats.row_of(f"{formats.CACHE}fp8", format, program) if scheme and program else None
    with pytest.raises(ConfigError, match="has no fp8 cache") if row is not None and not row.works else nullcontext():
        formats.check_caches(scheme, format, program)


@pytest.mark.parametrize("seen", list(itertools.product(BOTH, BOTH)))
@pytest.mark.parametrize("token", BOTH)
def test_a_model_is_run_where_axes_of_its_inputs_are_not_known(
    seen: tuple[bool, bool], token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales per token are right for inputs of three axes; a network that has not run shows its own when it does."""
    inputs = {name: SimpleNamespace(axes={3} if known else set()) for name, known in zip("ab", seen, strict=True)}
    layers = {name: SimpleNamespace(own=[part], in_features=4) for name, part in inputs.items()}
    runs = []

    class Runs(nn.Module):
        def forward(self) -> None:
            runs.append(1)
            inputs["a"].axes.add(4)

    monkeypatch.setattr(transformers_reads, "quantized_layers", lambda model: layers.items())
    monkeypatch.setattr(transformers_reads, "parts_of_inputs", lambda layer: layer.own)
    monkeypatch.setattr(transformers_reads, "show_axes", lambda model, layers: model())
    monkeypatch.setattr(transformers_reads, "strategy_of", lambda found: "token" if token else "tensor")
    schemes: Any = {name: SimpleNamespace(input_activations=object()) for name in inputs}
    why = transformers_reads.inputs(Runs(), schemes)
    assert len(runs) == (token and not all(seen))
    assert (why is not None and "inputs of 'a', which have 4 axes" in why) is bool(runs)


def test_weights_in_a_graph_are_compared_where_it_has_them(tmp_path: Path) -> None:
    """Not activations, and not a weight that nothing reads."""
    onnx = pytest.importorskip("onnx")
    graph = models.model(
        "g (float[2] x) => (float[2] y) { a = Identity (w) y = Add (x, a) }", {"w": np.ones(2, np.float32)}, 17
    )
    onnx.save(graph, tmp_path / "m.onnx")

    def marked(value: torch.Tensor | None) -> Any:
        return SimpleNamespace(name="w", value=value, frozen=True)

    every = [marked(None), marked(torch.zeros(2)), marked(torch.ones(2))]
    onnx_verify.verify_weights(tmp_path / "m.onnx", every, {0: "a", 1: "gone", 2: "a"}, set())
    with pytest.raises(ModelError, match="w"):
        onnx_verify.verify_weights(tmp_path / "m.onnx", every, {1: "a"}, set())


def test_a_model_whose_tie_is_at_an_end_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    model = llama(tie=True)
    assert model_files.config_of(model)["tie_word_embeddings"] is True
    monkeypatch.setattr(model_files, "is_untied", lambda model: True)
    assert model_files.config_of(model)["tie_word_embeddings"] is False


@pytest.mark.parametrize(("stacked", "turns"), list(itertools.product(BOTH, BOTH)))
def test_only_experts_that_take_turns_are_stacks(stacked: bool, turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(UnfusedExperts.__new__(UnfusedExperts) if stacked else nn.Linear(2, 2))
    if stacked:
        nn.Module.__init__(model[0])
    monkeypatch.setattr(stacked_blocks, "takes_turns", lambda module: turns)
    with pytest.raises(ConfigError, match="do not take turns") if stacked and not turns else nullcontext():
        assert [path for path, _ in stacked_blocks.stacks_of(model)] == (["0"] if stacked else [])


def test_settings_come_beside_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quark_model.onnx").write_text("a graph")
    read = []
    monkeypatch.setattr(write_as, "export_onnx", lambda *given, **named: None)
    monkeypatch.setattr(write_as, "write_config", lambda model, draft, graph: read.append(graph.read_text()))
    monkeypatch.setattr(write_as, "copy_beside", lambda model, draft: (draft / "tokenizer.json").write_text("t"))
    write_as.to_onnx(nn.Linear(1, 1), tmp_path, tmp_path, True)
    assert read == ["a graph"] and (tmp_path / "tokenizer.json").read_text() == "t"
    assert (tmp_path / "quark_model.onnx").exists()


@pytest.mark.parametrize("kind", GGML)
def test_bytes_of_a_type_of_gguf(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    found = layout.GgmlLayout.__new__(layout.GgmlLayout)
    found.__dict__.update(stage=SimpleNamespace(format=GGML[kind]), shape=(3, 512))
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    ((shape, dtype),) = found.form().values()
    assert shape == (3, 512 // size * nbytes) and dtype is torch.uint8
    with pytest.raises(ConfigError, match="no other format has it"):
        found.store(torch.ones(3, 512), None, None)


@pytest.mark.parametrize("files", [None, [], ["a.safetensors"]])
def test_files_that_transformers_loads_are_looked_at_first(
    files: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(given: Any) -> None:
        raise ModelError(f"seen: {list(given)}")

    monkeypatch.setattr(loader, "check_extras", refuse)
    own: Any = SimpleNamespace(json_export_config=None)
    given = {} if files is None else {"checkpoint_files": files}
    with pytest.raises(ModelError, match=rf"seen: {files or []}".replace("[", r"\[").replace("]", r"\]")):
        loader.QuarkLoader._process_model_before_weight_loading(own, nn.Module(), **given)


@pytest.mark.parametrize("weight_format", ["real_quantized", "fake_quantized"])
@pytest.mark.parametrize("slot", ["weight", "input_tensors"])
def test_a_layer_is_compact_where_it_holds_codes(weight_format: str, slot: str) -> None:
    spec = Spec(Dtype.int8, qscheme=QSchemeType.per_tensor)
    model = nn.Sequential(nn.Linear(4, 4))
    skeleton.map_layers(model, QConfig(QLayerConfig(**{slot: spec})), "reorder", weight_format, False)
    ((_, layer),) = quantized_layers(model)
    assert layer.compact is (weight_format == "real_quantized" and slot == "weight")


# ---- stored tensors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [None, (), (4,)])
@pytest.mark.parametrize("calibrated", list(itertools.product(BOTH, BOTH)))
@pytest.mark.parametrize("coded", list(itertools.product(BOTH, BOTH)))
def test_a_second_scale_is_relative_where_both_are_numbers_of_the_file(
    shape: Any, calibrated: Any, coded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "scale_element", lambda stage: "an element" if stage.coded else None)
    first, second = (
        SimpleNamespace(
            stage=SimpleNamespace(calibrated=static, coded=code),
            form=lambda: {} if shape is None else {"scale": (shape, torch.float32)},
        )
        for static, code in zip(calibrated, coded, strict=True)
    )
    found = layout.PairLayout(first, second).relative  # type: ignore[arg-type]
    assert found is (shape == () and all(calibrated) and not any(coded))


FOUND = {  # formats, and whether a scale, and whether a zero point, is stored beside the codes
    "int8": (Spec(Dtype.int8, qscheme=QSchemeType.per_tensor), True),
    "uint4": (Spec(Dtype.uint4, symmetric=False, **GROUPS), True),
    "fp8": (FP8E4M3PerTensorSpec(is_dynamic=False).to_quantization_spec(), True),
    "bfloat16": (Spec(Dtype.bfloat16), False),
    "float16": (Spec(Dtype.float16), False),
    "nvfp4": (NVFP4.to_quantization_spec(), True),
    "mxfp4": (OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec(), False),
}


@pytest.mark.parametrize("name", FOUND)
def test_parameters_are_those_that_a_file_holds(name: str) -> None:
    spec, scaled = FOUND[name]
    x = drawn(4, 64)
    quantizer: Any = quantizer_for(spec, x)
    kind: Any = layout.layout_of_quantizer(quantizer, (4, 64), "order")
    kept = layout.store(x, quantizer, "order")
    scale, zero = stored.parameters(kind, kept)
    assert (scale is not None) is (zero is not None) is scaled
    if scale is not None and zero is not None:
        assert torch.equal(scale, quantizer.scale.reshape(scale.shape))
        assert torch.equal(zero, quantizer.zero_point.reshape(zero.shape).to(zero.dtype))


@pytest.mark.parametrize(("granularity", "dims", "unit"), [
    (Group(-1, 48), 2, 1), (Group(0, 48), 2, 48), (Channel(1), 2, 1), (Channel(0), 2, 1), (Block2D(8, 4), 2, 8),
    (Group(-1, 48), 1, 48), (Channel(0), 0, 1),
])  # fmt: skip
def test_rows_that_share_their_scales(granularity: Any, dims: int, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "parts", lambda quantizer: [SimpleNamespace(granularity=granularity)])
    assert verify.unit_of(None, dims) == unit


@pytest.mark.parametrize("zeros", [[0, 0], [0, 5], [5, 0], [1, 5]])
@pytest.mark.parametrize("lowered", [0, 1])
def test_version_1_of_gptq_has_no_zero_point_of_0(zeros: list[int], lowered: int) -> None:
    x = drawn(8, 64)
    quantizer: Any = quantizer_for(Spec(Dtype.uint4, symmetric=False, **GROUPS), x)
    kind: Any = layout.layout_of_quantizer(quantizer, (8, 64), "order")
    kept = dict(layout.store(x, quantizer, "order"))
    quantizer.zero_point = torch.tensor([zeros] * 8, dtype=torch.int32)
    kept["zero_point"] = layout.store(x, quantizer, "order")["zero_point"]
    if lowered and 0 in zeros:
        with pytest.raises(ConfigError, match="a zero point of 0"):
            gptq.gptq_tensors("fc.weight", kind, kept, lowered)
        return
    words = gptq.gptq_tensors("fc.weight", kind, kept, lowered)["fc.qzeros"]
    assert words.flatten().tolist() == [int("".join(f"{zero - lowered:x}" for _ in range(8)), 16) for zero in zeros]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_in_a_half_type_multiply_in_float32(dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    codes = torch.arange(-64, 64, dtype=torch.int8).reshape(4, 32)
    scale = torch.tensor([[0.013], [0.17], [1.9], [0.0031]]).to(dtype)
    found = decoded.decompressor(scheme, "int-quantized")({"weight": codes, "weight_scale": scale})
    assert torch.equal(found.float(), codes.float() * scale.float())


@pytest.mark.parametrize("dtype", [Dtype.int4, Dtype.uint4], ids=str)
def test_blocks_with_a_minimum_are_the_values_of_the_model(dtype: Dtype) -> None:
    """Q4_1 is d q + m: the minimum is that of the lowest code, whichever number that has."""
    gguf = pytest.importorskip("gguf")
    x = drawn(4, 64) + 1
    quantizer: Any = quantizer_for(Spec(dtype, symmetric=False, **GROUPS), x)
    quantizer.scale = quantizer.scale.half().float()
    wanted = quantizer(x).detach()
    kind: Any = layout.layout_of_quantizer(quantizer, (4, 64), "order")
    data = gguf_tensors.integer_data(wanted, quantizer, kind, lambda array: array)
    found = gguf.quants.dequantize(data.view(np.uint8), gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_allclose(found, wanted.numpy(), atol=2.0**-10)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "MXFP4"])
def test_values_as_types_of_the_package(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    x = drawn(2, 64).numpy()
    data = gguf_tensors.rounded(x, kind)
    found = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    least = {"F32": 0, "F16": 2.0**-11, "BF16": 2.0**-8, "Q8_0": 0.02, "Q4_0": 0.3, "MXFP4": 0.5}[kind]
    assert np.abs(found - x).max() <= least * np.abs(x).max()
    assert data.dtype == {"F32": np.float32, "F16": np.float16}.get(kind, np.uint8)


@pytest.mark.parametrize(("numbers", "size", "expected"), [
    ([], 0, []), ([0], 1, ["0"]), ([0, 2], 3, ["0", "[PAD1]", "2"]), ([0], 0, None), ([3], 3, None),
])  # fmt: skip
def test_tokens_in_the_order_of_their_numbers(numbers: list[int], size: int, expected: list[str] | None) -> None:
    found = {number: str(number) for number in numbers}
    if expected is None:
        with pytest.raises(ModelError, match=f"the token {max(numbers)}, and the embedding of the model {size} rows"):
            gguf_wordpiece.in_order(Path("t"), found, size, str)
    else:
        assert gguf_wordpiece.in_order(Path("t"), found, size, str) == expected


INPUTS = {
    "int8": Spec(Dtype.int8, qscheme=QSchemeType.per_tensor),
    "int8 with zero points": Spec(Dtype.int8, qscheme=QSchemeType.per_tensor, symmetric=False),
    "uint8 with zero points": Spec(Dtype.uint8, qscheme=QSchemeType.per_tensor, symmetric=False),
    "fp8": FP8E4M3PerTensorSpec(is_dynamic=False).to_quantization_spec(),
    "nvfp4": NVFP4.to_quantization_spec(),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_compressed_tensors_have_their_scale(name: str) -> None:
    """NVFP4 has the quotient, others the scale; zero points lie among signed codes."""
    weight = Spec(Dtype.int8, qscheme=QSchemeType.per_channel, ch_axis=0)
    model = nn.Sequential(nn.Linear(32, 8))
    model = ModelQuantizer(QConfig(QLayerConfig(weight=weight, input_tensors=INPUTS[name]))).quantize_model(
        model, [drawn(4, 32) + 1]
    )
    ((_, layer),) = quantized_layers(model)
    given: Any = dict(layer.quantizers())["input_tensors"]
    symmetric = "zero" not in name
    arguments = SimpleNamespace(symmetric=symmetric)
    scheme = SimpleNamespace(weights=SimpleNamespace(symmetric=True), input_activations=arguments)
    state = compressed_tensors.state_of("0", layer, scheme, SimpleNamespace(value="int-quantized"))
    scale = given.scale.float().reshape(-1)
    named = {key: value for key, value in state.items() if key.startswith("input_") and "scale" in key}
    wanted = {"input_global_scale": 1 / scale} if name == "nvfp4" else {"input_scale": scale}
    assert named.keys() == wanted.keys() and all(torch.equal(named[key], wanted[key]) for key in wanted)
    assert ("input_zero_point" in state) is not symmetric
    if not symmetric:
        shift = 128 if name.startswith("uint8") else 0
        assert int(state["input_zero_point"]) == int(given.zero_point) - shift


def test_shared_layers_have_each_of_their_names() -> None:
    model = nn.Sequential(one := nn.Linear(4, 4), nn.ReLU(), one)
    assert [name for name, _ in places.own_modules(model)] == ["", "0", "1", "2"]
    made = ModelQuantizer(QConfig(QLayerConfig(weight=Spec(Dtype.int8, qscheme=QSchemeType.per_tensor))))
    assert [name for name, _ in places.own_modules(made.quantize_model(model, None))] == ["", "0", "1", "2"]


def test_names_in_files_are_those_of_today() -> None:
    """Checkpoints of BERT once had gamma and beta; none is written so."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    model = transformers.BertModel(transformers.BertConfig(**sizes))
    names = original.names_of(model)
    assert [names.outside(name) for name in model.state_dict()] == list(model.state_dict())


def test_codes_that_go_into_a_file_are_told_from_numbers_that_are_rounded_for_it() -> None:
    """Of codes only the scales are rounded, so they are compared more closely."""
    spec = Spec(Dtype.int4, **GROUPS)
    for one in (spec, OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()):
        model = ModelQuantizer(QConfig(QLayerConfig(weight=one))).quantize_model(nn.Sequential(nn.Linear(64, 8)), None)
        ((_, layer),) = quantized_layers(model)
        entry = gguf_tensors.coded_entry("0.weight", "w", layer, lambda array: array, lambda: np.zeros((8, 64)))
        assert entry is not None and entry.coded


@pytest.mark.parametrize("told", [[], ["*k_proj"]])
@pytest.mark.parametrize("given", [[], ["*v_proj"]])
def test_patterns_of_caches_are_those_of_the_configuration_or_those_that_are_given(
    told: list[str], given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("outside_layers", "cached_layers"):
        monkeypatch.setattr(described, name, lambda *own: {})
    monkeypatch.setattr(described, "excluded", lambda *own: [])
    monkeypatch.setattr(described, "cache_group", lambda config: told)
    config, export = QConfig(QLayerConfig(weight=Spec(Dtype.bfloat16))), JsonExporterConfig(kv_cache_group=given)
    found = described.described(config, export, nn.Linear(1, 1), SimpleNamespace(), ())  # type: ignore[arg-type]
    assert found["export"]["kv_cache_group"] == (told or given)


@pytest.mark.parametrize("format", ["pack-quantized", "int-quantized"])
@pytest.mark.parametrize("inputs", [None, ScaleType.float32, ScaleType.bfloat16])
def test_scales_of_weights_have_the_type_of_the_model_where_codes_are_packed_or_inputs_have_it(
    format: str, inputs: ScaleType | None
) -> None:
    weight = Spec(Dtype.int8, qscheme=QSchemeType.per_channel, ch_axis=0, scale_type=ScaleType.bfloat16)
    activation = None if inputs is None else Spec(Dtype.int8, qscheme=QSchemeType.per_tensor, scale_type=inputs)
    config = QConfig(QLayerConfig(weight=weight, input_tensors=activation))
    model = nn.Sequential(nn.Linear(32, 8)).bfloat16()
    model = ModelQuantizer(config).quantize_model(model, [drawn(4, 32).bfloat16()])
    ((_, layer),) = quantized_layers(model)
    arguments = SimpleNamespace(symmetric=True)
    scheme = SimpleNamespace(weights=arguments, input_activations=arguments)
    state = compressed_tensors.state_of("0", layer, scheme, SimpleNamespace(value=format))
    halved = format == "pack-quantized" or inputs is ScaleType.bfloat16
    assert state["weight_scale"].dtype == (torch.bfloat16 if halved else torch.float32)


INT4 = (Spec(Dtype.int4, qscheme=QSchemeType.per_channel, ch_axis=0).to_stage(),)
MATRIX, STACK = (layout.layout_of(INT4, shape) for shape in ((8, 8), (2, 8, 8)))
PAIR = layout.PairLayout(MATRIX, MATRIX)  # type: ignore[arg-type]


@pytest.mark.parametrize(("stored", "told"), [(MATRIX, False), (STACK, True), (PAIR, True)])
def test_gptq_packs_matrices_of_integers(stored: Any, told: bool) -> None:
    item: Any = SimpleNamespace(form={"a.bias": ((8,), torch.float32), "a.weight": ((8, 8), torch.int8)})
    assert custom_modes.gptq_item(item, {"b.weight": stored}, "gptq") is item
    with pytest.raises(ConfigError, match=r"'a\.weight' is no matrix of integers") if told else nullcontext():
        made = custom_modes.gptq_item(item, {"a.weight": stored}, "gptq")
        assert "a.qweight" in made.form


def test_names_of_experts_are_those_of_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of biases, and not of what the original has besides."""
    model, numbers = nn.Module(), torch.arange(8.0).reshape(4, 2)
    model.experts = UnfusedExperts.__new__(type("Own", (UnfusedExperts,), {}))
    nn.Module.__init__(model.experts)
    own = {"0.up_proj.weight": numbers[:1], "0.up_proj.bias": numbers[1]}
    monkeypatch.setattr(original, "numbered_stacks", lambda module, start: ({"up_proj": numbers}, own))
    outside = {"e.0.w1.weight": numbers[:1], "e.0.w1.bias": numbers[1], "e.0.more.weight": numbers[2]}
    names: Any = SimpleNamespace(groups=lambda stacks: {"k": [*stacks]}, taken_apart=lambda key, members: outside)
    assert original.expert_names(names, model) == {"experts.0.up_proj": "e.0.w1"}


ONE, ROWS = {"qscheme": QSchemeType.per_tensor}, {"qscheme": QSchemeType.per_channel, "ch_axis": 0}
RELATIVE: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "one scale, then one a row": (ONE, ROWS, True),
    "one scale, then one": (ONE, ONE, True),
    "two of rows": (ROWS, ROWS, False),
    "the first in float16": ({**ONE, "scale_type": ScaleType.float16}, ROWS, False),
    "the second in float16": (ONE, {**ROWS, "scale_type": ScaleType.float16}, False),
    "the first at run time": ({**ONE, "is_dynamic": True}, ROWS, False),
    "the second at run time": (ONE, {**ROWS, "is_dynamic": True}, False),
}


@pytest.mark.parametrize("name", RELATIVE)
def test_when_a_file_has_the_quotient_of_two_scales(name: str) -> None:
    """Both are float32 and known beforehand, and the first is one number for all rows."""
    first, second, relative = RELATIVE[name]
    stages = Spec(Dtype.fp8_e4m3, **first).to_stage(), Spec(Dtype.int4, **second).to_stage()
    pair = layout.layout_of(stages, (8, 16))
    assert isinstance(pair, layout.PairLayout) and pair.relative is relative


def test_tensors_that_layers_keep_together() -> None:
    """Of quantized layers, and of experts that are taken apart, whose activation functions have none."""
    model = nn.Module()
    model.experts = UnfusedExperts.__new__(type("Own", (UnfusedExperts,), {}))
    nn.Module.__init__(model.experts)
    model.experts.add_module("0", nn.ModuleDict({"up_proj": nn.Linear(2, 2), "act": nn.ReLU()}))
    model.plain = nn.Linear(2, 2)
    assert list(original.owners(model)) == ["experts.0.up_proj"]


def test_codes_are_written_for_each_layer_and_other_tensors_once() -> None:
    """Two layers of one weight have codes of their own, since each rounds it its own way."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4))
    model[1].weight, model[3].weight = model[0].weight, model[2].weight
    spec = Spec(Dtype.int8, qscheme=QSchemeType.per_tensor)
    quantized = ModelQuantizer(QConfig(QLayerConfig(weight=spec))).quantize_model(model, None)
    found = [name for name, _ in state.own_tensors(quantized, dict(quantized_layers(quantized)))]
    assert sorted(found) == sorted(
        [f"{k}.{slot}" for k in range(4) for slot in ("weight", "bias") if f"{k}.{slot}" != "3.weight"]
    )
