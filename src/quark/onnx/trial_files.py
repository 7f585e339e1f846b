"""The files of trials: the model of a choice, how it does on few samples, and the winner's under the wanted name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from quark.errors import DataError, QuarkError
from quark.files.private import private_folder
from quark.onnx import fingerprint
from quark.onnx.climb import Attempt
from quark.onnx.compare import ENDS, compare
from quark.onnx.data import Feed
from quark.onnx.data_layout import looked_at
from quark.onnx.graph import model as files
from quark.onnx.graph.shapes import leave_unsaid
from quark.onnx.quantization.config.config import Config
from quark.onnx.quantizer import ModelQuantizer
from quark.onnx.recipes import LIBRARIES, Choice
from quark.onnx.result import Result
from quark.onnx.trials import Probed
from quark.report.verdict import worst


def probed(model: Path, choice: Choice, fit: Sequence[Feed], choose: Sequence[Feed]) -> Probed:
    """How a choice does on few samples. Made for a process of its own."""
    with private_folder() as folder:
        try:
            quantized(model, choice, folder / "probe.onnx", fit)
            found = compare(model, folder / "probe.onnx", choose, ENDS, libraries=choice.options.get(LIBRARIES))
        except QuarkError:
            return Probed(rank=[], digest="")
        digest = fingerprint.of_model(files.load(folder / "probe.onnx"))
    return Probed(rank=list(Attempt(choice, worst(found.outputs, found.answers)).rank), digest=digest)


def quantized(model: Path, choice: Choice, path: Path, samples: Iterable[Feed]) -> Result:
    """Quantize a model as a choice says.

    Raises:
        DataError: timing left nothing to quantize.
    """
    config = choice.config()
    config.extra_options["PrintSummary"] = False
    result = ModelQuantizer(Config(global_quant_config=config)).run(model, path, looked_at(samples))
    if result.plan.tuned and not any(node.quantized for node in result.plan.nodes.values()):
        raise DataError("by this machine's timings everything is faster in float")
    return result


def write_model(source: Path, target: Path) -> None:
    """Write the model of a trial, its external data under the name that is wanted.

    Raises:
        OutputError: it cannot be written.
    """
    model = files.load(source)
    leave_unsaid(model)  # the reader states types of constants that the file does not have: it would not be the same
    files.save(model, target, source.with_name(f"{source.name}.data").exists())
