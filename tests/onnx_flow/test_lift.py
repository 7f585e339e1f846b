"""Lifting: outputs stay what they were, for every form of every operator, and what has no later form is refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.counting import calls
from tests.onnx_flow.old_operators import ZOO

from quark.errors import ModelError
from quark.ir.walk import all_nodes
from quark.onnx.graph.adapters import ADAPTERS
from quark.onnx.graph.functions import inline_functions
from quark.onnx.graph.lift import lift
from quark.onnx.graph.model import load, to_proto

TARGETS = (13, 17, 21)
REAL = ("gtcrn_simple", "silero_vad_16k_op15", "squeezenet11_flowers5", "stories260K", "ultraface_rfb320", "yolox_nano")


def lifted(proto: onnx.ModelProto, version: int) -> onnx.ModelProto:
    return to_proto(lift(load(proto), version))


def test_the_zoo_covers_every_adapter() -> None:
    seen = {node.op_type for opsets, build in ZOO.values() for node in all_nodes(load(build(opsets[0])))}
    since_7 = {name for name, rows in ADAPTERS.items() if rows[-1][0] > 7}
    assert since_7 - seen == {"Scan"}  # Scan-8 has no later form: test_refused


@pytest.mark.parametrize("name", ZOO)
def test_outputs_stay(name: str) -> None:
    opsets, build = ZOO[name]
    for opset in {opsets[0], opsets[-1]}:
        proto = build(opset)
        inputs = models.feeds(proto)
        expected = models.run(proto, inputs)
        for version in [version for version in TARGETS if version > opset]:
            result = lifted(proto, version)
            assert result.opset_import[0].version == version
            onnx.checker.check_model(result)
            models.assert_close(models.run(result, inputs), expected)


@pytest.mark.parametrize("name", REAL)
def test_real_models(name: str) -> None:
    path = models.REAL_MODELS / f"{name}.onnx"
    if not path.exists():
        pytest.skip("no shared models beside the repository")
    proto = onnx.load(path)
    inputs = models.real_feeds(name, proto)
    expected = models.run(path, inputs)
    for version in [version for version in TARGETS if version > proto.opset_import[0].version]:
        result = to_proto(lift(load(path), version))
        onnx.checker.check_model(result)
        models.assert_close(models.run(result, inputs), expected)


def _schemas() -> Iterator[list[onnx.defs.OpSchema]]:
    """For each operator, its schemas in force from opset 7 on."""
    by_name = defaultdict(list)
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            by_name[schema.name].append(schema)
    for history in by_name.values():
        history.sort(key=lambda schema: schema.since_version)
        yield [old for old, new in pairwise(history) if new.since_version > 7] + history[-1:]


def _incompatible(old: onnx.defs.OpSchema, new: onnx.defs.OpSchema) -> bool:
    """A node that was valid may not be any more, or may mean something else."""
    kept = set(old.attributes) & set(new.attributes)
    return (
        (new.deprecated and not old.deprecated)
        or bool(set(old.attributes) - set(new.attributes))
        or any(attr.required for name, attr in new.attributes.items() if name not in kept)
        or any(old.attributes[name].default_value != new.attributes[name].default_value for name in kept)
        or new.min_input > old.min_input
        or new.max_input < old.max_input
        or new.max_output < old.max_output
    )


def test_every_incompatible_change_of_onnx_has_an_adapter() -> None:
    changes = {
        (new.name, new.since_version)
        for history in _schemas()
        for old, new in pairwise(history)
        if _incompatible(old, new)
    }
    known = {(name, version) for name, rows in ADAPTERS.items() for version, _ in rows}
    assert len(changes) >= 30
    assert changes <= known


def test_enough_already_is_returned_untouched() -> None:
    model = load(models.cnn(17))
    assert lift(model, 13) is model
    assert model.graph.opset_imports[""] == 17


def test_weights_are_not_read_and_names_stay() -> None:
    proto = models.cnn(11)
    for node in proto.graph.node:
        node.name = f"node_of_{node.output[0]}"
    model = load(proto)
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    result = lift(model, 21)
    assert {name: value.const_value for name, value in result.graph.initializers.items()} == tensors
    assert [node.name for node in result.graph] == [node.name for node in proto.graph.node]


def test_graph_outputs_and_inputs_keep_their_names() -> None:
    proto = ZOO["Softmax_flattens"][1](11)
    result = lifted(proto, 13)
    assert [value.name for value in result.graph.output] == ["y"]
    assert [node.op_type for node in result.graph.node] == ["Shape", "Flatten", "Softmax", "Reshape"]


def test_equal_constants_are_shared() -> None:
    graph = "twice (float[2, 3] x) => (float[a, b, c] y) { u = Unsqueeze <axes = [0]> (x) s = Squeeze <axes = [0]> (u)"
    result = lifted(models.model(graph + " y = Unsqueeze <axes = [1]> (s) }", opset=11), 13)
    assert sorted(tuple(onnx.numpy_helper.to_array(tensor)) for tensor in result.graph.initializer) == [(0,), (1,)]


def test_custom_domains_are_left_alone() -> None:
    graph = """
    custom (float[2, 4] x) => (float[2, 4] y) {
        g = com.microsoft.Gelu (x)
        c = Clip <min = 0.0> (g)
        y = com.microsoft.BiasGelu (c, b)
    }"""
    proto = models.model(graph, {"b": models.normal(4)}, 10, domains={"com.microsoft": 1})
    result = lifted(proto, 17)
    assert {entry.domain: entry.version for entry in result.opset_import} == {"": 17, "com.microsoft": 1}
    models.assert_close(models.run(result, models.feeds(proto)), models.run(proto, models.feeds(proto)))


def test_a_model_without_nodes_of_onnx() -> None:
    proto = models.model("g (float[2, 4] x) => (float[2, 4] y) { y = com.microsoft.Gelu (x) }")
    del proto.opset_import[:]
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    result = lifted(proto, 17)
    assert {entry.domain: entry.version for entry in result.opset_import} == {"": 17, "com.microsoft": 1}
    models.run(result, models.feeds(proto))


def with_function(opset: int, within: int | None = None) -> onnx.ModelProto:
    """``y = Centre(x)`` in its own domain: x minus its mean over the last axis; ``within``: its opset."""
    within = opset if within is None else within
    mean = (
        "m = ReduceMean <axes = [-1]> (a)"
        if within < 18
        else "k = Constant <value_ints = [-1]> () m = ReduceMean (a, k)"
    )
    text = f"""
    <ir_version: 8, opset_import: ["": {opset}, "own": 1]>
    main (float[2, 3] x) => (float[2, 3] y) {{ y = own.Centre (x) }}
    <domain: "own", opset_import: ["": {within}]>
    Centre (a) => (b) {{ {mean} b = Sub (a, m) }}
    """
    return onnx.parser.parse_model(text)


def test_functions_are_lifted_too() -> None:
    proto = with_function(17)
    inputs = models.feeds(proto)
    result = lifted(proto, 21)
    assert result.functions[0].opset_import[0].version == 21
    onnx.checker.check_model(result)
    models.assert_close(models.run(result, inputs), models.run(proto, inputs))


@pytest.mark.parametrize(("opset", "within"), [(21, 17), (17, 21), (21, 18), (18, 21)])
@pytest.mark.parametrize("wanted", [17, 21])
def test_a_function_and_its_caller_meet_in_one_opset(opset: int, within: int, wanted: int) -> None:
    proto = with_function(opset, within)
    inputs = models.feeds(proto)
    model = lift(load(proto), wanted)
    inline_functions(model)
    assert not model.functions
    (x,) = inputs.values()
    models.assert_close(models.run(to_proto(model), inputs), [x - x.mean(-1, keepdims=True)])


def test_a_function_for_another_version_of_a_domain_is_refused() -> None:
    proto = with_function(21)
    proto.functions[0].opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 2))
    proto.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    with pytest.raises(ModelError, match=r"cannot be inlined.*ai\.onnx\.ml"):
        inline_functions(load(proto))


OPSET_6 = {  # ONNX Runtime does not run opset 6: what the operators meant is written out here
    "axis": ("y = Add <axis = 1, broadcast = 1> (x, c)", lambda x, c: x + c[:, None]),
    "last axes": ("y = Mul <broadcast = 1> (x, d)", lambda x, c: x * np.arange(4, dtype=np.float32)),
    "computed": ("a = Abs (c) y = Sub <axis = 1, broadcast = 1> (x, a)", lambda x, c: x - np.abs(c)[:, None]),
    "slope": ("y = PRelu (x, c)", lambda x, c: np.where(x < 0, x * c[:, None], x)),
    "test form": ("y = Dropout <is_test = 1, ratio = 0.5> (x)", lambda x, c: x),
    "statistics": (
        "y = BatchNormalization <epsilon = 0.0, is_test = 1> (x, c, c, z, o)",
        lambda x, c: x * c[:, None] + c[:, None],
    ),
}


@pytest.mark.parametrize("case", OPSET_6)
def test_opset_6(case: str) -> None:
    body, meaning = OPSET_6[case]
    weights = {"c": models.normal(3), "d": np.arange(4, dtype=np.float32)}
    weights |= {"z": np.zeros(3, np.float32), "o": np.ones(3, np.float32)}
    graph = f"old (float[2, 3, 4] x) => (float[2, 3, 4] y) {{ {body} }}"
    proto = models.initializers_as_inputs(models.model(graph, weights, 6))
    inputs = models.feeds(proto)
    models.assert_close(models.run(lifted(proto, 13), inputs), [meaning(inputs["x"], weights["c"])])


def test_opset_4_through_the_converter_of_onnx() -> None:
    body = "r = Reshape <shape = [2, 12]> (x) y = Mul <broadcast = 1> (r, w)"
    graph = f"old (float[2, 3, 4] x) => (float[2, 12] y) {{ {body} }}"
    weight = models.normal(12, scale=3)
    proto = models.initializers_as_inputs(models.model(graph, {"w": weight}, 4))
    inputs = models.feeds(proto)
    models.assert_close(models.run(lifted(proto, 13), inputs), [inputs["x"].reshape(2, 12) * weight])


REFUSED = {
    "an operator that ONNX does not know": ("y = Frobnicate (x)", 11, "Frobnicate"),
    "statistics for every position": ("y = BatchNormalization <spatial = 0> (x, x, x, x, x)", 7, "spatial"),
    "statistics that are read": ("y, m = BatchNormalization (x, x, x, x, x)", 9, "training"),
    "saved statistics": ("y, a, b, c, m = BatchNormalization (x, x, x, x, x)", 13, "training"),
    "a mask that is read": ("d, y = Dropout (x)", 7, "mask"),
    "nearest, up and down": (
        "s = Constant <value = float[4] {1.0, 1.0, 2.0, 0.5}> () y = Resize (x, s)",
        10,
        "shrinks",
    ),
    "a batch axis in Scan": ("y = Scan <num_scan_inputs = 1> (x)", 8, "batch axis"),
    "an attribute that no version has": ("y = Relu <slope = 0.1> (x)", 11, "'slope'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    body, opset, reason = REFUSED[case]
    outputs = "(float[a] y, float[b] m)" if "m = " in body else "(float[a] y)"
    with pytest.raises(ModelError, match=rf"'[ydm]' .* cannot be lifted from opset {opset} to 17: .*{reason}"):
        lift(load(models.model(f"case (float[1, 2, 4, 4] x) => {outputs} {{ {body} }}", opset=opset)), 17)


def test_a_parameter_of_a_function_cannot_become_an_input() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 17, "own": 1]>
    main (float[2, 3] x) => (float[2, 1] y) { y = own.Mean <axes = [1]> (x) }
    <domain: "own", opset_import: ["": 17]>
    Mean <axes: ints> (a) => (b) { b = ReduceMean <axes: ints = @axes> (a) }
    """
    with pytest.raises(ModelError, match=r"ReduceMean.*inline the function"):
        lift(load(onnx.parser.parse_model(text)), 18)


def test_an_opset_of_the_future() -> None:
    with pytest.raises(ModelError, match="opset 999 is not known"):
        lift(load(models.cnn()), 999)


def test_default_sessions_load_what_lifting_an_ir_3_file_gives() -> None:
    proto = models.initializers_as_inputs(models.cnn(7))
    result = lifted(proto, 21)
    assert 4 <= result.ir_version <= 10
    onnxruntime.InferenceSession(result.SerializeToString(), providers=["CPUExecutionProvider"])


def test_cost_is_linear_in_the_number_of_nodes() -> None:
    chains = [load(models.conv_chain(length, opset=11)) for length in (100, 200, 400)]
    lift(load(models.conv_chain(10, opset=11)), 21)  # fills the cache of schemas
    small, middle, large = (calls(lift, chain, 21) for chain in chains)
    assert middle < 2.2 * small and large < 2.2 * middle


def test_nothing_else_reads_the_ir_of_a_lifted_constant() -> None:
    model = lift(load(ZOO["unsqueeze"][1](9)), 13)
    (axes,) = model.graph.initializers.values()
    assert axes.dtype == ir.DataType.INT64 and axes.const_value is not None
    np.testing.assert_array_equal(axes.const_value.numpy(), [0, 3])
