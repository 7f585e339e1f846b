"""What transformers makes of a compressed-tensors checkpoint while it loads it: models that it would read wrongly.

Nothing about an architecture is known here. Each question is put to the model: its conversion tables, its tied weights,
its experts, and the method that gives new modules their first values.

    experts       are stacked in float: their inputs are not quantized, and stacked ones have no place for their codes
    ties          a codes tensor and a float one are compared, or looked up under a name that is not there
    conversions   of one tensor into several get several sources, which no conversion may have, and packed weights leave
                  the sources of others empty: both only where the layer that they make has no scales of its own
    first values  are written into ``weight``, which packed layers do not have
    zero points   of packed weights are packed too, and are asked for as they are
    blocks        (MX formats, NVFP4) come back as bfloat16, whatever the model computes in; the scales of inputs in
                  NVFP4 and MXFP8 are rounded in bfloat16, to others than were evaluated
    inputs        per token get a scale for each place on the first two axes: others than per token but for three axes;
                  in groups they are not cut where the last one is shorter
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from quark.errors import ConfigError, QuarkError
from quark.numerics.elements import Int
from quark.numerics.granularity import Token
from quark.torch.calibration import device_of
from quark.torch.config.model import QConfig
from quark.torch.config.tensor import QTensorConfig
from quark.torch.experts import UnfusedExperts, is_fused, numbered_stacks
from quark.torch.export.decoded import strategy_of
from quark.torch.export.gptqmodel_reads import METHODS, check_asked, check_gptqmodel, class_of, is_left_float, refusal
from quark.torch.export.model_files import HALVES, float_dtype, is_untied, kept_wide
from quark.torch.export.oldest_transformers import why_too_old
from quark.torch.export.original import WEIGHT, FileNames, base_of, conversions_of, names_of
from quark.torch.fake_quantize import FakeQuantize, parts
from quark.torch.first_input import attached
from quark.torch.quantized_layer import QuantLayer, detach, quantized_layers
from quark.torch.short_sample import shown
from quark.torch.stage import Stage

METHOD = "compressed-tensors"
FP8 = "fp8"  # a format with a tensor for each expert, whose reader knows nothing of stacks
TOKEN_AXES = 3  # batch, tokens, features
OTHERS = (ValueError, TypeError, RuntimeError, IndexError, KeyError, NotImplementedError)  # a copy without values is no
# whole model: only what asks for a weight is told


def why_not(
    model: nn.Module,
    schemes: Mapping[str, Any],
    formats: Mapping[str, Any],
    names: FileNames,
    described: Mapping[str, Any],
) -> str | None:
    """Why transformers would not read the checkpoint of a model as it is; None: it does.

    Args:
        model: quantized.
        schemes: of its quantized layers, by name in memory.
        formats: likewise.
        names: of its tensors outside.
        described: its ``quantization_config``.
    """
    packed = [name for name, format in formats.items() if "pack" in format.value]
    reasons = (
        zero_points(schemes, packed),
        blocks(model, schemes),
        input_blocks(schemes),
        experts(model, schemes, names),
        ties(model, schemes),
        conversions(described, names, schemes),
        values(model, packed),
        inputs(model, schemes),
    )
    return next((reason for reason in reasons if reason is not None), None)


def zero_points(schemes: Mapping[str, Any], packed: Iterable[str]) -> str | None:
    """Packed weights with zero points."""
    name = next((name for name in packed if not schemes[name].weights.symmetric), None)
    return name and f"it has no place for the packed zero points of {name!r} (sizes of stored tensors do not match)"


def blocks(model: nn.Module, schemes: Mapping[str, Any]) -> str | None:
    """Weights in blocks, of a model that does not compute in the type that they are decoded to."""
    dtype, name = float_dtype(model), next((name for name in schemes if schemes[name].weights.scale_dtype), None)
    if name is None or dtype is torch.bfloat16:
        return None
    own = str(dtype).removeprefix("torch.")
    return (
        f"it decodes the blocks of {name!r} to bfloat16, and this model computes in {own} (dtype=torch.bfloat16 fits)"
    )


def input_blocks(schemes: Mapping[str, Any]) -> str | None:
    """Inputs in blocks whose scales it finds otherwise: under a scale of the tensor (NVFP4), or 8 bits long (MXFP8).

    Of small Llamas the logits in bfloat16 differed by 16 to 37 % and by 7 to 13 %.
    """
    for name, scheme in schemes.items():
        found = scheme.input_activations
        if found is not None and found.scale_dtype and (strategy_of(found) == "tensor_group" or found.num_bits == 8):
            return f"it rounds the scales of the blocks of the inputs of {name!r} otherwise, and answers otherwise"
    return None


def inputs(model: nn.Module, schemes: Mapping[str, Any]) -> str | None:
    """Inputs whose scales it finds otherwise, by the axes that they have while the model runs, or cannot find."""
    told = {name: scheme.input_activations for name, scheme in schemes.items() if scheme.input_activations is not None}
    layers = {name: layer for name, layer in quantized_layers(model) if name in told}
    per_token = [name for name in layers if strategy_of(told[name]) == "token"]
    if any(not part.axes for name in per_token for part in parts_of_inputs(layers[name])):
        show_axes(model, [layers[name] for name in per_token])
    for name in per_token:
        axes = {axes for part in parts_of_inputs(layers[name]) for axes in part.axes} - {TOKEN_AXES}
        if axes:
            return (
                f"it shares scales among the inputs of {name!r}, which have {min(axes)} axes (per token they are right "
                f"for {TOKEN_AXES}; --exclude {name!r} keeps the layer float)"
            )
    for name, found in told.items():
        ragged = strategy_of(found) == "group" and not found.scale_dtype and name in layers
        if ragged and layers[name].in_features % found.group_size:
            return f"it cannot cut the {layers[name].in_features} inputs of {name!r} into groups of {found.group_size}"
    return None


def show_axes(model: nn.Module, layers: list[QuantLayer]) -> None:
    """Let a model show how many axes the inputs of ``layers`` have, as far as it runs.

    Without values quantizers let tensors pass, for they find no range.
    """
    on = [part for part in parts(model) if part.enabled and device_of(model).type == "meta"]
    try:
        for part in on:
            part.enabled = False
        for layer, axes in zip(layers, axes_seen(model, layers), strict=True):
            for part in parts_of_inputs(layer):
                part.axes |= axes
    finally:
        for part in on:
            part.enabled = True


def axes_seen(model: nn.Module, layers: Sequence[nn.Module]) -> list[set[int]]:
    """How many axes the inputs of each layer have while a model runs, as far as it does.

    Some models look for padding where they are given no mask, others look into the mask: without values neither can be
    done. Those of pictures and sounds are given none.
    """
    seen: list[set[int]] = [set() for _ in layers]

    def noted(axes: set[int]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda layer, given: axes.update({given[0].dim()} if given else ())

    hooks = [layer.register_forward_pre_hook(noted(axes)) for layer, axes in zip(layers, seen, strict=True)]
    with attached(hooks), suppress(QuarkError), torch.no_grad():  # no embedding, or its own quantizers find no range
        for sample in shown(model):
            with suppress(*OTHERS, AttributeError, QuarkError):
                model(**sample)
                break
    return seen


def show_axes_of(model: nn.Module, prepared: nn.Module) -> bool:
    """Let the float model show them to the copy without values that is ``prepared``, where that one did not run.

    Returns:
        Whether something was seen.
    """
    unknown = {
        name: found
        for name, layer in quantized_layers(prepared)
        if (found := [part for part in parts_of_inputs(layer) if isinstance(part.granularity, Token) and not part.axes])
    }
    own = {name: layer for name, layer in model.named_modules() if name in unknown}
    if not own or device_of(model).type == "meta":
        return False
    for name, axes in zip(own, axes_seen(model, list(own.values())), strict=True):
        for part in unknown[name]:
            part.axes |= axes
    return any(part.axes for name in own for part in unknown[name])


def parts_of_inputs(layer: QuantLayer) -> list[FakeQuantize]:
    """The stages of the inputs of a layer."""
    quantizer = dict(layer.quantizers()).get("input_tensors")
    return [] if quantizer is None else list(parts(quantizer))


def experts(model: nn.Module, schemes: Mapping[str, Any], names: FileNames) -> str | None:
    """Experts that are quantized: stacked ones are made up at random, others have float inputs, and one scheme with
    all other layers, which it takes them by when it stacks them."""
    stacks = {path: one for path, one in model.named_modules() if isinstance(one, UnfusedExperts) or is_fused(one)}
    inside: list[str] = []
    for path, module in stacks.items():
        own = next((name for name in schemes if name.startswith(f"{path}.")), None)
        if not isinstance(module, UnfusedExperts) or own is None or is_replaced(module):
            continue
        if not is_listed(path, module, names):
            return f"it has no place for the experts of {path!r}, and makes them up at random"
        if schemes[own].input_activations is not None:
            return f"it computes the experts of {path!r} with float inputs"
        inside += [
            own,
            *(f"{path}.{name}" for name, part in module.named_modules() if name and "weight" in part._parameters),
        ]
    left = [path for path, module in stacks.items() if is_fused(module)]
    weights = {name: schemes[name].weights if name in schemes else None for name in (*inside, *left, *schemes)}
    other = next((name for name, own in weights.items() if inside and own != weights[inside[0]]), None)
    return other and f"it stacks experts by one scheme, and {other!r} has another one than {inside[0]!r}, or none"


def check_custom(model: nn.Module, quantized: Sequence[str], config: QConfig, format: str) -> None:
    """Refuse what transformers would read wrongly in a format that other programs have made.

    Args:
        model: whose quantized experts are taken apart.
        quantized: names of its quantized layers.
        config: of it.
        format: any.

    Raises:
        ConfigError: the first such layer.
    """
    if format == "quark" and (old := why_too_old()):
        raise ConfigError(f"transformers does not load the format quark: {old}")
    if format in METHODS:
        check_gptqmodel(model, quantized, config, format)
        if why := values(model, quantized):
            raise ConfigError(f"transformers does not load it in the format {format}: {why}; use --format quark")
        check_asked(model, quantized)
    weight, names = config.global_quant_config.weight, names_of(model)
    if format == FP8:
        check_replaced(model, quantized)
    if format == FP8 and isinstance(weight, QTensorConfig) and weight.block_size:
        check_blocks(model, quantized, weight.block_size)
        entry = {"quant_method": FP8, "activation_scheme": "dynamic", "weight_block_size": list(weight.block_size)}
        if conversions_made(entry, names, quantized) is None:
            raise ConfigError(
                "transformers does not load it in the format fp8: it makes several tensors of one of the original, and "
                "cannot where weights have scales; use --format quark"
            )
    if format == FP8:
        check_listed(model, quantized, names)


def check_wide(model: nn.Module, layers: Iterable[tuple[str, Iterable[Stage], bool]]) -> None:
    """Layers that transformers holds in float32 in a model of a half type: what is float is made float32, codes too.

    Of small T5s in float16 the logits were 6 to 26 % off where codes of ``wo`` are no integers, or they broke off; 3 to
    46 % where inputs are quantized, which it rounds to float16 before.

    Args:
        model: float or quantized.
        layers: the name of each quantized layer, the stages of its weight, and whether its inputs are quantized.

    Raises:
        ConfigError: the first such layer.
    """
    dtype = getattr(model, "dtype", None)
    if dtype not in HALVES:
        return
    wide, own = kept_wide(model, dtype), str(dtype).removeprefix("torch.")
    for name, stages, has_inputs in layers:
        if (has_inputs or any(not isinstance(one.format, Int) for one in stages)) and wide(f"{name}.weight"):
            exclude = re.sub(r"\.\d+\.", ".*.", name)
            raise ConfigError(
                f"transformers holds {name!r} in float32 where the model computes in {own} (_keep_in_fp32_modules), "
                f"and finds other codes; use --dtype float32, integers for weights only, or --exclude '{exclude}'"
            )


def check_wide_layers(model: nn.Module) -> None:
    """The same of a quantized model."""
    layers = [(name, layer, dict(layer.quantizers())) for name, layer in quantized_layers(model)]
    check_wide(
        model,
        (
            (name, [one.stage for one in parts(layer.weight_quantizer)], "input_tensors" in slots)
            for name, layer, slots in layers
            if layer.weight_quantizer is not None
        ),
    )


def check_replaced(model: nn.Module, taken: Iterable[str]) -> None:
    """Refuse FP8 in layers that transformers does not replace on a GPU: codes would be floats of another size."""
    for name in taken:
        cls = class_of(model.get_submodule(name))
        if cls is not nn.Linear and "GroupedLinear" not in cls.__name__:
            raise refusal(f"reads FP8 in layers of nn.Linear itself, and {name!r} is a {cls.__name__}", name)
        if is_left_float(model, name, heads=False):
            raise refusal(f"leaves {name!r} float on a GPU, whatever a file says (_keep_in_fp32_modules)", name)


def check_blocks(model: Any, taken: Iterable[str], size: Sequence[int]) -> None:
    """Refuse FP8 whose last block is shorter: where transformers has no kernel, it takes blocks of equal length."""
    for name in taken:
        layer = model.get_submodule(name)
        for what, length, block in zip(
            ("outputs", "inputs"), (layer.out_features, layer.in_features), size, strict=True
        ):
            if length > block and length % block:
                exclude = re.sub(r"\.\d+\.", ".*.", name)
                raise ConfigError(
                    f"transformers takes the {length} {what} of {name!r} for blocks of equal length on a CPU "
                    f"(Fp8Dequantize), and {block} does not divide them; use --format quark, or --exclude '{exclude}'"
                )


def check_listed(model: nn.Module, taken: Sequence[str], names: FileNames) -> None:
    """Refuse quantized experts that the original has stacked in FP8: transformers would make them up at random."""
    for path, module in model.named_modules():
        if not isinstance(module, UnfusedExperts) or not any(name.startswith(f"{path}.") for name in taken):
            continue
        if not is_listed(path, module, names):
            exclude = f"{re.sub('[0-9]+', '*', path)}.*"
            raise ConfigError(
                f"transformers has no place for the single experts of {path!r} in the format fp8, and makes its "
                f"stacks up at random; use --format quark, or --exclude '{exclude}'"
            )


def is_replaced(module: UnfusedExperts) -> bool:
    """Whether transformers has a list of linear layers in the place of such experts, and quantizes those."""
    from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION as LISTS

    found: Mapping[str, Any] = LISTS.get(module.fused_class.__name__, {})
    return METHOD in found.get("quantization_methods", ())


def is_listed(path: str, module: UnfusedExperts, names: FileNames) -> bool:
    """Whether the original has the experts one by one: then their stacks come apart on the way out."""
    own, hit = f"{path}.0.down_proj", names.hit(f"{path}.down_proj") is not None
    form = {f"{path}.{name}": (tuple(x.shape), x.dtype) for name, x in numbered_stacks(module)[0].items()}
    stays = hit and len(names.written(form)) <= len(form)  # stacked there too, and turned
    return (names.layer(own) != base_of(own, names.renamed) or hit) and not stays


def ties(model: nn.Module, schemes: Mapping[str, Any]) -> str | None:
    """Weights that transformers ties, and that are not the same any more."""
    pairs = {} if is_untied(model) else getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in pairs.items():
        own = next((name for name in (target, source) if name.removesuffix(WEIGHT) in schemes), None)
        if own is not None and own.endswith(WEIGHT):
            return f"it ties {target!r} to {source!r}, of which {own!r} is quantized"
    return None


def conversions(described: Mapping[str, Any], names: FileNames, schemes: Mapping[str, Any]) -> str | None:
    """Conversions of transformers' own that do not survive the names of quantized tensors: it is asked for them."""
    made = conversions_made(described, names, schemes)
    if made is None:
        return "it makes several tensors of one when it loads the original, and cannot where weights have scales"
    joins = [step for step in made if is_join(step.source_patterns)]
    targets = tuple(target for step in joins for target in step.target_patterns if target.endswith(WEIGHT))
    whole = (name for name, _ in names.model.named_parameters() if name.endswith(targets))
    fp8 = all(one.weights.type == "float" and one.weights.num_bits == 8 for one in schemes.values())
    apart = None if fp8 else next(whole, None)
    return None if apart is None else f"it joins {apart!r} of several tensors, which it can only where weights are FP8"


