"""The small questions behind what files for vLLM have otherwise: which scales it shares, rounds again, or computes."""

from __future__ import annotations

import itertools
import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.consumers import tiny
from torch import nn

from quark.errors import ConfigError
from quark.torch import ModelQuantizer
from quark.torch.config.schemes import scheme as known_scheme
from quark.torch.config.type import Dtype, QSchemeType, ScaleType
from quark.torch.export import vllm_reads, vllm_schemes
from quark.torch.export.before_work import apart
from quark.torch.export.described import told_layers
from quark.torch.export.original import names_of
from quark.torch.quantization.config.config import (
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
)
from quark.torch.quantization.config.config import QTensorConfig as Spec

FP8, ROWS, INT8 = (
    one.to_quantization_spec() for one in (FP8E4M3PerTensorSpec(), FP8E4M3PerChannelSpec(0), Int8PerTensorSpec())
)
DYNAMIC = {"qscheme": QSchemeType.per_channel, "ch_axis": 1, "is_dynamic": True}
GROUP = {"qscheme": QSchemeType.per_group, "ch_axis": -1, "group_size": 32}


def staged(weight: Any, inputs: Any) -> Any:
    """The stages of weight and inputs."""
    layer = QLayerConfig(weight=weight, input_tensors=inputs)
    return layer.stages("weight"), layer.stages("input_tensors")


@pytest.mark.parametrize(("dtype", "dynamic", "symmetric", "narrow"), [
    (Dtype.int8, True, True, None), (Dtype.uint8, True, True, None), (Dtype.int8, False, True, None),
    (Dtype.int8, True, False, None), (Dtype.int8, True, True, False), (Dtype.int8, True, True, True),
])  # fmt: skip
def test_int8_inputs_with_a_scale_per_token_use_127_codes_on_either_side(
    dtype: Dtype, dynamic: bool, symmetric: bool, narrow: bool | None
) -> None:
    inputs = Spec(dtype, **{**DYNAMIC, "is_dynamic": dynamic}, symmetric=symmetric, narrow=narrow)
    layer = QLayerConfig(weight=INT8, input_tensors=inputs)
    changed = (dtype, dynamic, symmetric, narrow) == (Dtype.int8, True, True, None)
    assert vllm_reads.as_computed(layer).input_tensors.narrow == (True if changed else narrow)
    assert vllm_reads.as_computed(layer).weight == INT8
    for alone in (QLayerConfig(weight=INT8), QLayerConfig(input_tensors=inputs), QLayerConfig()):
        assert vllm_reads.as_computed(alone) == alone


