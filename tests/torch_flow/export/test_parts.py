"""Parts of the export by themselves: stored forms, headers, parameters that keep their types, moved values, names."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from quark.errors import ConfigError
from quark.numerics.blocks import BLOCKS
from quark.numerics.elements import ELEMENTS
from quark.numerics.granularity import Tensor
from quark.torch.config.type import Dtype, QSchemeType
from quark.torch.export import (
    card,
    compressed_caches,
    custom_modes,
    described,
    extras,
    gptq,
    modelopt,
    onnx_moves,
    original,
    shards,
)
from quark.torch.export.storage import SHIFTS, flat, storage_of
from quark.torch.export.stored import StoredParameters
from quark.torch.rotated import Dense, matrix_of

PACKED = {"int2": "high", "uint2": "high", "int3": "low", "uint3": "low", "int4": "low", "uint4": "low", "int5": "low"}
PACKED |= {"uint5": "low", "fp6_e3m2": "low", "fp6_e2m3": "low", "fp4_e2m1": "low"}


@pytest.mark.parametrize("name", [*ELEMENTS, "int5"])
def test_a_stored_form_holds_the_bits_of_its_format(name: str) -> None:
    element = BLOCKS["mx6"].element if name == "int5" else ELEMENTS[name]
    row, bits = storage_of(element), element.bits
    if name in PACKED:
        assert (row.bits, row.first) == (bits, PACKED[name])
        assert row.dtype == (torch.int32 if bits == 4 and name != "fp4_e2m1" else torch.uint8)
    else:
        assert row.dtype.itemsize * 8 == bits and not row.bits
    assert row.reorders == (name in ("int4", "uint4"))
    assert row.transposes == (name.lstrip("u").startswith("int") and bits not in (3, 5))
    assert flat((2, 3, 4)) == (2, 12) and flat((5,)) == (5,) and flat((2, 3)) == (2, 3) and SHIFTS.bits == 1


def test_parameters_keep_their_types_when_the_model_is_cast() -> None:
    form = {"scale": ((2,), torch.float32), "codes": ((3,), torch.uint8), "zero_point_2": ((1,), torch.float16)}
    made, layer = StoredParameters(form, torch.device("cpu")), nn.Linear(1, 1)
    made.scale.copy_(torch.tensor([1e-30, 3.0]))
    made.to(torch.bfloat16)
    assert {name: value.dtype for name, value in made._buffers.items()} == {k: v[1] for k, v in form.items()}  # type: ignore[union-attr]
    assert made.scale.tolist() == [torch.tensor(1e-30).item(), 3.0]
    made.settle(layer, "weight")
    assert set(made._buffers) == {"scale", "codes"} and "weight_zero_point_2" in layer._buffers
    assert made.numbered == {"zero_point_2": "weight_zero_point_2"} and set(made.stored) == set(form)
    layer.register_buffer("input_scale_2", torch.ones(1))
    made.release()
    assert set(layer._buffers) == {"input_scale_2"} and made.numbered == {}


def test_headers_of_files(tmp_path: Path) -> None:
    form = {"a": ((2, 3), torch.uint8), "b": ((4,), torch.float32), "c": ((), torch.int64)}
    head, places = shards.header_of(form)
    (length,) = struct.unpack("<Q", head[:8])
    entries = json.loads(head[8:])
    assert length == len(head) - 8 and len(head) % 8 == 0 and places == {"c": 0, "b": 8, "a": 24}
    assert entries["b"] == {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}
    assert entries["a"]["data_offsets"] == [24, 30]
    path = tmp_path / "model.safetensors"
    for body, whole in ((30, True), (29, False), (31, False), (0, False)):
        path.write_bytes(head + bytes(body))
        assert shards.is_whole(path) is whole
    shards.check_made("a", torch.zeros(2, 3, dtype=torch.uint8), form)
    for wrong in (torch.zeros(3, 2, dtype=torch.uint8), torch.zeros(2, 3)):
        with pytest.raises(Exception, match="was announced"):
            shards.check_made("a", wrong, form)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
def test_items_come_in_their_order(threads: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    items = [SimpleNamespace(make=lambda k=k: {"x": torch.tensor(k)}) for k in range(count)]
    assert [int(one["x"]) for one in shards.made_ahead(items)] == list(range(count))  # type: ignore[arg-type]
    started = shards.made_ahead(items)  # type: ignore[arg-type]
    next(started, None)
    started.close()  # type: ignore[attr-defined]


def test_flat_bytes_are_those_of_memory() -> None:
    value = torch.arange(6, dtype=torch.int16).reshape(2, 3).T
    assert shards.flat_bytes(value).numpy().tobytes() == value.contiguous().numpy().tobytes()
    assert shards.flat_bytes(torch.tensor(1.0, requires_grad=True)).numpy().tobytes() == struct.pack("<f", 1)


def pair(name: str, axis: int | None = None, scale: str = "s") -> list[object]:
    more = {} if axis is None else {"axis": axis}
    q = helper.make_node("QuantizeLinear", [name, scale, "z"], [f"{name}_c"], **more)
    return [q, helper.make_node("DequantizeLinear", [f"{name}_c", "s", "z"], [f"{name}_v"], **more)]


MOVE, RELU = helper.make_node("Transpose", ["x_v"], ["h"]), helper.make_node("Relu", ["h"], ["y"])


@pytest.mark.parametrize(
    ("nodes", "added"),
    [
        ([*pair("x"), MOVE, RELU], 1),
        ([*pair("x", 0), MOVE, RELU], 1),
        ([*pair("x", 1), MOVE, RELU], 0),
        ([*pair("x", None, "t"), MOVE, RELU], 0),
        ([*pair("x"), helper.make_node("Tanh", ["x_v"], ["h"]), RELU], 0),
        ([*pair("x"), helper.make_node("Transpose", ["x_v"], ["y"])], 0),
        ([helper.make_node("Transpose", ["x"], ["h"]), RELU], 0),
        ([*pair("x"), MOVE, *pair("h"), helper.make_node("Relu", ["h_v"], ["y"])], 0),
        ([*pair("x"), MOVE, helper.make_node("Transpose", ["h"], ["g"]),
          helper.make_node("Add", ["g", "h"], ["y"])], 2),
        ([*pair("x"), MOVE, *pair("h"), RELU], 0),
        ([*pair("x"), helper.make_node("Transpose", ["x_v"], ["h"], domain="own"), RELU], 0),
    ],
)  # fmt: skip
def test_moved_values_are_read_behind_pairs_of_the_same_scale(nodes: list[object], added: int) -> None:
    tensors = [numpy_helper.from_array(np.array(value, kind), name) for name, value, kind in
               (("s", 0.5, np.float32), ("t", 0.25, np.float32), ("z", 0, np.int8))]  # fmt: skip
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    before = len(graph.node)
    onnx_moves.quantize_moved(graph)
    assert len(graph.node) == before + 2 * added
    known = {"x", "s", "t", "z"}
    for node in graph.node:  # in order, and every moved value is read behind its own pair
        assert set(node.input) <= known
        known |= set(node.output)
        if added and node.op_type in ("Relu", "Add"):
            assert all(name.endswith(".values") for name in node.input)
    for node in [node for node in graph.node if node.name.endswith("quantize")]:
        assert list(node.input[1:]) == ["s", "z"]


def test_versions_and_widths_of_gptq() -> None:
    """gptq stores zero points less one (AutoGPTQ's packing), gptq_v2 as they are; a word has 32 bits."""
    assert gptq.VERSIONS == {"gptq": 1, "gptq_v2": 0} and gptq.WORD == 32
    assert gptq.BITS == (2, 3, 4, 8)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True),
        ({"is_dynamic": True}, False),
        ({"dtype": Dtype.int8}, False),
        ({"qscheme": QSchemeType.per_channel}, False),
        (None, False),
        ([], False),
    ],
)
def test_caches_that_programs_have_kernels_for(change: object, kept: bool) -> None:
    good = {"is_dynamic": False, "dtype": Dtype.fp8_e4m3, "qscheme": QSchemeType.per_tensor}
    one = SimpleNamespace(**good | change) if isinstance(change, dict) else change
    first = SimpleNamespace(output_tensors=SimpleNamespace(**good))
    caches = {"*k_proj": first, "*v_proj": SimpleNamespace(output_tensors=one)}
    for rope in (False, True):
        config = SimpleNamespace(kv_cache_post_rope=rope, kv_cache_quant_config=caches, algo_config=None)
        found = described.cache_group(config)  # type: ignore[arg-type]
        assert found == (list(caches) if kept else [])