def conversions_made(described: Mapping[str, Any], names: FileNames, schemes: Iterable[str]) -> list[Any] | None:
    """Those conversions, with the names of quantized tensors; None: it cannot."""
    from transformers.quantizers.auto import AutoHfQuantizer

    steps: list[Any] = [step for step in conversions_of(names.model) if hasattr(step, "operations")]
    if not steps:
        return []
    if old := why_too_old():
        raise ConfigError(f"transformers does not stack quantized weights when it reads this model: {old}")
    try:
        reader = AutoHfQuantizer.from_config(dict(described))
        reader.validate_environment()
        update = reader.update_weight_conversions
        view = [ConversionView(names.model, schemes)] if len(inspect.signature(update).parameters) > 1 else []
        return list(update(copy.deepcopy(steps), *view))  # without it up to transformers 5.20
    except ValueError:
        return None


def is_join(sources: Iterable[str]) -> bool:
    """Whether a conversion collects several weights, and the codes of each: those that are float have none."""
    sources = list(sources)
    coded = any(name.endswith(f"{WEIGHT}_packed") for name in sources)
    return coded and sum(name.endswith(WEIGHT) for name in sources) > 1 and not any("*" in name for name in sources)


class ConversionView:
    """A model as transformers sees it when it asks for conversions: the layers that it quantizes have scales."""

    def __init__(self, model: nn.Module, schemes: Iterable[str]) -> None:
        stacks = [
            f"{path}."
            for path, module in model.named_modules()
            if isinstance(module, UnfusedExperts) and not is_replaced(module)
        ]
        self.model = model
        self.layers = [name for name in schemes if not name.startswith(tuple(stacks))]

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, value) of the tensors of the model, and of the scales."""
        yield from self.model.named_parameters()
        yield from ((f"{name}{WEIGHT}_scale", torch.empty(0)) for name in self.layers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def values(model: nn.Module, packed: Iterable[str]) -> str | None:
    """Modules whose first values go into the weights of packed layers."""
    bare = without_values(model)
    for name in packed:
        layer = bare.get_submodule(name)
        detach(layer)
        layer._parameters.pop("weight", None)
    for name, module, owner in initialized(bare):
        with suppress(*OTHERS):
            try:
                owner._init_weights(module)
            except AttributeError as error:
                if "weight" in str(error):
                    return f"it gives {name!r} first values ({type(owner).__name__}._init_weights), which is packed"
    return None


def without_values(model: nn.Module) -> nn.Module:
    """A copy whose tensors have no values."""
    tensors = [*model.parameters(), *model.buffers()]
    empty: dict[int, Any] = {id(value): torch.empty_like(value.detach(), device="meta") for value in tensors}
    for parameter in model.parameters():
        empty[id(parameter)] = nn.Parameter(empty[id(parameter)], requires_grad=False)
    return copy.deepcopy(model, empty)


def initialized(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """(name, module, the model that gives it its first values) of all modules."""
    owners: dict[str, Any] = {}
    for name, module in model.named_modules():
        owner = module if hasattr(module, "_init_weights") else owners.get(name.rpartition(".")[0])
        owners[name] = owner
        if owner is not None:
            yield name, module, owner
