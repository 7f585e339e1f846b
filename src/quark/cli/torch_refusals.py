"""What a command of ``quark torch`` refuses by names alone, before torch is loaded, which takes seconds.

What is let pass is checked again by those who know more.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quark.algorithms.names import ROWS, TORCH
from quark.algorithms.own import OWN
from quark.config.file_formats import check_caches, check_formats, chosen_format
from quark.errors import ConfigError, DataError, ModelError, unknown
from quark.files.folder import UNFINISHED, check_detour, check_target
from quark.torch.config.algorithms import AlgoConfig
from quark.torch.config.model import QLayerConfig
from quark.torch.config.schemes import cache_scheme
from quark.torch.config.schemes import scheme as named
from quark.torch.files.headers import FolderUse, check_headers, check_layers, words_of
from quark.torch.token_files import check_rows

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
        named(name)
    if kv_cache is not None:
        cache_scheme(kv_cache)


def typed_schemes(scheme: str | None, layers: Sequence[str]) -> list[str]:
    """The schemes of a command: of all layers, where a file does not say it, and of single ones."""
    return [*([] if scheme is None else [scheme]), *split_layers(layers).values()]


def check_algorithms(names: Sequence[str]) -> None:
    """Refuse unknown algorithms.

    Raises:
        ConfigError: the nearest name is shown.
    """
    known = [*dict.fromkeys((*ALGORITHMS, *AlgoConfig.registry))]
    for name in names:
        if name not in known:
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


def check_model(
    model: Path,
    how: FolderUse,
    values: Mapping[str, Any] | None = None,
    data: Sequence[Path | None] = (),
    format: str = "quark",
    program: str | None = None,
) -> None:
    """Refuse a folder that the command cannot read, or whose layers do not fit what is wanted of them; and samples that
    cannot be read, or hold words that the model lacks.

    Args:
        model: the folder.
        how: it is read.
        values: keys and values of a configuration file.
        data: files of samples; None: none.
        format, program: as ``check_layers``.

    Raises:
        ModelError, ConfigError: as ``quark.torch.files.headers`` says.
        DataError: as ``quark.torch.token_files.check_rows``.
    """
    checkpoint = check_headers(model, how)
    if checkpoint is not None and values is not None:
        check_layers(checkpoint, values, format, program)
    for path in data:
        if path is not None:
            check_rows(path, None if checkpoint is None else words_of(checkpoint))


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
    if scheme is not None and not layers and is_static(named(scheme), "input_tensors"):
        raise DataError(
            f"the scheme {scheme!r} has static activations, which need samples: {way}, or use a dynamic or "
            f"weight-only scheme (`quark torch schemes` lists them)"
        )
    if kv_cache is not None and any(is_static(one, "output_tensors") for one in cache_scheme(kv_cache)):
        raise DataError(f"the KV cache scheme {kv_cache!r} has static ranges, which need samples: {way}")
    for name in algorithms:
        if TORCH.get(name, name) in (*SAMPLED, *OWN):
            raise DataError(f"the algorithm {name!r} needs samples: {way}")


def is_static(layer: QLayerConfig, slot: str) -> bool:
    """Whether a tensor of a layer has a range that is found on samples."""
    return any(stage.calibrated for stage in layer.stages(slot))


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
