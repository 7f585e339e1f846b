"""A folder that ``export_safetensors`` (or the peer) wrote becomes a model again.

    read and check → skeleton (the layers that the configuration names) → tensors, file after file → complete?

Each tensor goes to its place when it is read, so memory holds the model and one tensor. Shape and type are those that
the configuration asks for, or the tensor is named in an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.errors import ConfigError, ModelError, unknown
from quark.torch.config.model import QConfig
from quark.torch.export.checkpoint import Checkpoint, read_checkpoint
from quark.torch.export.config.config import JsonExporterConfig
from quark.torch.export.custom_modes import from_custom, key_mapping
from quark.torch.export.described import without_cached
from quark.torch.export.extras import has_extras, prepare, settle
from quark.torch.export.graph_reload import is_of_graph, ready_graph
from quark.torch.export.in_turn import is_joined
from quark.torch.export.left_out import is_ignored
from quark.torch.export.model_files import class_named, take_settings
from quark.torch.export.places import load
from quark.torch.export.skeleton import is_inside_attention, map_attention, mark_loaded, prepared
from quark.torch.quantized_layer import quantized_layers

METHODS = ("quark", "fp8", "awq")  # ``quark.torch.files`` reads further ones


@dataclass(frozen=True)
class Scheme:
    """What a checkpoint says about its quantization.

    Attributes:
        config: how the model is quantized.
        stored: how its tensors are stored.
        method: "quark", "fp8" or "awq": how tensors are called.
    """

    config: QConfig
    stored: JsonExporterConfig
    method: str


def own_model(
    model: nn.Module | None,
    folder: str | Path,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """The quantized model in a folder that we, or the peer, wrote; arguments as ``import_model_from_safetensors``.

    Raises:
        ModelError: files that are missing, broken, or do not fit the model; the file and the tensor are named.
        ConfigError: an unknown method or scheme.
    """
    checkpoint = read_checkpoint(folder)
    scheme = scheme_of(checkpoint)
    if is_of_graph(scheme.config):
        graph = ready_graph(model, checkpoint, scheme.config, scheme.stored)
        load(graph, checkpoint, scheme.method)
        return mark_loaded(graph).eval()
    if model is None:
        return from_transformers(checkpoint, scheme, trust_remote_code, attn_implementation, device)
    map_model(model, scheme)
    prepare(model, checkpoint)
    load(model, checkpoint, scheme.method)
    settle(model)
    return mark_loaded(model).eval()


def scheme_of(checkpoint: Checkpoint) -> Scheme:
    """What ``config.json`` says about the quantization."""
    found = checkpoint.config.get("quantization_config")
    file = str(checkpoint.folder / "config.json")
    if not isinstance(found, Mapping):
        raise ModelError(f"{file!r} has no quantization_config: this is not a quantized model")
    method = found.get("quant_method")
    if method not in METHODS:
        raise ConfigError(f"{file!r}: {unknown('quant_method', method, METHODS)}")
    try:
        stored = JsonExporterConfig(**found.get("export") or {})
        config = without_cached(QConfig.from_dict(found)) if method == "quark" else from_custom(found)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{file!r}: {error}") from error
    return Scheme(config, stored, str(method))


def map_model(model: nn.Module, scheme: Scheme) -> None:
    """Make a float model ready to take the tensors."""
    check_float(model)
    map_attention(model, scheme.config)
    prepared(model, scheme.config, scheme.stored.pack_method, scheme.stored.weight_format, bytes_only=True)


def check_float(model: nn.Module) -> nn.Module:
    """The model, which is not quantized.

    Raises:
        ModelError: it is.
    """
    if any(True for _ in quantized_layers(model)):
        raise ModelError(f"{type(model).__name__} is quantized already; pass a float model")
    return model


def from_transformers(
    checkpoint: Checkpoint,
    scheme: Scheme,
    trust_remote_code: bool,
    attn_implementation: str | None,
    device: str | torch.device,
) -> nn.Module:
    """The model that transformers makes from ``config.json``, with its layers and tensors from the checkpoint.

    Raises:
        ModelError: no such architecture, or tensors that do not fit.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    cls = class_of(checkpoint, trust_remote_code)
    config = transformers.AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code)
    own_parts = is_inside_attention(scheme.config) or has_extras(checkpoint) or is_joined(checkpoint.names)
    if own_parts:
        del config.quantization_config
        if kernel := attn_implementation or ("eager" if scheme.config.softmax_quant_spec else None):
            config._attn_implementation = kernel
        own = cls._from_config(config) if cls else auto.from_config(config)
        take_settings(own, checkpoint.folder)
        return own_model(own, checkpoint.folder).to(device)
    config.quantization_config = {
        **scheme.config.to_dict(),
        "quant_method": "quark",
        "export": scheme.stored.to_dict(),
    }
    loaded: Any = (cls or auto).from_pretrained(
        checkpoint.folder,
        config=config,
        dtype="auto",
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        key_mapping=key_mapping(scheme.method),
    )
    model, found = loaded
    unplaced = {name for name in found["unexpected_keys"] if not is_ignored(model, name)}
    check_keys(checkpoint, {**found, "unexpected_keys": unplaced})
    return mark_loaded(model).to(device).eval()


def class_of(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    """The class of transformers that ``config.json`` names; None where the folder's own code has it.

    Raises:
        ModelError: transformers does not have it.
    """
    if not trust_remote_code:
        from quark.torch.files.named import check_named

        check_named(checkpoint.folder, checkpoint.config)
    names = checkpoint.config.get("architectures") or []
    found = class_named(str(names[0])) if isinstance(names, list) and names else None
    if name := checkpoint.config.get("_class_name"):
        raise ModelError(
            f"{str(checkpoint.folder)!r} holds a {name}, a model of diffusers; pass the float model, or import "
            f"quark.integrations.diffusers and call {name}.from_pretrained"
        )
    if found is None and not trust_remote_code:
        raise ModelError(
            f"{str(checkpoint.folder / 'config.json')!r} names the architecture {names!r}, which transformers does not "
            f"have; pass the float model"
        )
    return found


def check_keys(checkpoint: Checkpoint, found: Mapping[str, Collection[Any]]) -> None:
    """Every tensor of the files has found its place, and every place its tensor.

    Raises:
        ModelError: not so.
    """
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[kind]:
            first = sorted(str(key) for key in found[kind])[0]
            raise ModelError(
                f"{str(checkpoint.folder)!r}: {len(found[kind])} {kind.replace('_', ' ')}, the first is {first!r}"
            )
