"""What each custom mode and format can say, as tables: one configuration a row, and the words or the refusal.

The rows are those of the formats' documents (AWQ, GPTQ, fine-grained FP8, ModelOpt, compressed-tensors); no model is
needed for them, so every entry stands at least once on either side of its condition.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import ConfigError, QuarkError
from quark.numerics.blocks import BLOCKS
from quark.numerics.elements import ELEMENTS
from quark.numerics.granularity import WHOLE, Block2D, Channel, Group, Tensor, Token
from quark.torch.config.type import ZeroPointType
from quark.torch.export import compressed_tensors as compressed
from quark.torch.export import custom_modes, gptq, layout, modelopt, vllm_reads, vllm_schemes
from quark.torch.quantization.config.config import (
    FP8E4M3PerGroupSpec,
    FP8E4M3PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
)
from quark.torch.quantization.config.config import QTensorConfig as Spec
from quark.torch.quantization.config.type import Dtype, QSchemeType

TENSOR, CHANNEL, GROUP, BLOCK = (
    QSchemeType.per_tensor,
    QSchemeType.per_channel,
    QSchemeType.per_group,
    QSchemeType.per_block,
)
GROUPS = {"qscheme": GROUP, "ch_axis": -1, "group_size": 32}
UINT4, INT4 = Spec(Dtype.uint4, symmetric=False, **GROUPS), Spec(Dtype.int4, **GROUPS)
FP8, FP8_DYNAMIC = (FP8E4M3PerTensorSpec(is_dynamic=on).to_quantization_spec() for on in (False, True))
INT8 = Spec(Dtype.int8, qscheme=TENSOR)


def of(**slots: Any) -> QLayerConfig:
    return QLayerConfig(**slots)


# ---- AWQ -------------------------------------------------------------------------------------------------------------

AWQ = {
    "uint4": (of(weight=UINT4), None),
    "int4": (of(weight=INT4), None),
    "axis 1": (of(weight=Spec(Dtype.int4, qscheme=GROUP, ch_axis=1, group_size=32)), None),
    "axis 0": (of(weight=Spec(Dtype.int4, qscheme=GROUP, ch_axis=0, group_size=32)), "only weights are quantized"),
    "int8": (of(weight=Spec(Dtype.int8, **GROUPS)), "int4 or uint4 per_group"),
    "channels": (of(weight=Spec(Dtype.int4, qscheme=CHANNEL, ch_axis=0)), "int4 or uint4 per_group"),
    "nothing": (of(), "int4 or uint4 per_group"),
    "inputs too": (of(weight=INT4, input_tensors=INT8), "only weights are quantized"),
    "outputs too": (of(weight=INT4, output_tensors=INT8), "only weights are quantized"),
    "biases too": (of(weight=INT4, bias=INT8), "only weights are quantized"),
    "two stages": (of(weight=[INT4, INT8]), "weight has 2 stages"),
}


@pytest.mark.parametrize("name", AWQ)
def test_what_awq_can_say(name: str) -> None:
    layer, refused = AWQ[name]
    config = QConfig(layer, exclude=["lm_head"])
    if refused is not None:
        with pytest.raises(ConfigError, match=refused):
            custom_modes.custom_config(config, "awq", {}, [])
        return
    found = custom_modes.custom_config(config, "awq", {"kept": 1}, [])
    assert found == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
        "pack_method": "reorder",
        "export": {"kept": 1},
    }
    back = custom_modes.from_custom(found)
    assert back.exclude == ["lm_head"] and back.global_quant_config.weight.group_size == 32
    assert back.global_quant_config.weight.dtype is Dtype.uint4 and not back.global_quant_config.weight.symmetric


MXFP4, MXFP4_DYNAMIC = (OCP_MXFP4Spec(-1, is_dynamic=on).to_quantization_spec() for on in (False, True))
STACKED = {
    "weights": (of(weight=MXFP4), None),
    "inputs too": (of(weight=MXFP4, input_tensors=MXFP4_DYNAMIC), "input_tensors quantized"),
    "biases too": (of(weight=MXFP4, bias=INT8), "bias quantized"),
    "int4": (of(weight=INT4), "the weight is int4"),
    "nothing": (of(), "the weight is float"),
    "two stages": (of(weight=[MXFP4, INT8]), r"mxfp4_even \+ int8"),
}


@pytest.mark.parametrize("name", STACKED)
def test_what_stacks_of_blocks_can_say(name: str) -> None:
    layer, refused = STACKED[name]
    if refused is not None:
        with pytest.raises(ConfigError, match=refused):
            custom_modes.custom_config(QConfig(layer), "mxfp4", {}, [])
        return
    found = custom_modes.custom_config(QConfig(layer), "mxfp4", {}, ["lm_head"])
    assert found == {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


@pytest.mark.parametrize("mode", ["awq", "fp8", "gptq", "modelopt", "mxfp4"])
@pytest.mark.parametrize("field", ["layer_quant_config", "layer_type_quant_config", "kv_cache_post_rope", "cache"])
def test_all_layers_are_alike(mode: str, field: str) -> None:
    weight = {"awq": INT4, "fp8": FP8, "gptq": INT4, "modelopt": FP8, "mxfp4": MXFP4}[mode]
    more: dict[str, Any] = {
        "layer_quant_config": {"layer_quant_config": {"a": of(weight=weight)}},
        "layer_type_quant_config": {"layer_type_quant_config": {nn.Linear: of(weight=weight)}},
        "kv_cache_post_rope": {
            "kv_cache_post_rope": True,
            "kv_cache_quant_config": {"*qkv_proj": of(output_tensors=FP8)},
        },
        "cache": {"kv_cache_quant_config": {"*k_proj": of(output_tensors=INT8)}},
    }[field]
    with pytest.raises(ConfigError):
        custom_modes.custom_config(QConfig(of(weight=weight), **more), mode, {}, [])


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"quant_method": "awq", "bits": 8, "group_size": 32}, "only bits=4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv", "group_size": 32}, "only bits=4"),
        ({"quant_method": "gptq"}, "is not read here"),
        ({"quant_method": "fp8", "activation_scheme": "other"}, "activation_scheme is None"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128], "activation_scheme": "dynamic"}, "two positive"),
        ({"quant_method": "fp8", "weight_block_size": [128], "activation_scheme": "dynamic"}, "two positive"),
        ({"quant_method": "fp8", "weight_block_size": [True, 128], "activation_scheme": "dynamic"}, "two positive"),
        ({"quant_method": "fp8", "weight_block_size": "128", "activation_scheme": "dynamic"}, "two positive"),
        ({"quant_method": "fp8", "weight_block_size": [128, 64], "activation_scheme": "static"}, "'dynamic' or None"),
        (
            {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic", "scale_fmt": "ue8m0"},
            "with float scales",
        ),
    ],
)
def test_what_is_not_read(entry: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        custom_modes.from_custom(entry)


# ---- FP8 -------------------------------------------------------------------------------------------------------------

BLOCKS_8 = Spec(Dtype.fp8_e4m3, qscheme=BLOCK, block_size=(1, 64), symmetric=True, is_dynamic=False)
BESIDE_BLOCKS = FP8E4M3PerGroupSpec(-1, 64, is_dynamic=True).to_quantization_spec()
FP8S: dict[str, tuple[QLayerConfig, dict[str, Any] | str]] = {
    "weights": (of(weight=FP8), {"activation_scheme": None}),
    "static": (of(weight=FP8, input_tensors=FP8), {"activation_scheme": "static"}),
    "dynamic": (of(weight=FP8, input_tensors=FP8_DYNAMIC), {"activation_scheme": "dynamic"}),
    "int8 inputs": (of(weight=FP8, input_tensors=INT8), "per_tensor, or weights per_block"),
    "int8 weights": (of(weight=INT8), "per_tensor, or weights per_block"),
    "channels": (of(weight=Spec(Dtype.fp8_e4m3, qscheme=CHANNEL, ch_axis=0)), "per_tensor, or weights per_block"),
    "outputs": (of(weight=FP8, output_tensors=FP8), "per_tensor, or weights per_block"),
    "biases": (of(weight=FP8, bias=FP8), "per_tensor, or weights per_block"),
    "inputs alone": (of(input_tensors=FP8), "per_tensor, or weights per_block"),
    "blocks": (of(weight=BLOCKS_8, input_tensors=BESIDE_BLOCKS), {"activation_scheme": "dynamic"}),
    "blocks alone": (of(weight=BLOCKS_8), "nothing else is quantized"),
    "blocks, one scale": (of(weight=BLOCKS_8, input_tensors=FP8_DYNAMIC), "nothing else is quantized"),
    "blocks, biases": (of(weight=BLOCKS_8, input_tensors=BESIDE_BLOCKS, bias=FP8), "nothing else is quantized"),
}


@pytest.mark.parametrize("name", FP8S)
def test_what_fp8_can_say(name: str) -> None:
    layer, expected = FP8S[name]
    config = QConfig(layer, exclude=["lm_head"])
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            custom_modes.custom_config(config, "fp8", {}, [])
        return
    found = custom_modes.custom_config(config, "fp8", {}, [])
    in_blocks = name == "blocks"
    assert found["activation_scheme"] == expected["activation_scheme"] and found["ignored_layers"] == ["lm_head"]
    assert found["weight_block_size"] == ([1, 64] if in_blocks else None)
    assert found.get("kv_cache_scheme") is None
    back = custom_modes.from_custom(found)
    assert back.exclude == ["lm_head"] and not back.kv_cache_quant_config
    for slot in ("weight", "input_tensors"):
        ours, theirs = getattr(layer, slot), getattr(back.global_quant_config, slot)
        assert (ours is None) == (theirs is None)
        assert ours is None or ours.to_stage() == theirs.to_stage()
    naming = custom_modes.naming_of(config, "fp8")
    assert naming == ("fp8 blocks" if in_blocks else "fp8")


@pytest.mark.parametrize(("cache", "fits"), [(FP8, True), (FP8_DYNAMIC, False), (INT8, False), (None, False)])
def test_caches_of_fp8(cache: Any, fits: bool) -> None:
    caches = {"*k_proj": of(output_tensors=FP8), "*v_proj": of(output_tensors=cache)}
    if not fits:
        with pytest.raises(QuarkError):
            custom_modes.custom_config(QConfig(of(weight=FP8), kv_cache_quant_config=caches), "fp8", {}, [])
        return
    config = QConfig(of(weight=FP8), kv_cache_quant_config=caches)
    found = custom_modes.custom_config(config, "fp8", {}, [])
    assert found["kv_cache_scheme"] == "static"
    assert set(custom_modes.from_custom(found).kv_cache_quant_config) == {"*k_proj", "*v_proj"}


# ---- GPTQ ------------------------------------------------------------------------------------------------------------


def plain(dtype: Dtype, **more: Any) -> Any:
    return Spec(dtype, **{"symmetric": not dtype.name.startswith("u"), **GROUPS, **more})


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        *((plain(Dtype[name]), True) for name in ("int2", "uint2", "int3", "int4", "uint4", "int8", "uint8")),
        (plain(Dtype.int16), False),
        (plain(Dtype.int4, ch_axis=1), True),
        (plain(Dtype.int4, ch_axis=0), False),
        (Spec(Dtype.int4, qscheme=CHANNEL, ch_axis=0), True),
        (Spec(Dtype.int4, qscheme=CHANNEL, ch_axis=1), False),
        (Spec(Dtype.int4, qscheme=TENSOR), False),
        (FP8, False),
        (None, False),
        ([INT4, INT8], False),
    ],
)
def test_weights_that_gptq_has_a_layout_for(weight: Any, expected: bool) -> None:
    assert gptq.fits(weight) == expected


def test_real_zero_points_have_no_place_in_gptq() -> None:
    kinds = [kind for kind in ZeroPointType if kind is not ZeroPointType.int32]
    assert kinds
    for kind in kinds:
        assert not gptq.fits(Spec(Dtype.uint4, symmetric=False, zero_point_type=kind, **GROUPS))


@pytest.mark.parametrize(
    ("bits", "rows", "columns", "fits"),
    [(4, 8, 64, True), (4, 9, 64, False), (4, 8, 60, False), (8, 4, 64, True), (3, 32, 64, True), (3, 16, 64, False)],
)
def test_words_are_full(bits: int, rows: int, columns: int, fits: bool) -> None:
    stage = plain(Dtype[f"int{bits}"], group_size=64).to_stage()
    made = layout.layout_of((stage,), (rows, columns), "order")
    if not fits:
        with pytest.raises(ConfigError, match="do not fill whole words"):
            gptq.gptq_form("fc.weight", made)  # type: ignore[arg-type]
        return
    groups = -(-columns // 64)
    assert gptq.gptq_form("fc.weight", made) == {  # type: ignore[arg-type]
        "fc.qweight": ((columns * bits // 32, rows), torch.int32),
        "fc.qzeros": ((groups, rows * bits // 32), torch.int32),
        "fc.scales": ((groups, rows), torch.float32),
        "fc.g_idx": ((columns,), torch.int32),
    }


# ---- ModelOpt --------------------------------------------------------------------------------------------------------

TOKEN = Spec(Dtype.fp8_e4m3, qscheme=CHANNEL, ch_axis=1, is_dynamic=True)
CHANNELS = Spec(Dtype.fp8_e4m3, qscheme=CHANNEL, ch_axis=0)
MODELOPT = {
    "FP8": of(weight=FP8, input_tensors=FP8),
    "FP8_PER_CHANNEL_PER_TOKEN": of(weight=CHANNELS, input_tensors=TOKEN),
    "dynamic": of(weight=FP8, input_tensors=FP8_DYNAMIC),
    "outputs": of(weight=FP8, input_tensors=FP8, output_tensors=FP8),
    "biases": of(weight=FP8, input_tensors=FP8, bias=FP8),
    "int8": of(weight=INT8, input_tensors=INT8),
    "weights": of(weight=FP8),
}


@pytest.mark.parametrize("name", MODELOPT)
@pytest.mark.parametrize("cached", [True, False])
def test_what_modelopt_calls_it(name: str, cached: bool) -> None:
    caches = {"*k_proj": of(output_tensors=FP8)} if cached else {}
    config = QConfig(MODELOPT[name], kv_cache_quant_config=caches)
    if not name.startswith("FP8"):
        with pytest.raises(ConfigError, match="ModelOpt's algorithms are"):
            modelopt.modelopt_config(config, [])
        return
    found = modelopt.modelopt_config(config, ["lm_head"])
    assert (found["quant_algo"], found["ignore"], "group_size" in found) == (name, ["lm_head"], False)
    assert found["kv_cache_scheme"] == ({"type": "float", "num_bits": 8, "dynamic": False} if cached else None)


@pytest.mark.parametrize(("name", "algorithm", "group"), [("nvfp4", "W4A16_NVFP4", 16), ("mxfp8_e4m3", None, None)])
def test_blocks_by_their_words(name: str, algorithm: str | None, group: int | None) -> None:
    stage = SimpleNamespace(format=BLOCKS[name], spec=SimpleNamespace(dynamic=False))
    assert modelopt.word(stage, False) == name  # type: ignore[arg-type]
    assert modelopt.ALGORITHMS.get((name, None, False)) == (None if algorithm is None else (algorithm, group))
    even = SimpleNamespace(format=BLOCKS["mxfp8_e4m3_even"])
    assert modelopt.word(even, True) == "mxfp8_e4m3"  # type: ignore[arg-type]
    row = SimpleNamespace(**{**vars(BLOCKS["nvfp4"]), "size": 32})
    assert isinstance(row.size, int)


@pytest.mark.parametrize(
    ("granularity", "activation", "expected"),
    [
        (Tensor(), True, "tensor"),
        (Tensor(), False, "tensor"),
        (Channel(0), False, "channel"),
        (Channel(0), True, "token"),
        (Token(), True, "token"),
        (Channel(1), False, str(Channel(1))),
    ],
)
def test_who_shares_a_scale(granularity: Any, activation: bool, expected: str) -> None:
    assert modelopt.scales(granularity, activation) == expected


# ---- compressed-tensors ----------------------------------------------------------------------------------------------


def part(row: Any, granularity: Any = None, symmetric: bool = True, dynamic: bool = False) -> Any:
    spec = SimpleNamespace(symmetric=symmetric, dynamic=dynamic, scale_rule="e4m3", narrow=True)
    return SimpleNamespace(stage=SimpleNamespace(format=row, spec=spec), granularity=granularity or Tensor())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "int") for name in ("int4", "int8", "uint4", "uint8")),
        ("fp8_e4m3", "float"),
        *((name, None) for name in ("int2", "int16", "fp8_e5m2", "fp4_e2m1")),
    ],
)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("weight", [True, False])
def test_elements_of_compressed_tensors(
    name: str, kind: str | None, symmetric: bool, dynamic: bool, weight: bool
) -> None:
    given = part(ELEMENTS[name], symmetric=symmetric, dynamic=dynamic)
    if kind is None:
        with pytest.raises(ConfigError, match=f"{name} is not a format of it"):
            compressed.arguments("fc", given, weight)
        return
    found = compressed.arguments("fc", given, weight)
    assert found == {
        "num_bits": ELEMENTS[name].bits,
        "type": kind,
        "symmetric": symmetric and not name.startswith("u"),
        "dynamic": dynamic and not weight,
        "strategy": "tensor",
        "observer_kwargs": {"quark": {"scale_rule": "e4m3", "narrow": True}},
    }


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [
        (Tensor(), {"strategy": "tensor"}),
        (Token(), {"strategy": "token"}),
        (Channel(0), {"strategy": "channel"}),
        (Channel(1), None),
        (Group(-1, 32), {"strategy": "group", "group_size": 32}),
        (Group(1, 32), {"strategy": "group", "group_size": 32}),
        (Group(-1, WHOLE), {"strategy": "channel"}),
        (Group(0, 32), None),
        (Block2D(1, 64), {"strategy": "block", "block_structure": [1, 64]}),
    ],
)
def test_strategies(granularity: Any, expected: dict[str, Any] | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="none of its strategies"):
            compressed.strategy("fc", part(ELEMENTS["int8"], granularity), weight=True)
        return
    assert compressed.strategy("fc", part(ELEMENTS["int8"], granularity), weight=True) == expected
    values = torch.zeros(4, 128)
    shapes = {"tensor": (1,), "token": (4, 1), "channel": (4, 1), "group": (4, 4), "block": (4, 2)}
    assert compressed.scale_shape(part(None, granularity), values) == shapes[expected["strategy"]]


@pytest.mark.parametrize(
    ("axis", "weight", "fits"),
    [(-1, True, True), (-1, False, True), (1, True, True), (1, False, False), (0, True, False)],
)
def test_blocks_run_along_the_last_axis(axis: int, weight: bool, fits: bool) -> None:
    given = part(BLOCKS["mxfp4"], Group(axis, 32))
    if not fits:
        with pytest.raises(ConfigError, match="blocks run along axis"):
            compressed.arguments("fc", given, weight)
        return
    found = compressed.arguments("fc", given, weight)
    assert (found["num_bits"], found["type"], found["symmetric"], found["group_size"]) == (4, "float", True, 32)
    assert (found["strategy"], found["scale_dtype"], found["dynamic"]) == ("group", torch.uint8, not weight)


@pytest.mark.parametrize("weight", [True, False])
def test_nvfp4_and_blocks_that_are_no_format(weight: bool) -> None:
    found = compressed.arguments("fc", part(BLOCKS["nvfp4"], Group(-1, 16)), weight)
    assert (found["strategy"], found["scale_dtype"], found["group_size"]) == ("tensor_group", torch.float8_e4m3fn, 16)
    assert found["dynamic"] == (False if weight else "local")
    for name in ("mxint8", "mx6", "bfp16", "amdfp4"):
        with pytest.raises(ConfigError, match=f"blocks of {name} are not a format"):
            compressed.arguments("fc", part(BLOCKS[name], Group(-1, BLOCKS[name].size)), weight)


def test_zero_points_among_signed_codes() -> None:
    zero = torch.tensor([0, 3, 8, 15], dtype=torch.int32)
    assert compressed.signed(part(ELEMENTS["int4"]), zero).tolist() == [0, 3, 8, 15]
    assert compressed.signed(part(ELEMENTS["uint4"]), zero).tolist() == [-8, -5, 0, 7]
    assert compressed.signed(part(ELEMENTS["uint8"]), zero).tolist() == [-128, -125, -120, -113]


# ---- vLLM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "inputs", "expected"),
    [
        (INT8, INT8, True),
        (INT8, None, False),
        (FP8, FP8, False),
        (INT8, FP8, False),
        (Spec(Dtype.int8, qscheme=CHANNEL, ch_axis=0), INT8, False),
        ([INT8, INT8], INT8, False),
    ],
)
def test_integers_with_one_scale_each(weight: Any, inputs: Any, expected: bool) -> None:
    layer = of(weight=weight, input_tensors=inputs)
    assert vllm_schemes.has_integer_tensors(layer.stages("weight"), layer.stages("input_tensors")) == expected


@pytest.mark.parametrize("format", ["quark", "compressed-tensors"])
@pytest.mark.parametrize(("layer", "fused"), [("k_proj", False), ("qkv_proj", True), ("up_proj", False)])
@pytest.mark.parametrize("behind", [False, True])
def test_caches_that_vllm_has_no_place_for(format: str, behind: bool, layer: str, fused: bool) -> None:
    caches = {f"*{layer}": of(output_tensors=FP8)} if layer != "up_proj" else {}
    config = QConfig(of(weight=FP8), kv_cache_quant_config=caches, kv_cache_post_rope=behind and bool(caches))
    model = nn.ModuleDict({"self_attn": nn.ModuleDict({layer: nn.Linear(8, 8)})})
    with pytest.raises(ConfigError, match=r"'self_attn\.qkv_proj' makes together") if fused else nullcontext():
        vllm_reads.check_for_vllm(model, config, format)


class BloomForCausalLM(nn.Module):
    """As vLLM's class is called."""


