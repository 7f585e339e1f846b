"""Every weight scheme that the configuration offers: the table that the tests of exports run over."""

from __future__ import annotations

from itertools import product

from quark.torch.config.type import Dtype, QSchemeType, RoundType, ScaleType, ZeroPointType
from quark.torch.quantization.config.config import (
    AmdFP4Spec,
    Bfloat16Spec,
    BFP16Spec,
    Float16Spec,
    FP4PerGroupSpec,
    FP8E4M3PerGroupSpec,
    FP8E4M3PerTensorSpec,
    FP8E5M3PerTensorSpec,
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    MX6Spec,
    MX9Spec,
    OCP_MXFP4DiffsSpec,
    OCP_MXFP4Spec,
    OCP_MXFP6E2M3Spec,
    OCP_MXFP6E3M2Spec,
    OCP_MXFP8E4M3Spec,
    OCP_MXFP8E5M2Spec,
    OCP_MXINT8Spec,
    ProgressiveSpec,
    QTensorConfig,
    ScaleQuantSpec,
)

Weight = QTensorConfig | list[QTensorConfig]
INTEGERS = [dtype for dtype in Dtype if "int" in dtype.name]
SCALED = [*INTEGERS, Dtype.fp8_e4m3, Dtype.fp8_e5m2, Dtype.fp6_e2m3, Dtype.fp6_e3m2, Dtype.fp4]
GRANULARITIES = {
    "tensor": {"qscheme": QSchemeType.per_tensor},
    "channel": {"qscheme": QSchemeType.per_channel, "ch_axis": 0},
    "channel1": {"qscheme": QSchemeType.per_channel, "ch_axis": 1},
    "group": {"qscheme": QSchemeType.per_group, "ch_axis": 1, "group_size": 16},
    "group0": {"qscheme": QSchemeType.per_group, "ch_axis": 0, "group_size": 8},
    "whole": {"qscheme": QSchemeType.per_group, "ch_axis": 1, "group_size": -1},
    "block": {"qscheme": QSchemeType.per_block, "block_size": (16, 16)},
}


def scaled() -> dict[str, Weight]:
    """Elements with scales: every type, granularity, symmetry; static and dynamic."""
    table: dict[str, Weight] = {}
    for dtype, (name, fields), dynamic in product(SCALED, GRANULARITIES.items(), (False, True)):
        for symmetric in (True, False) if dtype in INTEGERS else (True,):
            key = f"{dtype.name}-{name}-{'sym' if symmetric else 'asym'}{'-dynamic' * dynamic}"
            table[key] = QTensorConfig(dtype, is_dynamic=dynamic, symmetric=symmetric, **fields)
    return table


MX = (OCP_MXFP4Spec, OCP_MXFP6E2M3Spec, OCP_MXFP6E3M2Spec, OCP_MXFP8E4M3Spec, OCP_MXFP8E5M2Spec, OCP_MXINT8Spec)


def blocks(axis: int) -> dict[str, Weight]:
    """Formats of blocks along ``axis``."""
    specs = {
        **{
            f"{spec.__name__}-{mode}-{'dynamic' if dynamic else 'static'}": spec(axis, dynamic, mode)
            for spec in MX
            for mode in ("even", "floor", "ceil")
            for dynamic in (False, True)
        },
        "mx6": MX6Spec(axis),
        "mx9": MX9Spec(axis),
        "mx9-32": MX9Spec(axis, 32),
        "bfp16": BFP16Spec(axis),
        "amdfp4-16": AmdFP4Spec(axis, 16, False),
        "amdfp4-32-dynamic": AmdFP4Spec(axis, 32),
        "nvfp4": ScaleQuantSpec(FP4PerGroupSpec(axis, 16, is_dynamic=False), FP8E4M3PerTensorSpec()),
        "nvfp4-dynamic": ScaleQuantSpec(FP4PerGroupSpec(axis, 16), FP8E4M3PerTensorSpec(is_dynamic=True)),
        "nvfp4-one-stage": FP4PerGroupSpec(axis, 16, "e4m3", is_dynamic=False),
        "amdfp4_global": ScaleQuantSpec(FP4PerGroupSpec(axis, 32, is_dynamic=False), FP8E5M3PerTensorSpec()),
        "mxfp4-diffs": OCP_MXFP4DiffsSpec(axis),
        "fp8-group-float32": FP8E4M3PerGroupSpec(axis, 16, is_dynamic=False),
    }  # fmt: skip
    return {name: spec.to_quantization_spec() for name, spec in specs.items()}


def others() -> dict[str, Weight]:
    """Casts, two stages, other scales and roundings."""
    group = {"qscheme": QSchemeType.per_group, "ch_axis": 1, "group_size": 16}
    two = {
        "int4_fp8": ProgressiveSpec(FP8E4M3PerTensorSpec(), Int4PerChannelSpec(0)),
        "int4_fp8-dynamic": ProgressiveSpec(FP8E4M3PerTensorSpec(is_dynamic=True), Int4PerChannelSpec(0)),
        "int4_bfloat16": ProgressiveSpec(Bfloat16Spec(), Int4PerGroupSpec(1, 16)),
        "mxfp4_bfloat16": ProgressiveSpec(Bfloat16Spec(), OCP_MXFP4Spec(1, False)),
    }
    return {
        "float16": Float16Spec().to_quantization_spec(),
        "bfloat16": Bfloat16Spec().to_quantization_spec(),
        **{name: spec.to_quantization_spec() for name, spec in two.items()},
        **{
            f"{dtype.name}-real-zero-{'group' if fields is group else 'channel'}": QTensorConfig(
                dtype, symmetric=False, zero_point_type=ZeroPointType.float32, **fields
            )
            for dtype in (Dtype.uint4, Dtype.int4, Dtype.uint8, Dtype.int3)
            for fields in (group, GRANULARITIES["channel"])
        },
        **{
            f"int4-group-scale-{kind.name}": QTensorConfig(Dtype.int4, scale_type=kind, **group)
            for kind in ScaleType
        },
        **{
            f"int8-channel-round-{kind.name}": QTensorConfig(Dtype.int8, round_method=kind, **GRANULARITIES["channel"])
            for kind in (RoundType.round, RoundType.floor)
        },
        "int8-group-e8m0": QTensorConfig(Dtype.int8, scale_format="e8m0", **group),
        "fp4-group-e5m3-scales": QTensorConfig(Dtype.fp8_e4m3, scale_format="e5m3", **group),
    }  # fmt: skip


def every(axis: int = 1) -> dict[str, Weight]:
    """The whole table."""
    return {**scaled(), **blocks(axis), **others()}
