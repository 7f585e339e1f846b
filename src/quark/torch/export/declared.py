"""How a folder says that its model is quantized: in ``config.json``, or, of older programs, in a file beside it.

    config.json: quantization_config, or compression_config; of the model, or of a part of it (text_config)
    hf_quant_config.json     ModelOpt
    quantize_config.json     AutoGPTQ
    quant_config.json        AutoAWQ

Tensors that are codes, in a folder that does not say how, are refused: as floats they would be other numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from quark.errors import ConfigError, ModelError, unknown
from quark.reading import read_object
from quark.torch.transformers_names import quantization_methods

ENTRIES = ("quantization_config", "compression_config")
SIGNS = {
    "quant_algo": "modelopt",
    "config_groups": "compressed-tensors",
}  # of older descriptions without a quant_method
RESULTS = ("*.gguf", "*.onnx")
#: Methods whose codes are read; ``quark.torch.files.methods`` has a row for each of the others.
METHODS = (
    *("quark", "fp8", "mxfp8", "fbgemm_fp8", "awq", "gptq", "mxfp4", "compressed-tensors", "modelopt", "bitsandbytes"),
)
CODES = re.compile(r"\.(qweight|weight_packed|weight_scale|weight_scale_inv|weight_scale_2|SCB|weight\.absmax)$")


def said_in(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What ``config.json`` says about quantization; None: nothing.

    Raises:
        ConfigError: it says something that is no description.
    """
    parts = (config, *(part for part in config.values() if isinstance(part, dict)))
    for key, said in ((key, part[key]) for part in parts for key in ENTRIES if part.get(key) is not None):
        if not isinstance(said, dict):
            raise ConfigError(f"{key} of config.json is {said!r:.60}, and must be an object that names a quant_method")
        return said
    return None


def silent(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without what it says about quantization."""
    plain = {key: value for key, value in config.items() if key not in ENTRIES}
    return {
        key: silent(value) if isinstance(value, dict) and ENTRIES[0] in value else value for key, value in plain.items()
    }


def declared(folder: Path, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any] | None:
    """How the model in ``folder`` is quantized; None: it is float.

    Args:
        folder: where it is.
        config: its ``config.json``.
        names: of its tensors.

    Raises:
        ModelError: tensors are codes, and nothing says how.
    """
    said = said_in(config)
    if said is not None:
        unnamed = next((method for key, method in SIGNS.items() if key in said), None)
        return said if unnamed is None or "quant_method" in said else {**said, "quant_method": unnamed}
    code = next((name for name in names if CODES.search(name)), None)
    if code is None:
        return None
    for file, reading in BESIDE.items():
        if (folder / file).is_file():
            return reading(read_object(folder / file))
    raise ModelError(
        f"{str(folder)!r} holds the codes of a quantized model ({code!r}), and neither 'config.json' "
        f"(quantization_config) nor {', '.join(BESIDE)} says how to read them; take the folder as it was published"
    )


def of_modelopt(found: Mapping[str, Any]) -> dict[str, Any]:
    """``hf_quant_config.json``."""
    inner: Any = found.get("quantization") or {}
    return {
        **inner,
        "quant_method": "modelopt",
        "ignore": inner.get("exclude_modules") or [],
        "kv_cache_scheme": inner.get("kv_cache_quant_algo"),
    }


def of_gptq(found: Mapping[str, Any]) -> dict[str, Any]:
    """``quantize_config.json``."""
    return {**found, "quant_method": "gptq"}


def of_awq(found: Mapping[str, Any]) -> dict[str, Any]:
    """``quant_config.json``."""
    version = str(found.get("version", "gemm")).lower()
    return {
        "quant_method": "awq",
        "bits": found.get("w_bit", found.get("bits")),
        "group_size": found.get("q_group_size", found.get("group_size")),
        "version": version,
    }


BESIDE = {"hf_quant_config.json": of_modelopt, "quantize_config.json": of_gptq, "quant_config.json": of_awq}


def quantized_already(folder: Path, method: Any) -> ConfigError:
    """What is said of a quantized folder where only a float one is read."""
    return ConfigError(
        f"{str(folder)!r} is quantized already ({method}), and this reads float checkpoints: give the model that it "
        f"was made of; `quark torch quantize-files` and `quark torch convert` take it as it is"
    )


def float_alone(folder: Path, method: Any) -> ModelError:
    """What is said of a folder that says it is quantized, and holds float tensors alone."""
    return ModelError(
        f"{str(folder / 'config.json')!r} says that the model is quantized (quant_method is {method!r}), and every "
        f"tensor beside it is float; remove quantization_config if the model is"
    )


def not_coded(folder: Path) -> str:
    """What is said of a float folder where codes are carried over."""
    return (
        f"{str(folder)!r} is float; codes are carried over from {', '.join(METHODS)}. `quark torch convert "
        f"--requantize SCHEME` decodes it and quantizes it again"
    )


def check_written(folder: Path) -> None:
    """Refuse a folder of a format that is written, and not read.

    Raises:
        ModelError: it holds a file of one.
    """
    if results := sorted(path.name for pattern in RESULTS for path in folder.glob(pattern)):
        raise ModelError(
            f"{str(folder)!r} holds {results[0]!r}, a format that is written and is not read; start from the folder "
            f"that it was made of"
        )


def refuse_method(file: Path, method: Any, known: Iterable[str]) -> NoReturn:
    """Raise what is said of a method that is not read.

    Raises:
        ConfigError: it is one of transformers, or a name that there is not.
    """
    readable = [*known]
    if str(method) not in quantization_methods():
        raise ConfigError(f"{str(file)!r}: {unknown('quant_method', method, readable)}")
    raise ConfigError(
        f"{str(file)!r}: a model quantized by {method} is not read here ({', '.join(readable)} are); start from the "
        f"float model, or let transformers decode it where it can: from_pretrained, dequantize(), save_pretrained"
    )