def test_fp8_blocks_are_static_weights_beside_dynamic_activations() -> None:
    data = {"quant_method": "fp8", "weight_block_size": [32, 64], "activation_scheme": "dynamic"}
    layer = custom_modes.from_fp8_blocks(data).global_quant_config
    assert layer.weight.block_size == (32, 64) and layer.weight.is_dynamic is False and layer.weight.symmetric is True  # type: ignore[union-attr]
    assert layer.input_tensors.is_dynamic is True and layer.input_tensors.group_size == 64  # type: ignore[union-attr]
    for wrong in ([32], [32, 0], [32, 64, 1], 32, [32, 1.5], [True, 4]):
        with pytest.raises(Exception, match="two positive integers"):
            custom_modes.from_fp8_blocks({**data, "weight_block_size": wrong})
    for key, value, said in (("activation_scheme", "static", "not 'static'"), ("scale_fmt", "ue8m0", "float scales")):
        with pytest.raises(Exception, match=said):
            custom_modes.from_fp8_blocks({**data, key: value})
    assert custom_modes.from_fp8_blocks(data | {"ignored_layers": ["a"]}).exclude == ["a"]
    assert custom_modes.from_fp8_blocks(data | {"modules_to_not_convert": ["b"]}).exclude == ["b"]
    assert custom_modes.from_fp8_blocks(data | {"scale_fmt": "float"}).exclude == []