def test_layers_that_vllm_holds_in_float() -> None:
    mixer = nn.ModuleDict({name: nn.Linear(8, 8) for name in vllm_reads.SCANNED})
    model, plain = nn.ModuleDict({"0": nn.ModuleDict({"mixer": mixer})}), nn.ModuleDict({"in_proj": nn.Linear(8, 8)})
    vllm_reads.check_for_vllm(model, QConfig(of(weight=FP8)), "quark")  # no scan
    mixer.A_log = nn.Parameter(torch.zeros(8))
    told = r"'0.mixer.in_proj' is quantized, which vLLM holds in float .* --exclude '\*.mixer.\*'"
    with pytest.raises(ConfigError, match=told):
        vllm_reads.check_for_vllm(model, QConfig(of(weight=FP8)), "quark")
    vllm_reads.check_for_vllm(model, QConfig(of(weight=FP8), exclude=["*.mixer.*"]), "quark")
    vllm_reads.check_for_vllm(plain, QConfig(of(weight=FP8)), "quark")


def test_layers_that_vllm_packs_anew() -> None:
    for kind, told in ((BloomForCausalLM, r"--exclude '\*query_key_value'"), (nn.Module, None)):
        model = kind()
        model.query_key_value = nn.Linear(8, 8)
        with pytest.raises(ConfigError, match=told) if told else nullcontext():
            vllm_reads.check_for_vllm(model, QConfig(of(weight=FP8)), "quark")
        vllm_reads.check_for_vllm(model, QConfig(of(weight=FP8), exclude=["*query_key_value"]), "quark")


