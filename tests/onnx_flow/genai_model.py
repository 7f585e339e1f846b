"""A decoder as the builder of onnxruntime-genai writes it: operators of ONNX Runtime in both domains, a cache."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDE, HEADS, CACHED, HEAD, WORDS, LONGEST = 64, 4, 2, 16, 96, 32


class Decoder:
    """The nodes and weights of one decoder layer between an embedding and a head."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def keep(self, name: str, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def matrix(self, name: str, rows: int, columns: int) -> str:
        return self.keep(name, (self.rng.normal(size=(rows, columns)) / rows**0.5).astype(np.float32))

    def add(self, op_type: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: object) -> str:
        name = f"/model/{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name, domain=domain, **attributes))
        return outputs[0]

    def linear(self, x: str, name: str, rows: int, columns: int) -> str:
        return self.add("MatMul", [x, self.matrix(f"{name}.weight", rows, columns)], [name])

    def sizes(self) -> None:
        one = self.keep("one", np.array([1], np.int64))
        self.add("ReduceSum", ["attention_mask", one], ["count"], keepdims=1)
        self.add("Cast", [self.add("Sub", ["count", one], ["last"])], ["seqlens_k"], to=TensorProto.INT32)
        first = self.keep("first", np.array(1, np.int64))
        self.add("Gather", [self.add("Shape", ["attention_mask"], ["mask_shape"]), first], ["longest"])
        self.add("Cast", ["longest"], ["total"], to=TensorProto.INT32)

    def layer(self, x: str) -> None:
        ones = self.keep("norm.weight", np.ones(WIDE, np.float32))
        self.add("SimplifiedLayerNormalization", [x, ones], ["normed"], axis=-1, epsilon=1e-5, stash_type=1)
        for name, heads in (("q", HEADS), ("k", CACHED), ("v", CACHED)):
            self.linear("normed", name, WIDE, heads * HEAD)
        angles = np.outer(np.arange(LONGEST), 1e4 ** (-np.arange(HEAD // 2) / (HEAD // 2)))
        turns = [self.keep(f"{name}_cache", getattr(np, name)(angles).astype(np.float32)) for name in ("cos", "sin")]
        inputs = ["q", "k", "v", "past.key", "past.value", "seqlens_k", "total", *turns]
        numbers = {"num_heads": HEADS, "kv_num_heads": CACHED, "do_rotary": 1}
        outputs = ["attended", "present.key", "present.value"]
        self.add("GroupQueryAttention", inputs, outputs, "com.microsoft", **numbers)
        self.linear("attended", "o", WIDE, WIDE)
        outputs = ["again", "", "", "stream"]
        self.add("SkipSimplifiedLayerNormalization", [x, "o", ones], outputs, "com.microsoft", epsilon=1e-5)
        self.linear("again", "gate", WIDE, 2 * WIDE)
        self.add("Mul", ["gate", self.add("Sigmoid", ["gate"], ["open"])], ["silu"])
        self.add("Add", ["stream", self.linear("silu", "down", 2 * WIDE, WIDE)], ["end"])


def decoder() -> onnx.ModelProto:
    made = Decoder()
    made.add("Gather", [made.matrix("embed.weight", WORDS, WIDE), "input_ids"], ["embedded"])
    made.sizes()
    made.layer("embedded")
    made.linear("end", "logits", WIDE, WORDS)
    free = [("input_ids", "sequence"), ("attention_mask", "total_sequence")]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", size]) for name, size in free]
    caches = ["past.key", "past.value", "present.key", "present.value"]
    info = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", CACHED, f"{name[:4]}_sequence", HEAD])
        for name in caches
    ]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", WORDS])
    graph = helper.make_graph(made.nodes, "main_graph", [*inputs, *info[:2]], [logits, *info[2:]], made.weights)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def words(count: int) -> dict[str, np.ndarray]:
    """A prompt before which nothing is in the cache."""
    empty = np.zeros((1, CACHED, 0, HEAD), np.float32)
    ids = np.arange(3, 3 + count, dtype=np.int64)[None]
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "past.key": empty, "past.value": empty}
