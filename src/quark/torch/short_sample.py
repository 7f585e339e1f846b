"""The samples that experiments on a model run on: one that is made, a short window of a given one, one of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quark.errors import DataError
from quark.torch.calibration import device_of

TOKENS = (2, 16)  # of the sample that is made where none is given
PIXELS, SAMPLES = 224, 4000  # of a side of a picture whose size is not told, and of a sound
WINDOW = 64  # tokens of a given sample


def example(model: nn.Module) -> dict[str, torch.Tensor]:
    """Token numbers for a language model."""
    words = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if words is None:
        raise DataError("the structure of a model is found by running it; it has no embedding, so give a sample")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, words.num_embeddings, TOKENS, generator=generator).to(device_of(model))
    return {"input_ids": ids} if hasattr(model, "config") else {"": ids}


def shown(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """What a model of transformers may be shown, one of which most run on: tokens, without and with a mask and a
    picture; or pictures or sounds alone, of the sizes in its configuration."""
    config: Any = getattr(model, "config", None)
    seen = getattr(config, "vision_config", config)
    size = getattr(seen, "image_size", None) or PIXELS
    pixels = getattr(seen, "num_channels", 3), *((size, size) if isinstance(size, int) else size[-2:])
    alone = {"pixel_values": pixels, "input_values": (SAMPLES,)}.get(getattr(model, "main_input_name", ""))
    if alone is not None:
        return [{model.main_input_name: drawn(model, alone)}]  # type: ignore[dict-item]
    tokens = example(model)
    masked = {**tokens, "attention_mask": torch.ones(TOKENS, dtype=torch.int64, device=device_of(model))}
    return [tokens, masked, *([{**masked, "pixel_values": drawn(model, pixels)}] if seen is not config else [])]


def drawn(model: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    """Random numbers of a shape for each row, as the model has them."""
    like = next(model.parameters())
    made = torch.randn((TOKENS[0], *shape), generator=torch.Generator().manual_seed(0))
    return made.to(like.device, like.dtype)


def window(sample: Any) -> Any:
    """At most ``WINDOW`` tokens of a sample, from the row with the fewest padded ones; a sample that cannot be cut."""
    ids = token_ids(sample)
    if ids is None or ids.numel() <= WINDOW:
        return sample
    mask = sample.get("attention_mask") if isinstance(sample, Mapping) else None
    seen = torch.ones_like(ids) if mask is None else mask != 0
    row = int(seen.sum(1).argmax())
    start = min(int(seen[row].int().argmax()), max(0, ids.shape[1] - WINDOW))
    return cut(sample, ids, (slice(row, row + 1), slice(start, start + WINDOW)))


def token_ids(sample: Any) -> torch.Tensor | None:
    """The token numbers [rows, tokens] of a sample, all other tensors of which have that shape; else None."""
    values = sample.values() if isinstance(sample, Mapping) else (sample,)
    ids = sample.get("input_ids", sample.get("")) if isinstance(sample, Mapping) else sample
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.dim() != 2:
        return None
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return ids if all(value.shape == ids.shape for value in tensors) else None


def cut(sample: Any, ids: torch.Tensor, part: tuple[slice, slice]) -> Any:
    """The same part of every tensor of a sample."""
    if isinstance(sample, Mapping):
        return {name: value[part] if isinstance(value, torch.Tensor) else value for name, value in sample.items()}
    return ids[part]


def kinds(samples: Sequence[Any]) -> list[int]:
    """The first sample of each kind: those with the same parts, which may take a way of their own through a model."""
    found: dict[Any, int] = {}
    for k, sample in enumerate(samples):
        found.setdefault(form(sample), k)
    return list(found.values())


def form(value: Any) -> Any:
    """What a value is made of; sizes do not count."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), form(part)) for key, part in value.items() if part is not None))
    if isinstance(value, (list, tuple)):
        return tuple(form(part) for part in value)
    return (value.dim(), value.dtype) if isinstance(value, torch.Tensor) else type(value)
