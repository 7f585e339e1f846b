"""Our checkpoints through ``from_pretrained`` of transformers: what it uses for ``quant_method: "quark"``.

Its own quantizer maps layers and renames scales. It stacks experts while it loads them, and what is quantized expert by
expert cannot be stacked: those tensors were left over, and experts random. Ours takes experts apart before the tensors
are read, finds every tensor of a quantized layer by its name outside, keeps the conversions that stack tensors to those
that the model has, and refuses a model of which a quantized tensor was not in the files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_quark import CHECKPOINT_KEYS, QuarkHfQuantizer

from quark.errors import ConfigError, ModelError
from quark.torch.experts import UnfusedExperts
from quark.torch.export.api import _map_to_quark
from quark.torch.export.checkpoint import names_in
from quark.torch.export.custom_modes import BACK, quark_name
from quark.torch.export.extras import BRANCH, ROTATION
from quark.torch.export.in_turn import is_joined
from quark.torch.export.model_files import kept_wide
from quark.torch.export.original import names_of
from quark.torch.export.skeleton import mark_loaded
from quark.torch.export.stored import StoredParameters
from quark.torch.quantized_layer import OWN, QuantLayer, quantized_layers


class SharedNames(frozenset[str]):
    """Names that are shared by copies."""

    def __deepcopy__(self, memo: Any) -> SharedNames:
        return self


class ByLayer(WeightRenaming):
    """Tensors of quantized layers by the name outside of their layer; all others as the model's own steps have it."""

    def __init__(self, layers: Mapping[str, str], steps: list[Any], base: str) -> None:
        super().__init__("quark", "quark")
        self.layers = {**{f"{base}.{name}": value for name, value in layers.items()}, **layers}
        self.layers |= {name.removeprefix(f"{base}."): value for name, value in layers.items() if f"{base}." in name}
        self.steps = steps

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The name in memory."""
        key = source_key
        for mode in BACK:
            key = quark_name(key, mode)
        owner, _, own = key.rpartition(".")
        for step in self.steps:  # for layers too: steps remember that they were used
            source_key, _ = step.rename_source_key(source_key)
        return (f"{self.layers[owner]}.{own}" if owner in self.layers else source_key), None


class IfKnown(WeightConverter):
    """A conversion of the model's, of those tensors only that the model has a place for."""

    def __init__(self, step: Any, known: SharedNames) -> None:
        sources, targets = list(step._original_source_patterns), list(step._original_target_patterns)
        super().__init__(sources, targets, operations=step.operations)
        self.scope_prefix, self.base_model_prefix = step.scope_prefix, step.base_model_prefix
        self.known = known

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The place, and the pattern; nothing where there is no place."""
        key, pattern = super().rename_source_key(source_key)
        return (key, pattern) if key in self.known else (source_key, None)


class QuarkLoader(QuarkHfQuantizer):
    """The quantizer of transformers for our checkpoints, with experts that stay apart."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        stored = self.json_export_config
        wide = hold_wide(model)
        check_extras(kwargs.get("checkpoint_files") or ())
        _map_to_quark(
            model, self.quantization_config.quant_config, stored.pack_method, weight_format=stored.weight_format
        )
        for module in model.modules():
            parts = (module, *module.children())  # a model would initialize what is not as it was, from above too
            if isinstance(module, QuantLayer) or any(isinstance(part, UnfusedExperts) for part in parts):
                module.__dict__["_is_hf_initialized"] = True
        untie(model)
        model.__dict__["_get_dtype_plan"] = lambda dtype: plan_of(model, wide)
        self.loading = model
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], *given: Any) -> list[Any]:
        """The model's conversions, and ours before them; the model itself is ``given`` since transformers 5.21 only."""
        model = self.loading
        model.__dict__["_quark_conversions"] = [(copy.copy(step), step) for step in weight_conversions]
        base = model.base_model_prefix
        names = model.state_dict()
        longer, shorter = (f"{base}.{name}" for name in names), (name.removeprefix(f"{base}.") for name in names)
        known = SharedNames([*names, *longer, *shorter])
        renames = [step for step in weight_conversions if isinstance(step, WeightRenaming)]
        converters = [IfKnown(step, known) for step in weight_conversions if isinstance(step, WeightConverter)]
        layers = {outside: inside for inside, outside in names_of(model).layers.items()}
        scales = [WeightRenaming(f"{source}$", target) for source, target in CHECKPOINT_KEYS.items()]
        return [ByLayer(layers, renames, base), *scales, *converters]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        del self.loading, model.__dict__["_get_dtype_plan"]
        steps = model.__dict__.pop("_quark_conversions")  # renames that no file needed would be undone in those written
        model._weight_conversions = [kept for kept, used in steps if hasattr(used, "operations") or used.was_used()]
        check_loaded(model)
        return mark_loaded(model)


def hold_wide(model: Any) -> Callable[[str], object]:
    """Hold parameters in float32 that transformers does in a model of a half type, before some become codes; which."""
    wide = kept_wide(model, getattr(model, "dtype", None))
    for name, value in model.named_parameters():
        if wide(name):
            value.data = value.data.float()
    return wide


def plan_of(model: nn.Module, wide: Callable[[str], object]) -> dict[str, torch.dtype]:
    """The types of float tensors that are not the model's own: its patterns would make float32 of codes too."""
    coded = tuple(f"{name}." for name, layer in quantized_layers(model) if layer.weight_quantizer is not None)
    return {name: torch.float32 for name in model.state_dict() if wide(name) and not name.startswith(coded)}


def untie(model: nn.Module) -> None:
    """A weight that is quantized is shared with no float one any more."""
    coded = {f"{name}.weight" for name, layer in quantized_layers(model) if layer.weight_quantizer is not None}
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in list(ties.items()):
        if (target in coded) is not (source in coded):
            del ties[target]


def check_extras(files: Iterable[str]) -> None:
    """Raise for files with rotations or branches beside layers, or with gate and up of experts in one, which the model
    of transformers has no place for."""
    for file in files:
        names = names_in(Path(file))
        found = next((name for name in names if name.endswith((ROTATION, BRANCH)) or is_joined([name])), None)
        if found is not None:
            raise ConfigError(
                f"{file!r} holds {found!r}, for which transformers has no place; "
                f"quark.torch.import_model_from_safetensors(None, folder) loads it"
            )


def check_loaded(model: nn.Module) -> None:
    """Every tensor of the quantized layers was in the files.

    Raises:
        ModelError: one was not, and would be random; the first is named.
    """
    for name, layer in quantized_layers(model):
        values: dict[str, Any] = {own: layer._parameters.get(own) for own in OWN}
        for own, quantizer in layer.quantizers():
            if isinstance(quantizer, StoredParameters):
                values |= {f"{own} {key}": value for key, value in quantizer.stored.items()}
        for own, value in values.items():
            if value is not None and not getattr(value, "_is_hf_initialized", False):
                raise ModelError(f"the files lack {own!r} of the quantized layer {name!r}, or in another shape")


def register() -> None:
    """Let transformers use ``QuarkLoader``."""
    AUTO_QUANTIZER_MAPPING["quark"] = QuarkLoader
