"""What is said while a model is quantized: ``CryptoMode`` (nothing), ``IgnoreWarnings``, ``DebugMode``.

``CryptoMode`` silences the loggers of this package in the thread that quantizes: a filter on each of them looks at a
context variable, so other threads and other packages log as they did. ``IgnoreWarnings`` hides UserWarning and
ResourceWarning of the libraries underneath for the time of the call; the list of filters is put back as it was.

Not handled: what a user's own reader or custom operator prints.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import onnx

from quark.config.options import Options
from quark.config.plan import Plan
from quark.errors import ConfigError, ModelError
from quark.onnx.graph.model import INLINE_LIMIT
from quark.report.tables import print_lines

_log = logging.getLogger(__name__)
_SILENT: ContextVar[bool] = ContextVar("quark_silent", default=False)
_PACKAGE = Path(__file__).parents[1]


@contextmanager
def discreet(options: Options) -> Iterator[None]:
    """Hold back messages and warnings as the options say; everything is as before afterwards."""
    if options.CryptoMode:
        _listen()
    token = _SILENT.set(options.CryptoMode)
    try:
        with warnings.catch_warnings():
            if options.IgnoreWarnings or options.CryptoMode:
                for category in (UserWarning, ResourceWarning):
                    warnings.simplefilter("ignore", category)
            yield
    finally:
        _SILENT.reset(token)


@cache
def _listen() -> None:
    """Put the filter on every logger of this package, those of modules that are not imported yet included."""
    for file in _PACKAGE.rglob("*.py"):
        parts = file.relative_to(_PACKAGE.parent).with_suffix("").parts
        logging.getLogger(".".join(parts)).addFilter(_speaks)


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


def tell_decisions(plan: Plan) -> None:
    """``DebugMode``: every decision, to the log, or to standard error where no log is set up."""
    lines = [plan.explain(name) for name in dict.fromkeys([*plan.nodes, *plan.tensors])]
    if _log.hasHandlers():
        for line in lines:
            _log.log(max(_log.getEffectiveLevel(), logging.DEBUG), "%s", line)
    else:
        print_lines(lines)
