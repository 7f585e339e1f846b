"""What the keys and values of an attention cache can be quantized to, checked when a configuration is made.

Tokens come one at a time when text is generated, and all at once when it is read. Scales must not depend on which of
the two it was, so they are either static (one for all, or one per channel) or lie within one token (one per token, or
one per group of its channels). A scale per channel of a single token would be that channel's value: no quantization.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from quark.errors import ConfigError
from quark.numerics.granularity import Channel, Granularity, Group, Tensor
from quark.torch.stage import Stage, Stages

TOKENS, FEATURES = 1, (-1, 2)  # axes of [batch, tokens, heads * head size]


class Layer(Protocol):
    """A layer configuration."""

    def stages(self, slot: str) -> Stages:
        """What runs on a tensor."""


def check_cache(field: str, layers: Mapping[str, Layer]) -> None:
    """Every entry of ``kv_cache_quant_config`` says how to quantize, in a way that generation can keep.

    Raises:
        ConfigError: no ``output_tensors``, two stages, or scales that span tokens which come one at a time.
    """
    for pattern, layer in layers.items():
        name = f"{field}[{pattern!r}]"
        stages = layer.stages("output_tensors")
        if not stages:
            raise ConfigError(f"{name}: output_tensors says how keys or values are quantized; it is None")
        if len(stages) > 1:
            raise ConfigError(f"{name}: keys and values have one stage, and output_tensors has {len(stages)}")
        check_stage(name, stages[0])


def check_stage(name: str, stage: Stage) -> None:
    """One scale for all tokens, or scales within a token."""
    granularity = stage.spec.granularity
    if stage.calibrated and not spans_tokens(granularity):
        raise ConfigError(
            f"{name}: a static scale holds for all tokens: use per_tensor, or per_channel with ch_axis=-1 (one per "
            f"channel), or is_dynamic=True for one per token; this is {granularity}"
        )
    if stage.needs_range and not stage.calibrated and not within_token(granularity):
        raise ConfigError(
            f"{name}: tokens come one at a time, so a dynamic scale lies within one: use per_channel with ch_axis=1 "
            f"(one per token), or per_group with ch_axis=-1; or is_dynamic=False; this is {granularity}"
        )


def spans_tokens(granularity: Granularity) -> bool:
    """Whether there is one scale, or one per channel."""
    return isinstance(granularity, Tensor) or (isinstance(granularity, Channel) and granularity.axis in FEATURES)


def within_token(granularity: Granularity) -> bool:
    """Whether no two tokens share a scale."""
    if isinstance(granularity, Group):
        return granularity.axis in FEATURES
    return granularity == Channel(TOKENS)
