"""What the graph costs: graphs of growing length, quantized, in processor seconds.

    python -m benchmarks.graph_cost [--preset A8W8] [--shape chain|branching] [--lengths 500 5000] [--json FILE]

``length``: half the number of nodes. The tensors are tiny, so that what is measured is the handling of nodes. For each
length: the whole job, and how much of
it ONNX Runtime's sessions and runs and OnnxSlim took ("inference"). The rest is ours, and has to grow in proportion.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from benchmarks import record
from benchmarks.measure import table
from quark.onnx import Config, ModelQuantizer, get_default_config

LENGTHS = (100, 200, 400, 1000)
CHANNELS, SIZE = 4, 8


def chain(length: int) -> onnx.ModelProto:
    """``length`` times Conv (1x1, with bias) and Relu: twice as many nodes."""
    rng = np.random.default_rng(0)
    nodes, weights, name = [], [], "x"
    for k in range(length):
        for kind, shape in (("w", (CHANNELS, CHANNELS, 1, 1)), ("b", (CHANNELS,))):
            weights.append(numpy_helper.from_array(rng.normal(0, 0.5, shape).astype(np.float32), f"{kind}{k}"))
        nodes.append(helper.make_node("Conv", [name, f"w{k}", f"b{k}"], [f"c{k}"], name=f"conv{k}"))
        name = "y" if k == length - 1 else f"r{k}"
        nodes.append(helper.make_node("Relu", [f"c{k}"], [name], name=f"relu{k}"))
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, [1, CHANNELS, SIZE, SIZE]) for end in ("x", "y")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


class Branching:
    """About ``2 * length`` nodes: blocks of a residual Conv, two branches that a Concat joins, and a pool."""

    def __init__(self, length: int) -> None:
        self._rng, self._nodes, self._weights = np.random.default_rng(0), [], []
        name = "x"
        while len(self._nodes) < 2 * length - 1:
            name = self._block(name)
        self._nodes.append(helper.make_node("Identity", [name], ["y"], name="last"))

    def model(self) -> onnx.ModelProto:
        """The graph with its ends ``x`` and ``y``."""
        sizes = [1, CHANNELS, SIZE, SIZE]
        ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, sizes) for end in ("x", "y")]
        graph = helper.make_graph(self._nodes, "branching", ends[:1], ends[1:], self._weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def _block(self, name: str) -> str:
        inner = self._node("Relu", [self._conv(name)])
        name = self._node("Relu", [self._node("Add", [self._conv(inner), name])])
        branches = [self._node("Relu", [self._conv(name)]), self._node("Sigmoid", [self._conv(name)])]
        joined = self._conv(self._node("Concat", branches, axis=1), 2 * CHANNELS)
        return self._node("MaxPool", [self._node("Relu", [joined])], kernel_shape=[3, 3], pads=[1, 1, 1, 1])

    def _conv(self, name: str, channels: int = CHANNELS) -> str:
        weights = {"w": (CHANNELS, channels, 1, 1), "b": (CHANNELS,)}
        names = [f"{kind}{len(self._nodes)}" for kind in weights]
        for made, shape in zip(names, weights.values(), strict=True):
            self._weights.append(numpy_helper.from_array(self._rng.normal(0, 0.3, shape).astype(np.float32), made))
        return self._node("Conv", [name, *names])

    def _node(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        made = f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(op_type, inputs, [made], name=f"n{len(self._nodes)}", **attributes))
        return made


SHAPES: dict[str, Callable[[int], onnx.ModelProto]] = {
    "chain": chain,
    "branching": lambda length: Branching(length).model(),
}


class Clock:
    """Processor seconds spent inside wrapped functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its time counted."""

        def timed(*positional: Any, **named: Any) -> Any:
            start = time.process_time()
            try:
                return function(*positional, **named)
            finally:
                self.seconds += time.process_time() - start

        return timed


def measure(length: int, preset: str, shape: str = "chain") -> dict[str, float]:
    """Processor seconds of one job: in all, inference and OnnxSlim, and the rest."""
    config = get_default_config(preset)
    config.extra_options.update(PrintSummary=False)
    model, rng = SHAPES[shape](length), np.random.default_rng(1)
    feeds = [{"x": rng.normal(0, 1, (1, CHANNELS, SIZE, SIZE)).astype(np.float32)} for _ in range(2)]
    clock, session = Clock(), onnxruntime.InferenceSession
    kept = session.__init__, session.run
    session.__init__, session.run = clock.wrap(kept[0]), clock.wrap(kept[1])  # type: ignore[method-assign]
    start = time.process_time()
    try:
        ModelQuantizer(Config(config)).quantize_model(model, None, feeds)
    finally:
        session.__init__, session.run = kept  # type: ignore[method-assign]
    total = time.process_time() - start
    return {"nodes": len(model.graph.node), "total": total, "inference": clock.seconds, "ours": total - clock.seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="A8W8")
    parser.add_argument("--shape", choices=SHAPES, default="chain")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="half the nodes")
    parser.add_argument("--json", type=Path, help=record.HELP)
    given = parser.parse_args(arguments)
    measure(5, given.preset)
    rows = [measure(length, given.preset, given.shape) for length in given.lengths]
    print(table(["nodes", "all, CPU s", "without inference, CPU s", "ms a node"], map(cells, rows)))
    first, last = rows[0], rows[-1]
    if last["nodes"] > first["nodes"]:
        exponent = np.log(last["total"] / first["total"]) / np.log(last["nodes"] / first["nodes"])
        print(f"time grows with the power {exponent:.2f} of the number of nodes")
    if given.json:
        given.json.write_text(
            json.dumps({"preset": given.preset, "shape": given.shape, "rows": rows}, indent=2), encoding="utf-8"
        )


def cells(row: dict[str, float]) -> list[str]:
    """One line of the table."""
    per_node = 1000 * row["ours"] / row["nodes"]
    return [f"{row['nodes']:.0f}", f"{row['total']:.2f}", f"{row['ours']:.2f}", f"{per_node:.2f}"]


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
