"""``EvalMetrics``: cosine similarity and L2 distance of the quantized model's outputs to the float model's.

With ``PrintSummary`` the layers are ranked by the SQNR of their outputs too, with cause and remedy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from quark.config.options import Options
from quark.errors import ConfigError
from quark.onnx.compare import Comparison, compare
from quark.onnx.data import REWINDS, readable_again, samples_of
from quark.report.tables import decibels
from quark.report.values import Layer, Table


def check_evaluation(options: Options, reader: Any) -> None:
    """Raise before the work where the data of ``EvalMetrics`` would be gone after it.

    Raises:
        ConfigError: no data, or a calibration reader that can be read once only.
    """
    if not options.EvalMetrics or options.EvalDataReader is not None:
        return
    if reader is None or not readable_again(reader):
        why = "there is no calibration reader" if reader is None else "the calibration reader can be read only once"
        raise ConfigError(f"EvalMetrics: {why}. Give EvalDataReader, or a reader with rewind()")


def evaluate(
    model_input: str | Path | onnx.ModelProto, quantized: str | Path | onnx.ModelProto, options: Options, reader: Any
) -> Comparison:
    """Run both models on the data of the options.

    Raises:
        DataError: no samples, or samples that do not fit.
    """
    source = options.EvalDataReader if options.EvalDataReader is not None else reader
    for name in REWINDS:
        if hasattr(source, name):
            getattr(source, name)()
            break
    limit = None if options.EvalDataReader is not None else options.CalibDataSize
    samples = samples_of(source, limit)
    layers = options.PrintSummary and not options.CryptoMode
    return compare(model_input, quantized, samples, layers=layers, libraries=options.UserCustomOpLibPath)


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


def advice(layer: Layer, found: Comparison) -> str:
    """Why a layer's output is off, as far as its own weights and codes tell; empty where they are fine."""
    said = [one.advice for one in found.weak if one.node == layer.name]
    clipped = next((tensor.clipped for tensor in found.tensors if tensor.name == layer.tensor), 0.0)
    if clipped > CLIPPED:
        said.append(f"its codes clip {clipped:.0%} of the values; calibrate with MinMax or a higher Percentile")
    return "; ".join(said)
