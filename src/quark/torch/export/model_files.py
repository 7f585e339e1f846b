"""The files beside the tensors: ``config.json``, generation settings, and what lies beside the source model.

``config.json`` is the model's own configuration with a ``quantization_config``. A model whose output layer no longer
shares the weight of its embedding, because either is quantized, says so (``tie_word_embeddings: false``).
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from quark.errors import ModelError
from quark.reading import read_json
from quark.torch.export.stored import StoredTensor
from quark.torch.quantized_layer import QuantLayer

BESIDE = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py")
NOT_BESIDE = ("config.json", "generation_config.json", "*.index.json", "quantization_config.json", "README*")
DIFFUSERS_STEM = "diffusion_pytorch_model"


def is_transformers(model: nn.Module) -> bool:
    """Whether ``model`` is a ``PreTrainedModel``."""
    return has_base(model, "transformers.modeling_utils", "PreTrainedModel")


def is_diffusers(model: nn.Module) -> bool:
    """Whether ``model`` is a ``ModelMixin``."""
    return has_base(model, "diffusers.models.modeling_utils", "ModelMixin")


def has_base(model: nn.Module, module: str, name: str) -> bool:
    """Whether a class, named so that its library need not be imported, is a base of the model's."""
    return any((cls.__module__, cls.__name__) == (module, name) for cls in type(model).__mro__)


def stem_of(model: nn.Module) -> str:
    """How the files with tensors are called."""
    return DIFFUSERS_STEM if is_diffusers(model) else "model"


def write_config(model: nn.Module, folder: Path, quantization_config: Mapping[str, Any]) -> None:
    """``config.json`` with ``quantization_config``, and the generation settings; the model keeps its own."""
    config = config_of(model)
    config["quantization_config"] = dict(quantization_config)
    text = json.dumps(config, indent=2, sort_keys=True, default=str) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    generation = getattr(model, "generation_config", None)
    if is_transformers(model) and generation is not None:
        (folder / "generation_config.json").write_text(generation.to_json_string(), encoding="utf-8")


def config_of(model: nn.Module) -> dict[str, Any]:
    """The configuration of a model as a dictionary."""
    if is_diffusers(model):
        library: Any = model
        return json.loads(library.to_json_string())
    if not is_transformers(model):
        return {"architectures": [type(model).__name__]}
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(float_dtype(model)).removeprefix("torch.")
    if is_untied(model):
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return json.loads(config.to_json_string(use_diff=True))


def float_dtype(model: nn.Module) -> Any:
    """The type that the model computes in."""
    values = [module.dtype for module in model.modules() if isinstance(module, StoredTensor)]
    floats = [p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1]
    return (values or floats)[0]


def is_untied(model: nn.Module) -> bool:
    """Whether a quantized input or output embedding ends the sharing of their weight."""
    library: Any = model
    try:
        pair = (library.get_input_embeddings(), library.get_output_embeddings())
    except NotImplementedError:  # a model without words has no embedding of them
        return False
    return any(isinstance(module, QuantLayer) and module.weight_quantizer is not None for module in pair)


def copy_beside(model: nn.Module, folder: Path) -> None:
    """Tokenizer, processor and code files of the folder that the model came from: a local one, or one of the cache."""
    source = source_of(model)
    if source is None:
        return
    for path in sorted(path for pattern in BESIDE for path in source.glob(pattern)):
        skipped = any(path.match(pattern) for pattern in NOT_BESIDE)
        if path.is_file() and not skipped and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def source_of(model: nn.Module) -> Path | None:
    """The folder that a model of transformers came from, if it is here; nothing is downloaded."""
    config: Any = getattr(model, "config", None)
    name = str(getattr(config, "_name_or_path", "") or "") if is_transformers(model) else ""
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None))
    except HFValidationError:  # a folder that is gone
        return None
    return Path(found).parent if isinstance(found, str) else None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file with an object in it.

    Raises:
        ModelError: not there, not JSON, or not an object.
    """
    data = read_json(path, ModelError)
    if not isinstance(data, dict):
        raise ModelError(f"{str(path)!r} must hold an object, and holds a {type(data).__name__}")
    return data
