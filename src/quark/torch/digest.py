"""Digests of what a job of the torch flow begins with: a model, samples, the folder of a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.files.identity import digests_of
from quark.torch.export.checkpoint import Checkpoint

GRIDS = ".quark_grids"  # of a checkpoint that was decoded (``files.carried``)
RELEASES = ("openquark", "torch", "transformers", "safetensors")


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
    found |= digests_of(sorted(path for path in beside if path not in weights))
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


def digest_of_model(model: nn.Module) -> str:
    """Of all parameters and buffers."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
