"""What the number formats without ONNX types cost on stock ONNX Runtime: latency over float, bytes over float.

A ResNet-50 of random weights gets the operator of a format on every activation (every tensor but those that only a
Relu reads) and its weights stored packed in that format. The models take turns in one process, each between two runs
of the float model; the median of the ratios counts. ``--profile`` says where the time goes. No custom-op library is
loaded.

    python -m benchmarks.operators [--formats bfp16 mxfp4] [--threads 2] [--repeats 20] [--profile] [--toy]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import NodeProto, TensorProto, helper, numpy_helper

from benchmarks import measure, models, record
from quark.numerics.affine import Coding
from quark.numerics.blocks import BLOCKS
from quark.numerics.elements import ELEMENTS
from quark.operators import NodeFacts, add_functions, known_values, node, stored, stream

OPSET = 21
SPINNING = 0.1  # seconds after which the idle threads of a session have gone to sleep
Attributes = Mapping[str, "int | str"]


@dataclass(frozen=True)
class Case:
    """A format: the operator on its activations, the format of its weights, and what the latency may be over float."""

    limit: float
    weights: str
    op_name: str
    attributes: Attributes = field(default_factory=dict)


def bfp(limit: float, weights: str, **attributes: int | str) -> Case:
    """A case of ``BFPQuantizeDequantize``."""
    return Case(limit, weights, "BFPQuantizeDequantize", attributes)


def mx(element: str, weights: str) -> Case:
    """A case of ``MXQuantizeDequantize``."""
    return Case(4.0, weights, "MXQuantizeDequantize", {"element_dtype": element, "rounding_mode": 2})


TWO_LEVELS: dict[str, int | str] = {"bfp_method": "to_bfp_prime", "block_size": 16, "rounding_mode": 2}
CASES: dict[str, Case] = {
    "bfloat16": Case(1.5, "bfloat16", "Cast"),
    "fp8_e4m3": Case(2.5, "fp8_e4m3", "QuantizeDequantize", {"format": "fp8_e4m3"}),
    "fp8_e5m2": Case(2.5, "fp8_e5m2", "QuantizeDequantize", {"format": "fp8_e5m2"}),
    "bfp16": bfp(2.5, "bfp16", rounding_mode=2),
    "bfp16 half away": bfp(2.5, "bfp16"),
    "mx9": bfp(4.0, "mx9", bit_width=16, **TWO_LEVELS),
    "mx6": bfp(4.0, "mx6", bit_width=13, **TWO_LEVELS),
    "mx4": bfp(4.0, "mx4", bit_width=11, **TWO_LEVELS),
    "mxint8": mx("int8", "mxint8"),
    "mxfp8_e4m3": mx("fp8_e4m3", "mxfp8_e4m3"),
    "mxfp6_e3m2": mx("fp6_e3m2", "mxfp6_e3m2"),
    "mxfp6_e2m3": mx("fp6_e2m3", "mxfp6_e2m3"),
    "mxfp4": mx("fp4_e2m1", "mxfp4"),
    "amdfp4": Case(4.0, "amdfp4", "BlockQuantizeDequantize", {"format": "amdfp4", "axis": 1}),
}


def quantized(network: onnx.ModelProto, case: Case) -> onnx.ModelProto:
    """A copy of ``network`` with the operator on every activation and all weights packed."""
    model = onnx.ModelProto()
    model.CopyFrom(network)
    model.opset_import[0].version = OPSET
    graph, shapes = model.graph, known_values(model.graph)
    names = activations(model)
    made = {name: activation_nodes(name, f"{name}_quantized", case, shapes[name].shape) for name in names}
    nodes = [entry for name in weights_of(model) for entry in packed(graph, name, case.weights)]
    nodes += made.get(graph.input[0].name, [])
    for entry in graph.node:
        entry.input[:] = [f"{name}_quantized" if name in made else name for name in entry.input]
        nodes += [entry, *(added for name in entry.output for added in made.get(name, []))]
    del graph.node[:]
    graph.node.extend(nodes)
    for output in graph.output:
        output.name = f"{output.name}_quantized"
    graph.initializer.append(numpy_helper.from_array(np.float32(1 / 16), "activation_scale"))
    graph.initializer.append(numpy_helper.from_array(np.int32(0), "activation_zero_point"))
    add_functions(model)
    return model


def activations(model: onnx.ModelProto) -> list[str]:
    """Every float tensor of the graph that is not read by a Relu alone."""
    readers = defaultdict(list)
    for entry in model.graph.node:
        for name in entry.input:
            readers[name].append(entry.op_type)
    names = [model.graph.input[0].name, *(name for entry in model.graph.node for name in entry.output)]
    return [name for name in names if readers[name] != ["Relu"]]


def activation_nodes(x: str, y: str, case: Case, shape: tuple[int | None, ...] | None) -> list[NodeProto]:
    """The nodes that quantize ``x`` (of ``shape``) into ``y``."""
    if case.op_name == "Cast":
        pair = ((x, f"{x}_narrow", TensorProto.BFLOAT16), (f"{x}_narrow", y, TensorProto.FLOAT))
        return [helper.make_node("Cast", [source], [made], to=to) for source, made, to in pair]
    inputs = [x, "activation_scale", "activation_zero_point"] if case.op_name == "QuantizeDequantize" else [x]
    return [node(case.op_name, inputs, [y], case.attributes, NodeFacts(shape))]


def weights_of(model: onnx.ModelProto) -> list[str]:
    """Names of the weights of convolutions and linear layers; both have the inner dimension on axis 1."""
    return [entry.input[1] for entry in model.graph.node if entry.op_type in ("Conv", "Gemm")]


def packed(graph: onnx.GraphProto, name: str, format: str) -> list[NodeProto]:
    """Replace the initializer ``name`` by its packed form; the nodes that read it back."""
    index = next(k for k, tensor in enumerate(graph.initializer) if tensor.name == name)
    weight = numpy_helper.to_array(graph.initializer[index])
    del graph.initializer[index]
    if format == "bfloat16":
        kept = helper.make_tensor(f"{name}_bf16", onnx.TensorProto.BFLOAT16, weight.shape, weight)
        graph.initializer.append(kept)
        return [helper.make_node("Cast", [kept.name], [name], to=onnx.TensorProto.FLOAT)]
    if format in BLOCKS:
        row = stored(BLOCKS[format].encode(weight, 1), BLOCKS[format], 1)
        tensors, op_name, attributes = row.tensors, "BlockDequantize", row.attributes
    else:
        element, scale = ELEMENTS[format], np.float32(np.abs(weight).max() / ELEMENTS[format].max)
        codes = stream(Coding(element).quantize(weight, scale, np.int32(0)), element.bits)
        tensors = {"codes": codes, "scale": scale, "zero_point": np.int32(0), "shape": np.array(weight.shape)}
        op_name, attributes = "PackedDequantize", {"format": format}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(t), f"{name}_{key}") for key, t in tensors.items())
    return [node(op_name, [f"{name}_{key}" for key in tensors], [name], attributes)]


def session_of(path: Path, threads: int, profile: str = "") -> tuple[onnxruntime.InferenceSession, float]:
    """A default session and the seconds it took to load."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    start = time.perf_counter()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session, time.perf_counter() - start


