"""The samples of an algorithm: read once, checked, joined where that is asked for, and kept where the settings say."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from quark.errors import ConfigError, DataError
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.walk import Keep
from quark.onnx.data import CachedDataReader, Feed, checked, inputs_of, readable_again
from quark.onnx.fingerprint import of_arrays
from quark.onnx.graph.session import CPU
from quark.onnx.quantization.config.finetune import FineTuneConfig
from quark.onnx.ranges import samples_of
from quark.onnx.scratch import Scratch


def rereadable(reader: Any) -> Any:
    """The reader, or a copy of its samples in memory where it can be read only once."""
    return reader if reader is None or readable_again(reader) else CachedDataReader(reader)


def spread(feeds: Iterable[Feed], count: int) -> list[Feed]:
    """At most ``count`` samples, spread evenly over all: the first seconds of a sound may be silence.

    How many there are need not be known; never more than twice ``count`` are kept.
    """
    kept: list[Feed] = []
    stride = 1
    for number, feed in enumerate(feeds):
        if number % stride == 0:
            kept.append(feed)
        if len(kept) > 2 * count:
            kept, stride = kept[::2], 2 * stride
    return [kept[k * len(kept) // count] for k in range(count)] if len(kept) > count else kept


def feeds_of(model: ir.Model, context: JobContext, limit: int | None = None, joined: int = 1) -> list[Feed]:
    """At most ``limit`` samples, spread over all; ``joined`` of them at a time along their first axis.

    Raises:
        DataError: there is no data, or it does not fit the model.
        ConfigError: samples are to be joined and the model's first axis is fixed.
    """
    samples = samples_of(model, context.job.options, context.reader)
    found = checked(samples, inputs_of(model))
    feeds = list(found) if limit is None else spread(found, limit)
    if context.journal:
        digest = b""
        for feed in feeds:
            digest = of_arrays(feed, digest)
        context.journal.same("the samples of algorithms" + ("" if limit is None else f", at most {limit}"), digest)
    if joined == 1:
        return feeds
    fixed = [one for one in inputs_of(model) if not one.shape or one.shape[0] is not None]
    if fixed:
        raise ConfigError(f"dynamic_batch: the first axis of the input {fixed[0]} is fixed")
    return [_joined(feeds[start : start + joined]) for start in range(0, len(feeds), joined)]


def _joined(feeds: list[Feed]) -> Feed:
    try:
        return {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
    except ValueError as error:
        raise DataError(f"dynamic_batch: samples differ in shape and cannot be joined ({error})") from error


def keeper(config: FineTuneConfig, scratch: Scratch) -> Keep:
    """Where arrays stay: in memory, or from level 2 on in files that are mapped back."""
    if config.mem_opt_level < 2:
        return lambda array: array
    parent = scratch.folder("mem_opt_level=2") if config.cache_dir is None else Path(config.cache_dir)
    parent.mkdir(parents=True, exist_ok=True)

    def keep(array: np.ndarray) -> np.ndarray:
        if array.nbytes < 1 << 12:
            return array
        with tempfile.NamedTemporaryFile(dir=parent, suffix=".bin", delete=False) as file:
            np.ascontiguousarray(array).tofile(file)
        return np.memmap(file.name, array.dtype, "r", shape=array.shape)

    return keep


def providers_of(device: str) -> tuple[str, ...]:
    """The execution providers of an ``infer_device``.

    Raises:
        ConfigError: no such device name, or ONNX Runtime cannot use the device here.
    """
    kind = device.partition(":")[0]
    if kind == "cpu":
        return CPU
    known = {"cuda": "CUDAExecutionProvider", "gpu": "CUDAExecutionProvider", "rocm": "ROCMExecutionProvider"}
    if kind not in known:
        raise ConfigError(f"infer_device cannot be {device!r}; allowed: cpu, cuda, rocm")
    here = onnxruntime.get_available_providers()
    if known[kind] not in here:
        raise ConfigError(
            f"infer_device: this ONNX Runtime has no {known[kind]} for {device!r}, only {', '.join(here)}"
        )
    return (known[kind], *CPU)