TURNED = {  # per format: how the rows of a query are refused, that vLLM turns as if there were only a weight
    "rows": (Spec(Dtype.fp8_e4m3, qscheme=CHANNEL, ch_axis=0), {}),
    "eight bits": (Spec(Dtype.int8, qscheme=CHANNEL, ch_axis=0), {}),
    "words": (INT4, dict.fromkeys(["quark", "awq", "gptq"], "are packed along the outputs")),
    "zero points": (UINT4, dict.fromkeys(["quark", "awq", "gptq", "compressed-tensors"], "have zero points")),
    "wide zero points": (
        Spec(Dtype.uint8, symmetric=False, qscheme=CHANNEL, ch_axis=0),
        dict.fromkeys(["quark", "awq", "gptq", "compressed-tensors"], "have zero points"),
    ),
    "blocks": (
        Spec(Dtype.fp8_e4m3, qscheme=BLOCK, block_size=[8, 8]),
        dict.fromkeys(["quark", "awq", "gptq", "compressed-tensors"], "have scales of blocks"),
    ),
    "blocks, then codes": (
        [Spec(Dtype.fp8_e4m3, qscheme=BLOCK, block_size=[8, 8]), FP8],
        dict.fromkeys(["quark", "awq", "gptq", "compressed-tensors"], "have scales of blocks"),
    ),
    "two stages": ([FP8, INT4], dict.fromkeys(["quark", "awq", "gptq"], "are packed along the outputs")),
}


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("format", ["quark", "awq", "gptq", "compressed-tensors"])
def test_rows_that_vllm_turns(name: str, format: str) -> None:
    weight, refused = TURNED[name]
    told = refused.get(format)
    for kind in ("Llama4ForCausalLM", "Llama4ForConditionalGeneration", "LlamaForCausalLM"):
        for layer in ("a.q_proj", "a.k_proj", "a.v_proj"):
            model = type(kind, (nn.Module,), {})()
            model.a = nn.ModuleDict({layer[2:]: nn.Linear(32, 32)})
            wrong = told if kind.startswith("Llama4") and "v_proj" not in layer else None
            expected = (
                pytest.raises(ConfigError, match=f"the rows of '{layer}' .* {wrong};") if wrong else nullcontext()
            )
            with expected:
                vllm_reads.check_for_vllm(model, QConfig(of(weight=weight)), format)
            vllm_reads.check_for_vllm(model, QConfig(of(weight=weight), exclude=["*q_proj", "*k_proj"]), format)