def race(
    sessions: Mapping[str, onnxruntime.InferenceSession], feed: Any, repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of one inference of each (the fastest), and its latency over float (the median of the turns).

    In a turn the float model runs right before and after, so that both have the same share of a busy machine.
    """
    best, ratios = dict.fromkeys(sessions, math.inf), defaultdict(list)
    for _ in range(repeats):
        for name, session in sessions.items():
            turn = [milliseconds(each, feed) for each in (sessions["float"], session, sessions["float"])]
            best["float"], best[name] = min(best["float"], *turn[::2]), min(best[name], turn[1])
            ratios[name].append(2 * turn[1] / (turn[0] + turn[2]))
    return best, {name: statistics.median(found) for name, found in ratios.items()}


def milliseconds(session: onnxruntime.InferenceSession, feed: Any) -> float:
    """The second of two inferences, once the threads of the session before have stopped spinning."""
    time.sleep(SPINNING)
    session.run(None, feed)
    start = time.perf_counter()
    session.run(None, feed)
    return 1e3 * (time.perf_counter() - start)


def kernel_times(path: Path, feed: Any, threads: int, folder: Path, runs: int = 5) -> dict[str, float]:
    """Milliseconds per inference by operator; those inside an ``If`` count for themselves."""
    session, _ = session_of(path, threads, str(folder / "profile"))
    for _ in range(runs):
        session.run(None, feed)
    events = json.loads(Path(session.end_profiling()).read_text())
    times: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time") and event["args"]["op_name"] != "If":
            times[event["args"]["op_name"]] += event["dur"]
    return {name: total / runs / 1e3 for name, total in times.most_common()}


def report(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Build, load and time every model; print the table."""
    shape = models.TOY if arguments.toy else models.Shape()
    network = models.resnet(shape)
    paths = {"float": folder / "float.onnx"}
    onnx.save(network, paths["float"])
    for name in arguments.formats:
        paths[name] = folder / f"{name.replace(' ', '_')}.onnx"
        onnx.save(quantized(network, CASES[name]), paths[name])
    loaded = {name: session_of(path, arguments.threads) for name, path in paths.items()}
    feed = models.random_images(shape.image, 1, seed=1)[0]
    times, ratios = race({name: session for name, (session, _) in loaded.items()}, feed, arguments.repeats)
    lines = []
    for name, path in paths.items():
        size = paths["float"].stat().st_size / path.stat().st_size
        limit = CASES[name].limit if name in CASES else 1.0
        kernels = kernel_times(path, feed, arguments.threads, folder) if arguments.profile else {}
        lines.append(
            {"format": name, "milliseconds": times[name], "over_float": ratios[name], "limit": limit, "smaller": size,
             "load_seconds": loaded[name][1], "kernels": kernels}
        )  # fmt: skip
    headers = ["format", "ms", "over float", "limit", "file, times smaller", "load, s", "where the time goes (ms)"]
    print(measure.table(headers, map(cells, lines)))
    return {"machine": measure.machine(), "threads": arguments.threads, "lines": lines}


def cells(line: dict[str, Any]) -> list[str]:
    """One line of the table."""
    figures = [line["milliseconds"], line["over_float"], line["limit"], line["smaller"], line["load_seconds"]]
    kernels = ", ".join(f"{name} {value:.1f}" for name, value in list(line["kernels"].items())[:9])
    return [line["format"], *(f"{value:.2f}" for value in figures), kernels]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--toy", action="store_true", help="a tiny network, to see that the benchmark runs")
    parser.add_argument("--json", type=Path, help=record.HELP)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = report(arguments, Path(folder))
    print(measure.machine_line(result["machine"]), file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
