"""``quark onnx inspect``: what a model is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from quark.cli.output import print_json, show
from quark.onnx.describe import Description, Port, describe
from quark.report import Table, file_size


def run(path: Path, json: bool) -> None:
    """Describe a model file on standard output."""
    description = describe(path)
    if json:
        print_json(asdict(description))
        return
    for table in tables(description):
        show(table)


def tables(description: Description) -> Iterator[Table]:
    """The description as tables."""
    yield Table(Path(description.path).name, ("fact", "value"), _facts(description))
    yield Table("Inputs and outputs", ("side", "name", "type", "shape"), tuple(_ports(description)))
    yield Table("Operators", ("operator", "nodes", "after a DQ"), tuple(_operators(description)))
    for role, lines in description.tensors.items():
        rows = tuple((how, str(count)) for how, count in lines.items())
        yield Table(f"Quantized: {role}", ("how", "tensors"), rows)
    weights = ((name, str(count), f"{size:,}") for name, (count, size) in sorted(description.weights.items()))
    yield Table("Constants", ("type", "tensors", "elements"), tuple(weights))


def _facts(description: Description) -> tuple[tuple[str, str], ...]:
    codes = ", ".join(f"{count} × {name}" for name, count in description.activations.items())
    others = description.others
    none = "none" if description.tensors or others else "none: this is a float model"
    told = [("quantized otherwise", f"{len(others)} node{'s' * (len(others) != 1)}: {others[0]}")] if others else []
    return (
        ("size", file_size(description.bytes)),
        ("opset", f"{description.opset} (IR version {description.ir_version})"),
        ("made by", description.producer or "unknown"),
        ("quantized activations", codes or none),
        *told,
    )


def _ports(description: Description) -> Iterator[tuple[str, str, str, str]]:
    for side, ports in (("input", description.inputs), ("output", description.outputs)):
        for port in ports:
            yield side, port.name, port.dtype, _shape(port)


def _shape(port: Port) -> str:
    if port.shape is None:
        return "unknown"
    return "[" + ", ".join("?" if size is None else str(size) for size in port.shape) + "]"


def _operators(description: Description) -> Iterator[tuple[str, str, str]]:
    for name, count in description.operators.items():
        yield name, str(count), str(description.quantized.get(name, 0))
    yield "all", str(sum(description.operators.values())), str(sum(description.quantized.values()))