WORDS = [(12, INT4, "quark"), (12, INT4, "compressed-tensors"), (16, INT4, "quark"), (12, FP8, "quark")]


@pytest.mark.parametrize(("rows", "weight", "format"), [*WORDS, (12, INT8, "quark")])
def test_outputs_that_fill_no_words(rows: int, weight: Any, format: str) -> None:
    config, refused = QConfig(of(weight=weight)), (rows, weight, format) == (12, INT4, "quark")
    with pytest.raises(ConfigError, match="'a' has 12 outputs of 4 bits") if refused else nullcontext():
        vllm_reads.check_for_vllm(nn.ModuleDict({"a": nn.Linear(32, rows)}), config, format)


def test_classes_without_scales_of_caches() -> None:
    caches = {"*k_proj": of(output_tensors=FP8)}
    for name, told in (("JambaForCausalLM", "drops '.self_attn'"), ("LlamaForCausalLM", None)):
        model = type(name, (nn.Module,), {})()
        model.k_proj = nn.Linear(8, 8)
        config = QConfig(of(weight=FP8), kv_cache_quant_config=caches)
        with pytest.raises(ConfigError, match=told) if told else nullcontext():
            vllm_reads.check_for_vllm(model, config, "compressed-tensors")


@pytest.mark.parametrize("across", [True, False])
def test_caches_of_encoder_decoders(across: bool) -> None:
    model = nn.ModuleDict({"self_attn": nn.ModuleDict({"k_proj": nn.Linear(8, 8)})})
    model.config = SimpleNamespace(is_encoder_decoder=across)  # type: ignore[assignment]
    config = QConfig(of(weight=FP8), kv_cache_quant_config={"*k_proj": of(output_tensors=FP8)})
    with pytest.raises(ConfigError, match="encoder and decoder") if across else nullcontext():
        vllm_reads.check_for_vllm(model, config, "quark")


