"""Digests of what a job of the torch flow begins with: a model, samples, the folder of a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.files.identity import digests_of
from quark.files.plain import DATA, briefly, code_of, plain
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.export.model_files import COPIED

GRIDS = ".quark_grids"  # of a checkpoint that was decoded (``files.carried``)
RELEASES = ("openquark", "torch", "transformers", "safetensors")
RELEASED = frozenset(["builtins", "quark", "torch", "transformers"])
"""Packages whose code is told by their release: what decorates it there may change while a process runs."""
OWN = frozenset([*vars(nn.Module()), "generation_config"])
"""Attributes that every layer has; and how a model generates, which no job here asks for."""
HOOKS = ("_hf_", "_is_hf_", "_old_forward")
"""What loading with transformers and accelerate leaves on a layer."""
TOLD = frozenset(["architectures", "transformers_version"])
"""What a ``config.json`` says of itself."""


def identity_of(
    checkpoint: Checkpoint, described: Mapping[str, Any], device: str, samples: Iterable[Any] | None
) -> dict[str, str]:
    """All inputs of a job on files by name: weights, other files, configuration, samples, device, releases.

    Args:
        checkpoint: every file of its folder that is read or copied counts by its content.
        described: the configuration, as it is written into ``config.json``.
        device: where tensors are quantized.
        samples: as they will be used; ``None``: there are none.
    """
    beside = [path for path in checkpoint.folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    grids = [path for path in [checkpoint.folder / GRIDS] if path.is_file()]
    weights = [path for path in beside if path.name in checkpoint.files]
    found = {f"weights of {name}": digest for name, digest in digests_of(sorted(weights)).items()}
    found |= digests_of(sorted(path for path in beside if path not in weights and path.stat().st_size <= COPIED))
    found |= {"grids": ", ".join(digests_of(grids).values())} if grids else {}
    found |= {
        f"configuration: {key}": json.dumps(value, sort_keys=True, default=str) for key, value in described.items()
    }
    found["samples"] = "none" if samples is None else digest_of_samples(list(samples))
    return {**found, "device": device, **{f"release of {name}": release(name) for name in RELEASES}}


def release(package: str) -> str:
    """Of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def identity_of_model(model: nn.Module) -> dict[str, str]:
    """All of a network that its outputs depend on, by name: tensors, configuration, layers, device, releases.

    ``config.json`` is what the model has of it in memory, so that an edited file is named with its field. Layers
    count by their names, classes and code, and by every attribute that is no other layer: sizes, epsilons, activation
    functions, tensors that no checkpoint holds. Whether the model trains or hooks are set does not count; nor does
    what the code of a layer calls, where that is neither in the layer nor in a release that is named.
    """
    config = getattr(model, "config", None)
    found = {"config.json": _words(_settings(config))} if hasattr(config, "to_dict") else {}
    devices = sorted({str(value.device) for value in (*model.parameters(), *model.buffers())})
    found |= {"layers": _digest_of_layers(model), "model": digest_of_model(model), "device": ", ".join(devices)}
    return {**found, **{f"release of {name}": release(name) for name in RELEASES}}


def digest_of_model(model: nn.Module) -> str:
    """Of all parameters and buffers."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in model.state_dict().items():
        digest.update(f"{name} ".encode())
        _add(digest, value)
    return digest.hexdigest()


def _digest_of_layers(model: nn.Module) -> str:
    """Of everything in a model but what ``digest_of_model`` has and its configuration."""
    codes: dict[type, Any] = {}
    configs: dict[int, str] = {}
    digest = hashlib.blake2b(digest_size=16)

    def known(value: Any) -> Any:
        if isinstance(value, nn.Module):  # in a list, or the parent
            return f"layer {type(value).__qualname__}"
        if isinstance(value, torch.Tensor):
            return f"tensor {digest_of_samples([value])}"
        if hasattr(value, "to_dict"):
            if id(value) not in configs:
                configs[id(value)] = _words(_settings(value))
            return configs[id(value)]
        if isinstance(value, (*DATA, Enum, partial, type)) or is_dataclass(value) or hasattr(value, "__code__"):
            return None
        public = {key: item for key, item in getattr(value, "__dict__", {}).items() if not key.startswith("_")}
        return [briefly(value), plain(public, briefly)] if hasattr(value, "__dict__") else None

    for name, layer in model.named_modules():
        kind = type(layer)
        if kind not in codes:
            codes[kind] = _code_of(kind)
        state = {key: value for key, value in vars(layer).items() if key not in OWN and not key.startswith(HOOKS)}
        buffers = {key: value for key, value in layer._buffers.items() if key in layer._non_persistent_buffers_set}
        digest.update(_words([name, codes[kind], plain([state, buffers], known)]).encode())
    return digest.hexdigest()


def _code_of(kind: type) -> list[Any]:
    """The functions and values that a class of layers has and inherits; of a release that is named, its name alone."""
    found: list[Any] = [f"{one.__module__}.{one.__qualname__}" for one in kind.__mro__]
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] in RELEASED:
            continue
        values = {key: value for key, value in vars(one).items() if isinstance(value, (bool, int, float, str, tuple))}
        codes = {key: code_of(getattr(value, "fget", value)) for key, value in vars(one).items()}
        found.append(sorted((key, plain(value)) for key, value in values.items() if not key.startswith("__")))
        found.append(sorted((key, code) for key, code in codes.items() if code))
    return found


def _settings(config: Any) -> dict[str, Any]:
    """What a configuration of transformers says, but where it was read, and by what."""
    return {key: value for key, value in config.to_dict().items() if not key.startswith("_") and key not in TOLD}


def _words(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def digest_of_samples(samples: Sequence[Any]) -> str:
    """Of all tensors and numbers in the samples."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        _add(digest, sample)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray):
        _add(digest, torch.from_numpy(np.ascontiguousarray(value)))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(str(key).encode())
            _add(digest, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(digest, item)
    else:
        digest.update(repr(value).encode())
