"""What tells two jobs apart: a digest of a model, and a configuration in comparable words.

The digest covers the graph and every weight. Of a configuration everything counts that can change the result; options
that only say how the work is done (``HOW``) do not, so that an interrupted job may go on with more workers.

Not handled: objects of the user's own inside options; two of one class with equal attributes count as equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from quark import __version__
from quark.config.job import Job
from quark.errors import ConfigError
from quark.files.identity import digest_of_file
from quark.files.journal import Journal
from quark.files.plain import plain
from quark.ir.surgery import let_go
from quark.onnx.graph.weightless import external_proto

#: Options that change how the work is done or told, and not the model that comes out.
HOW = frozenset(
    [
        *("CalibOptimizeDisk", "CalibOptimizeMem", "CalibWorkerNum", "DebugMode", "EvalDataReader", "EvalMetrics"),
        *("IgnoreWarnings", "PrintSummary", "SaveAndRestore", "SaveTensorHistFig", "TmpDir"),
    ]
)
#: What computes: another release may round another way.
RELEASES = {"quark": __version__, "onnxruntime": onnxruntime.__version__}
RELEASE = "release of "
_PLACES = frozenset(["options", "external_data"])


def of_model(model: ir.Model) -> str:
    """A digest of the graph and all weights, hexadecimal. The model comes back unchanged."""
    proto, weights = external_proto(model)
    digest = hashlib.blake2b(proto.SerializeToString(deterministic=True), digest_size=16)
    for name, tensor in weights.items():
        digest.update(name.encode())
        digest.update(_bytes(tensor.numpy()))
        let_go(tensor)
    return digest.hexdigest()


def of_job(job: Job) -> dict[str, str]:
    """Everything in a job that decides about the result: name of the option or field -> its value in words."""
    found = {name: _words(value) for name, value in job.options if name not in HOW}
    return {
        **found,
        **releases(),
        **{f.name: _words(getattr(job, f.name)) for f in fields(job) if f.name not in _PLACES},
    }


def releases() -> dict[str, str]:
    """What computes, by name."""
    return {f"{RELEASE}{name}": _words(release) for name, release in RELEASES.items()}


def of_arrays(arrays: Mapping[str, np.ndarray], before: bytes = b"") -> bytes:
    """A digest of one sample, chained to ``before``, that of the samples that came earlier."""
    digest = hashlib.blake2b(before, digest_size=16)
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode())
        digest.update(_bytes(arrays[name]))
    return digest.digest()


def journal_of(model: ir.Model, job: Job, files: Iterable[tuple[str, Path]] = ()) -> Journal:
    """The journal of a job on a loaded model; its weights are read only where the option is set.

    Args:
        model: the float model.
        job: how it is quantized.
        files: what the configuration reads, by name; their contents count.

    Raises:
        ConfigError: as ``Journal``, or a path that is not that of a .json file.
    """
    path = job.options.SaveAndRestore
    if path is None:
        return Journal()
    if Path(path).suffix != ".json":
        raise ConfigError(f"SaveAndRestore is {str(path)!r}; it must be the path of a .json file")
    words = {
        name if name.startswith(RELEASE) else f"configuration: {name}": value for name, value in of_job(job).items()
    }
    contents = {f"content of {name}": digest_of_file(file) for name, file in files}
    return Journal(path, {"model": of_model(model), **words, **contents}, "SaveAndRestore")


def _bytes(array: np.ndarray) -> Any:
    if array.dtype.kind == "O":  # strings
        return repr(array.tolist()).encode()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b""


def _words(value: Any) -> str:
    return json.dumps(plain(value))
