"""What the device's functions cost by themselves: which are looked at, on how many samples, and what is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tests.onnx_flow import models

from quark.config.plan import NodePlan, Plan
from quark.onnx import QConfig, QLayerConfig, XInt8Spec
from quark.onnx.graph.model import load
from quark.onnx.npu import simulate, substitution

SIGMOID = "g (float[1, 64] x) => (float[1, 64] y, float[1, 64] z) { y = Sigmoid (x) z = Relu (x) }"


def job(**options: Any) -> Any:
    layer = QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec())
    return QConfig(layer, extra_options={"PrintSummary": False, **options}).compile()


def planned(model: ir.Model, quantized: bool = True) -> Plan:
    plan = Plan()
    for node in model.graph:
        plan.nodes[node.name or ""] = NodePlan(node.name or "", node.op_type, quantized, "")
    return plan


def samples(count: int, scale: float = 3.0) -> list[dict[str, np.ndarray]]:
    return [{"x": models.normal(1, 64, seed=k) * np.float32(scale)} for k in range(count)]


def hard(x: np.ndarray) -> np.ndarray:
    """The device's HardSigmoid, by its table: clip(x / 6 + 1 / 2, 0, 1) times 2731 * 6 / 2^14."""
    return np.clip(x / 6 + 0.5, 0, 1)


def test_a_function_that_is_clearly_another_is_told() -> None:
    model = load(models.model(SIGMOID, {}, 17))
    feeds = samples(6)
    (told,) = substitution.substitutions(model, planned(model), job(), feeds)
    assert told.startswith("ConvertSigmoidToHardSigmoid computes HardSigmoid for Sigmoid in 1 places")
    assert "leaves 'y' at" in told
    x = np.concatenate([feed["x"] for feed in feeds[: substitution.LOOKED]]).astype(np.float64)
    wanted = 1 / (1 + np.exp(-x))
    sqnr = 10 * np.log10((wanted**2).sum() / ((wanted - hard(x)) ** 2).sum())
    assert float(told.split("leaves 'y' at ")[1].split(" dB")[0]) == pytest.approx(sqnr, abs=0.06)
    assert [node.op_type for node in model.graph] == ["Sigmoid", "Relu"]


def test_an_output_whose_size_depends_on_values_says_nothing() -> None:
    """What a detector finds: HardSigmoid crosses a bound elsewhere, and there are more or fewer."""
    graph = """g (float[1, 64] x) => (float[K] y, float[1, 64] z) {
        z = Sigmoid (x) high = Greater (z, bound) where = NonZero (high) rows = Transpose <perm = [1, 0]> (where)
        y = GatherND (z, rows)
    }"""
    model, feeds = load(models.model(graph, {"bound": np.float32(0.8)}, 17)), samples(3)
    counts = [(np.sum(1 / (1 + np.exp(-feed["x"])) > 0.8), np.sum(hard(feed["x"]) > 0.8)) for feed in feeds]
    assert any(one != other for one, other in counts)
    (told,) = substitution.substitutions(model, planned(model), job(), feeds)
    assert "leaves 'z' at" in told


@pytest.mark.parametrize(
    ("options", "quantized", "reader"),
    [
        ({"ConvertSigmoidToHardSigmoid": False}, True, True),
        ({"SimulateDPU": False}, True, True),
        ({}, False, True),
        ({}, True, False),
    ],
)
def test_nothing_is_told_where_nothing_is_replaced_or_nobody_gave_data(
    options: dict[str, Any], quantized: bool, reader: bool
) -> None:
    model = load(models.model(SIGMOID, {}, 17))
    assert (
        substitution.substitutions(model, planned(model, quantized), job(**options), samples(2) if reader else None)
        == []
    )


def test_random_data_do_where_they_are_asked_for() -> None:
    model = load(models.model(SIGMOID, {}, 17))
    assert len(substitution.substitutions(model, planned(model), job(UseRandomData=True), None)) <= 1


def test_what_is_near_is_not_told() -> None:
    model = load(models.model(SIGMOID, {}, 17))
    assert substitution.substitutions(model, planned(model), job(), samples(2, 1e-3)) == []


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("replaced", [True, False])
def test_a_reader_that_is_read_once_is_remembered(once: bool, replaced: bool) -> None:
    data: Any = iter(samples(9)) if once else samples(9)
    found = substitution.remembering(job(ConvertSigmoidToHardSigmoid=replaced), data)
    assert isinstance(found, substitution.Remembering) == (once and replaced)
    assert substitution.remembering(job(), None) is None


@pytest.mark.parametrize("option", [row.option for row in simulate.SIMULATIONS])
@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_which_rewrites_a_job_has(option: str, given: bool | None, whole: bool) -> None:
    optional = {"ConvertSoftmaxToDPUVersion", "ConvertInstanceNormToDPUVersion", "ConvertClipToDPUVersion"}
    row = next(row for row in simulate.SIMULATIONS if row.option == option)
    made = job(**({} if given is None else {option: given}), SimulateDPU=whole)
    expected = whole and (option not in optional if given is None else given)
    assert simulate.asked(row, made) == expected