@pytest.mark.parametrize(
    ("scheme", "machine"),
    [("int8_wo_per_channel", "NVIDIA GPUs"), ("int4_wo_per_channel", "NVIDIA GPUs"), ("int4_int8_128", "Arm CPUs"),
     ("int4_wo_32", None), ("ptpc_int8", None), ("int8", None), ("fp8", None), ("ptpc_fp8", None)],
)  # fmt: skip
def test_machines_that_run_experts_in_compressed_tensors(
    scheme: str, machine: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM has one kernel for channels of integers (Marlin), and one for int4 beside int8 inputs (CPUExpertsInt4)."""
    known = known_scheme(scheme)
    found = vllm_schemes.runs_on(*staged(known.weight, known.input_tensors))
    assert found is None if machine is None else str(found).startswith(machine)
    experts, config = apart(tiny.tiny_model("mixtral", "MixtralForCausalLM")), QConfig(known, exclude=["*.gate"])
    told = scheme != "int8"  # which is refused
    with nullcontext() if told else pytest.raises(ConfigError), caplog.at_level(logging.WARNING):
        vllm_schemes.check_schemes(experts, config, "compressed-tensors")
    assert (" in compressed-tensors on " in caplog.text) is (machine is not None)


@pytest.mark.parametrize(("kind", "format", "floats", "refused"), [
    ("MixtralForCausalLM", "gptq_v2", [], True), ("MixtralForCausalLM", "gptq_v2", ["*.experts.*"], False),
    ("MixtralForCausalLM", "gptq", [], False), ("LlamaForCausalLM", "gptq_v2", [], False),
])  # fmt: skip
def test_zero_points_of_experts_are_lowered_for_a_kernel_that_adds_one(
    kind: str, format: str, floats: list[str], refused: bool
) -> None:
    """The one for CPUs, which takes those of the file; all others make their own of symmetric codes."""
    model = apart(tiny.tiny_model(kind.removesuffix("ForCausalLM").lower(), kind))
    config = QConfig(known_scheme("int4_wo_32"), exclude=["lm_head", "*.gate", *floats])
    with pytest.raises(ConfigError, match=r"adds one .*--format gptq has") if refused else nullcontext():
        vllm_schemes.check_schemes(model, config, format)


MIXED: dict[str, tuple[dict[str, str], list[str], str | None]] = {  # of ptpc_fp8: layers, floats, what is said
    "experts": ({"*.experts.*": "int4_wo_32"}, [], None),
    "a layer": ({"*layers.0.*": "mxfp4"}, [], None),
    "float experts of a layer": ({}, ["*layers.0.*experts*"], None),
    "an expert": (
        {"*.experts.1.*": "mxfp4"},
        [],
        r"all experts of 'model.layers.0.mlp.experts'.*'.*experts.1.gate_proj'",
    ),
    "a float expert": ({}, ["*.experts.1.*"], r"all experts of .* or none"),
    "a projection": ({"*down_proj": "mxfp4"}, [], r"all experts of .*'.*experts.0.down_proj' has another"),
    "values": ({"*v_proj": "mxfp4"}, [], r"'.*q_proj' and '.*v_proj' as one layer.*'\*k_proj'"),
    "inputs of values": (
        {"*v_proj": "mxfp4_weight_only", "*[qk]_proj": "mxfp4"},
        [],
        r"'.*q_proj' and '.*v_proj' as one",
    ),
    "float keys": ({}, ["*k_proj"], r"'.*q_proj' and '.*k_proj' as one layer"),
    "a name without a star": ({"model.layers.?.self_attn.o_proj": "mxfp4"}, [], r"for the scheme of '.*o_proj' by the"),
}


@pytest.mark.parametrize("format", ["quark", "compressed-tensors"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("mix", MIXED)
def test_what_vllm_reads_as_one_has_one_scheme_that_it_finds(mix: str, kind: str, format: str) -> None:
    """vLLM's judge read what passes here right, and broke off at the rest, or took a float expert for FP8."""
    layers, floats, why = MIXED[mix]
    model = tiny.tiny_model(kind, dict(tiny.model_types())[kind])
    given = {glob: known_scheme(name) for glob, name in layers.items()}
    config = QConfig(known_scheme("ptpc_fp8"), layer_quant_config=given, exclude=["lm_head", "*.gate", *floats])
    if mix == "a name without a star" and format != "quark":
        why = None
    with pytest.raises(ConfigError, match=f"^vLLM .*{why}") if why else nullcontext():
        vllm_schemes.check_schemes(apart(model), config, format)
    path = "block_sparse_moe" if kind == "mixtral" else "mlp"
    told = told_layers(config, apart(model), names_of(model))
    stacks = [f"model.layers.{number}.{path}.experts*" for number in (0, 1)] if mix == "experts" else []
    assert [name for name in told if name.endswith("experts*")] == stacks  # by which vLLM finds it


@pytest.mark.parametrize("rule", [None, "float32"])
@pytest.mark.parametrize("inputs", [Dtype.fp8_e4m3, Dtype.fp8_e5m2])
@pytest.mark.parametrize("dtype", [Dtype.int4, Dtype.uint4])
def test_scales_of_int4_beside_fp8_are_fp8_under_a_factor_per_output(
    dtype: Dtype, inputs: Dtype, rule: str | None
) -> None:
    for shared in (GROUP, {"qscheme": QSchemeType.per_channel, "ch_axis": 0}):
        weight = Spec(dtype, **shared, symmetric=True, scale_type=ScaleType.float32, scale_rule=rule)
        layer = QLayerConfig(weight=weight, input_tensors=Spec(inputs, qscheme=QSchemeType.per_tensor))
        found = vllm_reads.as_computed(layer).weight
        changed = (dtype, inputs, rule) == (Dtype.int4, Dtype.fp8_e4m3, None) and shared is GROUP
        expected = ("e4m3_of_row", None) if changed else (rule, weight.scale_type)
        assert (found.scale_rule, found.scale_type) == expected


@pytest.mark.parametrize("where", ["global", "a layer", "a type"])
@pytest.mark.parametrize(("weight", "rounded"), [(FP8, True), (ROWS, False), (INT8, False), (None, False)])
def test_fp8_weights_of_one_scale_are_rounded_again(weight: Any, rounded: bool, where: str) -> None:
    own, plain = QLayerConfig(weight=weight), QLayerConfig(weight=INT8)
    config = {
        "global": QConfig(own, layer_quant_config={"*a": plain}),
        "a layer": QConfig(plain, layer_quant_config={"*a": plain, "*b": own}),
        "a type": QConfig(plain, layer_type_quant_config={nn.Embedding: own}),
    }[where]
    assert vllm_reads.is_rounded(config) is rounded
    assert vllm_reads.is_rounded(QConfig(QLayerConfig(weight=INT8, input_tensors=FP8))) is False
    found = vllm_reads.read_by_vllm(config, torch.bfloat16)
    added = [[str(name) for name in one] for one in found.shared_scale_groups]
    assert added == ([list(one) for one in vllm_reads.READ_AS_ONE] if rounded else [])
    assert found.sync_moe_expert_input_amax is True


NAMES = ["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj", "b.up_proj"]


@pytest.mark.parametrize("program", [None, "vllm", "transformers"])
@pytest.mark.parametrize(("names", "groups", "told"), [
    (NAMES, [], True), (NAMES[1:], [], True), (NAMES[2:], [], False), (["a.q_proj", "b.k_proj"], [], False),
    (["a.gate_proj", "a.up_proj"], [], True), (["a.up_proj", "b.up_proj"], [], False), ([], [], False),
    (NAMES, [["*q_proj", "*k_proj", "*v_proj"]], False), (NAMES, [["*q_proj", "*k_proj"]], True),
    (NAMES, [["*o_proj"], ["*.?_proj"]], False),
])  # fmt: skip
def test_a_warning_where_siblings_that_are_read_as_one_have_scales_of_their_own(
    names: list[str], groups: list[list[str]], told: bool, program: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for weight in (FP8, ROWS):
            config = QConfig(QLayerConfig(weight=weight), shared_scale_groups=groups)
            vllm_reads.warn_of_rounding(names, config, "fp8", program)
    assert len(caplog.records) == (told and program != "transformers")


def test_names_of_one_shared_group() -> None:
    groups = [["*.a", "*.b"], ["*.b", "*.c", "d*"]]
    config = QConfig(QLayerConfig(weight=FP8), shared_scale_groups=groups)
    found = {names: vllm_reads.is_shared(set(names), config) for names in itertools.combinations("abcd", 2)}
    assert {names for names, shared in found.items() if shared} == {("a", "b"), ("b", "c"), ("b", "d"), ("c", "d")}


@pytest.mark.parametrize(("weight", "expected"), [(ROWS, True), (FP8, False), (INT8, False), (None, False)])
def test_fp8_with_a_scale_per_row(weight: Any, expected: bool) -> None:
    assert vllm_schemes.has_rows_of_fp8(*staged(weight, FP8)) is expected


@pytest.mark.parametrize(("inputs", "expected"), [
    (INT8, True), (FP8, False), (Spec(Dtype.int8, **DYNAMIC), False), (None, False),
])  # fmt: skip
def test_integer_inputs_whose_scales_are_known(inputs: Any, expected: bool) -> None:
    assert vllm_schemes.has_static_integers(*staged(INT8, inputs)) is expected
    assert vllm_schemes.has_integer_tensors(*staged(INT8, inputs)) is expected
    assert vllm_schemes.has_integer_tensors(*staged(ROWS, inputs)) is False


@pytest.mark.parametrize(("inputs", "expected"), [
    (Spec(Dtype.int4, **GROUP, is_dynamic=True), True), (Spec(Dtype.int8, **DYNAMIC), False), (INT8, False),
    (Spec(Dtype.fp8_e4m3, **GROUP, is_dynamic=True), False), (None, False),
])  # fmt: skip
def test_integer_inputs_of_a_scale_per_group(inputs: Any, expected: bool) -> None:
    assert vllm_schemes.has_integer_groups(*staged(ROWS, inputs)) is expected


@pytest.mark.parametrize("missing", [None, "A_log", *vllm_reads.SCANNED])
def test_a_selective_scan_has_all_of_its_projections(missing: str | None) -> None:
    module = nn.ModuleDict({name: nn.Linear(2, 2) for name in vllm_reads.SCANNED if name != missing})
    if missing != "A_log":
        module.A_log = nn.Parameter()
    assert vllm_reads.is_selective_scan(module) is (missing is None)


@pytest.mark.parametrize("symmetric", [(True,), (False,), (True, True), (True, False), (False, True)])
def test_one_stage_with_zero_points_is_not_turned(symmetric: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [SimpleNamespace(spec=SimpleNamespace(symmetric=one, row=None, granularity=None)) for one in symmetric]
    monkeypatch.setattr(vllm_reads, "find_candidates", lambda model: [SimpleNamespace(name="layers.0.q_proj")])
    monkeypatch.setattr(vllm_reads, "choose_all", lambda layer, config: (SimpleNamespace(stages=lambda slot: stages),))
    given: Any = (None, None, "compressed-tensors")
    with nullcontext() if all(symmetric) else pytest.raises(ConfigError, match="not where they have zero points"):
        vllm_reads.check_turned(*given)


class Networks(nn.Module):
    """Layers that vLLM makes one of, layers that it does not, and an expert."""

    def __init__(self) -> None:
        super().__init__()
        experts = nn.ModuleList([nn.ModuleDict({"gate_proj": nn.Linear(64, 32, bias=False)})])
        names = ("q_proj", "up_proj", "qkv_proj", "o_proj")
        layers = {name: nn.Linear(64, 32, bias=False) for name in names}
        self.layer = nn.ModuleDict({**layers, "experts": experts})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [layer(x) for layer in self.layer.values() if isinstance(layer, nn.Linear)]
        return torch.cat([*outputs, self.layer["experts"][0]["gate_proj"](x)], -1)  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("asked", [None, "*q_proj", "layer.o_proj"])
def test_fp8_inputs_of_mxfp4_are_divided_as_vllm_does(asked: str | None, dtype: torch.dtype) -> None:
    """QuarkW4A8_MXFP4_FP8: (x / scale).to(fp8).to(type) * scale; a scale without axes does not widen x."""
    torch.manual_seed(0)
    own = QLayerConfig(weight=OCP_MXFP4Spec(-1, False).to_quantization_spec(), input_tensors=FP8)
    config = vllm_reads.read_by_vllm(QConfig(own, layer_quant_config={asked: own} if asked else {}), dtype)
    x = torch.randn(64, 64).to(dtype)
    model = ModelQuantizer(config).quantize_model(Networks().to(dtype).eval(), [x])
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        fused = "experts" not in name and not name.endswith("o_proj")
        scale: Any = layer.input_quantizer.scale.float().reshape(() if fused else (1,))
        wanted = ((x / scale).to(torch.float8_e4m3fn).to(dtype) * scale).to(dtype)
        assert torch.equal(layer.input_quantizer(x), wanted), name


@pytest.mark.parametrize("weight", [OCP_MXFP4Spec(-1, False).to_quantization_spec(), ROWS])
@pytest.mark.parametrize(("form", "program"), [("quark", None), ("quark", "vllm"), ("awq", None)])
def test_a_warning_where_vllm_would_divide_otherwise(
    weight: Any, form: str, program: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        vllm_reads.warn_of_rounding([], QConfig(QLayerConfig(weight=weight, input_tensors=FP8)), form, program)
    assert len(caplog.records) == ((form, program) == ("quark", None) and weight is not ROWS)
