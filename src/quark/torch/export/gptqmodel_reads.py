"""What transformers makes of AWQ and GPTQ files: gptqmodel (7.7) computes their layers; optimum (2.3) puts GPTQ's in.

experts       that it stacks have no place for codes: it makes them up at random
layers        for AWQ all that are no exception, but never the head or ``_keep_in_fp32_modules``; for GPTQ those of the
              first blocks that optimum knows by name, of ``nn.Linear`` itself, whatever is left float there. A file can
              say which they are
gates         of eight types of models are divided by scales, which only the authors of AWQ write
outputs       that 32 does not divide have no kernel
zero points   of 4 bits with one scale for a row are left out on a CPU
weights       are no attribute of its layers: what asks one for its type breaks off
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from quark.errors import ConfigError, as_a
from quark.numerics.elements import Int
from quark.torch.config.model import QConfig
from quark.torch.config.tensor import QTensorConfig
from quark.torch.direct_reads import read_directly
from quark.torch.experts import UnfusedExperts
from quark.torch.export.gptq import VERSIONS
from quark.torch.quantized_layer import QuantLayer

METHODS = ("awq", *VERSIONS)
OUTPUTS, BITS = 32, 4


def check_gptqmodel(model: nn.Module, quantized: Iterable[str], config: QConfig, format: str) -> None:
    """Refuse what transformers would read wrongly, or not at all.

    Args:
        model: whose quantized experts are taken apart.
        quantized: names of its quantized layers.
        config: of it.
        format: one of ``METHODS``.

    Raises:
        ConfigError: the first such layer, or the whole model.
    """
    names, kind = list(quantized), getattr(getattr(model, "config", None), "model_type", "")
    if why := of_model(model, kind, config, format):
        raise ConfigError(f"transformers {why}; --format quark has it")
    stacks = [path for path, one in model.named_modules() if isinstance(one, UnfusedExperts)]
    for name in names:
        stack = next((path for path in stacks if name.startswith(f"{path}.")), None)
        if why := of_layer(model, name, stack, format):
            raise refusal(why, name if stack is None else f"{stack}.*")


def check_asked(model: nn.Module, quantized: Iterable[str]) -> None:
    """Refuse layers whose weight other code asks for, if only for its type: gptqmodel's layers have none.

    Raises:
        ConfigError: the first one.
    """
    asked = set(read_directly(model, at_all=True))
    if name := next((name for name in quantized if name in asked), None):
        raise refusal(f"breaks off where other code of the model asks for the weight of {name!r} (gptqmodel)", name)


def refusal(why: str, name: str) -> ConfigError:
    """What a layer, or all of a kind, is refused with."""
    pattern = re.sub(r"\.\d+\.", ".*.", name)
    return ConfigError(f"transformers {why}; use --format quark, or --exclude '{pattern}'")


def of_model(model: nn.Module, kind: str, config: QConfig, format: str) -> str | None:
    """Why a model is not read in a format; None: it is."""
    weight: Any = config.global_quant_config.weight
    if format == "awq":
        from transformers.integrations.awq import AWQ_SCALES_MAPPINGS

        if kind in AWQ_SCALES_MAPPINGS:
            return f"divides what the gates of {kind} give by scales, which such a file has not (AWQ_SCALES_MAPPINGS)"
        return None
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        return f"reads text models alone in GPTQ, and {type(model).__name__} begins with {model.main_input_name!r}"
    plain = isinstance(weight, QTensorConfig) and as_a(Int, weight.dtype.row).bits == BITS
    if plain and weight.group_size in (None, -1) and not weight.to_stage().spec.symmetric:
        return "leaves the zero points of 4 bits per channel out on a CPU (TorchFusedLinear of gptqmodel)"
    return None


def of_layer(model: Any, name: str, stack: str | None, format: str) -> str | None:
    """Why a layer is not read in a format; None: it is."""
    layer = model.get_submodule(name)
    cls = class_of(layer)
    if stack is not None:
        return f"has no place for the single experts of {stack!r} in the format {format}, and makes them up at random"
    if format in VERSIONS and cls is not nn.Linear:
        return f"leaves {name!r} float, a {cls.__name__}, and makes it up at random (get_layers of optimum)"
    if format in VERSIONS and name.rpartition(".")[2].isdigit():
        return f"leaves {name!r} float, as all whose name is a number, and makes it up at random (dir of a module)"
    if format == "awq" and is_left_float(model, name):
        return f"leaves {name!r} float, whatever a file says, and makes it up at random (get_modules_to_not_convert)"
    if layer.out_features % OUTPUTS:
        return f"has no kernel for the {layer.out_features} outputs of {name!r} (gptqmodel: multiples of {OUTPUTS})"
    return None


def class_of(layer: nn.Module) -> type[nn.Module]:
    """The class that a layer has, or has had before it was quantized."""
    return layer.float_class if isinstance(layer, QuantLayer) else type(layer)


def is_left_float(model: Any, name: str, heads: bool = True) -> bool:
    """Whether transformers never quantizes a layer: the head, and what it holds in float32 in half types, in any."""
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = list(getattr(model, "_keep_in_fp32_modules", None) or [])
    return not should_convert_module(name, HfQuantizer.get_modules_to_not_convert(model, [], kept, heads))


def told(entry: Mapping[str, Any], model: nn.Module, quantized: Iterable[str]) -> dict[str, Any]:
    """``quantization_config`` of a file, with which layers are quantized in the words of transformers: its modules."""
    names = set(quantized)
    if entry["quant_method"] == "gptq":
        return {**entry, "block_name_to_quantize": "", "modules_in_block_to_quantize": [sorted(names)]}
    if entry["quant_method"] == "fp8":  # it makes all that is called so experts in FP8, which find no scales
        stacks = [path for path, _ in model.named_modules() if path.endswith(".experts")]
        floats = [path for path in stacks if not any(name.startswith(f"{path}.") for name in names)]
        return {**entry, "ignored_layers": [*entry["ignored_layers"], *floats]}
    if entry["quant_method"] != "awq":
        return dict(entry)
    floats = [name for name, one in model.named_modules() if isinstance(one, nn.Linear) and name not in names]
    return {**entry, "modules_to_not_convert": list(dict.fromkeys([*entry["modules_to_not_convert"], *floats]))}
