"""The quantizer ``quark`` of diffusers. diffusers finds no quantizers by itself: importing this module registers it.

    Model.from_pretrained(folder)                   what ``export_safetensors`` wrote, bit for bit
    Model.from_pretrained(folder of a float model, quantization_config=QuarkQuantizationConfig(config))
                                                    quantized when it is loaded: weights, and dynamic activations
    model.save_pretrained(folder)                   of either: what ``export_safetensors`` writes

Pipelines load their parts in the same way. Not handled: static activations of a float model (they need samples:
``quark.torch.diffusion``), parts of a model offloaded to disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from torch import nn

from quark.errors import ConfigError, ModelError
from quark.torch.config.model import QConfig
from quark.torch.diffusion import qconfig_needs_activation_calibration
from quark.torch.export.checkpoint import Checkpoint, names_in
from quark.torch.export.config.config import JsonExporterConfig
from quark.torch.export.described import as_it_is
from quark.torch.export.extras import BRANCH, ROTATION, prepare, settle
from quark.torch.export.places import check_complete, place_of, places_of, put
from quark.torch.export.skeleton import is_inside_attention, map_layers
from quark.torch.export.state import items_of
from quark.torch.quantized_layer import QuantLayer
from quark.torch.quantizer import ModelQuantizer

__all__ = ["QuarkDiffusersQuantizer", "QuarkQuantizationConfig"]


class Method(StrEnum):
    """The name of the quantizer, as diffusers asks for it."""

    QUARK = "quark"


class QuarkQuantizationConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How diffusers is told to quantize, or what a folder says.

    Args:
        quantization_config: a ``QConfig``, or the ``quantization_config`` of a ``config.json``.

    Attributes:
        quant_config: the configuration.
        export: how tensors are stored.

    Raises:
        ConfigError: an unknown entry, or something that is not a layer of the model.
    """

    def __init__(self, quantization_config: QConfig | Mapping[str, Any]) -> None:
        given = quantization_config
        self.quant_method = Method.QUARK
        self.quant_config = given if isinstance(given, QConfig) else QConfig.from_dict(given)
        self.export = JsonExporterConfig(**({} if isinstance(given, QConfig) else given.get("export") or {}))
        if is_inside_attention(self.quant_config) or self.quant_config.kv_cache_quant_config:
            raise ConfigError("models of diffusers have no attention caches; configure their layers")

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False) -> Any:
        """The configuration that ``to_dict`` described."""
        made = cls(config_dict)
        return (made, {}) if return_unused_kwargs else made

    def to_dict(self) -> dict[str, Any]:
        """The ``quantization_config`` of a ``config.json``."""
        return as_it_is(self.quant_config, self.export)

    def to_diff_dict(self) -> dict[str, Any]:
        """The same: nothing is left out."""
        return self.to_dict()


