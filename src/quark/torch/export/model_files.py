"""The files beside the tensors: ``config.json``, generation settings, and what lies beside the source model.

Beside it lies everything but tensors: tokenizer, processor, code, chat templates, licence, and the folders that one of
these needs. What tells how the source was quantized stays there, since it is not so any more.

``config.json`` is the model's own configuration with a ``quantization_config``. A model whose output layer no longer
shares the weight of its embedding, because either is quantized, says so (``tie_word_embeddings: false``).
"""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import ModelError
from quark.reading import read_json, read_object, reason_of
from quark.torch.export.stored import StoredTensor
from quark.torch.quantized_layer import QuantLayer, has_base, is_diffusers
from quark.torch.template_reading import word_embeddings

log = logging.getLogger(__name__)

HALVES = (torch.float16, torch.bfloat16)
WRITTEN = ("config.json", "README*")
OUTDATED = (  # how AutoGPTQ, AutoAWQ, ModelOpt, llm-compressor and others quantized the source
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantization_config.json"),
    *("recipe.yaml", "quant_log.csv"),
)
WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.npz", "*.tflite"),
    *("*.gguf", "*.onnx", "*.onnx.data", "*.onnx_data", "*.index.json"),
)
GENERATION = "generation_config.json"
TEMPLATES = "additional_chat_templates"
STAGES = "modules.json"  # of sentence-transformers: folders with pooling and the like, which have tensors of their own
COPIED = 2**30  # bytes of a file that is copied along: a sparse one of a terabyte would fill the disk
DIFFUSERS_STEM = "diffusion_pytorch_model"
#: What the hub and vLLM call classes of transformers, for models whose own ``config.json`` does not tell (one that
#: transformers saved): no registry of transformers has these names, since its mappings go from model types to classes.
HUB_NAMES = {
    "PhimoeForCausalLM": "PhiMoEForCausalLM",
    "LightOnOcrForConditionalGeneration": "LightOnOCRForConditionalGeneration",
}


def name_inside(name: str) -> str:
    """The name in transformers of an entry of ``architectures``, which may have other capitals."""
    try:
        import transformers
    except ImportError:
        return name
    if hasattr(transformers, name):
        return name
    return next((known for known in dir(transformers) if known.lower() == name.lower()), name)


def name_outside(own: str, given: Any) -> str:
    """The entry of ``architectures`` for a class: as the source spells it, where that differs in capitals alone."""
    listed = [name for name in given or () if isinstance(name, str) and name.lower() == own.lower()]
    return next((name for name in listed if name != own), HUB_NAMES.get(own, own))


def class_named(name: str) -> Any:
    """The class of transformers for an entry of ``architectures``; None where it has none."""
    import transformers

    return getattr(transformers, name_inside(name), None)


def is_transformers(model: nn.Module) -> bool:
    """Whether ``model`` is a ``PreTrainedModel``."""
    return has_base(model, "transformers.modeling_utils", "PreTrainedModel")


def stem_of(model: nn.Module) -> str:
    """How the files with tensors are called."""
    return DIFFUSERS_STEM if is_diffusers(model) else "model"


def check_merged(model: nn.Module) -> None:
    """Adapters of peft are merged: files beside quantized weights have no place for layers that lie around others.

    Raises:
        ModelError: the first module that still holds one.
    """
    for name, module in model.named_modules():
        if isinstance(getattr(module, "base_layer", None), nn.Module) and hasattr(module, "merge"):
            raise ModelError(
                f"{name!r} ({type(module).__name__}) is an adapter around a layer, which no file of quantized weights "
                f"holds; merge it with peft (merge_and_unload), and quantize the model that it returns"
            )


def write_config(model: nn.Module, folder: Path, quantization_config: Mapping[str, Any]) -> None:
    """``config.json`` with ``quantization_config``, and the generation settings; the model keeps its own."""
    config = config_of(model)
    config["quantization_config"] = dict(quantization_config)
    text = json.dumps(config, indent=2, sort_keys=True, default=str) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    generation = getattr(model, "generation_config", None)
    if is_transformers(model) and generation is not None:
        (folder / GENERATION).write_text(generation.to_json_string(), encoding="utf-8")


