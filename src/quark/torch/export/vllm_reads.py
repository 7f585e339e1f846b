"""What vLLM 0.33 does not load of models whose scheme it has: experts by their layout, caches by their names.

``vllm_caches.txt`` lists the classes of vLLM whose own renaming (``.k_proj`` becomes ``.qkv_proj``) comes before that
of the scales of caches in the quark format, so that these find no place. ``tests/consumers/vllm_caches.py`` asks every
class of vLLM's registry, and writes it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

from torch import nn

from quark.errors import ConfigError
from quark.numerics.elements import Int
from quark.numerics.granularity import Tensor
from quark.torch.config.model import QConfig
from quark.torch.experts import UnfusedExperts, fact, is_fused

#: What reads experts whose rows take turns (gpt_oss), by format: the same for every scheme. In the quark format float
#: ones are not read either, and vLLM does not say so; in compressed-tensors they are.
ROWS_IN_TURN = {"quark": "GptOssModel._load_weights_quark", "compressed-tensors": "GptOssModel._load_weights_other"}


def check_for_vllm(model: nn.Module, config: QConfig, format: str) -> None:
    """Refuse, before any work, what vLLM does not load.

    Args:
        model: float, or a skeleton.
        config: how it will be quantized.
        format: that it will be written in.

    Raises:
        ConfigError: experts or caches of a kind; the message names the class or error of vLLM, and what reads them.
    """
    check_experts(model, config, format)
    check_cache_scales(model, config, format)


def check_experts(model: nn.Module, config: QConfig, format: str) -> None:
    """Experts that vLLM does not load."""
    for path, one in model.named_modules():
        if not (is_fused(one) or isinstance(one, UnfusedExperts)):
            continue
        floats = any(fnmatchcase(f"{path}.0.up_proj", pattern) for pattern in config.exclude)
        if fact(one, "has_gate") and not fact(one, "is_concatenated") and (format == "quark" or not floats):
            where = ROWS_IN_TURN.get(format, "GptOssModel.load_weights")
            raise ConfigError(
                f"vLLM reads gate and up of {path!r}, whose rows take turns, as one tensor ({where}), and files in "
                f"{format} have others; float experts are read: --format compressed-tensors --exclude '*experts*'"
            )
        if floats:
            continue
        if format == "compressed-tensors" and has_integer_tensors(config):
            raise ConfigError(
                f"vLLM does not load {path!r} in compressed-tensors with integers of one scale per tensor "
                f"(RuntimeError: Unsupported FusedMoe scheme, CompressedTensorsMoEMethod); --format quark has them"
            )


def check_cache_scales(model: nn.Module, config: QConfig, format: str) -> None:
    """Scales of keys and values for which vLLM has no place."""
    if not config.kv_cache_quant_config:
        return
    kind = type(model).__name__
    if config.kv_cache_post_rope:
        raise ConfigError(
            f"vLLM has no scales for the cache of {kind}, quantized behind RoPE (kv_cache_post_rope): it reads those "
            f"of the outputs of 'k_proj' and 'v_proj' (QuarkConfig.get_cache_scale_mapper); leave out --kv-cache"
        )
    if format == "quark" and kind.lower() in renamed_first():  # PhimoeForCausalLM is PhiMoEForCausalLM there
        raise ConfigError(
            f"vLLM finds no place for the scales of the cache of {kind} in the quark format: it takes "
            f"'k_proj.output_scale' for a part of 'qkv_proj' (hf_to_vllm_mapper); --format compressed-tensors has them"
        )


@cache
def renamed_first() -> frozenset[str]:
    """The classes of ``vllm_caches.txt``, in lower case: transformers and vLLM write some in other cases."""
    text = files("quark.torch.export").joinpath("vllm_caches.txt").read_text(encoding="utf-8")
    return frozenset(line.lower() for line in text.splitlines() if line and not line.startswith("#"))


def has_integer_tensors(config: QConfig) -> bool:
    """Whether weights and inputs are integers with one scale each."""
    stages = [config.global_quant_config.stages(slot) for slot in ("weight", "input_tensors")]
    return all(
        len(found) == 1 and isinstance(found[0].format, Int) and isinstance(found[0].spec.granularity, Tensor)
        for found in stages
    )