def test_models_that_are_not_of_transformers_have_no_conversions() -> None:
    for given in ({}, {"base_model_prefix": "m"}, {"config": None}):
        assert original.conversions_of(SimpleNamespace(**given)) == []
    steps = SimpleNamespace(base_model_prefix="m", config=None, _weight_conversions=("one",))
    pytest.importorskip("transformers")
    assert original.conversions_of(steps) == ["one"]


@pytest.mark.parametrize("field", ["layer_quant_config", "layer_type_quant_config"])
@pytest.mark.parametrize("mode", custom_modes.CUSTOM_MODES)
def test_custom_modes_say_nothing_about_single_layers(mode: str, field: str) -> None:
    fields = {"layer_quant_config": {}, "layer_type_quant_config": {}}
    config = SimpleNamespace(**fields | {field: True})
    with pytest.raises(Exception, match="all layers are alike"):
        custom_modes.custom_config(config, mode, {}, [])  # type: ignore[arg-type]


def test_rotations_in_files() -> None:
    hadamard = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    turn = hadamard / 2**0.5
    signs = extras.signs_of(Dense(turn))
    assert signs is not None and signs.dtype == torch.int8 and torch.equal(signs.double(), hadamard)
    assert torch.equal(extras.stored(Dense(turn)), signs)
    angle = torch.tensor(0.3, dtype=torch.float64)
    other = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    assert extras.signs_of(Dense(other)) is None and torch.equal(extras.stored(Dense(other)), other)
    blocks = torch.block_diag(hadamard, hadamard, hadamard)[torch.tensor([1, 0, 3, 2, 5, 4])]
    for stored, whole in ((signs, turn), (other, other), (blocks.to(torch.int8), blocks / 2**0.5)):
        torch.testing.assert_close(matrix_of(extras.rotation_of(stored)), whole, atol=1e-12, rtol=0)


def test_heads_of_cards_lose_what_is_ours() -> None:
    (own, *_) = card.OWN
    head = f"license: mit\n{own}: one\n- two\n  three\ntags:\n- kept\n"
    assert card.without_own(head) == "license: mit\ntags:\n- kept\n"
    assert card.without_own("- of a list\n") == "- of a list\n"


@pytest.mark.parametrize("caches", [None, {"type": "float"}])
@pytest.mark.parametrize("group", [None, 16])
def test_what_older_readers_of_modelopt_find(caches: object, group: int | None, tmp_path: Path) -> None:
    said = {"quant_algo": "NVFP4", "kv_cache_scheme": caches, "ignore": ["lm_head"], "producer": {"name": "x"}}
    modelopt.write_beside(tmp_path, said | ({} if group is None else {"group_size": group}))
    found = json.loads((tmp_path / modelopt.FILE).read_text())
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": caches and "FP8", "exclude_modules": ["lm_head"]}
    inner |= {} if group is None else {"group_size": group}
    assert found == {"producer": {"name": "x"}, "quantization": inner}


def test_caches_of_compressed_tensors_have_eight_bits_and_one_type() -> None:
    pytest.importorskip("compressed_tensors")

    def cache(name: str) -> SimpleNamespace:
        return SimpleNamespace(stage=SimpleNamespace(format=ELEMENTS[name]), granularity=Tensor())

    for name, kind in (("int8", "int"), ("fp8_e4m3", "float")):
        made = compressed_caches.cache_scheme({"k": cache(name), "v": cache(name)})  # type: ignore[dict-item]
        assert (made["num_bits"], made["type"], made["strategy"]) == (8, kind, "tensor")
        assert made["symmetric"] is True and made["dynamic"] is False
    with pytest.raises(Exception, match="one type for all caches"):
        compressed_caches.cache_scheme({"k": cache("int8"), "v": cache("fp8_e4m3")})  # type: ignore[dict-item]


@pytest.mark.parametrize(("scale", "symmetric", "name"), [(None, True, "k_proj"), (torch.ones(()), False, "k_proj")])
def test_caches_without_one_static_scale_are_refused(scale: object, symmetric: bool, name: str) -> None:
    stage = SimpleNamespace(format=ELEMENTS["int8"], spec=SimpleNamespace(symmetric=symmetric))
    part = SimpleNamespace(stage=stage, granularity=Tensor(), scale=scale)
    with pytest.raises(ConfigError):
        compressed_caches.check(name, part, False)  # type: ignore[arg-type]
    good = SimpleNamespace(stage=SimpleNamespace(format=ELEMENTS["int8"], spec=SimpleNamespace(symmetric=True)))
    good.granularity, good.scale = Tensor(), torch.ones(())
    compressed_caches.check(f"layers.0.{name}", good, False)  # type: ignore[arg-type]
