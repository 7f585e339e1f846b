"""What operators take on ONNX Runtime's CPU provider, in float and in integers: the table behind ``FloatWhereFaster``.

    python -m benchmarks.kernel_times --threads 2 --output benchmarks/results/kernel_times/wide_2.tsv
    python -m benchmarks.kernel_times --combine benchmarks/results/kernel_times/*.tsv --output kernel_times.tsv

The package's table is the mean of three: a processor that computes 512 bits in two steps on one thread (``narrow_1``),
one that computes them in one on one thread and on two (``wide_1``, ``wide_2``); each counts by its speed of float
convolutions of 1x1, so that what is decided by the mean is good in all three.

Every kind of operator runs at several shapes, once in float and once between Q and DQ pairs, with the profiler on; the
fastest fifth of many runs of each kernel counts, less what the profiler itself takes. The integer form's time is
everything between the first QuantizeLinear and the last DequantizeLinear, so that an operator without an integer kernel
pays for the pairs around it. The times of a kind are then written as

    microseconds = call + nanoseconds per element / 1000 + microseconds per million products

by least squares of the relative errors, no part below 0; the elements are those of the larger of input and output, for
convolutions of images (up to 4 channels), and those that make less than 16 channels, the rows of pixels that are copied
one by one, a kernel's rows for each place, and for those of volumes what the kernel covers at each place, in float of
each channel, in integers of all channels of a group at once. Of depthwise ones of channels that are no multiple of 4
they are what the kernel covers: in float at a stride, in integers with each channel beyond groups of 8 as 9. Kernels
compute 16 channels at a time: products of convolutions of pictures and sounds are those of whole groups of 16, of
sounds in places, too (one place counts as 4). Depthwise convolutions of channels that are a multiple of 8, of 4, and of
none, have rows of their own, and so have those of 1x1 that read or make channels that are no multiple of 4, which
integer kernels copy one by one; of sounds, those of 1 copy nothing in float, and of both kinds those of such channels
have rows, too.
For an LSTM they are the gates that are computed; its integer form is DynamicQuantizeLSTM.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from benchmarks import measure, record
from quark.onnx.qdq.slower import COPIED, convolution, copied

RUNS = 60
HEADER = ["kind", "form", "call_us", "element_ns", "product_us"]
CHAIN = 200
DOMAINS = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
#: Rows of the borders between float and integers, alone and where images change their layout, too.
BORDERS = ("QuantizeLinear", "DequantizeLinear", "QuantizeLinear image", "DequantizeLinear image")
#: Operators that run in the layout of the convolution before them, where there is one: they are measured behind it.
IN_LAYOUT = frozenset(["AveragePool", "GlobalAveragePool", "MaxPool", "Resize"])


@dataclass(frozen=True)
class Sample:
    """One operator at one shape: inputs that are computed, the weight, attributes, and its number of products."""

    kind: str
    op_type: str
    inputs: tuple[tuple[int, ...], ...]
    weight: tuple[int, ...] | None = None
    attributes: tuple[tuple[str, object], ...] = ()
    products: int = 0


def samples() -> Iterator[Sample]:
    """Every kind at several shapes."""
    for channels, size in itertools.product((16, 32, 64, 128, 256), (7, 14, 28, 56)):
        if channels * size * size <= 2**18:
            yield _conv(channels, channels, size, 1)
            yield _conv(channels, channels, size, 3, channels)
            yield _conv(channels, channels, size, 5, channels)
            yield _conv(channels, channels, size, 3, channels, 2)
            if channels <= 128:
                yield _conv(channels, channels, size, 3)
                yield _conv(channels, 2 * channels, size, 3, 1, 2)
                yield _conv(channels, channels, size, 3, 4)
            yield _conv(channels, 2 * channels, size, 1)
    for channels, size, kernel, stride in itertools.product((8, 16, 24, 32, 64), (8, 16, 32), (1, 3), (1, 2)):
        if channels * size**3 <= 2**20 and kernel >= stride:  # what is copied leaves the caches: large ones count
            if channels >= 16:
                yield _conv(channels, channels, size, kernel, 1, stride, 3)
            for made in (4, 8, 12):
                yield _conv(channels, made, size, kernel, 1, stride, 3)
            if kernel > 1:
                yield _conv(channels, channels, size, kernel, channels, stride, 3)
    for read, made, size in itertools.product((1, 2, 3, 4, 6, 32), (8, 16, 64), (8, 16, 24)):
        yield _conv(read, made, size, 3, 1, 1, 3)
        yield _conv(read, made, size, 3, 1, 2, 3)
    for channels, size, group in itertools.product((16, 32, 64), (8, 12), (2, 4, 8)):
        yield _conv(channels, channels, size, 3, group, 1, 3)
    for channels, size, kernel in itertools.product((16, 32, 64, 128, 256), (32, 128, 512, 2048), (3, 5, 9)):
        if channels * size <= 2**17:
            yield _conv(channels, channels, size, kernel, channels, 1, 1)
    for read, made, size, kernel in itertools.product(
        (8, 9, 10, 32, 41, 64, 128), (8, 9, 12, 17, 32, 61, 64, 128), (32, 128, 512, 2048), (1, 3, 5)
    ):
        if max(read, made) * size <= 2**17:
            yield _conv(read, made, size, kernel, 1, 1, 1)
    for parts, size, stride in itertools.product(
        (8, 24, 40, 56, 72, 120, 12, 20, 28, 36, 60, 100, 6, 9, 21, 22, 30, 31, 33, 58, 122), (7, 14, 28), (1, 2)
    ):
        yield _conv(parts, parts, size, 3, parts, stride)
        yield _conv(parts, parts, size, 5, parts, stride)
    for channels, size in itertools.product((21, 29, 30, 31, 33, 58, 62, 118, 121), (7, 14, 28, 40)):
        yield _conv(channels, channels, size, 1)
    for read, made, size, stride in itertools.product((5, 8, 12, 16, 32, 64), (4, 8, 12), (14, 28, 56), (1, 2)):
        yield _conv(read, made, size, 3, 1, stride)
        if stride == 1:
            yield _conv(read, made, size, 7)
            yield _conv(read, made, size, 1)
    for made, size, stride in ((4, 8, 1), (16, 8, 1), (8, 16, 1), (16, 16, 2), (16, 32, 2), (16, 32, 1)):
        yield _conv(3, made, size, 3, 1, stride)
        yield _conv(1, made, size, 3, 1, stride)
    for made, size, kernel in ((16, 64, 3), (32, 112, 3), (24, 176, 3), (16, 224, 6), (64, 112, 7), (96, 64, 11)):
        yield _conv(3, made, size, kernel, 1, 2)
        yield _conv(1, made, size, kernel, 1, 2)
    for rows, size in itertools.product((1, 8, 64, 256), (32, 64, 128, 256, 512)):
        kind, products = "MatMul weight" if rows > 1 else "MatMul row", rows * size * size
        yield Sample(kind, "MatMul", ((1, rows, size),), (size, size), (), products)
        yield Sample(kind, "Gemm", ((rows, size),), (size, size), (), products)
    for steps, batch, read, state in itertools.product((1, 10), (1, 4), (32, 64, 128, 256), (32, 64, 128, 256)):
        yield _lstm(steps, batch, read, state)
    for rows, size in itertools.product((8, 32, 128), (8, 32, 64)):
        both = ((1, 4, rows, size), (1, 4, size, rows))
        yield Sample("MatMul", "MatMul", both, None, (), 4 * rows * rows * size)
    for channels, size in ((8, 4), (16, 8), (32, 14), (64, 28), (48, 56), (16, 112)):
        yield from _light((1, channels, size, size))


def _light(shape: tuple[int, ...]) -> Iterator[Sample]:
    """Operators without weights."""
    square = (("kernel_shape", [3, 3]), ("strides", [2, 2]), ("pads", [1, 1, 1, 1]))
    for op_type in ("Relu", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Gelu", "Elu", "Exp", "Sqrt"):
        yield Sample(op_type, op_type, (shape,))
    for op_type in ("Add", "Mul", "Sub", "Div"):
        yield Sample(op_type, op_type, (shape, shape))
    yield Sample("SiLU", "SiLU", (shape,))
    yield Sample("Softmax", "Softmax", (shape,), None, (("axis", -1),))
    yield Sample("Softmax", "Softmax", (shape,), None, (("axis", 1),))
    yield Sample("Concat", "Concat", (shape, shape), None, (("axis", 1),))
    yield Sample("MaxPool", "MaxPool", (shape,), None, square)
    yield Sample("AveragePool", "AveragePool", (shape,), None, square)
    yield Sample("GlobalAveragePool", "GlobalAveragePool", (shape,))
    yield Sample("Transpose", "Transpose", (shape,), None, (("perm", [0, 2, 3, 1]),))
    yield Sample("Reshape", "Flatten", (shape,))
    yield Sample("Slice", "Slice", (shape,))
    yield Sample("Resize", "Resize", (shape,), None, (("mode", "nearest"),))
    yield Sample("Resize linear", "Resize", (shape,), None, (("mode", "linear"),))
    yield Sample("LayerNormalization", "LayerNormalization", (shape,), None)
    yield Sample("BORDER", "BORDER", (shape,))


def _conv(read: int, made: int, size: int, kernel: int, group: int = 1, stride: int = 1, rank: int = 2) -> Sample:
    out = -(-size // stride)
    attributes = (("group", group), ("pads", [kernel // 2] * 2 * rank), ("strides", [stride] * rank))
    weight = (made, read // group, *[kernel] * rank)
    kind, products = convolution(weight, group, made * (out * kernel) ** rank * read // group)
    return Sample(kind, "Conv", ((1, read, *[size] * rank),), weight, attributes, round(products))


def _lstm(steps: int, batch: int, read: int, state: int) -> Sample:
    gates = 4 * state
    products, kind = steps * batch * gates * (read + state), "LSTM" if batch == 1 else "LSTM batch"
    return Sample(kind, "LSTM", ((steps, batch, read),), (1, gates, read), (("hidden_size", state),), products)


# ---- models ----------------------------------------------------------------------------------------------------------


class Builder:
    """A model of one operator, with Q and DQ pairs or without."""

    def __init__(self, integers: bool) -> None:
        self.integers, self.nodes, self.constants = integers, list[onnx.NodeProto](), dict[str, np.ndarray]()
        self.random = np.random.default_rng(0)

    def constant(self, name: str, array: np.ndarray) -> str:
        """A stored tensor; its name."""
        self.constants[name] = array
        return name

    def pair(self, name: str) -> str:
        """The tensor behind Q and DQ, where the model is in integers; its name."""
        if not self.integers:
            return name
        scale, zero = self.constant(f"{name}_s", np.float32(0.03)), self.constant(f"{name}_z", np.uint8(128))
        self.nodes.append(helper.make_node("QuantizeLinear", [name, scale, zero], [f"{name}_c"], f"{name}_Q"))
        self.nodes.append(helper.make_node("DequantizeLinear", [f"{name}_c", scale, zero], [f"{name}_d"], f"{name}_D"))
        return f"{name}_d"

    def weight(self, name: str, shape: Sequence[int], axis: int) -> str:
        """A stored weight, as codes per channel in integers; its name."""
        if not self.integers:
            return self.constant(name, self.random.normal(0, 0.1, shape).astype(np.float32))
        self.constant(f"{name}_c", self.random.integers(-127, 127, shape).astype(np.int8))
        scale = self.constant(f"{name}_s", np.full(shape[axis], 1e-3, np.float32))
        zero = self.constant(f"{name}_z", np.zeros(shape[axis], np.int8))
        self.nodes.append(helper.make_node("DequantizeLinear", [f"{name}_c", scale, zero], [name], axis=axis))
        return name

    def apply(self, one: Sample, inputs: list[str]) -> str:
        """The operator on these tensors; the name of its result."""
        attributes = dict(one.attributes)
        if one.op_type == "LSTM":
            return self.lstm(one, inputs)
        if one.op_type in IN_LAYOUT:
            square = (one.inputs[0][1], one.inputs[0][1], 1, 1)
            self.nodes.append(helper.make_node("Conv", [inputs[0], self.weight("wb", square, 0)], ["before"], "before"))
            inputs = [self.pair("before")]
        if one.op_type == "SiLU":
            self.nodes.append(helper.make_node("Sigmoid", inputs, ["gate"], "gate"))
            self.nodes.append(helper.make_node("Mul", [inputs[0], self.pair("gate")], ["y"], "op"))
            return "y"
        if one.weight is not None:
            inputs = [*inputs, self.weight("w", one.weight, 0 if one.op_type == "Conv" else 1)]
        if one.op_type == "Slice":
            inputs += [self.constant(name, np.array([at])) for name, at in (("b", 0), ("e", 3), ("a", 1))]
        if one.op_type == "Resize":
            inputs += ["", self.constant("factors", np.array([1, 1, 2, 2], np.float32))]
        if one.op_type == "Flatten" and not self.integers:  # at an edge of the model it would be copied
            self.nodes.append(helper.make_node("Neg", inputs, ["before"], "before"))
            self.nodes.append(helper.make_node("Flatten", ["before"], ["flat"], "op"))
            self.nodes.append(helper.make_node("Neg", ["flat"], ["y"], "before y"))
            return "y"
        if one.op_type == "LayerNormalization":
            inputs += [self.constant("g", np.ones(one.inputs[0][-1], np.float32))]
        self.nodes.append(helper.make_node(one.op_type, inputs, ["y"], "op", **attributes))
        return "y"

    def lstm(self, one: Sample, inputs: list[str]) -> str:
        """An LSTM, or the operator of dynamic quantization with a scale per row of a gate."""
        _, gates, read = one.weight or (0, 0, 0)
        state, domain, beside = gates // 4, "com.microsoft" if self.integers else "", list[str]()
        for name, width in (("w", read), ("r", state)):
            if self.integers:
                codes = self.random.integers(-127, 127, (1, width, gates)).astype(np.int8)
                inputs.append(self.constant(name, codes))
                beside += [self.constant(f"{name}_s", np.full((1, gates), 1e-3, np.float32))]
                beside += [self.constant(f"{name}_z", np.zeros((1, gates), np.int8))]
            else:
                inputs.append(self.weight(name, (1, gates, width), 1))
        inputs += [self.constant("bias", np.zeros((1, 2 * gates), np.float32)), *([""] * 4 if beside else []), *beside]
        op_type = "DynamicQuantizeLSTM" if self.integers else "LSTM"
        self.nodes.append(helper.make_node(op_type, inputs, ["y"], "op", domain=domain, hidden_size=state))
        return "y"


def model_of(one: Sample, integers: bool) -> onnx.ModelProto:
    """The operator alone."""
    builder = Builder(integers)
    names = [f"x{k}" for k in range(len(one.inputs))]
    pair = str if one.op_type == "LSTM" else builder.pair  # its integer form reads and makes floats
    result = builder.apply(one, [pair(name) for name in names])
    return _proto(builder, dict(zip(names, one.inputs, strict=True)), pair(result))


def border_of(one: Sample) -> onnx.ModelProto:
    """Float convolution, integer convolution, float convolution, each 1x1 from channel to channel."""
    builder, channels = Builder(True), one.inputs[0][1]
    square, value = (channels, channels, 1, 1), "x0"
    for k, integers in enumerate((False, True, False)):
        builder.integers = integers
        read = builder.pair(value) if integers else value
        builder.nodes.append(helper.make_node("Conv", [read, builder.weight(f"w{k}", square, 0)], [f"v{k}"], f"op{k}"))
        value = builder.pair(f"v{k}") if integers else f"v{k}"
    return _proto(builder, {"x0": one.inputs[0]}, value)


def _proto(builder: Builder, inputs: dict[str, tuple[int, ...]], output: str) -> onnx.ModelProto:
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    made = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)]
    stored = [numpy_helper.from_array(np.asarray(array), name) for name, array in builder.constants.items()]
    graph = helper.make_graph(builder.nodes, "one", given, made, stored)
    return helper.make_model(graph, opset_imports=DOMAINS, ir_version=10)


# ---- times -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Where profiles are written for a moment, and on how many threads sessions run."""

    folder: Path
    threads: int = 1


