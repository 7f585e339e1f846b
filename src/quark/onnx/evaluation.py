"""``EvalMetrics``: cosine similarity and L2 distance of the quantized model's outputs to the float model's.

With ``PrintSummary`` the layers are ranked by the SQNR of their outputs too, with cause and remedy.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import onnx

from quark.config.options import Options
from quark.errors import ConfigError
from quark.onnx.bodies import CONTROL
from quark.onnx.compare import Checks, Comparison, compare
from quark.onnx.data import CachedDataReader, readable_again, samples_of
from quark.onnx.data_layout import as_reader
from quark.report.tables import decibels
from quark.report.values import LayerView, Table


def check_evaluation(options: Options, reader: Any) -> None:
    """Raise before the work where ``EvalMetrics`` would have no data after it.

    Raises:
        ConfigError: no reader, and no generated data.
    """
    if options.EvalMetrics and options.EvalDataReader is None and reader is None and not options.UseRandomData:
        raise ConfigError("EvalMetrics: there is no data. Give a calibration reader, EvalDataReader, or UseRandomData")


def kept_for_evaluation(options: Options, reader: Any) -> Any:
    """The calibration reader, its samples kept in memory where ``EvalMetrics`` reads them again and it cannot."""
    if not options.EvalMetrics or options.EvalDataReader is not None or reader is None or readable_again(reader):
        return reader
    return CachedDataReader(reader, options.CalibDataSize)


def evaluate(
    model_input: str | Path | onnx.ModelProto, quantized: str | Path | onnx.ModelProto, options: Options, reader: Any
) -> Comparison:
    """Run both models on the data of the options: EvalDataReader's, the calibration reader's, or generated ones.

    Raises:
        DataError: no samples, or samples that do not fit.
    """
    source, limit = options.EvalDataReader, None
    if source is None:
        source, limit = reader, options.CalibDataSize
    if source is None:
        from quark.onnx.random_data import RandomDataReader

        shapes, ranges = options.RandomDataReaderInputShape, options.RandomDataReaderInputDataRange
        source = RandomDataReader(model_input, shapes, ranges, limit or 1)
    layers = options.PrintSummary and not options.CryptoMode
    libraries = options.UserCustomOpLibPath
    return compare(
        model_input, quantized, samples_of(as_reader(model_input, source), limit), Checks(layers), libraries=libraries
    )


def metric_tables(found: Comparison | None) -> tuple[Table, ...]:
    """What was measured, for the summary: one row per output, and the ten weakest layers."""
    return () if found is None else (metric_table(found), layer_table(found, shown=10))


def metric_table(found: Comparison) -> Table:
    """One row per output."""
    rows = tuple((n, f"{d.cosine:.6f}", f"{d.l2:.4g}", decibels(d.sqnr)) for n, d in found.outputs.items())
    return Table("Evaluation", ("output", "cosine", "L2", "SQNR"), rows, f"Over {found.samples} samples.")


#: A layer whose codes clip more than this share of its values is told so.
CLIPPED = 0.01


def layer_table(found: Comparison, shown: int | None = None) -> Table:
    """The first ``shown`` layers by the SQNR of their outputs, the worst first, with cause and remedy where known."""
    ranked = sorted(found.layers, key=lambda layer: layer.sqnr)[:shown]
    rows = tuple(
        (one.name or one.tensor, one.op_type, decibels(one.sqnr), f"{one.cosine:.6f}", advice(one, found))
        for one in ranked
    )
    left = len(found.layers) - len(ranked)
    columns = ("node", "operator", "SQNR", "cosine", "cause and remedy")
    return Table("Layer by layer, worst first", columns, rows, f"{left} more." if left else "")


def advice(layer: LayerView, found: Comparison) -> str:
    """Why a layer's output is off, as far as its own weights and codes tell; empty where they are fine.

    Of If and Loop: what is said of the layers inside, and how to find those that lose.
    """
    said = [one.advice for one in found.weak if one.node == layer.name]
    if layer.op_type in CONTROL and math.isfinite(layer.sqnr):
        said += [f"{one.node}: {one.advice}" for one in found.weak if one.node.startswith(f"{layer.name}/")]
        said.append("`quark onnx sensitivity` tries the layers inside")
    clipped = next((tensor.clipped for tensor in found.tensors if tensor.name == layer.tensor), 0.0)
    if clipped > CLIPPED:
        said.append(f"its codes clip {clipped:.0%} of the values; calibrate with MinMax or a higher Percentile")
    return "; ".join(said)
