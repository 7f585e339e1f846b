"""The files that a quantization reads and writes, for the gate (``quark.files.outputs``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from quark.config.job import Job
from quark.files.outputs import Input, Output
from quark.onnx.graph.model import ModelInput, inputs_of_model, output_of
from quark.onnx.ranges import FIGURES
from quark.onnx.shapeshifter import read

WRITTEN = ("SaveAndRestore", "TmpDir", "cache_dir")


def outputs_of(job: Job, model_output: str | Path | None) -> Iterator[Output]:
    """All that a job writes."""
    if model_output is not None:
        yield output_of(model_output)
    options = job.options
    if options.SaveAndRestore is not None and Path(options.SaveAndRestore).parent.is_dir():
        yield Output(Path(options.SaveAndRestore), "SaveAndRestore", "state")
    if options.SaveTensorHistFig:
        yield Output(FIGURES, "SaveTensorHistFig", folder=True)
    if options.PreprocessYAML is not None and not options.CryptoMode:
        preprocessed = read(options.PreprocessYAML).preprocessed
        if preprocessed is not None:
            yield output_of(preprocessed, "preprocessed_model_path")


def inputs_of(job: Job, model_input: ModelInput, reader: Any) -> Iterator[Input]:
    """All that it reads: the model, files that options and algorithms name, and the samples where the reader tells."""
    yield from inputs_of_model(model_input)
    if isinstance(path := getattr(reader, "data_path", None), (str, Path)):
        yield "the calibration data", Path(path)
    for value in (dict(job.options), job.algorithms):
        yield from _named(value, "a file")


def _named(value: Any, name: str) -> Iterator[Input]:
    """Whatever in a configuration is the path of a file, and what it is called there."""
    if isinstance(value, (str, Path)):
        if 0 < len(str(value)) < 4096 and "\0" not in str(value) and Path(value).is_file():
            yield name, Path(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from () if key in WRITTEN else _named(item, f"the file of {key}")
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _named(item, name)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _named({one.name: getattr(value, one.name) for one in fields(value)}, name)