def kernel_times(model: onnx.ModelProto, at: Setting, overhead: float = 0.0) -> dict[tuple[str, str], float]:
    """Microseconds of every kernel, by (name of the node, operator), less what the profiler adds to each."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = at.threads, 3
    options.enable_profiling, options.profile_file_prefix = True, str(at.folder / "profile")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(1)
    feed = {one.name: random.normal(size=one.shape).astype(np.float32) for one in session.get_inputs()}
    for _ in range(RUNS):
        session.run(None, feed)
    path, found = Path(session.end_profiling()), defaultdict[tuple[str, str], list[float]](list)
    for event in json.loads(path.read_text(encoding="utf-8")):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            found[event["name"].removesuffix("_kernel_time"), event["args"]["op_name"]].append(event["dur"])
    path.unlink()
    return {kernel: _fastest(times) - overhead for kernel, times in found.items()}


def _fastest(times: Sequence[float]) -> float:
    """The mean of the fastest fifth: the profiler counts whole microseconds, and other programs run beside."""
    return float(np.mean(sorted(times)[: max(len(times) // 5, 1)]))


@cache
def profiler_overhead(at: Setting) -> float:
    """Microseconds that the profiler adds to a lone kernel: to a tiny one, over its part of a chain without it."""
    chain, alone = _chain(CHAIN), kernel_times(_chain(1), at)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = at.threads
    session = onnxruntime.InferenceSession(chain.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed, times = {"v0": np.ones((1, 1), np.float32)}, []
    for _ in range(20 * RUNS):  # of a busy machine, too, some are undisturbed
        start = time.perf_counter()
        session.run(None, feed)
        times.append((time.perf_counter() - start) * 1e6)
    return sum(alone.values()) - min(times) / CHAIN


def _chain(nodes: int) -> onnx.ModelProto:
    """Tiny kernels one behind the other."""
    made = [helper.make_node("Sqrt", [f"v{k}"], [f"v{k + 1}"], f"op{k}") for k in range(nodes)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1]) for name in ("v0", f"v{nodes}")]
    graph = helper.make_graph(made, "chain", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def float_time(one: Sample, at: Setting) -> float:
    """Microseconds of the float form; reorderings at its edges are part of borders."""
    times = kernel_times(model_of(one, False), at, profiler_overhead(at))
    return sum(each for kernel, each in times.items() if not _beside(kernel, one))


def integer_time(one: Sample, at: Setting) -> float:
    """Microseconds of everything between the pairs at its edges."""
    times = kernel_times(model_of(one, True), at, profiler_overhead(at))
    edges = [name for name, op_type in times if op_type == "QuantizeLinear" and name[0] == "x" and name.endswith("_Q")]
    left = sum(each for kernel, each in times.items() if kernel[0] not in edges and not _beside(kernel, one))
    return left - sum(each for (name, _), each in times.items() if name.startswith("y_D"))


def _beside(kernel: tuple[str, str], one: Sample) -> bool:
    """Whether a kernel is not the operator's: a change of layout, or the convolution before it."""
    name, op_type = kernel
    if name.startswith("before") or (one.op_type in IN_LAYOUT and "Conv" in op_type):
        return True
    return op_type.startswith("Reorder") or (op_type == "Transpose" and one.op_type != "Transpose")