@pytest.mark.parametrize(
    ("format", "told"), [("quark", "self_attn.wk', which is cached"), ("compressed-tensors", None)]
)
def test_caches_by_other_names(format: str, told: str | None) -> None:
    model = nn.ModuleDict({"self_attn": nn.ModuleDict({"wk": nn.Linear(8, 8), "k_proj": nn.Linear(8, 8)})})
    for layer in ("wk", "k_proj"):
        config = QConfig(of(weight=FP8), kv_cache_quant_config={f"*{layer}": of(output_tensors=FP8)})
        with pytest.raises(ConfigError, match=told) if told and layer == "wk" else nullcontext():
            vllm_reads.check_for_vllm(model, config, format)


@pytest.mark.parametrize(
    ("name", "for_vllm"),
    [
        ("model.layers.0.self_attn.k_proj.output_scale", "model.layers.0.self_attn.k_scale"),
        ("model.layers.0.self_attn.v_proj.output_scale", "model.layers.0.self_attn.v_scale"),
        ("transformer.h.3.attn.v_proj.output_scale", "transformer.h.3.attn.attn.v_scale"),  # vLLM adds no second .attn
    ],
)
def test_names_of_the_scales_of_caches_for_vllm(name: str, for_vllm: str) -> None:
    assert vllm_reads.cache_scale_name(name) == for_vllm
    assert vllm_reads.cache_scale_name(for_vllm.replace(".attn.attn.", ".attn.")) == for_vllm  # of compressed-tensors
    assert custom_modes.quark_name(for_vllm, "quark") == name
    for other in ("model.layers.0.self_attn.k_proj.weight_scale", "model.layers.0.self_attn.q_proj.output_scale"):
        assert vllm_reads.cache_scale_name(other) == other == custom_modes.quark_name(other, "quark")


