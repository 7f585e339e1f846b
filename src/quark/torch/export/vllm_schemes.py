"""Schemes of layers that vLLM 0.33 makes one of, and what it does not load of stacked experts.

It reads all experts of a stack as one layer, and siblings such as q, k and v too: in one scheme, that of the first
expert or of the first sibling, or of the name that it looks for. Others crash, or are loaded as something else without
a word (a float expert beside FP8 ones is rounded to FP8 without a scale).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from quark.errors import ConfigError
from quark.numerics.elements import Float, Int
from quark.numerics.granularity import Channel, Group, Tensor
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.experts import UnfusedExperts, fact
from quark.torch.export.described import stack_outside, told_layers
from quark.torch.export.in_turn import chosen_stages
from quark.torch.export.original import names_of
from quark.torch.export.stacked_blocks import MODE, takes_turns
from quark.torch.export.widths import READ_AS_ONE
from quark.torch.matching import Candidate, find_candidates
from quark.torch.stage import Stage

log = logging.getLogger(__name__)

Stages = tuple[Stage, ...]
#: What reads experts whose rows take turns (gpt_oss), by format: the same for every scheme; float ones are read.
ROWS_IN_TURN = {"compressed-tensors": "GptOssModel._load_weights_other"}
#: Classes that look for the tensors of experts under names that a table remaps, which lacks global scales of inputs.
REMAPPED = ("GraniteMoeHybridForCausalLM",)
#: What finds the scheme of several layers that are one, by format; all layers are alike in others.
FINDS = {"quark": "QuarkConfig._find_matched_config", "compressed-tensors": "find_matched_target"}


class RefusedExperts(NamedTuple):
    """Experts of a kind in a format.

    Attributes:
        format: of the file.
        holds: whether weights and inputs are of the kind.
        why: what vLLM does with {path!r}, and a way.
    """

    format: str
    holds: Callable[[Stages, Stages], bool]
    why: str


def check_schemes(model: nn.Module, config: QConfig, format: str) -> None:
    """Refuse layers whose schemes vLLM does not find, or does not load.

    Args:
        model: a copy without values whose experts are taken apart.
        config: how it will be quantized.
        format: that it will be written in.

    Raises:
        ConfigError: experts, siblings or names; the message names the class or error of vLLM, and a way.
    """
    layers = {layer.name: layer for layer in find_candidates(model)}
    found = {name: chosen_stages(layer, config) for name, layer in layers.items()}
    if format != MODE:
        for path, stack in stacks(model):
            own = {name: one for name, one in found.items() if name.startswith(f"{path}.")}
            check_experts(path, stack, own, format, type(model).__name__)
    check_siblings(found, format)
    if format == "quark":
        check_names(model, layers, config)


def stacks(model: nn.Module) -> Iterator[tuple[str, UnfusedExperts]]:
    """(path, module) of all stacked experts."""
    return ((path, one) for path, one in model.named_modules() if isinstance(one, UnfusedExperts))


def check_experts(
    path: str, stack: nn.Module, own: Mapping[str, tuple[Stages, ...]], format: str, architecture: str
) -> None:
    """Experts of one stack; ``own`` has the stages of each of their layers."""
    floats = not any(any(stages) for stages in own.values())
    turns = takes_turns(stack)
    if fact(stack, "has_gate") and not fact(stack, "is_concatenated") and not (turns if format == "quark" else floats):
        raise ConfigError(
            f"vLLM reads gate and up of {path!r}, whose rows take turns, as one tensor "
            f"({ROWS_IN_TURN.get(format, 'GptOssModel.load_weights')}), and files in {format} have others; "
            f"--format quark has FP8 and MXFP4 ones, --format compressed-tensors --exclude '*experts*' float ones"
        )
    if floats or (format == "quark" and turns):  # in_turn.py says which
        return
    first, scheme = next(iter(own.items()))
    if other := next((name for name, stages in own.items() if stages != scheme), None):
        raise ConfigError(
            f"vLLM reads all experts of {path!r} in one scheme ({FINDS.get(format, 'RoutedExperts')}), and {other!r} "
            f"has another one than {first!r}, or none; a pattern such as '*.experts.*' fits all of them"
        )
    weight, inputs = scheme
    if why := next((one.why for one in REFUSED if one.format == format and one.holds(weight, inputs)), None):
        raise ConfigError(f"vLLM {why.format(path=path)}")
    if format == "compressed-tensors" and architecture in REMAPPED and any(map(is_nvfp4, inputs)):
        raise ConfigError(
            f"vLLM finds no place for the scales of the inputs of {path!r} (KeyError: w2_input_global_scale, "
            f"maybe_remap_moe_expert_param_name); --format quark has them"
        )
    if format == "compressed-tensors" and (machine := runs_on(weight, inputs)):
        log.warning("vLLM runs %r in compressed-tensors on %s", path, machine)


def check_siblings(found: Mapping[str, tuple[Stages, ...]], format: str) -> None:
    """Layers beside each other that vLLM reads as one, of several schemes, or in part float."""
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in found):
        for group in READ_AS_ONE:
            own = [name for name in (f"{parent}.{one}" for one in group) if name in found]
            if other := next((name for name in own if found[name] != found[own[0]]), None):
                kinds = ", ".join(repr(f"*{one}") for one in group)
                raise ConfigError(
                    f"vLLM reads {own[0]!r} and {other!r} as one layer, in one scheme "
                    f"({FINDS.get(format, 'LinearBase')}), and they have two; give {kinds} the same "
                    f"one, or leave all of them float"
                )


def check_names(model: nn.Module, layers: Mapping[str, Candidate], config: QConfig) -> None:
    """Layers for which vLLM finds another scheme in the quark format, by the name that it looks for."""
    names = names_of(model)
    entries = told_layers(config, model, names)
    if not (entries or config.layer_type_quant_config) or any(takes_turns(one) for _, one in stacks(model)):
        return  # in_turn.py asks for the names of the latter
    whole = {path: stack_outside(path, names) for path, _ in stacks(model)}
    for name, layer in layers.items():
        stages = chosen_stages(layer, config)
        path = next((path for path in whole if name.startswith(f"{path}.")), None)
        there = names.layer(name) if path is None else whole[path]
        said = found_there(there, entries) or config.global_quant_config
        if any(stages) and tuple(tuple(said.stages(slot)) for slot in ("weight", "input_tensors")) != stages:
            raise ConfigError(
                f"vLLM looks for the scheme of {name!r} by the name {there!r}, and finds another one "
                f"({FINDS['quark']}); name its layers by patterns with '*'"
            )


def found_there(name: str, entries: Mapping[str, QLayerConfig]) -> QLayerConfig | None:
    """What vLLM finds for a name in ``layer_quant_config``: names without a star fit all that they begin with."""
    hits = (own for key, own in entries.items() if (fnmatchcase(name, key) if "*" in key else name in key))
    return next(hits, None)


def runs_on(weight: Stages, inputs: Stages) -> str | None:
    """The only machines that vLLM has a kernel for, of experts in compressed-tensors; None: it has one for others."""
    if not weight or not isinstance(weight[0].format, Int):
        return None
    if not inputs and isinstance(weight[0].spec.granularity, Channel):
        return "NVIDIA GPUs alone (Marlin; elsewhere AssertionError, CompressedTensorsWNA16MoEMethod: groups alone)"
    if inputs and weight[0].format.bits == 4 and isinstance(inputs[0].format, Int):
        return "Arm CPUs alone (CPUExpertsInt4; elsewhere NotImplementedError: No W4A8 Int8 MoE backend)"
    return None


def is_nvfp4(stage: Stage) -> bool:
    """Blocks under a scale of the tensor."""
    return stage.is_block and bool(getattr(stage.format, "tensor_scale", False))


def has_static_integers(weight: Stages, inputs: Stages) -> bool:
    """Whether inputs are integers whose scales are known beforehand."""
    return any(isinstance(one.format, Int) and one.calibrated for one in inputs)


def has_integer_groups(weight: Stages, inputs: Stages) -> bool:
    """Whether inputs are integers with a scale per group."""
    return any(isinstance(one.format, Int) and isinstance(one.spec.granularity, Group) for one in inputs)


def has_rows_of_fp8(weight: Stages, inputs: Stages) -> bool:
    """Whether weights are FP8 with a scale per row."""
    return any(isinstance(one.spec.row, Float) and isinstance(one.spec.granularity, Channel) for one in weight)


def has_integer_tensors(weight: Stages, inputs: Stages) -> bool:
    """Whether weights and inputs are integers with one scale each."""
    return all(
        len(found) == 1 and isinstance(found[0].format, Int) and isinstance(found[0].spec.granularity, Tensor)
        for found in (weight, inputs)
    )


REFUSED = (
    RefusedExperts(
        "gptq_v2",
        lambda weight, inputs: True,
        "adds one to the zero points of {path!r} on a CPU (prepare_int4_moe_layer_for_cpu), which version 2 of GPTQ "
        "has as they are; --format gptq has them lowered by one",
    ),
    RefusedExperts(
        "compressed-tensors",
        has_integer_tensors,
        "does not load {path!r} in compressed-tensors with integers of one scale per tensor (RuntimeError: Unsupported "
        "FusedMoe scheme, CompressedTensorsMoEMethod); --scheme ptpc_int8, with a scale per token, is read",
    ),
    RefusedExperts(
        "compressed-tensors",
        has_integer_groups,
        "does not load {path!r} in compressed-tensors with groups of integer inputs (RuntimeError: Unsupported "
        "FusedMoe scheme, CompressedTensorsMoEMethod); --scheme int4_int8_128, with a scale per token, is read, on Arm "
        "CPUs",
    ),
    RefusedExperts(
        "quark",
        has_static_integers,
        "loads {path!r} with static scales of integer inputs and has no kernel to run them (AttributeError: 'NoneType' "
        "object has no attribute 'is_monolithic', QuarkW8A8Int8MoEMethod); --scheme ptpc_int8, with a scale per token, "
        "runs",
    ),
    RefusedExperts(
        "modelopt",
        has_rows_of_fp8,
        "does not load {path!r} in ModelOpt's format with FP8 of a scale per row (RuntimeError: shape '[]' is invalid, "
        "RoutedExperts.weight_loader); --format quark and --format compressed-tensors have it",
    ),
)
