"""Exports at their bounds: words that outputs fill, blocks along rows, what numbers may differ by, what is turned."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from quark.config.file_formats import FORMATS, quantizes_behind_rope
from quark.errors import ConfigError
from quark.torch.config.type import Dtype
from quark.torch.export import (
    gguf_bounds,
    gguf_tensors,
    gguf_vocabulary,
    layout,
    onnx_model,
    onnx_turned,
    transformers_reads,
    verify,
    vllm_reads,
)
from quark.torch.export import stored as stored_parts
from quark.torch.fake_quantize import make_quantizer, parts
from quark.torch.quantization.config.config import (
    FP4PerGroupSpec,
    FP8E4M3PerBlockSpec,
    FP8E4M3PerTensorSpec,
    Int4PerChannelSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    QTensorConfig,
    ScaleQuantSpec,
)

INT4 = Int4PerChannelSpec(ch_axis=0).to_quantization_spec()
INT8 = Int8PerTensorSpec("min_max", symmetric=True, scale_type="float", round_method="half_even", is_dynamic=False)


@pytest.mark.parametrize(("rows", "words"), [(8, True), (12, False), (16, True), (33, False)])
def test_outputs_of_a_layer_fill_words_of_32_bits(rows: int, words: bool) -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, rows, bias=False)})
    with nullcontext() if words else pytest.raises(ConfigError, match=f"{rows} outputs of 4 bits"):
        vllm_reads.check_words(model, QConfig(QLayerConfig(weight=INT4)))
    vllm_reads.check_words(model, QConfig(QLayerConfig(weight=INT8.to_quantization_spec())))
    vllm_reads.check_words(model, QConfig(QLayerConfig()))


@pytest.mark.parametrize(
    ("path", "rows", "read"),
    [
        ("a.q_proj", 128, True), ("a.q_proj", 192, False), ("a.k_proj", 64, False), ("a.v_proj", 64, True),
        ("a.gate_proj", 200, False), ("a.up_proj", 200, True), ("a.down_proj", 200, True), ("a.o_proj", 64, True),
        ("a.experts.0.up_proj", 200, False), ("a.experts.0.up_proj", 256, True), ("a.q_a_proj", 64, False),
    ],
)  # fmt: skip
def test_no_block_of_rows_lies_in_two_layers_that_vllm_reads_as_one(path: str, rows: int, read: bool) -> None:
    model = nn.Module()
    *owners, last = path.split(".")
    inner = model
    for name in owners:
        inner.add_module(name, nn.Module())
        inner = inner.get_submodule(name)
    inner.add_module(last, nn.Linear(128, rows, bias=False))
    blocks = FP8E4M3PerBlockSpec().to_quantization_spec()
    with nullcontext() if read else pytest.raises(ConfigError, match=f"{rows} outputs, which 128 does not divide"):
        vllm_reads.check_parts(model, QConfig(QLayerConfig(weight=blocks)))
    vllm_reads.check_parts(model, QConfig(QLayerConfig(weight=INT8.to_quantization_spec())))
    vllm_reads.check_parts(model, QConfig(QLayerConfig(weight=blocks), exclude=["*"]))


@pytest.mark.parametrize("kind", gguf_bounds.FLOATS)
@pytest.mark.parametrize("value", [1.0, -300.0])
def test_what_floats_may_be_off(kind: str, value: float) -> None:
    """Half a unit of the last place of 10, 7 or 23 mantissa bits, and a thousandth of it for the arithmetic."""
    relative = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8}[kind]
    for factor, over in ((0.99, 0), (1.0005, 0), (1.01, 1), (1.9, 1)):
        apart = np.array([abs(value) * relative * factor], np.float32)
        expected = over if relative else 0
        assert gguf_bounds.beyond(kind, np.array([value], np.float32), apart) == expected
    assert gguf_bounds.beyond(kind, np.array([value, value], np.float32), np.array([0.5, -30], np.float32)) == (
        2 if abs(value) == 1 else 1 if kind == "BF16" else 2
    )


def test_codes_may_be_off_by_digits_of_float16() -> None:
    entry = gguf_tensors.GGUFTensor("a", "Q8_0", (1,), lambda: (np.zeros(1), lambda: np.zeros(1)), coded=True)
    values = np.full(3, 8.0, np.float32)
    apart = values * np.float32(2.0**-10) * np.array([0.9999, 1.0005, -1.002], np.float32)
    assert entry.beyond(values, apart) == 1


def test_an_added_token_keeps_the_score_that_it_had(tmp_path: Path) -> None:
    vocabulary = [["<unk>", -1.5], ["a", -2.5], ["b", -3.5]]
    added = [{"id": 1, "content": "a", "special": True}, {"id": 4, "content": "c", "special": False}]
    data = {"model": {"type": "Unigram", "unk_id": 0, "vocab": vocabulary}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    kind, texts, scores, kinds = gguf_vocabulary.json_tokens(tmp_path / "tokenizer.json", 5)
    assert kind == "llama" and texts == ["<unk>", "a", "b", "[PAD3]", "c"]
    assert scores == [-1.5, -2.5, -3.5, -10000.0, 0.0]
    assert kinds == [2, 3, 1, 5, 4]  # unknown, control, normal, unused, user defined, as llama.cpp numbers them


def graph_of(shape: tuple[int, ...], perm: list[int]) -> Any:
    codes = np.arange(np.prod(shape), dtype=np.int8).reshape(shape)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=0),
        helper.make_node("Transpose", ["d"], ["t"], perm=perm),
        helper.make_node("MatMul", ["x", "t"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    constants = [numpy_helper.from_array(codes, "w"), numpy_helper.from_array(np.ones(shape[0], np.float32), "s")]
    return helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)


@pytest.mark.parametrize(
    ("shape", "perm", "turned"),
    [((2, 3), [1, 0], True), ((2, 3), [0, 1], False), ((2, 3, 4), [0, 2, 1], False), ((2, 3, 4), [1, 0], False)],
)
def test_matrices_alone_are_stored_as_they_are_read(shape: tuple[int, ...], perm: list[int], turned: bool) -> None:
    graph = graph_of(shape, perm)
    before = numpy_helper.to_array(graph.initializer[0])
    found = onnx_turned.turn_weights(graph)
    after = numpy_helper.to_array(graph.initializer[0])
    assert [node.op_type for node in graph.node].count("Transpose") == (0 if turned else 1)
    assert bool(found) is turned
    np.testing.assert_array_equal(after, before.T if turned else before)
    (axis,) = (one.i for one in graph.node[0].attribute)
    assert axis == (1 if turned else 0)


@pytest.mark.parametrize("shared", ["w", "s", None])
def test_what_others_read_is_not_turned(shared: str | None) -> None:
    graph = graph_of((2, 3), [1, 0])
    graph.node.append(helper.make_node("Identity", [shared or "x"], ["other"]))
    before = numpy_helper.to_array(graph.initializer[0])
    assert onnx_turned.turn_weights(graph) == (set() if shared else {"d"})
    after = numpy_helper.to_array(graph.initializer[0])
    np.testing.assert_array_equal(after, before if shared else before.T)


@pytest.mark.parametrize(
    ("sizes", "axes", "passed"),
    [((3, 1), [0], True), ((3, 1), [1], False), ((3, 4), [-1], True), (("n", 4), [0], False), ((3, 4), [0, 1], False)],
)
def test_squeezes_of_sizes_that_are_not_one_pass_over_them(
    sizes: tuple[Any, ...], axes: list[int], passed: bool
) -> None:
    place = ir.Value(name="axes", const_value=ir.tensor(np.array(axes)))
    node = ir.node("Squeeze", [ir.Value(name="x", shape=ir.Shape(sizes)), place])
    other = ir.node("Squeeze", [ir.Value(name="z")])
    model = ir.Model(ir.Graph([], node.outputs, nodes=[node, other], opset_imports={"": 17}), ir_version=8)
    onnx_model.pass_over_squeezes(model)
    assert (node.op_type, len(node.inputs)) == (("Identity", 1) if passed else ("Squeeze", 2))
    assert other.op_type == "Squeeze"


def test_scales_of_two_stages_have_names_of_their_own() -> None:
    stages = tuple(INT8.to_quantization_spec().to_stage() for _ in range(2))
    quantizer = make_quantizer(stages, "x")
    for number, part in enumerate(parts(quantizer), 1):
        part.scale, part.zero_point = torch.tensor(0.25 * number), None
    stored = stored_parts.stored_activation(quantizer)
    assert {name: float(value) for name, value in stored.items()} == {"scale": 0.25, "scale_2": 0.5}


@pytest.mark.parametrize(("kind", "size"), [("Q4_K", 144), ("Q6_K", 210), ("Q8_0", 272)])
def test_bytes_of_ggml_have_the_size_of_their_blocks(kind: str, size: int) -> None:
    """256 values take a super-block of a K-quant, and eight blocks of 34 bytes of Q8_0 (ggml-common.h)."""
    stage = QTensorConfig(Dtype[kind.lower()], ch_axis=-1).to_stage()
    (form,) = layout.layout_of((stage,), (3, 512)).form().values()
    assert form == ((3, 2 * size), torch.uint8)


@pytest.mark.parametrize("format", [*FORMATS, "safetensors"])
def test_which_readers_quantize_keys_behind_the_rotary_embedding(format: str) -> None:
    """vLLM, whatever it reads, and what reads the formats that it shares with others; the quark format says which."""
    assert quantizes_behind_rope(format, None) is (format in ("compressed-tensors", "fp8", "modelopt"))
    assert quantizes_behind_rope(format, "vllm")


@pytest.mark.parametrize(
    ("sources", "joins"),
    [
        (["a.weight", "b.weight", "a.weight_packed", "b.weight_packed"], True),
        (["a.weight", "a.weight_packed"], False),
        (["a.weight", "b.weight"], False),
        (["*.weight", "b.weight", "c.weight", "*.weight_packed"], False),
    ],
)
def test_what_collects_several_weights(sources: list[str], joins: bool) -> None:
    assert transformers_reads.is_join(sources) is joins


def test_scales_of_layers_are_seen_as_empty_tensors() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    seen = dict(transformers_reads.ConversionView(model, ["a"]).named_parameters())
    assert sorted(seen) == ["a.weight", "a.weight_scale", "b.weight"]
    assert seen["a.weight_scale"].shape == torch.Size([0])


@pytest.mark.parametrize("skipped", range(9))
@pytest.mark.parametrize("count", [*range(10), 16, 17, 24])
def test_tensors_are_compared_as_bytes(skipped: int, count: int) -> None:
    """Eight at a time where memory and length allow it, which is all that the type of the view may depend on."""
    values = torch.arange(64, dtype=torch.uint8)[skipped : skipped + count]
    found = verify.as_bytes(values)
    together = count % 8 == 0 and skipped % 8 == 0
    assert found.dtype == (torch.int64 if together else torch.uint8)
    assert found.numpy().tobytes() == values.numpy().tobytes()


ALONE = {
    "channels of a matrix": (nn.Linear(8, 16), INT4, False),
    "rows that fill no word": (nn.Linear(8, 15), INT4, True),
    "one scale": (nn.Linear(8, 16), INT8.to_quantization_spec(), True),
    "a kernel": (nn.Conv2d(4, 16, 1), INT4, True),
    "codes": (nn.Linear(8, 16), INT4, True),
    "two stages": (nn.Linear(8, 16), [FP8E4M3PerTensorSpec().to_quantization_spec(), INT4], True),
    "blocks": (nn.Linear(32, 16), OCP_MXFP4Spec(-1, False).to_quantization_spec(), False),
    "blocks under a scale": (
        nn.Linear(32, 16),
        ScaleQuantSpec(FP4PerGroupSpec(-1, 16), FP8E4M3PerTensorSpec()).to_quantization_spec(),
        True,
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_matrices_with_scales_along_their_rows_are_compared_together(name: str) -> None:
    from quark.torch import ModelQuantizer
    from quark.torch.export.stored import StoredTensor
    from quark.torch.quantized_layer import quantized_layers

    module, weight, alone = ALONE[name]
    model = ModelQuantizer(QConfig(QLayerConfig(weight=weight))).quantize_model(nn.Sequential(module), None)
    ((_, layer),) = quantized_layers(model)
    if name == "codes":  # a stand-in for what a reloaded model has, which decodes by itself
        held = layer._modules["weight_quantizer"]
        stored = StoredTensor.__new__(StoredTensor)
        nn.Module.__init__(stored)
        stored.layout = type("L", (), {"shape": (16, 8)})()
        stored.quantizer = lambda value: held  # type: ignore[method-assign]
        layer._modules["weight_quantizer"] = stored
    found: Any = verify.CodedSlot(None, "w", layer, "weight")  # type: ignore[arg-type]
    assert (found.key is None) is alone


CODES = ("a.weight", "b.weight", "a.weight_packed", "b.weight_packed")


@pytest.mark.parametrize(
    ("sources", "targets", "weights", "said"),
    [
        (CODES, ["c.weight"], [("int", 4)], "it joins 'c.weight' of several tensors"),
        (CODES, ["c.weight"], [("int", 8)], "it joins 'c.weight' of several tensors"),  # codes that are not packed
        (CODES, ["c.weight"], [("float", 4)], "it joins 'c.weight' of several tensors"),
        (CODES, ["c.weight"], [("float", 8)], None),
        (CODES, ["c.weight"], [("float", 8), ("int", 8)], "it joins 'c.weight' of several tensors"),
        (CODES, ["d.weight"], [("int", 4)], None),  # a tensor that the model lacks
        (CODES[:2], ["c.weight"], [("int", 4)], None),  # float tensors alone are joined
        (None, ["c.weight"], [("int", 4)], "it makes several tensors of one"),
    ],
)
def test_joins_of_weights_other_than_fp8_have_no_way_back(
    sources: Any, targets: list[str], weights: list[tuple[str, int]], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from transformers.quantizers.auto import AutoHfQuantizer

    def changed(steps: Any, view: Any) -> Any:
        if sources is None:
            raise ValueError("no such conversion")
        return [SimpleNamespace(source_patterns=list(sources), target_patterns=targets)]

    reader = SimpleNamespace(validate_environment=lambda: None, update_weight_conversions=changed)
    monkeypatch.setattr(AutoHfQuantizer, "from_config", staticmethod(lambda described: reader))
    monkeypatch.setattr(transformers_reads, "conversions_of", lambda model: [SimpleNamespace(operations=())])
    names: Any = SimpleNamespace(model=nn.ModuleDict({"c": nn.Linear(2, 2)}))
    schemes = {
        f"c{number}": SimpleNamespace(weights=SimpleNamespace(type=type_, num_bits=bits))
        for number, (type_, bits) in enumerate(weights)
    }
    found = transformers_reads.conversions({}, names, schemes)
    assert found is None if said is None else str(found).startswith(said)
    monkeypatch.setattr(transformers_reads, "conversions_of", lambda model: [object()])
    assert transformers_reads.conversions({}, names, schemes) is None