# ---- stored forms ----------------------------------------------------------------------------------------------------


def test_which_scales_are_stored_as_codes() -> None:
    def stage(rule: str) -> Any:
        return SimpleNamespace(spec=SimpleNamespace(scale_rule=rule))

    for rule in ("float32", "power_of_two", "int16"):
        assert layout.scale_element(stage(rule)) is None and layout.scale_dtype(stage(rule)) is torch.float32
        scale = torch.tensor([0.5, 3.0])
        assert torch.equal(layout.get_scale(layout.put_scale(scale, stage(rule)), stage(rule)), scale)
    kinds = {"float16": torch.float16, "bfloat16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
    for rule, dtype in kinds.items():
        assert layout.scale_dtype(stage(rule)) is dtype
        kept = layout.put_scale(torch.tensor([0.5, 3.0]), stage(rule))
        assert kept.dtype is dtype and layout.get_scale(kept, stage(rule)).tolist() == [0.5, 3.0]


def test_a_quotient_gives_its_product_back() -> None:
    generator = torch.Generator().manual_seed(0)
    factor = torch.rand(5000, generator=generator) + 0.1
    product = factor * (torch.rand(5000, generator=generator) + 0.1)
    assert torch.equal(layout.quotient(product, factor) * factor, product)


def test_a_scale_over_the_blocks_and_their_own_belong_together() -> None:
    for changes in ({"tensor_scale": False}, {"rule": "e5m3"}, {"size": 32}):
        row = replace(BLOCKS["nvfp4"], **changes)
        with pytest.raises(ConfigError, match="are not a format"):
            compressed.block_arguments("fc", row, True)
        plain = not row.tensor_scale
        assert modelopt.word(part(row).stage, False) == (
            "nvfp4" if plain else f"nvfp4 of {row.size} under {row.rule} scales"
        )


@pytest.mark.parametrize("fused", [True, False])
def test_values_of_a_fused_projection_have_a_name_of_their_own(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from quark.torch.export import state

    projections = {"k": "kv", "v": "kv"} if fused else {"k": "k_proj", "v": "v_proj"}
    kept = SimpleNamespace(stage=SimpleNamespace(calibrated=True, format=SimpleNamespace(has_zero_point=True)))
    cache = SimpleNamespace(projections=projections, _modules={"k": kept, "v": kept})
    monkeypatch.setattr(state, "cache_quantizers", lambda model: [("", cache)])
    monkeypatch.setattr(state, "parts", lambda quantizer: [quantizer])
    found = [(name, kind) for name, _, kind in state.attention_parameters(nn.Module())]
    first, second = ("kv.output", "kv.output") if fused else ("k_proj.output", "v_proj.output")
    last = "_2" if fused else ""
    assert found == [
        (f"{first}_scale", "scale"),
        (f"{first}_zero_point", "zero_point"),
        (f"{second}_scale{last}", "scale"),
        (f"{second}_zero_point{last}", "zero_point"),
    ]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "granularity", ["tensor", "channel", "other channel", "32", "64", "48", "120", "long", "rows", "first of two"]
)
def test_weights_that_gguf_has_blocks_for(bits: int, granularity: str) -> None:
    from quark.torch.export.gguf_types import fits

    given: dict[str, Any] = {
        "tensor": {"qscheme": TENSOR},
        "channel": {"qscheme": CHANNEL, "ch_axis": 0},
        "other channel": {"qscheme": CHANNEL, "ch_axis": 1},
        "32": GROUPS,
        "64": {**GROUPS, "group_size": 64},
        "48": {**GROUPS, "group_size": 48},
        "120": {**GROUPS, "group_size": 120},
        "first of two": {"qscheme": CHANNEL, "ch_axis": -2},
        "long": {**GROUPS, "group_size": 144},
        "rows": {**GROUPS, "ch_axis": 0},
    }[granularity]
    whole = granularity in ("tensor", "channel", "first of two", "32", "64", "long")
    for name, wide in ((f"int{bits}", False), (f"uint{bits}", bits == 8)):
        if name not in Dtype.__members__:
            continue
        for symmetric in (True, False):
            stage = Spec(Dtype[name], symmetric=symmetric, **given).to_stage()
            made: Any = layout.layout_of((stage,), (96, 144), "order")
            expected = whole and (bits < 8 or (symmetric and not wide))
            assert fits(made) == expected, (name, symmetric)


@pytest.mark.parametrize("format", ["quark", "compressed-tensors", "modelopt"])
@pytest.mark.parametrize("kind", [vllm_schemes.REMAPPED[0], "MixtralForCausalLM"])
@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("inputs", [["nvfp4"], ["other"], [], ["other", "nvfp4"]], ids=str)
@pytest.mark.parametrize("floats", [True, False])
@pytest.mark.parametrize("turns", [True, False, "with biases"])
def test_experts_that_vllm_does_not_load(
    format: str, kind: str, integers: bool, inputs: list[str], floats: bool, turns: bool | str, monkeypatch: Any
) -> None:
    facts = {"has_gate": True, "is_concatenated": not turns}
    monkeypatch.setattr(vllm_schemes, "fact", lambda module, name: facts[name])
    monkeypatch.setattr(vllm_schemes, "takes_turns", lambda module: turns == "with biases")
    rows = (one._replace(holds=lambda *stages: integers) for one in vllm_schemes.REFUSED)
    monkeypatch.setattr(vllm_schemes, "REFUSED", tuple(rows))
    monkeypatch.setattr(vllm_schemes, "is_nvfp4", "nvfp4".__eq__)
    monkeypatch.setattr(vllm_schemes, "runs_on", lambda *stages: None)
    own: Any = {"experts.0.up_proj": ((), ()) if floats else (("weight",), tuple(inputs))}
    mapped, packed = kind in vllm_schemes.REMAPPED, format == "compressed-tensors"
    if (format, turns) == ("quark", "with biases"):
        told = None  # check_in_turn says more
    elif turns and not (format != "quark" and floats):
        told = "whose rows take turns"
    elif floats or not (integers or "nvfp4" in inputs):
        told = None
    elif packed:
        told = "with integers of one scale" if integers else "the scales of the inputs of 'experts'" if mapped else None
    else:
        told = {"quark": "no kernel to run them", "modelopt": "a scale per row"}[format] if integers else None
    with pytest.raises(ConfigError, match=told) if told else nullcontext():
        vllm_schemes.check_experts("experts", nn.Linear(2, 2), own, format, kind)
