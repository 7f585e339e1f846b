"""The exact pieces, each alone on ONNX Runtime: powers of two, the three roundings, small floats."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil, floor

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.operators.running import run

from quark.errors import ConfigError
from quark.numerics.elements import ELEMENTS
from quark.operators.arithmetic import floor_power, round_float, round_integer
from quark.operators.body import Body

SMALL = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
}


def compute(write: Callable[[Body], str], x: np.ndarray) -> np.ndarray:
    """What ``write`` makes of ``x``."""
    body = Body(17)
    function = body.function("test", "F", "", ["x"], {"y": write(body)})
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(x.shape)) for name in "xy"]
    graph = helper.make_graph([helper.make_node("F", ["x"], ["y"], domain="test")], "g", value[:1], value[1:])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("test", 1)]
    return run(helper.make_model(graph, opset_imports=imports, ir_version=10, functions=[function]), {"x": x})


def test_floor_power_of_every_binade() -> None:
    tops = np.array([0x000000, 0x000001, 0x400000, 0x7FFFFE, 0x7FFFFF, 0x2AAAAA], np.uint32)
    normal = ((np.arange(1, 255, dtype=np.uint32)[:, None] << 23) | tops).ravel().view(np.float32)
    subnormal = np.concatenate([1 << np.arange(23), (1 << np.arange(1, 23)) - 1]).astype(np.uint32).view(np.float32)
    x = np.concatenate([normal, subnormal])
    want = np.ldexp(np.float64(1), np.frexp(x.astype(np.float64))[1] - 1).astype(np.float32)
    np.testing.assert_array_equal(compute(lambda body: floor_power(body, "x"), x), want)
    few = np.float32([3, 2.0**-127, 2.0**100])
    np.testing.assert_array_equal(compute(lambda body: floor_power(body, "x", -6), few), [2.0**-5, 2.0**-133, 2.0**94])


def test_floor_power_of_zero_and_infinity() -> None:
    got = compute(lambda body: floor_power(body, "x"), np.float32([0, np.inf, np.nan]))
    np.testing.assert_array_equal(got, [0, np.nan, np.nan])


def nearest_integer(value: float, mode: int) -> int:
    exact, half = Fraction(value), Fraction(1, 2)
    if mode == 0:
        return floor(exact + half) if exact >= 0 else ceil(exact - half)
    return floor(exact + half) if mode == 1 else round(exact)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_roundings_at_every_tie_and_beside_it(mode: int) -> None:
    whole = np.concatenate([np.arange(300), 2 ** np.arange(9, 22), 2 ** np.arange(9, 22) - 1])
    ties = (whole + 0.5).astype(np.float32)
    values = np.concatenate([ties, whole.astype(np.float32), np.float32([1e-45, 1e-30, 0.25, 0.75])])
    values = np.concatenate([values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(np.inf))])
    values = np.concatenate([values, -values])
    values = values[np.abs(values) < 2**22]
    got = compute(lambda body: round_integer(body, "x", mode), values)
    np.testing.assert_array_equal(got, [nearest_integer(float(value), mode) for value in values])


def test_a_rounding_mode_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="rounding_mode"):
        round_integer(Body(17), "x", 3)


@pytest.mark.parametrize("name", SMALL)
def test_small_floats_over_a_stride_of_all_mantissas(name: str) -> None:
    element = ELEMENTS[name]
    mantissas = np.concatenate([np.arange(0, 1 << 23, 997), np.arange(0, 64), (1 << 23) - 1 - np.arange(64)])
    steps = np.arange(1 << 23 >> 23 - element.mantissa_bits - 1) << 23 - element.mantissa_bits - 1  # values and ties
    near = (steps[:, None] + np.arange(-2, 3)).ravel().clip(0, (1 << 23) - 1)
    exponents = np.arange(element.emin - element.mantissa_bits - 3, int(np.log2(element.max)) + 3)
    bits = np.concatenate([mantissas, near]).astype(np.uint32) | (exponents[:, None] + 127 << 23).astype(np.uint32)
    x = bits.ravel().view(np.float32)
    x = np.concatenate([x, -x, np.float32([0, 3e38, -3e38, 1e-45])])
    want = np.clip(x, -element.max, element.max).astype(SMALL[name]).astype(np.float32)
    np.testing.assert_array_equal(compute(lambda body: round_float(body, "x", element), x), want)
