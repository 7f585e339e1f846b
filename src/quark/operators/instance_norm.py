"""``ExtendedInstanceNormalization`` (com.amd.quark, version 1): InstanceNormalization that a compiler takes whole.

    y = scale * (x - mean) / sqrt(var + epsilon) + bias      mean and variance of every channel of every sample

A device has one instruction for it; everywhere else this function runs the standard operator.
"""

from __future__ import annotations

from collections.abc import Mapping

from quark.operators.body import Body
from quark.operators.views import NodeFacts

ATTRIBUTES: dict[str, float | str] = {"epsilon": 1e-5}


def variant(attributes: Mapping, facts: NodeFacts) -> str:
    """One body for every tensor."""
    return "all"


def write(body: Body, attributes: Mapping, label: str) -> str:
    """The body of ``ExtendedInstanceNormalization`` on ``x``, ``scale``, ``bias``."""
    return body.op("InstanceNormalization", "x", "scale", "bias", attributes={"epsilon": float(attributes["epsilon"])})
