"""One model for every operator that ONNX documents, as onnx writes them for its own backends."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases

Case = tuple[str, onnx.ModelProto, dict[str, np.ndarray]]


@cache
def cases() -> tuple[Case, ...]:
    """(name, model, sample): nodes of floating inputs first, each once as it is, and once with weights for inputs."""
    return tuple(_cases())


def _cases() -> Iterator[Case]:
    for case in collect_testcases(None):
        model, sets = case.model, case.data_sets
        if not sets or not all(isinstance(one, np.ndarray) for one in sets[0][0]):
            continue
        feed = dict(zip([one.name for one in model.graph.input], sets[0][0], strict=False))
        if not any(one.dtype.kind == "f" for one in feed.values()):
            continue
        yield case.name, model, feed
        if len(feed) > 1:
            yield f"{case.name}_constant", with_constants(model, feed), dict([next(iter(feed.items()))])


def with_constants(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> onnx.ModelProto:
    """All inputs but the first as initializers, as the weights of a layer are."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    first = model.graph.input[0].name
    for name, array in feed.items():
        if name != first:
            made.graph.initializer.append(numpy_helper.from_array(array, name))
    del made.graph.input[:]
    made.graph.input.append(model.graph.input[0])
    made.ir_version = max(made.ir_version, 4)  # before, an initializer is an input too
    return made
