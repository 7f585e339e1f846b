"""``ExtendedLSTM`` (com.amd.quark, version 1): an LSTM whose node states the grids of its tensors.

    y = LSTM(x, w, r, b)      inputs as ONNX has them: [length, batch, inputs], [directions, 4 hidden, ...]

A compiler that runs it with integers reads scale and zero point of all five tensors there. The inputs come
dequantized, so that everywhere else this function, the standard operator, gives the same values. Only the first output
exists, and lengths, initial states and peepholes do not: see :mod:`quark.onnx.passes.lstm_to_custom`.
"""

from __future__ import annotations

from collections.abc import Mapping

from quark.operators.body import Body
from quark.operators.views import NodeFacts

DIRECTIONS = ("forward", "reverse", "bidirectional")
#: Tensors whose grid the node states, as its attributes name them.
TENSORS = ("x", "w", "r", "b", "y")
_SCALES: dict[str, float | str] = {f"{tensor}_scale": 1.0 for tensor in TENSORS}
_ZERO_POINTS: dict[str, float | str] = {f"{tensor}_zero_point": 0 for tensor in TENSORS}
ATTRIBUTES: dict[str, float | str] = {"direction": "forward", "hidden_size": 1, "layout": 0, **_SCALES, **_ZERO_POINTS}


def variant(attributes: Mapping, facts: NodeFacts) -> str:
    """One body for every tensor."""
    return "all"


def write(body: Body, attributes: Mapping, label: str) -> str:
    """The body of ``ExtendedLSTM`` on ``x``, ``w``, ``r``, ``b``; ``layout`` is of opset 14 and 0 before."""
    given = {name: attributes[name] for name in ("direction", "hidden_size")}
    layout = {"layout": attributes["layout"]} if attributes["layout"] else {}
    return body.op("LSTM", "x", "w", "r", "b", attributes={**given, **layout})
