"""A block judged as a whole: the error of its answers when its layers are quantized as they will be.

Transformations are chosen layer by layer; whether the block gets better by all of them together is tried out on a few
samples, and a block that does not is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from quark.torch.algorithms.blocks import Stream, first
from quark.torch.algorithms.context import Context, matrix, new_quantizer
from quark.torch.fake_quantize import Quantizer, calibrate_with, parts
from quark.torch.matching import Match
from quark.torch.structure import answer, run_model

SAMPLES = 8  # that a block is judged on
MODEL_SAMPLES = 16  # that a model is judged on
ROWS = 256  # of each answer of a model that are compared, at most
VALUES = 1 << 20  # of each answer that are compared, or a few rows: vocabularies are wide
WORTH = 0.98  # part of the error that a change must leave at most: less is chance


def keep_if_better(context: Context, name: str, block: nn.Module, stream: Stream, change: Callable[[], None]) -> bool:
    """Change a block; put its parameters back if its quantized answers are then further from the float ones.

    Args:
        context: the float model.
        name, block, stream: the block and what enters it.
        change: of the parameters of the block, which leaves its float answers as they are.

    Returns:
        Whether the change was kept.
    """
    inside = set(block.modules())
    items = [item for module, item in context.layers().items() if module in inside]
    count = min(SAMPLES, len(stream.hidden))
    wanted = [first(stream.forward(name, block, k)) for k in range(count)]

    def error() -> float:
        with quantizing(items):
            found = [first(stream.forward(name, block, k)) for k in range(count)]
        pairs = zip(found, wanted, strict=True)
        return sum(float((x.float() - y.float()).square().double().mean()) for x, y in pairs)

    before, parameters = error(), {module: dict(module._parameters) for module in block.modules()}
    change()
    if error() <= WORTH * before:
        return True
    for module, values in parameters.items():
        module._parameters.update(values)
    return False


def model_error(context: Context) -> Callable[[], float]:
    """A function: how far the answers of the model, quantized as it will be, are from those that it gives now.

    Answers as wide as an embedding's table are scores of words: the mean KL divergence of what they predict, of which
    squared differences say little (a shift of all scores means nothing). Others: the mean squared difference.
    """
    items = [item for item in context.found.quantized if item.stages["weight"]]
    samples = context.samples[:MODEL_SAMPLES]
    wanted = [some_rows(answer(run_model(context.model, sample))) for sample in samples]
    tables = [module.num_embeddings for module in context.model.modules() if isinstance(module, nn.Embedding)]
    distance = divergence if wanted and wanted[0].shape[-1] in tables else squared

    def error() -> float:
        with quantizing(items):
            found = [some_rows(answer(run_model(context.model, sample))) for sample in samples]
        return sum(distance(x, y) for x, y in zip(found, wanted, strict=True))

    return error


def squared(x: torch.Tensor, y: torch.Tensor) -> float:
    """The mean squared difference."""
    return float((x - y).square().double().mean())


def divergence(x: torch.Tensor, y: torch.Tensor) -> float:
    """The mean KL divergence of the scores ``x`` from the scores ``y``, [rows, words]."""
    p, q = y.double().log_softmax(-1), x.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def some_rows(output: torch.Tensor) -> torch.Tensor:
    """Up to ``ROWS`` rows of an answer, evenly spread; float32."""
    rows = output.detach().reshape(-1, output.shape[-1]) if output.dim() else output.detach().reshape(1, 1)
    count = min(ROWS, max(ROWS // 16, VALUES // max(rows.shape[1], 1)))
    return rows[:: max(1, -(-len(rows) // count))].float().clone()


@contextmanager
def quantizing(items: list[Match]) -> Iterator[None]:
    """Float layers that answer as if they were quantized; static input ranges are those of each input."""
    saved = [(item.layer.module, item.layer.module._parameters["weight"]) for item in items]
    hooks = []
    for item in items:
        module, kind = item.layer.module, item.layer.kind
        value = quantized_matrix(item, matrix(module, kind))
        stored = value.T if kind.transposed else value
        weight = module._parameters["weight"]
        module._parameters["weight"] = nn.Parameter(stored.to(weight.dtype), requires_grad=False)  # type: ignore[union-attr]
        if item.stages["input_tensors"]:
            hooks.append(module.register_forward_pre_hook(input_hook(item)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, weight in saved:
            module._parameters["weight"] = weight


def input_hook(item: Match) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Quantizes the first input of a layer."""

    def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (quantize_new(new_quantizer(item, "input_tensors"), args[0]), *args[1:])

    return before


def quantize_new(quantizer: Quantizer | None, x: torch.Tensor) -> torch.Tensor:
    """``x`` through a fresh quantizer whose ranges are those of ``x``."""
    if quantizer is None or not x.numel():
        return x
    calibrate_with(quantizer, x)
    for part in parts(quantizer):
        x = part.quantized(x)
    return x


def quantized_matrix(item: Match, weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] as the layer would quantize it."""
    stored = weight.T if item.layer.kind.transposed else weight
    stored = quantize_new(new_quantizer(item, "weight"), stored)
    return stored.T if item.layer.kind.transposed else stored