class QuarkDiffusersQuantizer(DiffusersQuantizer):  # type: ignore[misc]
    """What diffusers calls while it loads and saves a model."""

    use_keep_in_fp32_modules = True
    requires_calibration = False
    required_packages: ClassVar[list[str]] = ["accelerate"]
    quantization_config: QuarkQuantizationConfig

    def validate_environment(self, torch_dtype: Any = None, device_map: Any = None) -> None:
        """Refuse what cannot be loaded, before anything is."""
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise ConfigError("device_map: parts of a quantized model cannot be offloaded to disk")
        if not self.pre_quantized and qconfig_needs_activation_calibration(self.quantization_config.quant_config):
            raise ConfigError(
                "static activations need samples, and from_pretrained has none: load the float model, quantize it with "
                "ModelQuantizer (quark.torch.diffusion records samples), then export_safetensors"
            )

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: Any) -> list[str]:
        """Names of tensors in the files; they become those of the modules in this list, once there are modules."""
        self.loaded_keys = list(loaded_keys)
        self.files = [checkpoint_files] if isinstance(checkpoint_files, str | Path) else list(checkpoint_files or ())
        return self.loaded_keys

    def added(self) -> Checkpoint | None:
        """The files, where they hold branches or rotations beside layers."""
        if not any(name.endswith((BRANCH, ROTATION)) for name in self.loaded_keys):
            return None
        paths = [Path(file) for file in self.files]
        return Checkpoint(paths[0].parent, {}, {path.name: tuple(names_in(path)) for path in paths})

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Tensors of a file under the names that the modules have."""
        return {self.names.get(name, name): value for name, value in state_dict.items()}

    def _process_model_before_weight_loading(
        self, model: nn.Module, device_map: Any = None, keep_in_fp32_modules: Sequence[str] = ()
    ) -> None:
        self.names: dict[str, str] = {}
        if self.pre_quantized:
            for name, module in model.named_modules():
                if set(keep_in_fp32_modules) & set(name.split(".")):
                    module.float()
            config, stored = self.quantization_config.quant_config, self.quantization_config.export
            map_layers(model, config, stored.pack_method, stored.weight_format, bytes_only=True)
            if (files := self.added()) is not None:
                prepare(model, files)
            self.names = state_names(model)
            self.loaded_keys[:] = [self.names.get(name, name) for name in self.loaded_keys]
        model.register_to_config(quantization_config=self.quantization_config)  # type: ignore[operator]

    def update_missing_keys(self, model: nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        """Refuse files without all tensors.

        Raises:
            ModelError: the first one is named.
        """
        if self.pre_quantized and missing_keys:
            raise ModelError(
                f"the files lack {len(missing_keys)} tensors of the model, the first is {min(missing_keys)!r}"
            )
        return missing_keys

    def check_if_quantized_param(
        self,
        model: nn.Module,
        param_value: Any,
        param_name: str,
        state_dict: Mapping[str, Any],
        param_device: Any = None,
    ) -> bool:
        """Whether a tensor belongs to a quantized layer: then its type stays that of the file."""
        return self.pre_quantized and any(isinstance(owner, QuantLayer) for owner in owners(model, param_name))

    def create_quantized_param(
        self,
        model: nn.Module,
        param_value: Any,
        param_name: str,
        target_device: Any,
        state_dict: Mapping[str, Any],
        unexpected_keys: Any = None,
        dtype: Any = None,
    ) -> None:
        """Put a tensor of a quantized layer in its place."""
        module, own = place_of(model, param_name)
        put(module, own, state_dict[param_name], f"tensor {param_name!r}", torch.device(target_device))

    def _process_model_after_weight_loading(self, model: nn.Module) -> nn.Module:
        if self.pre_quantized:
            check_complete(model)
            settle(model)
        else:
            ModelQuantizer(self.quantization_config.quant_config).quantize_model(model)
        model.__dict__.pop("save_pretrained", None)  # it is saved by way of this quantizer
        self.model = model
        return model

    def get_state_dict_and_metadata(
        self, state_dict: Mapping[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What ``save_pretrained`` writes.

        Raises:
            ConfigError: pickled files.
        """
        if not safe_serialization:
            raise ConfigError("quantized models are saved as safetensors; leave safe_serialization=True")
        stored = self.quantization_config.export
        items = items_of(self.model, stored.pack_method, stored.weight_format)
        return {name: value for item in items for name, value in item.make().items()}, {}

    @property
    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` writes the model."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether weights can be trained: they are codes."""
        return False


def state_names(model: nn.Module) -> dict[str, str]:
    """The name of each tensor in a file → its name in the state of the model."""
    modules = {id(module): name for name, module in model.named_modules()}
    return {
        name: f"{modules[id(places[0][0])]}.{places[0][1]}".removeprefix(".")
        for name, places in places_of(model).items()
    }


def owners(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules that a dotted name passes through."""
    found, module = [], model
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        found.append(module)
    return found


AUTO_QUANTIZER_MAPPING[Method.QUARK.value] = QuarkDiffusersQuantizer
AUTO_QUANTIZATION_CONFIG_MAPPING[Method.QUARK.value] = QuarkQuantizationConfig
