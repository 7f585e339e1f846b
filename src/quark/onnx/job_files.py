"""The files that a quantization reads and writes, for the gate (``quark.files.outputs``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from quark.config.job import Job
from quark.files.outputs import Input, Output, check_outputs
from quark.onnx.graph.model import ModelInput, inputs_of_model, output_of
from quark.onnx.ranges import FIGURES
from quark.onnx.shapeshifter import read

PREPROCESSED = "preprocessed_model_path"
WRITTEN = ("SaveAndRestore", "TmpDir", "cache_dir", "sensitivity_cache_file")


def check_files(job: Job, model_input: ModelInput, model_output: str | Path | None, reader: Any) -> None:
    """Refuse, before any work, to write over what is read.

    Raises:
        OutputError: as ``check_outputs``; also for an output that a configuration file names and that is no result of
            ours: a stranger may have written the file.
    """
    check_outputs(outputs_of(job, model_output), inputs_of(job, model_input, reader))
    if isinstance(job.options.PreprocessYAML, str):
        named = [output for output in outputs_of(job, None) if output.name == PREPROCESSED]
        check_outputs(named, overwrite=False)


def outputs_of(job: Job, model_output: str | Path | None) -> Iterator[Output]:
    """All that a job writes."""
    if model_output is not None:
        yield output_of(model_output)
    options = job.options
    if options.SaveAndRestore is not None and Path(options.SaveAndRestore).parent.is_dir():
        yield Output(Path(options.SaveAndRestore), "SaveAndRestore", "state")
    for algorithm in job.algorithms:
        if isinstance(cache := getattr(algorithm, "sensitivity_cache_file", None), (str, Path)):
            yield Output(Path(cache), "sensitivity_cache_file", "state")
    if options.SaveTensorHistFig:
        yield Output(FIGURES, "SaveTensorHistFig", folder=True)
    if options.PreprocessYAML is not None and not options.CryptoMode:
        preprocessed = read(options.PreprocessYAML).preprocessed
        if preprocessed is not None:
            yield output_of(preprocessed, PREPROCESSED)


def inputs_of(job: Job, model_input: ModelInput, reader: Any) -> Iterator[Input]:
    """All that it reads: the model, files that options and algorithms name, and the samples where the reader tells."""
    yield from inputs_of_model(model_input)
    if isinstance(path := getattr(reader, "data_path", None), (str, Path)):
        yield "the calibration data", Path(path)
    yield from named_files(job)


def named_files(job: Job) -> Iterator[Input]:
    """The files that options and algorithms name."""
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
