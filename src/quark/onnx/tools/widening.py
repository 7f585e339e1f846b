"""A float16 model as a float32 one in memory, for tools that go on from there."""

from __future__ import annotations

import argparse
from typing import Any


def widened(given: argparse.Namespace) -> Any:
    """The protobuf of the input model in float32."""
    from quark.onnx.shapeshifter import transform

    return transform(given.input, {"passes": ["convert_fp16_to_fp32"]}).proto
