"""The contract of a graph pass, over the whole table: a new row is tested without a new test.

Each pass keeps ONNX Runtime's outputs (or says what it changes), names of inputs and outputs, and shared initializers;
leaves a valid model; finds nothing the second time; reports each refusal as a sentence; and fires on some model here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tests.onnx_flow import models, pass_models
from tests.onnx_flow.counting import calls
from tests.onnx_flow.test_passes import REAL, ZOO

from quark.ir.surgery import STANDS_FOR
from quark.ir.walk import all_nodes
from quark.onnx.graph.lift import lift
from quark.onnx.graph.model import load, to_proto
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.passes.registry import apply, passes
from quark.onnx.passes.row import Pass
from quark.onnx.passes.table import TABLE

SEEDS = range(5)
CASES = [*ZOO, *pass_models.TRIGGERS, *(f"random {seed}" for seed in SEEDS)]
#: Passes with arguments that depend on the model: how a test finds some.
ARGUMENTS = {
    "convert_opset_version": lambda proto: {"target_opset_version": 21},
    "fix_shapes": lambda proto: {"input_output_name_shapes": _shapes(proto)},
    "set_node_attributes": lambda proto: {"node_attribute_updates": []},
    "convert_code_type": lambda proto: {"change": "s8_to_u8"},
    "remove_qdq_between_op_types": lambda proto: {"remove_qdq_between_op_types": [("Mul", "Add"), ("Conv", "Mul")]},
}
#: Largest difference of an output relative to the largest value of it (or 1), for all passes.
TOLERANCE = 1e-4
#: Passes that no model here makes fire without arguments of its own; each has a test of its own.
ON_REQUEST = {"set_node_attributes"}
#: One step of an iteration: the next call makes the next step (its end is tested in test_cle).
ITERATES = {"cross_layer_equalization"}


def _shapes(proto: onnx.ModelProto) -> dict[str, list[int]]:
    ends = [*models.real_inputs(proto)]
    return {v.name: [dim.dim_value or 2 for dim in v.type.tensor_type.shape.dim] for v in ends}


@cache
def model_of(case: str) -> onnx.ModelProto:
    if case.startswith("random"):
        return pass_models.random_graph(int(case.split()[1]))
    return ZOO[case] if case in ZOO else pass_models.TRIGGERS[case]()


@cache
def expected_of(case: str) -> list[np.ndarray]:
    return models.run(model_of(case), models.feeds(model_of(case)))


@cache
def plain_of(case: str, shapes: bool) -> tuple[list[str], list[str]]:
    model = load(model_of(case))
    if shapes:
        infer_shapes(model)
    return skeleton(to_proto(model))


def skeleton(proto: onnx.ModelProto) -> tuple[list[str], list[str]]:
    """Nodes with what they read and write, and initializers."""
    nodes = [node.SerializeToString(deterministic=True).hex() for node in proto.graph.node]
    return nodes, sorted(tensor.SerializeToString(deterministic=True).hex() for tensor in proto.graph.initializer)


def untouched(result: onnx.ModelProto, case: str, shapes: bool) -> bool:
    return skeleton(result) == plain_of(case, shapes)


def arguments_of(row: Pass, proto: onnx.ModelProto) -> dict[str, Any]:
    given = ARGUMENTS[row.name](proto) if row.name in ARGUMENTS else {}
    return row.arguments(given) or {}


def loaded(row: Pass, proto: onnx.ModelProto) -> ir.Model:
    """A model as the pass wants it."""
    model = load(proto)
    if row.shapes:
        infer_shapes(model)
    return model


def run_pass(
    row: Pass, proto: onnx.ModelProto, model: ir.Model | None = None
) -> tuple[onnx.ModelProto, PassReport, PassReport]:
    """(result, report of the first run, report of the second)."""
    model = model or loaded(row, proto)
    arguments = arguments_of(row, proto)
    report = apply(model, row, arguments)
    result = to_proto(model)
    if row.shapes:
        infer_shapes(model)
    return result, report, apply(model, row, arguments)


#: Loaded models, by case and whether shapes were inferred, that the passes before have left as they were: most do.
UNTOUCHED: dict[tuple[str, bool], ir.Model] = {}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_contract(row: Pass) -> None:
    fired = 0
    for case in CASES:
        proto = model_of(case)
        before = proto.SerializeToString(deterministic=True)
        model = UNTOUCHED.pop((case, row.shapes), None) or loaded(row, proto)
        result, report, again = run_pass(row, proto, model)
        assert again.fired == 0 or row.name in ITERATES, f"{case}: the second run fired"
        assert proto.SerializeToString(deterministic=True) == before, f"{case}: the caller's model changed"
        assert all(isinstance(reason, str) and " " in reason for reason in report.refused), case
        if not report.fired:
            assert untouched(result, case, row.shapes), f"{case}: changed, but reports nothing"
            if not again.fired:
                UNTOUCHED[case, row.shapes] = model
            continue
        onnx.checker.check_model(result, full_check=True)
        same_interface(result, proto, case)
        if not row.changes:
            models.assert_close(models.run(result, models.feeds(proto)), expected_of(case), TOLERANCE)
        assert max(Counter(node.name for node in all_nodes(model)).values()) == 1, f"{case}: nodes of one name"
        assert not nameless(proto, model), f"{case}: what rules say of these names holds for nothing"
        fired += report.fired
    assert fired or row.name in ON_REQUEST, f"no model makes {row.name} fire: add one to pass_models.TRIGGERS"


def nameless(proto: onnx.ModelProto, model: ir.Model) -> set[str | None]:
    """Nodes that have gone whose result a node of another name makes that does not stand for them."""
    before = [node for node in load(proto).graph if node.domain == ""]
    names, makers = {node.name for node in before}, {value.name: node for node in before for value in node.outputs}
    now, found = {node.name for node in all_nodes(model)}, set()
    for node in all_nodes(model):
        old = next((makers[value.name] for value in node.outputs if value.name in makers), None)
        if node.name not in names and old is not None and old.name not in now | {*node.meta.get(STANDS_FOR, ())}:
            found.add(old.name)
    return found


def split(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same model, whose outputs are made in a branch of an If, which reads what is made outside."""
    made, read = onnx.ModelProto(), {name for node in proto.graph.node for name in node.input}
    made.CopyFrom(proto)
    ends = {value.name: value for value in proto.graph.output}
    last = [node for node in proto.graph.node if set(node.output) <= ends.keys() - read]
    for node in last:
        made.graph.node.remove(node)
    names = [name for node in last for name in node.output]
    then, other = (onnx.helper.make_graph(last, b, [], [ends[name] for name in names]) for b in ("then", "otherwise"))
    del other.node[:]
    for value, inner in zip(other.output, then.output, strict=True):
        kind = value.type.tensor_type
        size = [dim.dim_value or 1 for dim in kind.shape.dim]
        zeros = onnx.helper.make_tensor("", kind.elem_type, size, [0] * math.prod(size))
        value.name = f"other_{value.name}"
        other.node.append(onnx.helper.make_node("Constant", [], [value.name], value=zeros))
        inner.name = f"inner_{inner.name}"
    for node in then.node:
        node.output[:] = [f"inner_{name}" for name in node.output]
    made.graph.node.append(
        onnx.helper.make_node("If", ["a_choice"], names, "choice", then_branch=then, else_branch=other)
    )
    made.graph.input.append(onnx.helper.make_tensor_value_info("a_choice", onnx.TensorProto.BOOL, []))
    return made