def take_settings(model: nn.Module, folder: Path) -> None:
    """Give a model that was made from ``config.json`` alone the generation settings of its folder.

    Raises:
        ModelError: they cannot be read.
    """
    if not (is_transformers(model) and (folder / GENERATION).is_file()):
        return
    from transformers import GenerationConfig

    library: Any = model
    try:
        library.generation_config = GenerationConfig.from_dict(read_object(folder / GENERATION))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{str(folder / GENERATION)!r} cannot be read: {reason_of(error)}") from error


def config_of(model: nn.Module) -> dict[str, Any]:
    """The configuration of a model as a dictionary."""
    if is_diffusers(model):
        library: Any = model
        return json.loads(library.to_json_string())
    if not is_transformers(model):
        return {"architectures": [type(model).__name__]}
    config: Any = copy.deepcopy(model.config)
    config.architectures = [name_outside(type(model).__name__, config.architectures)]
    config.dtype = str(float_dtype(model)).removeprefix("torch.")
    if is_untied(model):
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False
    for part in (config, config.get_text_config()):
        for entry in ("quantization_config", "compression_config"):
            part.__dict__.pop(entry, None)
    return json.loads(config.to_json_string(use_diff=True))


def float_dtype(model: nn.Module) -> Any:
    """The type that the model computes in."""
    values = [module.dtype for module in model.modules() if isinstance(module, StoredTensor)]
    floats = [p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1]
    return (values or floats)[0]


def kept_wide(model: nn.Module, dtype: torch.dtype | None) -> Callable[[str], object]:
    """Whether transformers holds a tensor of a model of a half type in float32: router biases, for one."""
    fields = {
        torch.bfloat16: ("_keep_in_fp32_modules_strict",),
        torch.float16: ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"),
    }.get(dtype or torch.float32, ())
    patterns = {one for field in fields for one in getattr(model, field, None) or ()}
    return re.compile("|".join(sorted(one.replace("*", ".*") for one in patterns)) or "(?!)").search


def is_untied(model: nn.Module) -> bool:
    """Whether a quantized input or output embedding ends the sharing of their weight."""
    library: Any = model
    pair = (word_embeddings(model), getattr(library, "get_output_embeddings", lambda: None)())
    return any(isinstance(module, QuantLayer) and module.weight_quantizer is not None for module in pair)


def copy_beside(model: nn.Module, folder: Path) -> None:
    """What lies beside the tensors that the model came from: in a local folder, or in one of the cache."""
    source = source_of(model)
    if source is not None:
        copy_files(source, folder)


def copy_files(source: Path, folder: Path) -> None:
    """What lies beside the tensors in ``source``, to ``folder``; what is there stays.

    Raises:
        ModelError: a list of folders that cannot be read.
    """
    for path in beside(source):
        goal = folder / path.relative_to(source)
        if not goal.exists() and is_copied(path):
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, goal)


def is_copied(path: Path) -> bool:
    """Whether a file goes along; one that is too large stays where it is, and that is said."""
    size = path.stat().st_size
    if size > COPIED:
        log.warning("%s has %d bytes and is not copied: files beside the tensors are up to %d", path, size, COPIED)
    return size <= COPIED


def beside(source: Path) -> Iterator[Path]:
    """The files beside the tensors in ``source``, and those of folders with templates, code, or further stages."""
    stages = stages_of(source)
    for path in sorted(source.iterdir()):
        if path.name.startswith((".", "__pycache__")):
            continue
        if path.is_file():
            yield from () if any(map(path.match, WRITTEN)) else without_weights([path])
        elif path.name in stages:
            yield from files_of(path)
        elif path.is_dir() and (path.name == TEMPLATES or any(path.glob("*.py"))):
            yield from without_weights(files_of(path))


def without_weights(paths: list[Path]) -> list[Path]:
    """Files that hold no tensors, and do not say how the source was quantized."""
    return [path for path in paths if path.name not in OUTDATED and not any(map(path.match, WEIGHTS))]


def files_of(folder: Path) -> list[Path]:
    """The files of a folder, but for those of folders in it."""
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def stages_of(source: Path) -> set[str]:
    """Names of the folders that ``modules.json`` lists."""
    found = read_json(source / STAGES, ModelError) if (source / STAGES).is_file() else []
    rows = found if isinstance(found, list) else []
    return {str(row.get("path")) for row in rows if isinstance(row, dict)}


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
