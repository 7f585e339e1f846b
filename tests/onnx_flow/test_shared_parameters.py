"""Which tensors share scale and zero point in the file, and which ranges are asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.onnx_flow import models

from quark.config.options import Options
from quark.config.plan import TensorPlan
from quark.config.tensor import TensorSpec
from quark.onnx.graph.model import load
from quark.onnx.qdq import settings
from quark.onnx.qdq.initializers import ParameterInitializers


@pytest.mark.parametrize(("role", "shared"), [("activation", True), ("weight", False), ("bias", False)])
def test_activations_of_a_group_share_their_parameters(role: Any, shared: bool) -> None:
    made = ParameterInitializers(load(models.model("g (float[2] x) => (float[2] y) { y = Relu (x) }", {}, 17)))
    one, other = (
        TensorPlan(name, role, TensorSpec("int8"), "", "group", scale=np.float32(2), zero_point=np.int8(0))
        for name in ("a", "b")
    )
    pairs = made.of(one), made.of(other)
    assert (pairs[0] == pairs[1]) is shared
    assert made.of(one) == pairs[0]


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("given", [None, True, False])
def test_the_wider_side_holds_for_both_where_the_zero_point_is_free(given: bool | None, centred: bool) -> None:
    """A centred grid has one side only: nothing is left to mirror."""
    spec = TensorSpec("int8", symmetric=centred, method="minmax")
    assert spec.grid.centred is centred
    found = settings.request_of(spec, Options(CalibTensorRangeSymmetric=given))
    assert found.mirrored is (given is True and not centred)
