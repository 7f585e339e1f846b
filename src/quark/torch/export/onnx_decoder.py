"""A language model as torch's exporter traces it: only tensors go in and come out.

    without a cache   the caller's arguments                                      → logits
    with a cache      input_ids, attention_mask, past_key_values.N.{key,value}    → logits, present.N.{key,value}

With a cache every size varies: batch, new tokens, and tokens of the past, which may be none. Keys and values have the
shape [batch, heads, tokens, head size] of ``transformers`` caches. Layers with a sliding window get all of the past:
the mask takes what is in the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.errors import ConfigError, ModelError
from quark.reading import reason_of
from quark.torch.calibration import NOT_RUN

BATCH, NEW, PAST = 2, 3, 5  # sizes to trace with: a size of 1 would be taken for one that never varies


@dataclass(frozen=True)
class Traced:
    """What the exporter is given.

    Attributes:
        model: with tensors as arguments and results.
        arguments, keywords: what it is called with.
        input_names, output_names, dynamic_shapes: as ``torch.onnx.export`` takes them.
    """

    model: nn.Module
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    input_names: Sequence[str] = ()
    output_names: Sequence[str] = ()
    dynamic_shapes: Any = None


class Cached(nn.Module):
    """A decoder whose cache is a list of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, past: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits of the new tokens, and keys and values of all."""
        from transformers import DynamicCache

        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        result = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        return result.logits, tensors_of(result.past_key_values)


def tensors_of(cache: Any) -> list[torch.Tensor]:
    """Key, value, key, value, … of the layers of a cache that hold some."""
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def with_cache(model: nn.Module, arguments: tuple[Any, ...]) -> Traced:
    """A decoder with its cache as inputs and outputs.

    Args:
        model: a decoder of transformers.
        arguments: token ids [batch, tokens], which its words are drawn from.

    Raises:
        ModelError: a model without a cache of keys and values.
        ConfigError: arguments that are not token ids.
    """
    ids = arguments[0] if arguments else None
    if not (isinstance(ids, torch.Tensor) and ids.dim() == 2 and not ids.is_floating_point() and ids.numel()):
        raise ConfigError("use_cache: input_args must be token ids, one integer tensor [batch, tokens]")
    words = ids.flatten().repeat(BATCH * (PAST + NEW))[: BATCH * (PAST + NEW)].reshape(BATCH, PAST + NEW)
    past = [tensor.clone() for tensor in past_of(model, words[:, :PAST])]
    names = [f"{number}.{kind}" for number in range(len(past) // 2) for kind in ("key", "value")]
    varies = torch.export.Dim.DYNAMIC
    rows = {0: varies, 1: varies}
    return Traced(
        Cached(model),
        (words[:, PAST:].contiguous(), torch.ones_like(words), past),
        {},
        ("input_ids", "attention_mask", *(f"past_key_values.{name}" for name in names)),
        ("logits", *(f"present.{name}" for name in names)),
        (rows, rows, [{0: varies, 2: varies} for _ in past]),
    )


def check_decoder(model: nn.Module) -> None:
    """Refuse what has no cache by its configuration.

    Raises:
        ModelError: no decoder of transformers.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "use_cache") or getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"use_cache: {type(model).__name__} is not a decoder of transformers with a cache; export it without "
            f"use_cache"
        )


def check_kinds(model: nn.Module, layers: Iterable[Any]) -> None:
    """Every layer keeps keys and values of all tokens, and nothing else.

    Raises:
        ModelError: one keeps something else, such as the state of a convolution, beside them or alone.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    for number, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):  # what is derived from them keeps more
            raise ModelError(
                f"use_cache: layer {number} of {type(model).__name__} keeps a {type(layer).__name__}, which is not "
                f"keys and values of all tokens; export it without use_cache"
            )


def caches_said(config: Any) -> list[Any]:
    """The layers of a cache, by the configuration alone."""
    from transformers.cache_utils import DynamicCache

    return list(DynamicCache(config=config).layers)


@torch.no_grad()
def past_of(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values of some tokens.

    Raises:
        ModelError: the model has none, or keeps something else besides.
    """
    from transformers.cache_utils import DynamicCache

    check_decoder(model)
    layers = getattr(getattr(_answer(model, ids), "past_key_values", None), "layers", None)
    if not layers:
        kind = type(model).__name__
        raise ModelError(f"use_cache: {kind} returns no cache of keys and values; export it without use_cache")
    check_kinds(model, layers)
    cache = DynamicCache()  # its layers keep everything, also where a window slides
    _answer(model, ids, past_key_values=cache)
    return tensors_of(cache)


def _answer(model: nn.Module, ids: torch.Tensor, **given: Any) -> Any:
    """What a float model answers token ids, with its cache.

    Raises:
        ModelError: it does not run on them alone, or not with such a cache; what it said.
    """
    try:
        return model(input_ids=ids, use_cache=True, **given)
    except NOT_RUN as error:
        raise ModelError(
            f"use_cache: {type(model).__name__} does not run on token ids with a cache of keys and values "
            f"({reason_of(error)}); export it without use_cache"
        ) from error


def check_varying(arguments: tuple[Any, ...], shapes: Any) -> None:
    """A size that varies is not 1 in the example: the exporter would take it for fixed, and say nothing.

    Raises:
        ConfigError: one is.
    """
    given = shapes.values() if isinstance(shapes, dict) else shapes
    for k, (argument, varying) in enumerate(zip(arguments, given or (), strict=False)):
        if not isinstance(argument, torch.Tensor) or not isinstance(varying, dict):
            continue
        for axis, size in varying.items():
            if size not in (None, torch.export.Dim.STATIC) and argument.shape[axis] == 1:
                raise ConfigError(
                    f"dynamic_shapes: axis {axis} of argument {k} varies, and input_args has the size 1 there, which "
                    f"would be written as fixed; give an example with 2 or more"
                )
