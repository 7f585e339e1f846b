"""A number format is one row: made-up ones, registered by the one public call, work everywhere; ml_dtypes judges."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
import torch
from tests.onnx_flow import models
from tests.torch_flow.export.networks import IDS, llama, logits
from torch import nn

import quark
import quark.onnx as q
from quark.config.file_formats import chosen_format
from quark.errors import ConfigError
from quark.numerics.elements import Float, Int
from quark.numerics.formats import FORMATS, Block, get_format
from quark.onnx.describe import describe
from quark.onnx.quantization.config.data_type import data_types
from quark.operators import OPERATORS
from quark.torch import LLMTemplate, ModelQuantizer, export_onnx, export_safetensors, import_model_from_safetensors
from quark.torch.config.schemes import scheme, scheme_names
from quark.torch.export import vllm_reads
from quark.torch.export.before_work import check_before_work
from quark.torch.files import quantize_checkpoint
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config.type import Dtype
from quark.torch.search import search
from quark.torch.sensitivity import TorchSearchGoal

RNG = np.random.default_rng(29)
X = (RNG.normal(size=(6, 40)) ** 3).astype(np.float32)
W = (RNG.normal(size=(40, 8)) ** 3).astype(np.float32)
ELEMENT = Float("fp8_e3m4", 3, 4, 15.5, has_infinity=True, has_nan=True)
BLOCK = Block("mxfp8_e3m4", ELEMENT, 32, "e8m0_even")
WHOLE = Int("int7", 7)


@pytest.fixture
def rows() -> Iterator[None]:
    for row in (ELEMENT, BLOCK, WHOLE):
        quark.register_format(row)
    yield
    for row in (BLOCK, ELEMENT, WHOLE):
        quark.unregister_format(row.name)


def small(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    """``x`` through the float8_e3m4 of ml_dtypes, under amax / 15.5 of all or of each index of ``axis``."""
    axes = None if axis is None else tuple(k for k in range(x.ndim) if k != axis)
    scale = (np.abs(x).max(axis=axes, keepdims=axis is not None) / np.float32(15.5)).astype(np.float32)
    return np.clip(x / scale, -15.5, 15.5).astype(ml_dtypes.float8_e3m4).astype(np.float32) * scale


def in_blocks(x: np.ndarray) -> np.ndarray:
    """Rows in blocks of 32 (a short last one) under 2**(e - 3), e the exponent of amax rounded to five digits."""
    out = np.empty_like(x)
    for start in range(0, x.shape[1], 32):
        part = x[:, start : start + 32].astype(np.float64)
        mantissa, exponent = np.frexp(np.abs(part).max(axis=1, keepdims=True))
        exponent = exponent - 1 + (np.floor(mantissa * 2 * 16 + 0.5) >= 32)
        scaled = np.clip(part / 2.0 ** (exponent - 3), -15.5, 15.5).astype(np.float32)
        out[:, start : start + 32] = scaled.astype(ml_dtypes.float8_e3m4).astype(np.float64) * 2.0 ** (exponent - 3)
    return out


def session(model: bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
def test_stock_onnx_runtime_runs_an_onnx_model_in_it(rows: None, kind: str) -> None:
    proto = models.model("g (float[n,40] x) => (float[n,8] y) { y = MatMul(x, w) }", {"w": W})
    spec = q.MXFP8E3M4Spec if kind == "block" else q.FP8E3M4Spec
    shared = q.QuantGranularity.Channel if kind == "channel" else q.QuantGranularity.Tensor
    config = q.QConfig(q.QLayerConfig(spec(), spec(quant_granularity=shared)), extra_options={"PrintSummary": False})
    result = q.ModelQuantizer(config).run(proto, None, [{"x": X}])
    assert result.proto.ByteSize() < 20_000  # packed weights, and no table of more than 256 values
    found = session(result.proto.SerializeToString()).run(None, {"x": X})[0]
    if kind == "block":
        expected = in_blocks(X) @ in_blocks(np.ascontiguousarray(W.T)).T
    else:
        expected = small(X) @ small(W, axis=1 if kind == "channel" else None)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


SPECS: dict[str, dict[str, Any]] = {
    "tensor": {"qscheme": "per_tensor"},
    "channel": {"qscheme": "per_channel", "ch_axis": 0},
    "block": {"qscheme": "per_group", "ch_axis": -1, "group_size": 32, "scale_format": "e8m0"},
}


@pytest.mark.parametrize("kind", SPECS)
def test_a_torch_model_in_it_goes_to_files_and_back_and_to_onnx(rows: None, kind: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(40, 8, bias=False))
    model[0].weight.data = torch.from_numpy(W.T.copy())
    weight = QTensorConfig(Dtype.fp8_e3m4, **SPECS[kind])
    inputs = (
        QTensorConfig(Dtype.mxfp8_e3m4, ch_axis=-1)
        if kind == "block"
        else QTensorConfig(Dtype.fp8_e3m4, **SPECS["tensor"])
    )
    made = ModelQuantizer(QConfig(QLayerConfig(input_tensors=inputs, weight=weight))).quantize_model(
        model, [torch.from_numpy(X)]
    )
    with torch.no_grad():
        answer = made(torch.from_numpy(X))
    columns = np.ascontiguousarray(W.T)
    if kind == "block":
        expected = in_blocks(X) @ in_blocks(columns).T
    else:
        expected = small(X) @ small(columns, axis=0 if kind == "channel" else None).T
    np.testing.assert_allclose(answer.numpy(), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    export_safetensors(made, tmp_path / "m")
    fresh = import_model_from_safetensors(nn.Sequential(nn.Linear(40, 8, bias=False)), tmp_path / "m")
    with torch.no_grad():
        assert torch.equal(fresh(torch.from_numpy(X)), answer)
    export_onnx(made, tmp_path / "o", torch.from_numpy(X), input_names=["x"])
    found = session((tmp_path / "o" / "quark_model.onnx").read_bytes()).run(None, {"x": X})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["mxfp8_e3m4_weight_only", "int7_wo_per_channel"])
def test_file_to_file_says_what_memory_says(rows: None, name: str, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "float")
    config = LLMTemplate.get("llama").get_config(name)
    quantize_checkpoint(tmp_path / "float", tmp_path / "files", config)
    made = ModelQuantizer(config).quantize_model(model)
    fresh = import_model_from_safetensors(llama(), tmp_path / "files")
    assert torch.equal(logits(fresh), logits(made))
    assert not torch.equal(logits(made), logits(llama())) and IDS.shape


def test_a_format_that_is_gone_is_an_error_that_names_it(rows: None, tmp_path: Path) -> None:
    model = ModelQuantizer(QConfig(scheme("fp8_e3m4_wo_per_channel"))).quantize_model(nn.Sequential(nn.Linear(40, 8)))
    export_safetensors(model, tmp_path / "m")
    quark.unregister_format(BLOCK.name)
    quark.unregister_format(ELEMENT.name)
    try:
        with pytest.raises(ConfigError, match="fp8_e3m4"):
            import_model_from_safetensors(nn.Sequential(nn.Linear(40, 8)), tmp_path / "m")
        for asked in (lambda: Dtype.fp8_e3m4, lambda: q.FP8E3M4, lambda: q.FP8E3M4Spec):
            with pytest.raises(AttributeError, match=r"(?i)fp8_?e3m4"):
                asked()
        with pytest.raises(ConfigError, match="fp8_e3m4"):
            get_format("fp8_e3m4")
    finally:
        quark.register_format(ELEMENT)
        quark.register_format(BLOCK)


def test_names_come_from_the_row(rows: None) -> None:
    member = Dtype.fp8_e3m4
    assert Dtype("fp8_e3m4") is Dtype["fp8_e3m4"] is Dtype.from_str("FP8_E3M4") is member in Dtype
    assert pickle.loads(pickle.dumps(member)) is copy.deepcopy(member) is member and isinstance(member, Dtype)  # noqa: S301 (ours)
    assert (member.name, member.to_bitwidth(), member.to_torch_packed_dtype()) == ("fp8_e3m4", 8, torch.uint8)
    assert list(Dtype)[-1].name in {ELEMENT.name, BLOCK.name, WHOLE.name} and len(Dtype) == len(Dtype.__members__)
    assert issubclass(q.FP8E3M4, q.BaseDataType) and (q.FP8E3M4.bitwidth, q.FP8E3M4.max_value) == (8, 15.5)
    assert q.Int7Spec().data_type is q.Int7 is data_types()["Int7"] and q.Int7Spec().to_spec().format == "int7"
    assert pickle.loads(pickle.dumps(q.Int7)) is q.Int7  # noqa: S301 (ours)
    assert {"fp8_e3m4", "fp8_e3m4_wo_128", "mxfp8_e3m4", "int7_wo_per_channel"} <= set(scheme_names())
    assert OPERATORS["PackedDequantize"].settings({"format": "int7"})["format"] == "int7"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Float("Fp8", 3, 4, 15.5), "lower case"),
        (Float("fp8e4m3", 3, 4, 15.5), "cannot be told from 'fp8_e4m3'"),
        (Float("fp4", 2, 1, 6.0), "cannot be told from 'fp4_e2m1'"),
        (Float("fp9", 4, 4, 480.0), "9 bits"),
        (Int("int24", 24), "24 bits"),
        (Float("fp8_e3m4", 3, 4, 15.3), "not the value"),
        (Float("fp7", 3, 3, 15.0, torch_dtype="float8_e4m3fn"), "leave out torch_dtype"),
        (Float("fp5", 1, 3, 1.0), "two exponent bits"),
        (Float("ufp6", 3, 3, 30.0, signed=False), "a sign"),
        (Float("fp4_e3m0", 3, 0, 8.0, has_infinity=True), "has_infinity needs a mantissa bit"),
        (
            Block("mine", Int("uint4", 4, False, "UINT4", None, "uint4"), 32),
            "'uint4' has no sign, and blocks no offset",
        ),
        (Block("mine", ELEMENT, 32, "e8m0_evn"), "Did you mean 'e8m0_even'"),
        (Block("mine", ELEMENT, 0), "one element or more"),
        (Block("mine", Float("fp8_e4m3", 3, 4, 15.5), 32), "not the format of that name"),
        ("fp8_e3m4", "a format is an Int, a Float or a Block"),
        (replace(ELEMENT, name="float"), "cannot be told from 'float'"),
    ],
)
def test_what_is_no_format_is_refused(row: Any, words: str) -> None:
    before = dict(FORMATS)
    with pytest.raises(ConfigError, match=words):
        quark.register_format(row)
    assert before == FORMATS


def test_a_format_with_the_name_of_a_scheme_is_not_taken_for_it() -> None:
    quark.register_format(replace(ELEMENT, name="fp8"))
    try:
        with pytest.raises(ConfigError, match="the scheme 'fp8' is that of a registered format and one of ours"):
            LLMTemplate.get("llama").get_config("fp8")
        assert scheme("fp8_wo_128").weight is not None
    finally:
        quark.unregister_format("fp8")
    assert scheme("fp8").weight is not None


@pytest.mark.parametrize("row", [Float("fp5_e2m2", 2, 2, 7.0), Float("fp5_e3m1", 3, 1, 24.0), Int("own_int2", 2)])
def test_the_smallest_formats_of_ones_own(row: Float | Int) -> None:
    """Two exponent bits or one mantissa bit: the largest numbers are 1.75 x 2^2 and 1.5 x 2^4."""
    quark.register_format(row)
    try:
        assert FORMATS[row.name].max == row.max
    finally:
        quark.unregister_format(row.name)
    assert row.name not in FORMATS


def test_powers_of_two_with_a_sign() -> None:
    """No mantissa bit: 0 and 2^-2 to 2^4; half way between two of them is 1.5 times the smaller, and goes up."""
    row = Float("fp4_e3m0", 3, 0, 16.0)
    values = np.array([0.0, *2.0 ** np.arange(-2, 5)], np.float32)
    x = (X * np.float32(16.0) / np.abs(X).max()).astype(np.float32)
    nearest = values[np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(x), side="right")]
    quark.register_format(row)
    try:
        assert np.array_equal(row.round(x), np.copysign(nearest, x))
        made = ModelQuantizer(QConfig(scheme("fp4_e3m0_wo_per_channel"))).quantize_model(
            nn.Sequential(nn.Linear(40, 8, bias=False))
        )
        with torch.no_grad():
            found = made[0](torch.eye(40)).T.abs()
        logs = torch.log2(found / found.amax(1, keepdim=True))
        assert torch.allclose(logs, logs.round(), atol=1e-5) and logs[logs > -99].min() >= -6.5
    finally:
        quark.unregister_format(row.name)


@pytest.mark.parametrize("slot", ["input_tensors", "output_tensors", "weight", "bias"])
def test_a_float_without_a_sign_is_for_scales(slot: str) -> None:
    config = QConfig(QLayerConfig(**{slot: QTensorConfig(Dtype.fp8_e5m3, qscheme="per_tensor")}))
    with pytest.raises(ConfigError, match="of '0': e5m3 has no sign, so numbers below 0 would be lost"):
        ModelQuantizer(config).quantize_model(nn.Sequential(nn.Linear(40, 8)), [torch.from_numpy(X)])


@pytest.mark.parametrize(
    ("types", "words"),
    [
        ("e5m3/int8", "inputs: e5m3 has no sign, so numbers below 0 would be lost"),
        ("uint8/e5m3@channel", "weight: e5m3 has no sign"),
        ("uint8/e8m0", "weight: e8m0 has no sign"),
        (
            "uint8/float16@channel",
            "weight: float16 has no scales, and none per channel",
        ),
        ("bfloat16/bfloat16@32", "weight: bfloat16 has no scales, and none per group of 32"),
    ],
)
def test_what_onnx_cannot_hold_is_refused_before_any_work(types: str, words: str) -> None:
    """Made zeros of all numbers below 0, or ended in an error of the writer."""
    proto = models.model("g (float[n,40] x) => (float[n,8] y) { y = MatMul(x, w) }", {"w": W})
    with pytest.raises(ConfigError, match=words):
        q.ModelQuantizer(q.Config(q.get_default_config(types))).run(proto, None, [{"x": X}])


def test_inspecting_a_file_does_not_need_its_format(rows: None, tmp_path: Path) -> None:
    proto = models.model("g (float[n,40] x) => (float[n,8] y) { y = MatMul(x, w) }", {"w": W})
    config = q.QConfig(q.QLayerConfig(q.FP8E3M4Spec(), q.MXFP8E3M4Spec()), extra_options={"PrintSummary": False})
    q.ModelQuantizer(config).run(proto, tmp_path / "q.onnx", [{"x": X}])
    quark.unregister_format(BLOCK.name)
    try:
        (said,) = describe(tmp_path / "q.onnx").others
    finally:
        quark.register_format(BLOCK)
    assert said.startswith("a plan holds no blocks of the type mxfp8_e3m4, which the node")


def test_nobody_says_that_vllm_reads_it(rows: None) -> None:
    formats = (Dtype.fp8_e3m4, Dtype.fp8_e4m3, Dtype.bfloat16)
    layers = [QLayerConfig(weight=QTensorConfig(one, qscheme="per_tensor")) for one in formats]
    assert [vllm_reads.is_rounded(QConfig(layer)) for layer in layers] == [False, True, False]


@pytest.mark.parametrize("where", ["weight", "cache"])
@pytest.mark.parametrize("program", ["vllm", "transformers", "llama.cpp"])
def test_no_other_program_reads_it(rows: None, program: str, where: str, tmp_path: Path) -> None:
    own = QTensorConfig(Dtype.fp8_e3m4, qscheme="per_tensor")
    cache = {"*k_proj": QLayerConfig(output_tensors=own)} if where == "cache" else None
    config = QConfig(scheme("int4_wo_32") if cache else QLayerConfig(weight=own), kv_cache_quant_config=cache or {})
    with pytest.raises(ConfigError, match="does not read a format of your own such as fp8_e3m4; leave out --for"):
        check_before_work(llama(), config, chosen_format(None, program), program, tmp_path)
    with pytest.raises(ConfigError, match="such as int7"):
        search(llama(), [IDS], ["int4_wo_32", "int7_wo_128", "float"], TorchSearchGoal("sqnr>=8", program="vllm"))


def test_onnx_runtime_and_nobody_in_particular_read_it(rows: None, tmp_path: Path) -> None:
    config = QConfig(scheme("fp8_e3m4_wo_per_channel"))
    for format, program in (("quark", None), ("onnx", "onnxruntime-genai"), ("onnx", None)):
        check_before_work(llama(), config, format, program, tmp_path)


def test_only_registered_formats_can_be_forgotten(rows: None) -> None:
    for name, words in (("int8", "built in"), ("int9", "registered: fp8_e3m4, int7, mxfp8_e3m4")):
        with pytest.raises(ConfigError, match=words):
            quark.unregister_format(name)
    with pytest.raises(ConfigError, match="element of mxfp8_e3m4"):
        quark.unregister_format("fp8_e3m4")
    with pytest.raises(ConfigError, match="cannot be told from"):
        quark.register_format(ELEMENT)
