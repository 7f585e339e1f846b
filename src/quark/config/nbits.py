"""``MatMulNBitsParams``: how the weights of MatMul are stored in few bits."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from quark.config.typed import Constraint, Misfit, typed
from quark.dataclass import dataclass
from quark.errors import ConfigError, check_names

#: Widths and the smallest block that ONNX Runtime has kernels for; blocks are powers of two.
BITS = (2, 4, 8)
SMALLEST_BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class NBits:
    """The validated parameters.

    Attributes:
        Algorithm: a row of ``quark.onnx.qdq.nbits_algorithms.ALGORITHMS``.
        GroupSize: elements along the summed axis that share a scale; a power of two from 16 on.
        Symmetric: zero stands in the middle of the codes; otherwise every group has a zero point.
        Bits: width of a code.
        AccuracyLevel: what ONNX Runtime computes in: 0 as it likes, 1 float32, 2 float16, 3 bfloat16, 4 int8.
    """

    Algorithm: Literal["DEFAULT", "GPTQ", "HQQ"] = "DEFAULT"
    GroupSize: int = 128
    Symmetric: bool = True
    Bits: int = 4
    AccuracyLevel: Annotated[int, Constraint(ge=0, le=4)] = 0


#: What ONNX Runtime has kernels for, beyond the types: a test, and its words.
_RUNNABLE: Mapping[str, tuple[Callable[[int], bool], str]] = {
    "Bits": (lambda bits: bits in BITS, f"ONNX Runtime runs {', '.join(map(str, BITS))} bits"),
    "GroupSize": (
        lambda size: size >= SMALLEST_BLOCK and not size & (size - 1),
        f"ONNX Runtime takes powers of two from {SMALLEST_BLOCK} on",
    ),
}


def parse_nbits(given: Mapping[str, Any]) -> NBits:
    """Validate ``MatMulNBitsParams``.

    Raises:
        ConfigError: an unknown name (the nearest one is shown) or a bad value.
    """
    names = [one.name for one in fields(NBits)]
    check_names("parameter in MatMulNBitsParams", given, names)
    return NBits(**{name: _value(name, given[name]) for name in names if name in given})


def _value(name: str, given: Any) -> Any:
    """What was given for a parameter, in its type."""
    try:
        value = typed(given, NBits.__annotations__[name], strict=True)
    except Misfit as error:
        place = ".".join(map(str, (name, *error.place)))
        raise ConfigError(f"MatMulNBitsParams: {place} cannot be {error.value!r}: {error.reason}") from error
    holds, words = _RUNNABLE.get(name, (lambda _: True, ""))
    if not holds(value):
        raise ConfigError(f"MatMulNBitsParams: {name} cannot be {value!r}: {words}")
    return value