def border_times(one: Sample, at: Setting) -> tuple[float, ...]:
    """Microseconds of Q and of DQ between convolutions, then of both with half of the changes of layout each."""
    times = kernel_times(border_of(one), at, profiler_overhead(at))
    layout = sum(each for (_, op_type), each in times.items() if op_type.startswith(("Reorder", "Transpose"))) / 2
    kinds = ("QuantizeLinear", "DequantizeLinear")
    quantize, dequantize = (sum(each for (_, op), each in times.items() if op == kind) for kind in kinds)
    return quantize, dequantize, quantize + layout, dequantize + layout


def elements(one: Sample, outputs: int = 0, integers: bool = False) -> int:
    """Elements of the largest tensor that is computed, or how often a convolution copies."""
    read = [int(np.prod(shape)) for shape in one.inputs]
    if one.kind in COPIED and one.weight is not None:
        group = int(str(dict(one.attributes).get("group", 1)))
        return copied(one.kind, one.weight, group, outputs // one.weight[0], max(*read, outputs))[integers]
    if one.op_type == "LSTM" and one.weight is not None:
        return one.products // (one.weight[2] + one.weight[1] // 4)
    return max(*read, outputs, sum(read) if one.op_type == "Concat" else 0)


def made_elements(one: Sample) -> int:
    """Elements of the output, by inference."""
    graph = onnx.shape_inference.infer_shapes(model_of(one, False)).graph if one.op_type != "BORDER" else None
    return 0 if graph is None else int(np.prod([dim.dim_value for dim in graph.output[0].type.tensor_type.shape.dim]))


def fitted(rows: list[tuple[float, int, int]]) -> tuple[float, float, float]:
    """(call, ns per element, us per million products) of rows (microseconds, elements, products)."""
    times = np.array([max(time, 0.2) for time, _, _ in rows])
    parts = np.array([[1.0, count / 1e3, products / 1e6] for _, count, products in rows])
    active = [k for k in range(3) if parts[:, k].any()]
    while True:
        found, *_ = np.linalg.lstsq(parts[:, active] / times[:, None], np.ones(len(times)), rcond=None)
        if (found >= 0).all():
            break
        active.pop(int(np.argmin(found)))
    values = [0.0, 0.0, 0.0]
    for place, value in zip(active, found, strict=True):
        values[place] = float(value)
    return values[0], values[1], values[2]


def measured(kinds: Sequence[str], threads: int = 1) -> dict[tuple[str, str], list[tuple[float, int, int]]]:
    """(microseconds, elements, products) of every sample of these kinds (none: of all), by (kind, form)."""
    rows = defaultdict[tuple[str, str], list[tuple[float, int, int]]](list)
    with tempfile.TemporaryDirectory() as name:
        at = Setting(Path(name), threads)
        for one in samples():
            if kinds and one.kind not in kinds:
                continue
            count, copies = (elements(one, made_elements(one), form) for form in (False, True))
            if one.kind == "BORDER":
                times = border_times(one, at)
                for kind, each in zip(BORDERS, times, strict=True):
                    rows[kind, "integer"].append((each, count, 0))
                continue
            rows[one.kind, "float"].append((float_time(one, at), count, one.products))
            rows[one.kind, "integer"].append((integer_time(one, at), copies, one.products))
    return rows


def told_rows(path: Path) -> list[list[str]]:
    """The rows of a table."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")][1:]


def combined(paths: Sequence[Path]) -> list[list[str]]:
    """The mean of tables, each counted by its speed of float convolutions: no slow one decides alone."""
    read = [{(kind, form): np.array(values, float) for kind, form, *values in told_rows(path)} for path in paths]
    speeds = np.array([1 / one["Conv 1x1", "float"][2] for one in read])
    shares = speeds / speeds.sum()
    rows = {key: sum(share * one[key] for share, one in zip(shares, read, strict=True)) for key in read[0]}
    return [[*key, *(f"{value:.3g}" for value in values)] for key, values in rows.items()]


def merged(path: Path, lines: list[list[str]]) -> list[list[str]]:
    """The rows of a table, those measured now in the place of their old ones or behind all."""
    now = {tuple(line[:2]): line for line in lines}
    kept = [now.pop((line[0], line[1]), line) for line in told_rows(path)]
    return [*kept, *now.values()]


def main() -> int:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kinds", nargs="+", default=[], help="measure these kinds alone; --output keeps its other rows"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of each session")
    parser.add_argument("--combine", nargs="+", type=Path, help="measure nothing: the mean of these tables")
    parser.add_argument("--output", type=Path, help="write the table here, as the package reads it")
    parser.add_argument("--json", type=Path, help=record.HELP)
    arguments = parser.parse_args()
    if arguments.combine:
        lines, origin = (
            combined(arguments.combine),
            f"# The mean of {', '.join(path.name for path in arguments.combine)}",
        )
    else:
        rows = measured(arguments.kinds, arguments.threads)
        lines = [[*row, *(f"{value:.3g}" for value in fitted(found))] for row, found in rows.items()]
        origin = f"# ONNX Runtime {onnxruntime.__version__}, {arguments.threads} thread(s), AVX512-VNNI"
    print(measure.table(HEADER, lines))
    if arguments.output:
        lines = merged(arguments.output, lines) if arguments.kinds else lines
        arguments.output.write_text(
            "\n".join(
                [f"{origin}: python -m benchmarks.kernel_times", *("\t".join(line) for line in [HEADER, *lines]), ""]
            )
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": lines}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
