"""A model as a float graph: exported by ``torch.export``, functional, with layers as modules and batch norms folded.

The first dimension of the sample's tensors, where they share it, is a batch: the graph takes any. A batch of one is
exported as two, because torch takes the size 1 for a constant. Where the model fixes the batch, the graph has it too.
The model that is given is not changed: the graph's parameters are copies.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from quark.errors import DataError, ModelError
from quark.torch.calibration import accepted, device_of, evaluating, to_device, without_cache
from quark.torch.graph.fold import fold_graph
from quark.torch.graph.functional import make_functional
from quark.torch.graph.lift import lift_layers

log = logging.getLogger(__name__)
NO_SAMPLE = object()


def float_graph(model: nn.Module, sample: Any = NO_SAMPLE) -> GraphModule:
    """The graph of ``model``.

    Args:
        model: any module, which a sample is needed for; or ``torch.export.export(...).module()``.
        sample: as calibration takes them.

    Raises:
        DataError: no sample.
        ModelError: a model that cannot be exported.
    """
    given = is_exported(model)
    if not given and sample is NO_SAMPLE:
        raise DataError(
            "fx_graph_mode exports the model with the first sample of the dataloader, and there is none; give samples, "
            "or a graph: torch.export.export(model, args).module()"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of its copies of input structures
        exported: Any = model if given else exported_with(model, sample).module()
        graph = copy.deepcopy(exported.graph)
        make_functional(graph)
        lifted = lift_layers(exported, graph)
    folded = fold_graph(lifted)
    log.debug("batch norms folded into %s", ", ".join(folded) or "no layer")
    return lifted


def without_writes(program: ExportedProgram) -> ExportedProgram:
    """The program itself, or torch's own rewriting of it where our rules cannot take its writes in place."""
    try:
        make_functional(program.module().graph)
    except ModelError:
        return program.run_decompositions({})
    return program


def is_exported(model: nn.Module) -> bool:
    """Whether ``model`` is a graph of operators, not of modules."""
    if not isinstance(model, GraphModule):
        return False
    called = [str(node.target) for node in model.graph.nodes if node.op == "call_module"]
    return all(name.startswith("_guards_fn") for name in called)


def exported_with(model: nn.Module, sample: Any) -> ExportedProgram:
    """``model`` as torch exports it for ``sample``."""
    sample = to_device(sample, device_of(model))
    if isinstance(sample, Mapping):
        args, kwargs = (), {str(name): value for name, value in sample.items()}
    else:
        args = (sample,) if isinstance(sample, torch.Tensor) else accepted(model, sample)
        kwargs = {}
    size = batch_of([*args, *kwargs.values()])
    with evaluating(model), without_cache(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the exporter's own
        warnings.simplefilter("ignore", DeprecationWarning)
        return any_batch(model, args, kwargs, size) or fixed_batch(model, args, kwargs)


def fixed_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """The program for these very shapes."""
    try:
        return without_writes(torch.export.export(model, args, kwargs))
    except Exception as error:
        raise ModelError(
            f"torch.export cannot make a graph of {type(model).__name__}, which fx_graph_mode needs; eager_mode needs "
            f"none. It says: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
        ) from error


def any_batch(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], size: int | None
) -> ExportedProgram | None:
    """The program for any size of the batch; None where there is no batch, or the model fixes it."""
    if size is None:
        return None
    batch: Any = torch.export.Dim.AUTO
    args, kwargs = widened(args, size), {name: widened((value,), size)[0] for name, value in kwargs.items()}
    wide = max(size, 2)
    positional = tuple({0: batch} if has_batch(value, wide) else None for value in args)
    named = {name: {0: batch} if has_batch(value, wide) else None for name, value in kwargs.items()}
    try:
        program = torch.export.export(model, args, kwargs, dynamic_shapes=named if kwargs else positional)
        program = without_writes(program)
    except Exception as error:  # noqa: BLE001 (the exporter raises whatever its parts raise; the next way is tried)
        log.debug("no graph for any batch: %s", error)
        return None
    given = set(program.graph_signature.user_inputs)
    inputs = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in given)
    fixed = [
        x for x in inputs if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == wide and is_known(x.shape[0])
    ]
    return None if fixed else program


def is_known(size: Any) -> bool:
    """Whether a size is a number, not a symbol."""
    return isinstance(size, int)


def batch_of(values: list[Any]) -> int | None:
    """The first dimension of the first tensor."""
    return next((int(value.shape[0]) for value in values if isinstance(value, torch.Tensor) and value.dim()), None)


def has_batch(value: Any, size: int) -> bool:
    """Whether a tensor's first dimension is the batch."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == size


def widened(values: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """A batch of one twice."""
    return tuple(torch.cat([value, value]) if size == 1 and has_batch(value, 1) else value for value in values)


def first_of(samples: Any) -> tuple[Any, Any]:
    """The first sample (or ``NO_SAMPLE``), and samples that still have it; an iterator is not lost."""
    if samples is None:
        return NO_SAMPLE, None
    if iter(samples) is not samples:
        return next(iter(samples), NO_SAMPLE), samples
    taken = list(samples)
    return (taken[0] if taken else NO_SAMPLE), taken
