"""How far quantized models are from what a float model answers, on the samples that decide about changes.

The answers are kept by ``quark.measure.guard``, the loss is that of ``quark.measure.outputs``; what a lead is worth
says ``quark.measure.gain``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import onnx_ir as ir

from quark.config.options import Options
from quark.measure.guard import Reference
from quark.measure.outputs import Loss, Values, loss_of
from quark.onnx.graph.run import Feed, Runner, trim_heap
from quark.onnx.graph.session import Runtime


def reference(model: ir.Model, feeds: Sequence[Feed], options: Options) -> Reference[Feed]:
    """What a float model answers to samples."""
    return Reference(feeds, partial(_running, model, options))


def distance(
    expected: Iterable[tuple[Feed, Values]], model: ir.Model, options: Options, as_given: bool = False
) -> Loss:
    """The loss of a quantized model.

    Args:
        expected: a ``Reference``, or its answers.
        model: it.
        options: how to run it.
        as_given: its float weights count as they are.
    """
    run = _running(model, options, as_given)
    loss = loss_of((values, run(feed)) for feed, values in expected)
    del run
    trim_heap()
    return loss


def _running(model: ir.Model, options: Options, as_given: bool = False) -> Callable[[Feed], Values]:
    names = [str(value.name) for value in model.graph.outputs]
    runner = Runner(model, names, (), replace(Runtime.of(options), as_given=as_given))
    return lambda feed: runner.run(feed).values
