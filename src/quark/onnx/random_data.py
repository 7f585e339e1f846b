"""Samples that are made up, for trial runs and for a look at what a model takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.errors import DataError, check_names
from quark.onnx.data import CalibrationDataReader, Feed, ModelInput, inputs_of
from quark.onnx.free_sizes import usual_shapes
from quark.onnx.graph.model import ModelInput as Source
from quark.onnx.graph.model import load

SEED, GENERATED = 42, 2**29  # so many numbers at most for one input


class RandomDataReader(CalibrationDataReader):
    """Generated samples, for trial runs: the ranges they give mean nothing.

    Floats are uniform in [0, 1). Integers are indices where they index a table of the model (below its length), else 0
    or 1. Free sizes are those of ``quark.onnx.free_sizes``: 1 for a batch, 16 indices, 4096 values of a sound.

    Args:
        model_input: path or model.
        input_shape: shape per input name, for inputs with free sizes.
        input_data_range: [lowest, highest] of every input by name; integers take both ends. ``None``: as above.
        data_size: number of samples.
        seed: the same seed gives the same samples.

    Raises:
        DataError: an option names an input that the model does not have, a shape does not fit, or a range is empty or
            missing.
    """

    generated = True

    def __init__(
        self,
        model_input: Source,
        input_shape: Mapping[str, Sequence[int]] | None = None,
        input_data_range: Mapping[str, Sequence[float]] | None = None,
        data_size: int = 1,
        seed: int = SEED,
    ) -> None:
        model = model_input if isinstance(model_input, ir.Model) else load(model_input)
        inputs = inputs_of(model)
        shapes, ranges = dict(input_shape or {}), dict(input_data_range or {})
        for option, given in (("RandomDataReaderInputShape", shapes), ("RandomDataReaderInputDataRange", ranges)):
            check_names(f"input in {option}", given, [one.name for one in inputs], DataError)
        if input_data_range is not None:
            missing = [one.name for one in inputs if one.name not in ranges]
            if missing:
                raise DataError(
                    f"RandomDataReaderInputDataRange gives no [lowest, highest] for the input {missing[0]!r}; it must "
                    "name every input of the model, or be None for [0, 1)"
                )
        usual = usual_shapes([value for value in model.graph.inputs if not value.is_initializer()], shapes)
        tables = {str(value.name): _table_length(value) for value in model.graph.inputs}
        self._makers = [
            _Maker(one, _random_shape(one, shapes.get(one.name), usual), _random_range(one, ranges, tables))
            for one in inputs
        ]
        self._size, self._seed, self._next = data_size, seed, 0

    def __len__(self) -> int:
        return self._size

    def get_next(self) -> Feed | None:
        """The next sample, or None after ``data_size`` of them."""
        if self._next >= self._size:
            return None
        self._next += 1
        makers = enumerate(self._makers)
        return {m.input.name: m.make(np.random.default_rng((self._seed, self._next, i))) for i, m in makers}

    def rewind(self) -> None:
        """Start again; the same samples come."""
        self._next = 0


@dataclass(frozen=True)
class _Maker:
    """How the random values of one input are made; a ``DataError`` where they are too many."""

    input: ModelInput
    shape: Sequence[int]
    range: tuple[float, float]

    def __post_init__(self) -> None:
        if (size := math.prod(self.shape)) > GENERATED:
            raise DataError(
                f"random data for the input {self.input.name!r} of shape {list(self.shape)} are {size} numbers; at "
                f"most {GENERATED} are made: give data of your own, or a smaller shape in RandomDataReaderInputShape"
            )

    def make(self, rng: np.random.Generator) -> np.ndarray:
        dtype = self.input.dtype
        if dtype is None:
            raise DataError(f"random data cannot be made for the input {self.input}: give a calibration data reader")
        lo, hi = self.range
        if dtype.kind == "b":
            return rng.integers(0, 2, self.shape).astype(bool)
        if dtype.kind in "iu":
            return rng.integers(int(lo), int(hi), self.shape, endpoint=True).astype(dtype)
        return (lo + (hi - lo) * rng.random(self.shape, np.float32)).astype(dtype)


def _random_shape(one: ModelInput, given: Sequence[int] | None, usual: Mapping[str, tuple[int, ...]]) -> Sequence[int]:
    if given is None:
        if one.shape is None:
            raise DataError(f"the input {one} has no rank: give its shape in RandomDataReaderInputShape")
        return usual[one.name]
    sizes = tuple(given)
    fits = one.shape is None or (
        len(sizes) == len(one.shape) and all(size in (None, own) for size, own in zip(one.shape, sizes, strict=True))
    )
    if not fits or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise DataError(f"RandomDataReaderInputShape gives {list(sizes)}, which does not fit the input {one}")
    return sizes


def _random_range(
    one: ModelInput, ranges: Mapping[str, Sequence[float]], tables: Mapping[str, int | None]
) -> tuple[float, float]:
    if one.name in ranges:
        bounds = tuple(ranges[one.name])
        if len(bounds) != 2 or not bounds[0] <= bounds[1]:
            raise DataError(
                f"RandomDataReaderInputDataRange gives {list(bounds)} for the input {one.name!r}; "
                "it must be [lowest, highest]"
            )
        return bounds[0], bounds[1]
    if one.dtype is not None and one.dtype.kind in "iu":
        length = tables.get(one.name)
        return (0, 1) if length is None else (0, length - 1)
    return 0, 1


def _table_length(value: ir.Value) -> int | None:
    """Length of the shortest constant table that an integer input indexes with Gather, through reshaping; else None."""
    lengths: list[int | None] = []
    for node, position in value.uses():
        if node.op_type == "Gather" and position == 1:
            table = node.inputs[0]
            axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
            length = table.shape[axis] if table is not None and table.shape is not None else None
            lengths.append(length if isinstance(length, int) else None)
        elif node.op_type in ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten") and position == 0:
            lengths.append(_table_length(node.outputs[0]))
    known = [length for length in lengths if length]
    return min(known) if known else None
