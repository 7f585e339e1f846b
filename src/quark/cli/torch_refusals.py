"""What a command of ``quark torch`` refuses by names alone, before torch is loaded, which takes seconds.

The tables repeat what ``quark.torch`` says of its schemes and algorithms; a test holds them to it. What they let pass
is checked again by those who know more.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from quark.errors import ConfigError, DataError, unknown
from quark.files.folder import check_target

GROUPS = ("32", "64", "128", "per_channel")
WEIGHT_ONLY = (*(f"{kind}_wo_{size}" for kind in ("int4", "uint4") for size in GROUPS), "int8_wo_per_channel")
DYNAMIC = (
    *("mxfp4_weight_only", "int4_wa_64", "ptpc_int8", "ptpc_fp8", "fp8_block", "int4_fp8", "int4_fp8_128"),
    *("int4_int8_128", "mxfp8", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxfp4_mxfp6_e2m3", "amdfp4", "amdfp4_g32"),
    *("mx6", "mx9", "bfp16"),
)
STATIC = ("int8", "fp8", "mxfp4_fp8", "amdfp4_global16", "amdfp4_global32", "nvfp4", "fp4_block16_scale_e4m3")
SCHEMES = (*WEIGHT_ONLY, *DYNAMIC, *STATIC)
CACHES = {"fp8": True, "int8": True, "int8_per_token": False, "int4_per_token": False, "int4_per_channel": True}
SAMPLED = (
    *("cle", "smooth", "autosmoothquant", "awq", "svdquant"),
    *("gptaq", "gptq", "qronos", "autoround", "adaround", "adaquant"),
)
BEGUN = "quark_progress.json"  # in a folder whose job is not finished
NEEDS = "give a text with --data"


def check_names(scheme: str | None, kv_cache: str | None, layers: Sequence[str]) -> None:
    """Refuse unknown names.

    Args:
        scheme: of all layers; None: a file says it.
        kv_cache: scheme of keys and values.
        layers: ``GLOB=SCHEME`` of single layers.

    Raises:
        ConfigError: an unknown scheme; the nearest name is shown.
    """
    for name in ([] if scheme is None else [scheme]) + [*split_layers(layers).values()]:
        if name not in SCHEMES and built_in_alone():
            raise ConfigError(unknown("quantization scheme", name, SCHEMES))
    if kv_cache is not None and kv_cache not in CACHES:
        raise ConfigError(unknown("KV cache scheme", kv_cache, CACHES))


def check_samples(scheme: str | None, kv_cache: str | None, algorithms: Sequence[str], layers: Sequence[str]) -> None:
    """Refuse what needs samples, where there are none.

    Args:
        scheme, kv_cache, layers: as ``check_names``.
        algorithms: names.

    Raises:
        DataError: static activations or an algorithm.
    """
    if scheme in STATIC and not layers:
        raise DataError(
            f"the scheme {scheme!r} has static activations, which need samples: {NEEDS}, or use a dynamic or "
            f"weight-only scheme (`quark torch schemes` lists them)"
        )
    if kv_cache is not None and CACHES[kv_cache]:
        raise DataError(f"the KV cache scheme {kv_cache!r} has static ranges, which need samples: {NEEDS}")
    for name in algorithms:
        if name in SAMPLED:
            raise DataError(f"the algorithm {name!r} needs samples: {NEEDS}")


def built_in_alone() -> bool:
    """Whether nobody in this process can have registered schemes, or formats, which have schemes of their own."""
    from quark.numerics.formats import BUILT_IN, FORMATS

    return "quark.torch.config.schemes" not in sys.modules and set(FORMATS) <= set(BUILT_IN)


def split_layers(texts: Sequence[str]) -> dict[str, str]:
    """The schemes of single layers, by glob.

    Raises:
        ConfigError: not GLOB=SCHEME.
    """
    found = {}
    for text in texts:
        glob, sign, name = text.partition("=")
        if not (glob and sign and name):
            raise ConfigError(f"--layer {text!r}: give a glob and a scheme, as in '*down_proj=int8_wo_per_channel'")
        found[glob] = name
    return found


def check_output(output: Path, resumed: bool = False) -> Path:
    """The folder of the result.

    Args:
        output: as it was typed.
        resumed: a job that was interrupted there goes on.

    Raises:
        ConfigError: it holds a model already.
    """
    goal = output.expanduser().resolve()
    if not (resumed and (goal / BEGUN).is_file()):
        check_target(goal)
    return goal
