"""Quantization schemes by name: what a name means for the weight and the input of a linear layer.

    <weight>_wo_<group>     weights only, in groups along the inputs (or per_channel)
    <type>                  weight and input; inputs static where one scale holds for all of a tensor, else dynamic
    <weight>_<input>        weight and input in different types; with _<group> weights in groups, inputs per token
    fp8_block               weights in blocks of 128 x 128, inputs in groups of 128 (as DeepSeek has them)

Types of GGUF (``Q4_K``, ``Q8_0``) are schemes of weights alone, for llama.cpp. A registered format
(``quark.register_format``) has schemes of its own: its name for weight and input, ``_wo_128`` and ``_wo_per_channel``
(blocks: ``_weight_only``) for the weight. ``KV_SCHEMES`` are those of keys and values. A scheme of your own:
``register_scheme``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from quark.errors import ConfigError, check_name, unknown
from quark.numerics.formats import BUILT_IN, FORMATS, Block
from quark.numerics.ggml import GGML
from quark.observers import SEARCHES
from quark.torch.config import specs
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.config.spec_schemes import DataTypeSpec
from quark.torch.config.tensor import QTensorConfig, is_block
from quark.torch.config.type import Dtype, QSchemeType

Rows = Mapping[str, tuple[DataTypeSpec, DataTypeSpec | None]]


def nvfp4(second: DataTypeSpec, group: int = 16) -> DataTypeSpec:
    """FP4 blocks whose scales are quantized under one float32 scale."""
    return specs.ScaleQuantSpec(specs.FP4PerGroupSpec(-1, group, is_dynamic=False), second)


def nvfp4_input(second: DataTypeSpec, group: int = 16) -> DataTypeSpec:
    """The same for inputs: blocks as they come, under a static scale."""
    return specs.ScaleQuantSpec(specs.FP4PerGroupSpec(-1, group), second)


E4M3, E5M3 = specs.FP8E4M3PerTensorSpec(), specs.FP8E5M3PerTensorSpec()
NVFP4: tuple[DataTypeSpec, DataTypeSpec] = (nvfp4(E4M3), nvfp4_input(E4M3))
PROGRESSIVE = specs.ProgressiveSpec(specs.FP8E4M3PerTensorSpec(), specs.Int4PerChannelSpec(0))
INT4_TOKEN = specs.Int4PerGroupSpec(-1, 64, is_dynamic=True)

WEIGHT_ONLY: Rows = {
    **{f"int4_wo_{size}": (specs.Int4PerGroupSpec(-1, size), None) for size in (32, 64, 128)},
    "int4_wo_per_channel": (specs.Int4PerChannelSpec(0), None),
    **{f"uint4_wo_{size}": (specs.Uint4PerGroupSpec(-1, size), None) for size in (32, 64, 128)},
    "uint4_wo_per_channel": (specs.Uint4PerChannelSpec(0), None),
    "int8_wo_per_channel": (specs.Int8PerChannelSpec(0, True), None),
    "mxfp4_weight_only": (specs.OCP_MXFP4Spec(-1, is_dynamic=False), None),
}
WEIGHT_AND_INPUT: Rows = {
    "int4_wa_64": (specs.Int4PerGroupSpec(-1, 64), INT4_TOKEN),
    "int8": (specs.Int8PerTensorSpec(), specs.Int8PerTensorSpec()),
    "ptpc_int8": (specs.Int8PerChannelSpec(0, True), specs.Int8PerChannelSpec(1, True, is_dynamic=True)),
    "fp8": (specs.FP8E4M3PerTensorSpec(scale_type="float"), specs.FP8E4M3PerTensorSpec(scale_type="float")),
    "ptpc_fp8": (specs.FP8E4M3PerChannelSpec(0), specs.FP8E4M3PerChannelSpec(1, is_dynamic=True)),
    "fp8_block": (specs.FP8E4M3PerBlockSpec(), specs.FP8E4M3PerGroupSpec(-1, 128, symmetric=True)),
    "int4_fp8": (PROGRESSIVE, specs.FP8E4M3PerTensorSpec(is_dynamic=True)),
    "int4_fp8_128": (specs.Int4PerGroupSpec(-1, 128), specs.FP8E4M3PerChannelSpec(1, is_dynamic=True)),
    "int4_int8_128": (specs.Int4PerGroupSpec(-1, 128), specs.Int8PerChannelSpec(1, True, is_dynamic=True)),
}
BLOCKS: Rows = {
    "mxfp8": (specs.OCP_MXFP8E4M3Spec(-1, is_dynamic=False), specs.OCP_MXFP8E4M3Spec(-1)),
    "mxfp6_e3m2": (specs.OCP_MXFP6E3M2Spec(-1, is_dynamic=False), specs.OCP_MXFP6E3M2Spec(-1)),
    "mxfp6_e2m3": (specs.OCP_MXFP6E2M3Spec(-1, is_dynamic=False), specs.OCP_MXFP6E2M3Spec(-1)),
    "mxfp4": (specs.OCP_MXFP4Spec(-1, is_dynamic=False), specs.OCP_MXFP4Spec(-1)),
    "mxfp4_mxfp6_e2m3": (specs.OCP_MXFP4Spec(-1, is_dynamic=False), specs.OCP_MXFP6E2M3Spec(-1)),
    "mxfp4_fp8": (specs.OCP_MXFP4Spec(-1, is_dynamic=False), specs.FP8E4M3PerTensorSpec(scale_type="float")),
    "amdfp4": (specs.AmdFP4Spec(-1, 16, is_dynamic=False), specs.AmdFP4Spec(-1, 16)),
    "amdfp4_g32": (specs.AmdFP4Spec(-1, 32, is_dynamic=False), specs.AmdFP4Spec(-1, 32)),
    **{f"amdfp4_global{size}": (nvfp4(E5M3, size), nvfp4_input(E5M3, size)) for size in (16, 32)},
    "nvfp4": NVFP4,
    "fp4_block16_scale_e4m3": NVFP4,
    "mx6": (specs.MX6Spec(-1), specs.MX6Spec(-1)),
    "mx9": (specs.MX9Spec(-1), specs.MX9Spec(-1)),
    "bfp16": (specs.BFP16Spec(-1), specs.BFP16Spec(-1)),
}
ROWS: Rows = {**WEIGHT_ONLY, **WEIGHT_AND_INPUT, **BLOCKS}
GGUF = {row.kind: QTensorConfig(Dtype[row.name], ch_axis=-1, group_size=row.size) for row in GGML.values()}
NAMES = (*ROWS, *GGUF)
TWO_LEVEL = ("nvfp4", "fp4_block16_scale_e4m3")  # siblings share the scale above their blocks

INT4_PER_TOKEN = specs.Int4PerChannelSpec(1, is_dynamic=True)
INT8_PER_TOKEN = specs.Int8PerChannelSpec(1, True, is_dynamic=True)
KV_SCHEMES: Mapping[str, tuple[DataTypeSpec, DataTypeSpec]] = {  # of keys, of values
    "fp8": (specs.FP8E4M3PerTensorSpec(scale_type="float"),) * 2,
    "fp8_per_head": (specs.FP8E4M3PerChannelSpec(-1),) * 2,
    "int8": (specs.Int8PerTensorSpec(),) * 2,
    "int8_per_token": (INT8_PER_TOKEN,) * 2,
    "int4_per_token": (INT4_PER_TOKEN,) * 2,
    "int4_per_channel": (specs.Int4PerChannelSpec(-1), INT4_PER_TOKEN),
}
SHARED_SCALE = ("fp8", "int8")  # one scale for the keys and values of an attention module
PER_HEAD = ("fp8_per_head",)  # scales of channels that become one for each head

TOLD = attrgetter("format", "symmetric", "granularity", "dynamic", "real_zero")
PLAIN = ("float32", "bfloat16", "float16")  # rules of scales that are one type or another
REGISTERED: dict[str, QLayerConfig] = {}


def layer_of(weight: DataTypeSpec, activation: DataTypeSpec | None) -> QLayerConfig:
    """The configuration of a layer whose weight and input have these types."""
    inputs = None if activation is None else activation.to_quantization_spec()
    return QLayerConfig(input_tensors=inputs, weight=weight.to_quantization_spec())


def scheme_names() -> list[str]:
    """Every scheme, built in and registered."""
    return [*NAMES, *REGISTERED, *of_formats()]


def of_formats() -> dict[str, QLayerConfig]:
    """The schemes of registered formats."""
    made: dict[str, QLayerConfig] = {}
    for name in sorted(set(FORMATS) - BUILT_IN):
        dtype = Dtype[name]
        if isinstance(FORMATS[name], Block):
            blocks = QTensorConfig(dtype, ch_axis=-1)
            made |= {name: QLayerConfig(blocks, weight=blocks), f"{name}_weight_only": QLayerConfig(weight=blocks)}
            continue
        whole = QTensorConfig(dtype, qscheme=QSchemeType.per_tensor)
        channels = QTensorConfig(dtype, qscheme=QSchemeType.per_channel, ch_axis=0)
        groups = QTensorConfig(dtype, qscheme=QSchemeType.per_group, ch_axis=-1, group_size=128)
        made[name] = QLayerConfig(whole, weight=whole)
        made |= {f"{name}_wo_128": QLayerConfig(weight=groups), f"{name}_wo_per_channel": QLayerConfig(weight=channels)}
    return made


def scheme(name: str) -> QLayerConfig:
    """A new configuration of the scheme called ``name``, or ``name:METHOD``: with ranges that this calibration method
    (``quark.observers.SEARCHES``) finds, of the inputs if they have some before the model runs, else of the weights.

    Raises:
        ConfigError: no such scheme or method; the nearest name is shown. Or nothing in the scheme has such a range, or
            a registered format has its name.
    """
    own = of_formats()
    if name in own and name in NAMES:
        raise ConfigError(f"the scheme {name!r} is that of a registered format and one of ours: rename the format")
    if name in REGISTERED:
        return QLayerConfig.from_dict(REGISTERED[name].to_dict())
    base, _, method = name.partition(":")
    if method:
        return _calibrated(scheme(base), method, name)
    if name in ROWS:
        return layer_of(*ROWS[name])
    if name in GGUF:
        return QLayerConfig(weight=GGUF[name])
    if name not in own:
        raise ConfigError(unknown("quantization scheme", name, scheme_names()))
    return own[name]


def names_like(config: QLayerConfig) -> list[str]:
    """The built-in schemes that have the types, scales and moments of ``config``, whatever finds its ranges."""
    return [name for name in ROWS if _alike(scheme(name)) == _alike(config)]


def _alike(config: QLayerConfig) -> list[list[tuple[Any, ...]]]:
    """What a reader has to know of a layer; scales of integers may be in the type of the model."""
    specs = ([stage.spec for stage in config.stages(slot)] for slot in ("weight", "input_tensors", "output_tensors"))
    return [[(*TOLD(one), "" if one.scale_rule in PLAIN else one.scale_rule) for one in slot] for slot in specs]


def _calibrated(config: QLayerConfig, method: str, name: str) -> QLayerConfig:
    """The scheme with another method where a range is found before the model runs."""
    check_name(f"calibration method of {name!r}", method, SEARCHES)
    for slot in ("input_tensors", "weight"):
        one = getattr(config, slot)
        if isinstance(one, QTensorConfig) and not is_block(one) and one.to_stage().calibrated:
            found: dict[str, Any] = {slot: replace(one, observer_cls=None, calibration_method=method)}
            return replace(config, **found)
    raise ConfigError(f"{name!r}: nothing in this scheme has a range that is found before the model runs")


def base_name(name: str) -> str:
    """The scheme without its calibration method."""
    return name if name in REGISTERED else name.partition(":")[0]


def register_scheme(name: str, config: QLayerConfig) -> None:
    """Make ``scheme(name)`` return ``config``.

    Raises:
        ConfigError: the name of a built-in scheme.
    """
    if name in NAMES:
        raise ConfigError(f"{name!r} is a built-in scheme; register yours under another name")
    if not isinstance(config, QLayerConfig):
        raise TypeError(f"a scheme is a QLayerConfig, not {type(config).__name__}")
    REGISTERED[name] = config


def unregister_scheme(name: str) -> None:
    """Forget a registered scheme.

    Raises:
        ConfigError: a built-in scheme, or one that is not registered.
    """
    if name not in REGISTERED:
        kind = "built in and stays" if name in NAMES else "not registered"
        raise ConfigError(f"the scheme {name!r} is {kind}; registered: {', '.join(REGISTERED) or 'none'}")
    del REGISTERED[name]


def cache_like(config: QConfig) -> str | None:
    """The scheme of keys and values that a model has; None: none of ours, or its cache is float."""
    found = {repr(_alike(layer)) for layer in config.kv_cache_quant_config.values()}
    for name in KV_SCHEMES:
        known = {repr(_alike(layer)) for layer in cache_scheme(name)}
        if (known, name in PER_HEAD) == (found, bool(config.kv_cache_per_head)):
            return name
    return None


def cache_scheme(name: str) -> tuple[QLayerConfig, QLayerConfig]:
    """How keys and values are quantized under the name ``name``."""
    check_name("KV cache scheme", name, KV_SCHEMES)
    keys, values = (QLayerConfig(output_tensors=spec.to_quantization_spec()) for spec in KV_SCHEMES[name])
    return keys, values
