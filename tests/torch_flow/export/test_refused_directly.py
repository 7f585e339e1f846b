"""What parts of the exports refuse, each asked directly on either side of its bound.

Bounds are those of the formats: the largest float16, words of 32 bits, blocks of 32 and 256 numbers, the types of
safetensors, the scalings of a rotary embedding that GGUF has keys for.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from quark.config import file_formats as formats
from quark.errors import ConfigError, ModelError, QuarkError
from quark.numerics.elements import ELEMENTS
from quark.numerics.ggml_bytes import half
from quark.numerics.granularity import Block2D, Channel, Group, Tensor
from quark.torch import ModelQuantizer
from quark.torch.export import (
    checkpoint,
    gguf_architectures,
    gguf_model,
    gguf_tensors,
    gptq,
    onnx_decoder,
    onnx_model,
    places,
    reload,
    shards,
    stacked_blocks,
    stored,
    verify,
    write_as,
)
from quark.torch.export.api import export_safetensors
from quark.torch.export.custom_modes import QuantConfigParser
from quark.torch.export.gguf_rope import UNSCALED
from quark.torch.export.gguf_row import Architecture
from quark.torch.export.gguf_table import ARCHITECTURES
from quark.torch.export.layout import ElementLayout
from quark.torch.export.shards import Item
from quark.torch.export.verify import FolderReader, OfForeign
from quark.torch.quantization.config.config import FP8E4M3PerTensorSpec, OCP_MXFP4Spec, QConfig, QLayerConfig

FP8 = FP8E4M3PerTensorSpec().to_quantization_spec()


def refused(told: str | None, kind: type[QuarkError] = ConfigError) -> Any:
    return nullcontext() if told is None else pytest.raises(kind, match=told)


# ---- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value, fits", [(65504.0, True), (65519.0, True), (65520.0, False), (-7e4, False)])
def test_scales_of_gguf_are_float16(value: float, fits: bool) -> None:
    """65504 is the largest float16, and from 65520 on values round to infinity."""
    with refused(None if fits else f"scales are float16, and one is {abs(value):g}"):
        kept = half(np.array([0.5, value], np.float32))
        assert kept.view(np.float16).ravel().tolist() == [0.5, 65504.0]


@pytest.mark.parametrize(
    "kind, block", [("F32", 1), ("BF16", 1), ("Q4_0", 32), ("Q8_0", 32), ("Q4_K", 256), ("Q6_K", 256)]
)
def test_rows_are_whole_blocks(kind: str, block: int) -> None:
    gguf = pytest.importorskip("gguf")
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] == block
    gguf_tensors.check_rows("a", kind, 3 * block)
    for length in (block + 1, 3 * block - 1) if block > 1 else ():
        with pytest.raises(ConfigError, match=f"'a' has rows of {length} numbers, and {kind} has blocks of {block}"):
            gguf_tensors.check_rows("a", kind, length)


def rotary(rope: dict[str, Any], row: Architecture) -> dict[str, Any]:
    """The keys that a file gets."""
    written: dict[str, Any] = {}

    class Writer:
        def __getattr__(self, name: str) -> Any:
            return lambda value: written.__setitem__(name.removeprefix("add_rope_"), value)

    config = SimpleNamespace(rope_parameters={"rope_theta": 5e5, **rope}, max_position_embeddings=64)
    gguf_architectures.add_rope(Writer(), config, row)
    return written


@pytest.mark.parametrize("kind", [None, "default", "llama3", "linear", "longrope", "dynamic"])
def test_scalings_of_a_rotary_embedding(kind: str | None) -> None:
    gguf = pytest.importorskip("gguf")
    rope = {} if kind is None else {"rope_type": kind, "factor": 4.0}
    with refused(f"is scaled by '{kind}'" if kind in ("longrope", "dynamic") else None, ModelError):
        found = rotary(rope, ARCHITECTURES["mixtral"])
        scaled = {"scaling_type": gguf.RopeScalingType.LINEAR, "scaling_factor": 4.0} if kind == "linear" else {}
        assert found == {"freq_base": 5e5, **scaled}


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_divided_frequencies_and_parts_of_heads_are_refused_where_llama_cpp_ends_its_process(family: str) -> None:
    """Those that read them were run with both (tests/consumers/llama_rope.py)."""
    row = ARCHITECTURES[family]
    other = "which llama.cpp does otherwise in" if row.name in UNSCALED else None
    with refused(
        other or (None if row.divisors else "is scaled by 'llama3', which llama.cpp does not read"), ModelError
    ):
        rotary({"rope_type": "llama3", "factor": 8.0}, row)
    with refused(other or ("which llama.cpp takes for 'yarn'" if row.yarn_unit else None), ModelError):
        rotary({"rope_type": "linear", "factor": 8.0}, row)
    given = {"head_dim": 64, "partial_rotary_factor": 0.5, "num_hidden_layers": 0, "hidden_act": row.activations[0]}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 64}
    config = SimpleNamespace(
        **given, **heads, architectures=list(row.encoder), layers_block_type=["mamba", "attention"]
    )
    told = None if row.partial else "a part of each head is rotated, which llama.cpp does not do in"
    with refused(told, ModelError):
        gguf_architectures.check_network(config, row)


YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "unit, given, told",
    [
        (0.0, {}, None),
        (0.0, {"mscale": None}, None),
        (0.0, {"mscale": 1.0, "mscale_all_dim": 1.0}, "which cannot be written for 'a'"),
        (0.1, {}, "without mscale and mscale_all_dim"),
        (0.0, {"beta_fast": 32, "beta_slow": 1, "truncate": True}, None),
        (0.0, {"beta_fast": 16}, "beta_fast=16, and llama.cpp has 32, whatever the file says"),
        (0.0, {"beta_slow": 2.0}, "beta_slow=2.0, and llama.cpp has 1, whatever"),
        (0.0, {"truncate": False}, "truncate=False, and llama.cpp has True, whatever"),
        (0.1, {"mscale": 0.5, "mscale_all_dim": 0.5}, None),
        (0.1, {"mscale": 1.0, "mscale_all_dim": 0.5}, "which cannot be written"),
        (0.1, {"mscale": 1.0}, "which cannot be written"),
        (0.1, {"mscale_all_dim": 1.0}, "which cannot be written"),
        (0.1, {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0}, "which cannot be written"),
    ],
)
def test_settings_of_yarn(unit: float, given: dict[str, Any], told: str | None) -> None:
    with refused(told, ModelError):
        found = rotary({**YARN, **given}, Architecture("a", yarn_unit=unit))
        scale = given.get("mscale_all_dim")
        assert found.get("scaling_yarn_log_mul") == (None if scale is None else pytest.approx(unit * scale))


def test_a_tensor_that_a_gguf_file_lacks(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    writer.add_tensor("there", values)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    there = gguf_model.checksum(values)
    gguf_model.read_back(tmp_path / "m.gguf", {"there": there})
    with pytest.raises(ModelError, match="the tensor 'lost' is not in the file"):
        gguf_model.read_back(tmp_path / "m.gguf", {"there": there, "lost": there})
    values[1, 2] = 7
    with pytest.raises(ModelError, match="the tensor 'there' has other bytes"):
        gguf_model.read_back(tmp_path / "m.gguf", {"there": gguf_model.checksum(values)})


def test_experts_of_one_layer_have_one_type() -> None:
    def entry(kind: str, value: float, coded: bool = False) -> gguf_tensors.GGUFTensor:
        values = np.full((2, 32), value, np.float32)
        return gguf_tensors.GGUFTensor("e", kind, (2, 32), lambda: (10 * values, lambda: values), coded)

    alike = gguf_tensors.together("e", [entry("Q8_0", 1, True), entry("Q8_0", 2, True)])
    assert (alike.kind, alike.shape, alike.coded) == ("Q8_0", (2, 2, 32), True)
    made, values = alike.make()
    assert made[:, 0, 0].tolist() == [10, 20] and values()[:, 0, 0].tolist() == [1, 2]
    rescued = gguf_tensors.together("e", [entry("Q8_0", 1, True), entry("F32", 2)])
    assert (rescued.kind, rescued.coded) == ("F32", False) and rescued.make()[0][:, 0, 0].tolist() == [1, 2]
    with pytest.raises(ConfigError, match="experts of one layer have the types Q4_0, Q8_0"):
        gguf_tensors.together("e", [entry("Q8_0", 1), entry("Q4_0", 2)])


# ---- files and formats -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits, rows, columns, told", [
    (4, 8, 16, None), (8, 4, 4, None), (2, 16, 32, None),
    (4, 12, 16, "12 outputs of 4 bits"), (4, 16, 12, "12 inputs of 4 bits"), (8, 6, 8, "6 outputs of 8 bits"),
])  # fmt: skip
def test_sides_of_gptq_fill_words(bits: int, rows: int, columns: int, told: str | None) -> None:
    row = ELEMENTS[f"int{bits}"]
    stage = SimpleNamespace(spec=SimpleNamespace(scale_rule="float32", granularity=None))
    layout: Any = SimpleNamespace(element=row, shape=(rows, columns), stage=stage, granularity=None)
    with refused(told), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gptq, "groups_of", lambda _: 1)
        form = gptq.gptq_form("a.weight", layout)
        assert form["a.qweight"] == ((columns * bits // 32, rows), torch.int32)
        assert form["a.qzeros"] == ((1, rows * bits // 32), torch.int32)


def test_names_and_types_of_safetensors() -> None:
    def item(*names: str, dtype: torch.dtype = torch.float32) -> Item:
        return Item(dict.fromkeys(names, ((1,), dtype)), dict)

    shards.check_names([[item("a", "b")], [item("c", dtype=torch.bfloat16)]])
    with pytest.raises(ModelError, match="two tensors have the name 'b'"):
        shards.check_names([[item("a", "b")], [item("b")]])
    with pytest.raises(ModelError, match=r"'c' is torch.complex64, which safetensors files cannot hold"):
        shards.check_names([[item("c", dtype=torch.complex64)]])


def test_tensors_that_are_asked_for_by_name(tmp_path: Path) -> None:
    from contextlib import ExitStack

    values = torch.arange(6.0).reshape(2, 3)
    save_file({"a": values}, tmp_path / "model.safetensors")
    with ExitStack() as undo:
        reader = FolderReader(tmp_path, undo, {})
        assert torch.equal(reader("a"), values) and torch.equal(reader("a", 1), values[1])
        with pytest.raises(ModelError, match="the tensor 'b' is not in the files"):
            reader("b")
    (tmp_path / "config.json").write_text("{}")
    found = checkpoint.Checkpoint(tmp_path, {}, checkpoint.weight_files(tmp_path))
    assert torch.equal(found.read("a"), values)
    with pytest.raises(ModelError, match="lacks the tensor 'b'"):
        found.read("b")
    for text in ("{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ModelError, match="has no weight_map"):
            checkpoint.weight_files(tmp_path)


@pytest.mark.parametrize("name, plain", [
    ("a.safetensors", True), ("a" * 243 + ".safetensors", True), ("a" * 244 + ".safetensors", False),
    ("ä" * 121 + ".safetensors", True), ("ä" * 122 + ".safetensors", False), ("a.bin", False),
    ("b/a.safetensors", False),
    ("b\\a.safetensors", False), ("c:a.safetensors", False), ("a\0.safetensors", False),
])  # fmt: skip
def test_files_that_an_index_may_name(name: str, plain: bool) -> None:
    """In the folder, on every system: 255 bytes are the most that file systems take."""
    assert checkpoint._is_plain(name) is plain


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("off, near", [(0.0, True), (2.0**-8, False), (2.0**-6, None)])
def test_how_near_weights_of_other_formats_are(exact: bool, off: float, near: bool | None) -> None:
    """Exactly, or where a format multiplies scales in another order, by 2^-7 of each value; never of another shape."""
    weight = torch.tensor([[1.0, -2.0], [0.5, 4.0]])
    held = SimpleNamespace(parts={}, cut=lambda stored, _: stored, decode=lambda _: weight * (1 + off), exact=exact)
    one = object.__new__(OfForeign)
    one.__dict__ |= {"foreign": held, "prefix": "a", "windows": None}
    with refused(None if near or (near is False and not exact) else "a", ModelError):
        one.compare(weight)
    for other in (weight[:1], weight.reshape(-1), torch.ones(3, 5)):
        with pytest.raises(ModelError):
            one.compare(other)


def test_formats_by_name() -> None:
    assert formats.chosen_format("gguf", None) == "gguf" and formats.chosen_format(None, None) == "quark"
    assert formats.chosen_format("awq", "vllm") == "awq"
    for given, told in ((("guf", None), "format 'guf'"), ((None, "vlm"), "program 'vlm'")):
        with pytest.raises(ConfigError, match=told):
            formats.chosen_format(*given)
    with pytest.raises(ConfigError, match="format 'guf'"):
        write_as.export_as(nn.Module(), "nowhere", "guf", "nowhere")


def test_frozen_values_lie_on_their_grid(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 8, bias=False)).eval()
    mxfp4 = OCP_MXFP4Spec(-1, is_dynamic=False).to_quantization_spec()
    made = ModelQuantizer(QConfig(QLayerConfig(weight=mxfp4))).quantize_model(model, [torch.ones(1, 64)])
    frozen = ModelQuantizer.freeze(made)
    export_safetensors(frozen, tmp_path / "on")
    with torch.no_grad():
        frozen[0].weight[0, 0] = frozen[0].weight[0].abs().max() * 0.7  # between 4 and 6 sixths of a power of two
    with pytest.raises(ModelError, match="the frozen values do not lie on the grid of mxfp4"):
        export_safetensors(frozen, tmp_path / "off")


def test_a_state_that_is_not_a_tensor(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None:
            """Take nothing."""

    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval()
    made = ModelQuantizer(QConfig(QLayerConfig(weight=FP8))).quantize_model(model, [torch.ones(1, 8)])
    made.add_module("odd", Odd(2, 2))
    with pytest.raises(ModelError, match=r"holds 'odd._extra_state', which is not a tensor but dict"):
        export_safetensors(made, tmp_path / "m")


def test_tensors_without_values() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    places.check_complete(model)
    model[1].register_buffer("extra", torch.empty(2, device="meta"))
    with pytest.raises(ModelError, match=r"1 tensors .* the first is '1.extra'"):
        places.check_complete(model)


@pytest.mark.parametrize("entry, own, told", [
    ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, False, None),
    ({"architectures": ["LlamaForCausalLM"]}, False, "names no model_type"),
    ({"architectures": ["Nothing"]}, False, r"names the architecture \['Nothing'\]"),
    ({"architectures": ["Nothing"]}, True, None),
    ({}, False, r"names the architecture \[\]"),
    ({"architectures": "LlamaForCausalLM"}, False, "names the architecture 'LlamaForCausalLM'"),
    ({"_class_name": "FluxTransformer2DModel"}, True, "a model of diffusers"),
])  # fmt: skip
def test_classes_of_transformers(entry: dict[str, Any], own: bool, told: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    found: Any = SimpleNamespace(config=entry, folder=Path("f"))
    with refused(told, ModelError):
        cls = reload.class_of(found, own)
        assert cls is (None if own else transformers.LlamaForCausalLM)


def test_custom_modes_have_no_biases() -> None:
    entry = {"quant_method": "awq", "bits": 4, "group_size": 64}
    assert QuantConfigParser.from_custom_config(entry).global_quant_config.weight.group_size == 64
    with pytest.raises(ConfigError, match="no quantized biases"):
        QuantConfigParser.from_custom_config(entry, is_bias_quantized=True)


# ---- ONNX ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [(), ("text",), (torch.ones(2, 3),), (torch.ones(3, dtype=torch.int64),),
                                   (torch.ones(2, 0, dtype=torch.int64),)])  # fmt: skip
def test_a_decoder_is_traced_with_token_ids(given: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="input_args must be token ids"):
        onnx_decoder.with_cache(nn.Module(), given)


def test_models_without_a_cache() -> None:
    class Plain(nn.Module):
        def __init__(self, **config: Any) -> None:
            super().__init__()
            self.config = SimpleNamespace(**config)

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            return SimpleNamespace(past_key_values=None)

    ids = torch.ones(1, 2, dtype=torch.int64)
    for config, told in (
        ({}, "is not a decoder of transformers"),
        ({"use_cache": True, "is_encoder_decoder": True}, "is not a decoder of transformers"),
        ({"use_cache": True}, "returns no cache"),
        ({"use_cache": False, "is_encoder_decoder": False}, "returns no cache"),
    ):
        with pytest.raises(ModelError, match=told):
            onnx_decoder.past_of(Plain(**config), ids)


def test_sizes_that_vary_are_not_one_in_the_example() -> None:
    varies, fixed = torch.export.Dim.DYNAMIC, torch.export.Dim.STATIC
    example = (torch.ones(1, 3), torch.ones(2, 1))
    onnx_decoder.check_varying(example, None)
    onnx_decoder.check_varying(example, ({1: varies}, {0: varies}))
    onnx_decoder.check_varying(example, {"x": {0: None}, "y": {1: fixed}})
    onnx_decoder.check_varying((torch.ones(1), "text"), (None, {0: varies}))
    for shapes, told in (
        (({0: varies},), "axis 0 of argument 0"),
        ({"x": {}, "y": {1: varies}}, "axis 1 of argument 1"),
    ):
        with pytest.raises(ConfigError, match=told):
            onnx_decoder.check_varying(example, shapes)


@pytest.mark.parametrize("given", [(("a",), (), None), ((), ("a",), None), ((), (), {"a": {}}), ((), (), None)])
def test_names_beside_a_cache(given: tuple[Any, ...]) -> None:
    with refused("leave input_names" if any(given) else None):
        onnx_model.refuse_names(*given)


@pytest.mark.parametrize("granularity, dims, expected", [
    (Block2D(4, 8), 2, 4), (Channel(0), 2, 1), (Channel(-2), 2, 1), (Channel(1), 2, 0), (Channel(-1), 2, 0),
    (Channel(-1), 1, 1), (Group(0, 4), 2, 4), (Group(-2, 4), 2, 4), (Group(1, 4), 2, 1), (Group(-1, 4), 2, 1),
    (Tensor(), 2, 0),
])  # fmt: skip
def test_rows_that_share_a_scale(granularity: Any, dims: int, expected: int) -> None:
    assert verify.rows_of_a_scale(granularity, dims) == expected


@pytest.mark.parametrize("symmetric", [True, False])
def test_parameters_of_stored_tensors(symmetric: bool) -> None:
    """What has no zero points has those that stand for 0; formats that find their scales have none."""
    stage = SimpleNamespace(needs_range=True)
    layout: Any = object.__new__(ElementLayout)
    layout.__dict__.update(stage=stage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ElementLayout, "has_zero_point", not symmetric)
        patch.setattr(ElementLayout, "scale", lambda self, made: made["scale"])
        patch.setattr(ElementLayout, "zero_point", lambda self, made: made["zero"])
        scale, zero = stored.parameters(layout, {"scale": torch.tensor([0.5, 2.0]), "zero": torch.tensor([3, 4])})
    assert scale is not None and zero is not None
    assert scale.tolist() == [0.5, 2.0] and zero.tolist() == ([0, 0] if symmetric else [3, 4])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_files_are_numbered_where_there_are_several(count: int, tmp_path: Path) -> None:
    items = [shards.item_of(f"t{k}", torch.ones(4)) for k in range(count)]
    names = shards.write_shards(tmp_path, items, shard_size=16)
    expected = [f"model-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)]
    assert names == (["model.safetensors"] if count == 1 else expected)
    assert (tmp_path / "model.safetensors.index.json").exists() == (count > 1)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == set(names)


@pytest.mark.parametrize(
    "opset, told", [(20, "must be 21 or later, not 20"), (21, "already exists"), (None, "already")]
)
def test_opsets_of_exports(opset: int | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config_of", "refuse_to_export"):
        monkeypatch.setattr(onnx_model, name, lambda model: None)
    (tmp_path / onnx_model.FILE).touch()
    with pytest.raises(ConfigError, match=told):
        onnx_model.export_onnx(torch.nn.Linear(1, 1), tmp_path, torch.ones(1), opset_version=opset)


def test_what_belongs_to_no_stack_stays_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that are in no stack are refused, one missing of a stack too; other tensors stay as they are."""
    ends = [f"e.{number}.{name}_proj.{end}" for number in range(2) for name in ("gate", "up", "down")
            for end in stacked_blocks.OWN]  # fmt: skip
    items = [shards.item_of(name, torch.ones(1)) for name in (*ends, "norm.weight")]
    module = SimpleNamespace(num_experts=2)
    monkeypatch.setattr(stacked_blocks, "stacks_of", lambda model: [("e", module)])
    for name in ("coded_stack", "bias_stack"):
        monkeypatch.setattr(
            stacked_blocks, name, lambda target, *_, kind=name: shards.item_of(f"{target}.{kind}", torch.ones(1))
        )
    coded = [name for name in ends if name.endswith("weight")]
    found = stacked_blocks.stacked_items(None, items, coded)  # type: ignore[arg-type]
    stacks = [f"e.{name}.{kind}" for name in ("gate_up_proj", "down_proj") for kind in ("coded_stack", "bias_stack")]
    assert [name for item in found for name in item.form] == ["norm.weight", *stacks]
    with pytest.raises(ConfigError, match="'q' is quantized, and only experts can be"):
        stacked_blocks.stacked_items(None, items, [*coded, "q.weight"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'e\.1\.down_proj\.bias' is not there"):
        without = [item for item in items if "e.1.down_proj.bias" not in item.form]
        stacked_blocks.stacked_items(None, without, coded)  # type: ignore[arg-type]
