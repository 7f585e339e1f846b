"""Other types for the codes of activations (the tools convert_s8s8_to_u8s8, convert_u16s8_to_s16s8, …).

    int8 → uint8      zero point + 128               the same grid: outputs stay
    uint16 → int16    zero point - 32768             the same grid: outputs stay
    uint16 → uint8    scale · 257, zero point / 257  the same range with fewer codes: outputs change

Stored weights keep their type. Biases whose scale is input scale × weight scale follow it.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.errors import check_name
from quark.onnx.graph.quantized import code_type, stages
from quark.onnx.graph.report import PassReport
from quark.onnx.quantized_rows import QuantizedRows


@dataclass(frozen=True)
class CodeChange:
    """codes' = codes / ratio + shift, scale' = scale · ratio."""

    old: str
    new: str
    shift: int
    ratio: int = 1


CHANGES = {
    "s8_to_u8": CodeChange("INT8", "UINT8", 128),
    "u8_to_s8": CodeChange("UINT8", "INT8", -128),
    "u16_to_s16": CodeChange("UINT16", "INT16", -32768),
    "s16_to_u16": CodeChange("INT16", "UINT16", 32768),
    "u16_to_u8": CodeChange("UINT16", "UINT8", 0, 257),
}
Which = Annotated[str, f"Which change: {', '.join(CHANGES)}."]


def run(model: ir.Model, change: Which) -> PassReport:
    """Change the codes of every activation of that type, in place.

    Raises:
        ConfigError: there is no such change.
    """
    check_name("change of codes", change, CHANGES)
    new, rows, fired, refused = CHANGES[change], QuantizedRows(model), 0, []
    for stage in stages(model):
        if code_type(stage.first) != new.old:
            continue
        if stage.first.overload:
            refused.append(f"{stage.first.name!r} stays: its operator is a function for codes of {new.old}")
            continue
        row = rows.of(stage.first)
        if row is None or any(code_type(node) != new.old for node in stage.last):
            refused.append(
                f"{stage.first.name!r} stays: its parameters are computed, or its codes are read differently"
            )
            continue
        offset = np.rint(np.asarray(row.zero_point) / new.ratio) + new.shift
        rows.move(row, np.asarray(row.scale) * new.ratio, offset, new.new)
        fired += 1
    rows.write(biases=new.ratio != 1)
    return PassReport("code_types", fired, tuple(refused))
