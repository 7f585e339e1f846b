"""Infinite weights become large finite ones (the tool replace_inf_weights).

Masks written with -inf turn a whole row of scores into NaN when something is quantized on the way; a large finite
number masks as well.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import constant_array, set_constant
from quark.ir.walk import graphs_of
from quark.onnx.graph.report import PassReport

Value = Annotated[float, "What stands for infinity; its negative for minus infinity."]


def run(model: ir.Model, replace_inf_value: Value = 10000.0) -> PassReport:
    """Replace ±inf in every initializer, in place."""
    fired = 0
    for graph in graphs_of(model):
        for value in list(graph.initializers.values()):
            array = constant_array(value)
            if array is None or value.dtype is None or not value.dtype.is_floating_point():
                continue
            if array.dtype.kind != "f" or not np.isinf(array).any():
                continue
            finite = np.where(np.isinf(array), np.sign(array) * replace_inf_value, array).astype(array.dtype)
            set_constant(value, finite)
            fired += 1
    return PassReport("replace_inf", fired)
