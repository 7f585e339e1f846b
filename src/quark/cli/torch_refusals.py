"""What a command of ``quark torch`` refuses by names alone, before torch is loaded, which takes seconds.

The tables repeat what ``quark.torch`` says of its schemes and algorithms; a test holds them to it. What they let pass
is checked again by those who know more.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from quark.algorithms.names import ROWS, TORCH
from quark.algorithms.own import OWN
from quark.config.file_formats import check_caches, check_formats, chosen_format
from quark.errors import ConfigError, DataError, ModelError, check_name, unknown
from quark.files.folder import UNFINISHED, check_detour, check_target

GROUPS = ("32", "64", "128", "per_channel")
WEIGHT_ONLY = (*(f"{kind}_wo_{size}" for kind in ("int4", "uint4") for size in GROUPS), "int8_wo_per_channel")
DYNAMIC = (
    *("mxfp4_weight_only", "int4_wa_64", "ptpc_int8", "ptpc_fp8", "fp8_block", "int4_fp8", "int4_fp8_128"),
    *("int4_int8_128", "mxfp8", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxfp4_mxfp6_e2m3", "amdfp4", "amdfp4_g32"),
    *("mx6", "mx9", "bfp16"),
)
STATIC = ("int8", "fp8", "mxfp4_fp8", "amdfp4_global16", "amdfp4_global32", "nvfp4", "fp4_block16_scale_e4m3")
GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
SCHEMES = (*WEIGHT_ONLY, *DYNAMIC, *STATIC, *GGUF)
CACHES = {
    "fp8": True,
    "fp8_per_head": True,
    "int8": True,
    "int8_per_token": False,
    "int4_per_token": False,
    "int4_per_channel": True,
}
SAMPLED = tuple(row.torch for row in ROWS if row.torch and row.samples)  # algorithms that need samples
TEXTS = (".txt", ".md")
#: Names of files that a tokenizer may lie in, of all its kinds.
TOKENIZER = re.compile(r"token|vocab|merges|spm|spiece|sentencepiece|bpe|byte_maps|\.model$", re.IGNORECASE)
ALGORITHMS = tuple(name for row in ROWS if row.torch for name in (row.torch, row.onnx, *row.also) if name)
#: Kinds of devices -> names in ``torch.version`` of libraries; torch must have been built with one of them.
DEVICES: dict[str, tuple[str, ...]] = {"cpu": (), "cuda": ("cuda", "hip"), "xpu": ("xpu",), "mps": ()}
NEEDS = "give a text with --data"
CONVERT_NEEDS = "use `quark torch quantize-files` with --data"  # `convert` reads none


def check_names(scheme: str | None, kv_cache: str | None, layers: Sequence[str]) -> None:
    """Refuse unknown names.

    Args:
        scheme: of all layers; None: a file says it.
        kv_cache: scheme of keys and values.
        layers: ``GLOB=SCHEME`` of single layers.

    Raises:
        ConfigError: an unknown scheme; the nearest name is shown.
    """
    for name in typed_schemes(scheme, layers):
        if name.partition(":")[0] not in SCHEMES and built_in_alone():  # a calibration method may stand behind
            raise ConfigError(unknown("quantization scheme", name, SCHEMES))
    if kv_cache is not None:
        check_name("KV cache scheme", kv_cache, CACHES)


def typed_schemes(scheme: str | None, layers: Sequence[str]) -> list[str]:
    """The schemes of a command: of all layers, where a file does not say it, and of single ones."""
    return [*([] if scheme is None else [scheme]), *split_layers(layers).values()]


def check_algorithms(names: Sequence[str]) -> None:
    """Refuse unknown algorithms.

    Raises:
        ConfigError: the nearest name is shown.
    """
    known = [*dict.fromkeys((*ALGORITHMS, *OWN))]
    for name in names:
        if name not in known and "quark.torch.config.algorithms" not in sys.modules:
            raise ConfigError(unknown("algorithm", name, known))


def check_reader(schemes: Iterable[str], kv_cache: str | None, format: str | None, program: str | None) -> str:
    """The format that is meant; refuse one that has not the schemes, or in which the program does not read them.

    Raises:
        ConfigError: that, or an unknown name; the nearest name is shown.
    """
    chosen = chosen_format(format, program)
    silent = "transformers" if chosen == "compressed-tensors" else None  # who says nothing may mean it
    check_formats(schemes, chosen, program or silent)
    check_caches(kv_cache, chosen, program)
    return chosen


def check_data(model: Path, *paths: Path | None) -> None:
    """Refuse samples that are not there, and text for a folder without a tokenizer; None: none are given.

    Raises:
        DataError: their path.
        ModelError: the folder of the model.
    """
    for path in paths:
        if path is not None and not path.exists():
            raise DataError(f"the data {str(path)!r} does not exist")
        if path is not None and path.suffix in TEXTS and not any(TOKENIZER.search(one.name) for one in model.iterdir()):
            raise ModelError(
                f"the folder {str(model)!r} holds no tokenizer, which the text {str(path)!r} needs: copy that of the "
                "original model, or give token ids (.npy, .npz); a model of pictures or sounds is quantized in Python"
            )


def check_folder(model: Path) -> None:
    """Refuse a model that is not a folder.

    Raises:
        ModelError: its path.
    """
    if not model.is_dir():
        raise ModelError(f"{str(model)!r} is not a folder; models are loaded from local folders")


def check_device(name: str) -> None:
    """Refuse a device that this torch has not, without loading it.

    Args:
        name: such as cpu, cuda or cuda:1.

    Raises:
        ConfigError: no name of a device or a torch that was built without it.
    """
    kind, colon, number = name.partition(":")
    if kind not in DEVICES or (colon and not number.isdigit()):
        raise ConfigError(unknown("--device", name, DEVICES))
    if kind == "mps" and sys.platform != "darwin":
        raise ConfigError(f"--device {name} is for macOS; leave --device out")
    built = torch_version()
    if DEVICES[kind] and built and not any(built.get(library) for library in DEVICES[kind]):
        raise ConfigError(
            f"--device {name}: the torch {built['__version__']} that is installed was built without it; leave --device "
            f"out, or install a torch for this device"
        )


def torch_version() -> dict[str, object]:
    """What ``torch/version.py`` says: ``__version__``, and the libraries it was built with; empty without the file."""
    found = find_spec("torch")
    files = [Path(folder) / "version.py" for folder in (found and found.submodule_search_locations) or ()]
    return next((runpy.run_path(str(file)) for file in files if file.is_file()), {})


def check_samples(
    scheme: str | None, kv_cache: str | None, algorithms: Sequence[str], layers: Sequence[str], way: str = NEEDS
) -> None:
    """Refuse what needs samples, where there are none.

    Args:
        scheme, kv_cache, layers: as ``check_names``.
        algorithms: names.
        way: how samples are given.

    Raises:
        DataError: static activations or an algorithm.
    """
    if scheme in STATIC and not layers:
        raise DataError(
            f"the scheme {scheme!r} has static activations, which need samples: {way}, or use a dynamic or "
            f"weight-only scheme (`quark torch schemes` lists them)"
        )
    if kv_cache is not None and CACHES[kv_cache]:
        raise DataError(f"the KV cache scheme {kv_cache!r} has static ranges, which need samples: {way}")
    for name in algorithms:
        if TORCH.get(name, name) in (*SAMPLED, *OWN):
            raise DataError(f"the algorithm {name!r} needs samples: {way}")


def built_in_alone() -> bool:
    """Whether nobody in this process can have registered schemes, or formats, which have schemes of their own."""
    from quark.numerics.formats import BUILT_IN, FORMATS

    return "quark.torch.config.schemes" not in sys.modules and set(FORMATS) <= set(BUILT_IN)


def split_layers(texts: Sequence[str]) -> dict[str, str]:
    """The schemes of single layers, by glob.

    Raises:
        ConfigError: not GLOB=SCHEME.
    """
    found = {}
    for text in texts:
        glob, sign, name = text.partition("=")
        if not (glob and sign and name):
            raise ConfigError(f"--layer {text!r}: give a glob and a scheme, as in '*down_proj=int8_wo_per_channel'")
        found[glob] = name
    return found


def check_output(output: Path, resumed: bool = False) -> Path:
    """The folder of the result.

    Args:
        output: as it was typed.
        resumed: a job that was interrupted there goes on.

    Raises:
        ConfigError: it holds a model already, or what an interrupted job left.
    """
    goal = output.expanduser().resolve()
    if not (resumed and (goal / UNFINISHED).is_file()):
        check_target(goal)
    if not resumed:
        check_detour(goal)
    return goal
