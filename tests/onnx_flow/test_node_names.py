"""No two nodes of a file share a name, whatever the float model calls its nodes and tensors: runtimes refuse it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.ir.surgery import name_apart
from quark.onnx import Config, ModelQuantizer, get_default_config

NAMES = {
    "none": ("", "", "", ""),
    "those of what they make": ("seen", "wide", "active", "features"),
    "those of nodes that are added": ("x", "seen_DequantizeLinear", "seen_QuantizeLinear", "seen_scale"),
}
PRESETS = ("A8W8_CPU", "A8W8", "XINT8", "UINT8_DYNAMIC_QUANT", "MATMUL_NBITS", "BFP16", "BF16")


def encoder(names: tuple[str, ...]) -> onnx.ModelProto:
    """Rows of a table, two layers and a normalization; the nodes have these names."""
    rng = np.random.default_rng(0)
    sizes = {"table": (64, 32), "up": (32, 64), "down": (64, 32)}
    weights = [numpy_helper.from_array(rng.normal(size=size).astype(np.float32), name) for name, size in sizes.items()]
    steps = [
        ("Gather", ["table", "ids"], "seen"),
        ("MatMul", ["seen", "up"], "wide"),
        ("Relu", ["wide"], "active"),
        ("MatMul", ["active", "down"], "features"),
    ]
    nodes = [helper.make_node(op, read, [made], name=name) for (op, read, made), name in zip(steps, names, strict=True)]
    given = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "length"])
    output = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", "length", 32])
    graph = helper.make_graph(nodes, "graph", [given], [output], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_node_has_a_name_of_its_own(names: tuple[str, ...], preset: str, tmp_path: Path) -> None:
    feeds = [{"ids": np.random.default_rng(seed).integers(0, 64, size=(1, 9))} for seed in range(4)]
    config = get_default_config(preset)
    config.extra_options["PrintSummary"] = False
    quantizer = ModelQuantizer(Config(global_quant_config=config))
    onnx.save(encoder(names), tmp_path / "model.onnx")
    quantizer.quantize_model(tmp_path / "model.onnx", tmp_path / "q.onnx", feeds)  # which opens and runs the file
    found = [node.name for node in onnx.load(tmp_path / "q.onnx").graph.node]
    assert len(set(found)) == len(found)


def test_the_node_that_was_there_keeps_its_name() -> None:
    head = '<ir_version: 10, opset_import: ["": 20]> main (float[2] x) => (float[2] y)'
    text = head + "{ a = Abs (x) b = Neg (a) y = Relu (b) }"
    model = ir.from_proto(onnx.parser.parse_model(text))
    for node in model.graph:
        node.name = "one"
    name_apart(model, {"one": "Neg"})
    assert [(node.op_type, node.name) for node in model.graph] == [("Abs", "one_1"), ("Neg", "one"), ("Relu", "one_2")]
