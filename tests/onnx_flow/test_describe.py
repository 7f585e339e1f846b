"""What ``describe`` reads from a model, and how long models take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.errors import ModelNotFoundError
from quark.onnx import latency
from quark.onnx.describe import Port, describe, file_bytes
from quark.onnx.graph.run import session_options
from quark.onnx.graph.session import Runtime
from quark.onnx.latency import quiet_seconds


def product(size: int) -> onnx.ModelProto:
    """``y = x @ w`` with a Q/DQ pair on ``x`` (uint16) and one on the constant ``w`` (int8)."""
    constants = {
        "w": np.eye(size, dtype=np.float32),
        "s": np.array(0.1, np.float32),
        "zw": np.array(0, np.int8),
        "zx": np.array(9, np.uint16),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "zx"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "zx"], ["xd"]),
        helper.make_node("QuantizeLinear", ["w", "s", "zw"], ["wq"]),
        helper.make_node("DequantizeLinear", ["wq", "s", "zw"], ["wd"]),
        helper.make_node("MatMul", ["xd", "wd"], ["m"]),
        helper.make_node("Relu", ["m"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10, producer_name="hand")


@pytest.mark.parametrize("kind", ["QLinearAdd", "DynamicQuantizeMatMul", "GatherBlockQuantized", "QAttention"])
def test_operators_on_codes_of_other_tools_are_told(kind: str, tmp_path: Path) -> None:
    """A model whose every layer was one of them was called a float model, and its plan left them out."""
    proto = product(4)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    proto.graph.node[-1].CopyFrom(helper.make_node(kind, ["m", "w"], ["y"], "other", domain="com.microsoft"))
    onnx.save(proto, tmp_path / "m.onnx")
    assert describe(tmp_path / "m.onnx").others == (f"a plan holds no {kind}, which is the node 'other'",)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx.save(product(4), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_operators_ports_and_codes(path: Path) -> None:
    found = describe(path)
    assert (found.opset, found.ir_version, found.producer) == (21, 10, "hand")
    assert found.inputs == (Port("x", "float32", ("N", 4)),)
    assert found.outputs == (Port("y", "float32", None),)
    assert found.operators == {"MatMul": 1, "Relu": 1}
    assert found.quantized == {"MatMul": 1}
    assert found.activations == {"uint16": 1} and not found.others
    assert found.tensors == {
        "activation": {"uint16 asymmetric per tensor, float32, given": 1},
        "weight": {"int8 symmetric per tensor, float32, given": 1},
    }
    assert found.weights == {"float32": (2, 17), "int8": (1, 1), "uint16": (1, 1)}


def test_what_a_plan_cannot_hold_is_told(tmp_path: Path) -> None:
    """Operators on codes, and scales that are computed: a model with them is no float model."""
    made = product(4)
    made.graph.node[0].input[1] = "scale"
    made.graph.node.insert(0, helper.make_node("Abs", ["s"], ["scale"]))
    made.graph.node.append(helper.make_node("MatMulInteger", ["xq", "wq"], ["codes"], "product"))
    onnx.save(made, tmp_path / "m.onnx")
    found = describe(tmp_path / "m.onnx")
    assert not found.activations and set(found.tensors) == {"weight"}
    computed, whole = found.others
    assert "a scale that is computed" in computed and "no MatMulInteger, which is the node 'product'" in whole


def test_bytes_count_external_data(tmp_path: Path, path: Path) -> None:
    assert describe(path).bytes == path.stat().st_size
    onnx.save(product(64), tmp_path / "e.onnx", save_as_external_data=True, location="e.bin", size_threshold=100)
    expected = (tmp_path / "e.onnx").stat().st_size + (tmp_path / "e.bin").stat().st_size
    assert file_bytes(tmp_path / "e.onnx") == expected
    assert (tmp_path / "e.bin").stat().st_size >= 64 * 64 * 4


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        describe(tmp_path / "nowhere.onnx")


def test_latency_tells_a_large_model_from_a_small_one() -> None:
    models = {"small": product(4), "large": product(1024)}
    for model in models.values():
        model.graph.input[0].type.tensor_type.shape.dim[1].ClearField("dim_value")
    small = quiet_seconds({"small": models["small"]}, {"x": np.ones((1, 4), np.float32)}, rounds=3)
    large = quiet_seconds({"large": models["large"]}, {"x": np.ones((64, 1024), np.float32)}, rounds=3)
    assert 0 < small["small"] < large["large"]


@pytest.mark.parametrize(("seconds", "runs"), [(0.001, 10), (0.01, 2 + 6), (0.03, 1 + 4), (0.2, 1 + 2)])
def test_of_slow_models_a_block_has_fewer_inferences(
    seconds: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncounted until 0.02 s have passed, four at most; counted until 0.1 s have, two to six of them."""
    now, ran = [0.0], []

    class Session:
        def get_inputs(self) -> list[Any]:
            return []

        def run(self, names: None, feed: Any) -> None:
            ran.append(feed)
            now[0] += seconds

    monkeypatch.setattr(latency.time, "perf_counter", lambda: now[0])
    found = latency.session_seconds({"it": (Session(), {})}, 0.0)  # type: ignore[dict-item]
    assert len(ran) == runs and found["it"] == pytest.approx(seconds)


@pytest.mark.parametrize(("seconds", "first"), [(60.0, []), (0.0, [0.02, 0.02, 0.01, 0.02, 0.02])])
def test_inferences_that_other_programs_interrupt_do_not_count(
    seconds: float, first: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long one loses its core before it ends, a short one does not: by medians the short one won 10 times for 2.
    Where the first block is unlike in itself, there is another one."""
    long = [0.02, *first, *[0.002, 0.02, 0.02] * 40]
    now, taken = [0.0], {"long": iter(long), "short": iter([0.001] * 200)}

    class Session:
        def __init__(self, name: str) -> None:
            self.name = name

        def get_inputs(self) -> list[Any]:
            return []

        def run(self, names: None, feed: Any) -> None:
            now[0] += next(taken[self.name])

    monkeypatch.setattr(latency.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(latency, "_spins", lambda session: False)
    found = latency.session_seconds({name: (Session(name), {}) for name in taken}, seconds)  # type: ignore[misc]
    assert found["long"] / found["short"] == pytest.approx(2)


def test_a_session_that_is_timed_is_as_a_user_opens_it() -> None:
    usual, sparing = (session_options(Runtime(usual=usual)) for usual in (True, False))
    assert usual.enable_cpu_mem_arena and usual.enable_mem_pattern
    assert not sparing.enable_cpu_mem_arena and not sparing.enable_mem_pattern


@pytest.mark.parametrize(("threads", "count"), [((1, 1), 0.0), ((1, 2), latency.REST), ((2,), 0.0)])
def test_sessions_of_several_threads_wait_for_those_of_the_one_before(
    threads: tuple[int, ...], count: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They spin for a while behind an inference: on two cores the next session seemed to have one."""
    slept: list[float] = []
    monkeypatch.setattr(latency.time, "sleep", slept.append)
    sessions = {}
    for number, each in enumerate(threads):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = each
        model = product(4).SerializeToString()
        one = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        sessions[str(number)] = one, {"x": np.ones((1, 4), np.float32)}
    assert latency.session_seconds(sessions, 60.0, rounds=2).keys() == sessions.keys()
    assert slept == [count] * 2 * len(threads)
