"""What a model is made of, read from its graph: inputs, operators, weights, and where its quantized values are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import onnx_ir as ir

from quark.config.plan import TensorPlan
from quark.dataclass import dataclass
from quark.errors import ModelError
from quark.ir.surgery import opset
from quark.ir.walk import all_nodes, graphs_of
from quark.onnx.graph.model import data_files, load
from quark.onnx.graph.quantized import DEQUANTIZE, FUSED, QUANTIZERS, STORED, constants_of
from quark.onnx.quantized_plan import rows_of

SPELLED = {"FLOAT": "float32", "DOUBLE": "float64"}


@dataclass(frozen=True)
class Port:
    """An input or output; free sizes are None or a name, an unknown shape is None."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class Description:
    """The facts about one model file.

    Attributes:
        path: the file.
        bytes: its size with its external data.
        opset, ir_version, producer: as the file says.
        inputs, outputs: without initializers that are also listed as inputs.
        operators: nodes per operator, the most frequent first; Q and DQ nodes left out, those of subgraphs counted.
        quantized: of these, nodes that read at least one dequantized value.
        weights: (tensors, elements) of stored constants per data type.
        activations: quantized activations per data type.
        tensors: quantized tensors per role and per what a plan says of them (``quark.onnx.quantized_plan``).
        others: why a plan cannot hold what else is quantized, a sentence per node.
    """

    path: str
    bytes: int
    opset: int
    ir_version: int
    producer: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    operators: dict[str, int]
    quantized: dict[str, int]
    weights: dict[str, tuple[int, int]]
    activations: dict[str, int]
    tensors: dict[str, dict[str, int]]
    others: tuple[str, ...]


def describe(path: str | Path) -> Description:
    """Read a model file and describe it.

    Raises:
        ModelError: the file is missing or is not a model.
    """
    model = load(path)
    nodes = [node for node in all_nodes(model) if node.op_type not in QUANTIZERS | DEQUANTIZE | STORED]
    found = [row for _, row in rows_of(model)]
    rows = [row for row in found if isinstance(row, TensorPlan)]
    told = {
        role: [row.spec.describe(given=True) for row in rows if row.role == role]
        for role in ("activation", "weight", "bias")
    }
    return Description(
        path=str(path),
        bytes=file_bytes(path),
        opset=opset(model),
        ir_version=model.ir_version,
        producer=" ".join(filter(None, (model.producer_name, model.producer_version))),
        inputs=tuple(_port(value) for value in model.graph.inputs if not value.is_initializer()),
        outputs=tuple(_port(value) for value in model.graph.outputs),
        operators=_counted(_kind(node) for node in nodes),
        quantized=_counted(_kind(node) for node in nodes if any(_is_dequantized(value) for value in node.inputs)),
        weights=_weights(model),
        activations=_counted(row.spec.format for row in rows if row.role == "activation"),
        tensors={role: _counted(lines) for role, lines in told.items() if lines},
        others=tuple(str(row) for row in found if isinstance(row, ModelError)),
    )


def file_bytes(path: str | Path) -> int:
    """Size of a model file together with the external data that it names."""
    path = Path(path)
    return sum(file.stat().st_size for file in (path, *data_files(path)))


def largest_constant(path: str | Path) -> int:
    """Elements of the largest constant of floating point, 0 where there is none."""
    return max((one.size for one in constants_of(load(path)) if one.dtype.is_floating_point()), default=0)


def dtype_name(dtype: ir.DataType | None) -> str:
    """The name of a data type in NumPy's words; ``?`` where it is unknown."""
    return "?" if dtype is None else SPELLED.get(dtype.name, dtype.name.lower())


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _kind(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _is_dequantized(value: ir.Value | None) -> bool:
    maker = value.producer() if value is not None else None
    return maker is not None and maker.op_type in DEQUANTIZE | FUSED | STORED


def _weights(model: ir.Model) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for graph in graphs_of(model):
        for value in graph.initializers.values():
            if value.const_value is not None:
                name = dtype_name(value.const_value.dtype)
                tensors, elements = found.get(name, (0, 0))
                found[name] = (tensors + 1, elements + value.const_value.size)
    return found


def _port(value: ir.Value) -> Port:
    shape = None if value.shape is None else tuple(_size(size) for size in value.shape)
    return Port(str(value.name), dtype_name(value.dtype), shape)


def _size(size: int | ir.SymbolicDim) -> int | str | None:
    return size if isinstance(size, int) else size.value
