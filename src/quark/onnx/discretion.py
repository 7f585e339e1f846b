"""What is said while a model is quantized: ``CryptoMode`` (nothing), ``IgnoreWarnings``, ``DebugMode``.

``CryptoMode`` silences the loggers of this package, and of the libraries that name tensors in their messages, in the
threads that quantize: a filter on each of them looks at a context variable, so other threads log as they did. (ONNX
Runtime's telemetry, which keeps file names, graph names and the text of errors in a database, is off in every run.)

``IgnoreWarnings`` hides UserWarning and ResourceWarning of the libraries underneath in the same way: one entry in the
list of warning filters that matches in the threads that quantize only, and is taken out afterwards.

Not handled: what a user's own reader or custom operator prints.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import onnx

from quark.config.job import Job
from quark.config.options import Options
from quark.config.plan import Plan
from quark.errors import ConfigError, ModelError
from quark.onnx.graph.model import INLINE_LIMIT
from quark.report.tables import print_lines

_log = logging.getLogger(__name__)
_SILENT: ContextVar[bool] = ContextVar("quark_silent", default=False)
_HUSHED: ContextVar[bool] = ContextVar("quark_hushed", default=False)
#: This package, and the libraries underneath that log names of tensors.
_PACKAGES = ("quark", "onnx_ir", "onnxscript", "onnxslim")


class _Here:
    """In the place of a pattern for the text of a warning: matches every text where warnings are to be hidden."""

    def match(self, text: str) -> bool:
        return _HUSHED.get()


@contextmanager
def discreet(options: Options) -> Iterator[None]:
    """Hold back messages and warnings as the options say; everything is as before afterwards."""
    if options.CryptoMode:
        _listen()
    silent, hushed = _SILENT.set(options.CryptoMode), _HUSHED.set(options.IgnoreWarnings or options.CryptoMode)
    entries: list[Any] = [("ignore", _Here(), category, None, 0) for category in (UserWarning, ResourceWarning)]
    filters = cast("list[Any]", warnings.filters)  # typeshed knows it as a sequence; it is the list that all share
    filters[:0] = entries
    try:
        yield
    finally:
        for entry in entries:
            if entry in filters:
                filters.remove(entry)
        _HUSHED.reset(hushed)
        _SILENT.reset(silent)


def inherited() -> Callable[[], None]:
    """What a thread runs first that is to be as discreet as the one that starts it."""
    return partial(_adopt, _SILENT.get(), _HUSHED.get())


def _adopt(silent: bool, hushed: bool) -> None:
    _SILENT.set(silent)
    _HUSHED.set(hushed)


@cache
def _listen() -> None:
    """Put the filter on every logger of these packages, those of modules that are not imported yet included."""
    for package in _PACKAGES:
        spec = find_spec(package)
        for folder in map(Path, spec.submodule_search_locations or () if spec is not None else ()):
            for file in folder.rglob("*.py"):
                parts = file.relative_to(folder.parent).with_suffix("").parts
                logging.getLogger(".".join(parts).removesuffix(".__init__")).addFilter(_speaks)


def _speaks(record: logging.LogRecord) -> bool:
    return not _SILENT.get()


def check_secret(options: Options, model_input: object, model_output: object) -> None:
    """Raise where ``CryptoMode`` could not keep the model off the disk.

    Raises:
        ConfigError: the model is a file, or is to become one.
        ModelError: it is larger than a protobuf in memory can be.
    """
    if not options.CryptoMode:
        return
    if not isinstance(model_input, onnx.ModelProto):
        raise ConfigError("CryptoMode: give the model as an onnx.ModelProto, not as a path: files are not touched")
    if model_output is not None:
        raise ConfigError("CryptoMode: leave model_output out; the quantized model is returned and not written")
    if model_input.ByteSize() > INLINE_LIMIT:
        raise ModelError("CryptoMode: the model exceeds the 2 GiB of a ModelProto")


def tell_idle(job: Job) -> None:
    """A warning about options that were set and that change nothing in this mode of quantization."""
    idle = job.options.idle(job.mode)
    if idle:
        _log.warning("%s", idle)


def tell_decisions(plan: Plan, options: Options) -> None:
    """``DebugMode``: every decision, to the log, or to standard error where no log is set up."""
    if not options.DebugMode:
        return
    lines = [plan.explain(name) for name in dict.fromkeys([*plan.nodes, *plan.tensors])]
    if _log.hasHandlers():
        for line in lines:
            _log.log(max(_log.getEffectiveLevel(), logging.DEBUG), "%s", line)
    else:
        print_lines(lines)