@cache
def apart() -> dict[str, tuple[onnx.ModelProto, dict[str, np.ndarray]]]:
    """Models whose last layers stand in bodies, with a sample."""
    feeds = {"a_choice": np.array(True)}
    found = {case: (split(model_of(case)), {**models.feeds(model_of(case)), **feeds}) for case in pass_models.TRIGGERS}
    return {case: one for case, one in found.items() if one[0].graph.node[-1].output}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_patterns_end_where_a_body_begins(row: Pass) -> None:
    """What a body reads from outside is no chain: its outputs are made in it."""
    for case, (proto, feed) in apart().items():
        model = loaded(row, proto)
        if apply(model, row, arguments_of(row, proto)).fired:
            result = to_proto(model)
            onnx.checker.check_model(result, full_check=True)
            same_interface(result, proto, case)
            if not row.changes:
                models.assert_close(models.run(result, feed), expected_of(case), TOLERANCE)


def same_interface(result: onnx.ModelProto, proto: onnx.ModelProto, case: str) -> None:
    assert [value.name for value in result.graph.output] == [value.name for value in proto.graph.output], case
    ends = [value.name for value in models.real_inputs(result)]
    assert ends == [value.name for value in models.real_inputs(proto)], case


def _nhwc(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.moveaxis(array, 1, -1) if array.ndim == 4 else array for name, array in arrays.items()}


