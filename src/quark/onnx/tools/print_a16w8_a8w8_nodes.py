"""List the quantized nodes by the bits of their activations and weights."""

from __future__ import annotations

import argparse
import re

import onnx_ir as ir

from quark.ir.surgery import constant_array
from quark.onnx.graph.model import load
from quark.onnx.graph.quantized import DEQUANTIZE, QUANTIZE, code_type, dequantizer
from quark.onnx.tools.command import Tool, run_as_program


def run(given: argparse.Namespace) -> str:
    """The list."""
    found: dict[str, list[str]] = {}
    for node in load(given.input).graph:
        if node.op_type not in QUANTIZE | DEQUANTIZE and node.domain == "":
            bits = precision(node)
            if bits:
                found.setdefault(bits, []).append(f"{node.name} ({node.op_type})")
    return "\n".join(f"{kind} ({len(nodes)}): {', '.join(nodes)}" for kind, nodes in sorted(found.items()))


def precision(node: ir.Node) -> str:
    """``a8w8`` or ``a16``, from the DQs that feed a node; empty where none does."""
    sides: dict[str, int] = {}
    for value in node.inputs[:2]:
        dq = dequantizer(value)
        bits = re.search(r"\d+", code_type(dq)) if dq is not None else None
        if dq is not None and bits is not None:
            side = "w" if constant_array(dq.inputs[0]) is not None else "a"
            sides[side] = max(sides.get(side, 0), int(bits[0]))
    return "".join(f"{side}{sides[side]}" for side in "aw" if side in sides)


TOOL = Tool(__file__, __doc__, run, files=("input",))

if __name__ == "__main__":
    run_as_program(TOOL)