def test_nhwc_is_the_same_model_with_the_axes_moved() -> None:
    proto = pass_models.image_model()
    row = passes()["convert_nchw_to_nhwc"]
    result, report, _ = run_pass(row, proto)
    feeds = models.feeds(proto)
    expected = dict(zip(("y", "v"), models.run(proto, feeds), strict=True))
    assert report.fired == 2 and len(report.refused) == 2
    models.assert_close(models.run(result, _nhwc(feeds)), list(_nhwc(expected).values()), 1e-6)
    assert [dim.dim_value for dim in result.graph.input[0].type.tensor_type.shape.dim][1:] == [8, 6, 3]


@pytest.mark.parametrize("name", REAL)
def test_real_models(name: str) -> None:
    path = models.REAL_MODELS / f"{name}.onnx"
    if not path.exists():
        pytest.skip("no shared models beside the repository")
    proto = onnx.load(path)
    inputs = models.real_feeds(name, proto)
    expected = models.run(path, inputs)
    model = lift(load(path), 20)
    infer_shapes(model)
    for row in TABLE:  # one after the other, as the flow does
        if row.changes or row.name in ("convert_opset_version", "fill_value_info", "fix_shapes"):
            continue
        report = apply(model, row, arguments_of(row, proto))
        if report.fired:
            infer_shapes(model)
            result = to_proto(model)
            onnx.checker.check_model(result)
            models.assert_close(models.run(result, inputs), expected, TOLERANCE)
            assert row.name in ITERATES or apply(model, row, arguments_of(row, proto)).fired == 0


#: How often a pass fires on the model that was written for it, and what it says about the rest.
COUNTS: dict[str, tuple[str, int, list[str]]] = {
    "fuse_gelu": ("gelu", 3, []),
    "fuse_layer_norm": ("layer_norm", 3, []),
    "fuse_instance_norm": ("instance_norm", 3, []),
    "fuse_l2_norm": ("l2_norm", 2, ["its epsilon (0.5) is none"]),
    "fold_batch_norm_after_concat": ("concat_norm", 1, []),
    "fold_batch_norm": ("concat_norm", 0, ["it follows Concat"]),
    "convert_bn_to_conv": ("pools_and_splits", 1, []),
    "convert_split_to_slice": ("pools_and_splits", 3, []),
    "split_large_kernel_pool": ("pools_and_splits", 1, []),
    "faster_forms": ("focuses", 4, ["padding does not count"]),
    "fuse_lstm_cell": ("lstm_cell", 1, []),
    "direct_convs": ("slow_forms", 2, ["its stride is above 1"]),
    "fewer_moves": ("slow_forms", 2, []),
    "faster_floats": ("slow_floats", 5, []),
    "later_transposes": ("channels_last", 5, []),
    "fold_div_into_matmul": ("attention_scale", 2, []),
    "replace_clip6_relu": ("pools_and_splits", 1, ["its bounds are (0.0, inf)"]),
    "convert_clip_to_relu": (
        "quantized_clips",
        1,
        ["the codes behind it reach 12, beyond its upper bound 6", "its lower bound is -6.0"],
    ),
    "fold_relu": ("quantized_clips", 3, ["reach -6.04724, beyond 0", "reach 12, beyond 6"]),
    "copy_shared_init": ("concat_norm", 3, []),
    "copy_bias_init": ("concat_norm", 1, []),
}


@pytest.mark.parametrize("name", COUNTS)
def test_every_written_form_is_found_and_every_refusal_has_its_reason(name: str) -> None:
    case, fired, reasons = COUNTS[name]
    _, report, _ = run_pass(passes()[name], model_of(case))
    assert report.fired == fired, report
    assert len(report.refused) == len(reasons), report
    for reason, refusal in zip(reasons, report.refused, strict=True):
        assert reason in refusal


def test_gelu_says_which_opset_it_needs() -> None:
    _, report, _ = run_pass(passes()["fuse_gelu"], model_of("gelu below opset 20"))
    assert report.fired == 0 and len(report.refused) == 3 and "needs opset 20 and the model has 13" in report.refused[0]


# ---- cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [row for row in TABLE if row.name != "simplify"], ids=lambda row: row.name)
def test_cost_is_linear(row: Pass) -> None:
    costs = []
    for length in (20, 40):
        proto = models.conv_chain(length)
        model = load(proto)
        infer_shapes(model)
        arguments = arguments_of(row, proto)
        costs.append(calls(apply, model, row, arguments))
    assert costs[1] < 2.3 * costs[0] + 200, f"{row.name}: {costs}"
