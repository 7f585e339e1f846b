"""What a folder's ``config.json`` and the headers of its files alone show to be wrong, before torch is loaded.

What passes is looked at again with the model's modules (``skeleton.py``), which decide the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.numerics.granularity import Group
from quark.reading import read_object
from quark.search.values import FLOAT
from quark.torch.architectures import PLAIN, globs_of
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.config.schemes import scheme
from quark.torch.config_file import WHOLE, split
from quark.torch.export.checkpoint import SUFFIX, Checkpoint, check_no_adapter, check_pickled, opened, read_checkpoint
from quark.torch.export.declared import (
    CODES,
    METHODS,
    check_written,
    float_alone,
    not_coded,
    quantized_already,
    refuse_method,
)
from quark.torch.export.widths import check_for_vllm, check_widths
from quark.torch.files.config_fields import check_counts, type_named
from quark.torch.files.named import check_by_names, check_code
from quark.torch.files.plain import HEAD, WORDS, check_fields, check_shapes, has_head, lacks, placeless
from quark.torch.patterns import check_fit, check_group, check_pattern, hint, matches
from quark.torch.transformers_names import causal_class, classes, config_source

EMBEDDING = re.compile(r"embed|(^|\.)wte$|(^|\.)wpe$")
PLAINLY, FLOATS = (".weight", ".bias"), ("F16", "BF16", "F32", "F64")  # tensors that no method has for codes
PART = re.compile(r"model\.layers\.(\d+)\.(.+\.weight)")  # a parameter of a layer


@dataclass(frozen=True)
class FolderUse:
    """How a command reads a folder.

    Attributes:
        loaded: transformers loads the model.
        code: it may run the folder's own code.
        float: it has to be float.
    """

    loaded: bool = False
    code: bool = False
    float: bool = False


def check_headers(folder: Path, how: FolderUse) -> Checkpoint | None:
    """Refuse a folder that the command cannot read.

    Args:
        folder: of a model.
        how: it is read.

    Returns:
        The float checkpoint; None: it is quantized.

    Raises:
        ModelError: no configuration, files that are missing or broken, a type or a number that no model has.
        ConfigError: quantized in a way that is not read, or at all where only float models are.
    """
    check_no_adapter(folder)
    if how.loaded:
        check_pickled(folder)
        check_code(folder, read_object(folder / "config.json"), how.code)
    checkpoint = read_checkpoint(folder)
    said: Any = checkpoint.config.get("quantization_config")
    if said is not None:
        check_method(folder, said, checkpoint, how)
        return None
    config = checkpoint.config
    type_named(folder, config)
    check_by_names(folder, config, how.loaded)
    listed = config.get("architectures")
    if isinstance(listed, list) and listed and listed[0] in classes():
        check_counts(folder, config, checkpoint.names)
    check_tensors(checkpoint)
    return checkpoint


def check_coded(folder: Path) -> None:
    """Refuse a folder whose codes cannot be carried over.

    Raises:
        ModelError, ConfigError: as ``check_headers``; or it is float.
    """
    if not any(folder.glob(f"*{SUFFIX}")):
        check_written(folder)
    if check_headers(folder, FolderUse()) is not None:
        raise ConfigError(not_coded(folder))


def check_method(folder: Path, said: Mapping[str, Any], checkpoint: Checkpoint, how: FolderUse) -> None:
    """Refuse a quantized folder that cannot be read, is to be float, or is."""
    method = said.get("quant_method")
    if method not in METHODS:
        refuse_method(folder / "config.json", method, METHODS)
    if how.float and any(map(CODES.search, checkpoint.names)):
        raise quantized_already(folder, method)
    if method == "quark":
        try:
            QConfig.from_dict(said)
        except ConfigError as error:
            raise ConfigError(f"{str(folder / 'config.json')!r}: {error}") from error
    elif all(name.endswith(PLAINLY) and kind in FLOATS for name, (_, kind) in tensors_in(checkpoint).items()):
        raise float_alone(folder, method)  # no method has codes without scales beside them


def check_tensors(checkpoint: Checkpoint) -> None:
    """Refuse layers that lack a part, or are not as many as ``config.json`` says, and tensors of other shapes, where
    headers tell all layers.

    Raises:
        ModelError: a tensor that is missing, of another shape, or of a layer that the configuration does not have.
    """
    shapes, config, folder = plain_tensors(checkpoint), checkpoint.config, checkpoint.folder
    source = config_source(str(config.get("model_type"))) if shapes else None
    if source is None or source.others & config.keys():
        return
    check_fields(folder, config, source)
    check_shapes(folder, config, source, shapes)
    count = config.get("num_hidden_layers", source.fields.get("num_hidden_layers"))
    if type(count) is not int or count <= 0:
        return
    inside = {name: found for name in sorted(checkpoint.names) if (found := PART.fullmatch(name))}
    parts = sorted({one[2] for one in inside.values()})
    wanted = [f"{WORDS}.weight", *(f"model.layers.{number}.{part}" for number in range(count) for part in parts)]
    if has_head(config, source):
        wanted.append(f"{HEAD}.weight")
    if missing := [name for name in wanted if name not in checkpoint.names]:
        raise lacks(folder, missing[0])
    if more := sorted(set(inside) - set(wanted)):
        raise placeless(folder, more[0])


def check_layers(
    checkpoint: Checkpoint, values: Mapping[str, Any], format: str = "quark", program: str | None = None
) -> None:
    """Refuse names of layers that are not there, groups that do not divide a weight, and what a format cannot hold,
    where headers tell all layers.

    Args:
        checkpoint: a float one.
        values: keys and values of a configuration file, as ``quark.torch.from_values.config_of``.
        format: that is written.
        program: that will read it; None: not known.

    Raises:
        ConfigError: such a name, or a layer that does not fit what is wanted of it.
    """
    shapes = plain_shapes(checkpoint)
    if not shapes:
        return
    wanted = wanted_of(values, globs_of(str(checkpoint.config["model_type"])).exclude)
    if wanted is None:
        return
    everything = sorted({name[:end] for name in shapes for end in ends_of(name)})
    layers = [*shapes, *(name for name in wanted.usual if "*" not in name and name not in shapes)]
    for pattern in wanted.exclude:  # a module without tensors may be meant, unless a layer is near
        if hint(pattern, everything, layers):
            check_pattern("exclude", pattern, [*everything, *layers], everything, layers)
    for pattern in wanted.layers:
        check_pattern("layer_quant_config", pattern, layers, everything, layers)
    for name, shape in shapes.items():
        if not EMBEDDING.search(name) and not any(matches([name], one) for one in (*wanted.exclude, *wanted.usual)):
            config, source = wanted.choose(name)
            check_layer(name, shape, config, source)
            check_widths(name, config.stages("weight"), shape[0], shape[1], format)
            if program == "vllm":
                check_for_vllm(name, config.stages("weight"), shape[0], format)
    if format == "gguf":
        check_gguf(checkpoint, shapes[WORDS][0])


def check_gguf(checkpoint: Checkpoint, words: int) -> None:
    """Refuse a type and a tokenizer that llama.cpp does not have.

    Raises:
        ConfigError: the type.
        ModelError: the tokenizer.
    """
    from quark.torch.export.gguf_architectures import architecture_of
    from quark.torch.export.gguf_vocabulary import add_vocabulary

    kind = str(checkpoint.config["model_type"])
    row = architecture_of(kind)
    from gguf import GGUFWriter

    add_vocabulary(GGUFWriter(None, row.name), checkpoint.folder, words, kind)


@dataclass(frozen=True)
class WantedLayers:
    """What a configuration wants of layers.

    Attributes:
        everywhere: of all of them.
        layers: by name or glob.
        exclude: names and globs that stay float.
        usual: the same of the architecture, which need not match.
    """

    everywhere: QLayerConfig
    layers: Mapping[str, QLayerConfig]
    exclude: tuple[str, ...]
    usual: tuple[str, ...]

    def choose(self, name: str) -> tuple[QLayerConfig, str]:
        """What is wanted of a layer, and the field that says so; exact names go before globs."""
        found = name if name in self.layers else next((one for one in self.layers if matches([name], one)), None)
        if found is None:
            return self.everywhere, "global_quant_config"
        return self.layers[found], f"layer_quant_config[{found!r}]"


def wanted_of(values: Mapping[str, Any], usual: tuple[str, ...]) -> WantedLayers | None:
    """What keys and values want; None: types of layers decide, or caches, which modules tell."""
    if WHOLE in values:
        config = QConfig.from_dict(values)
        if config.layer_type_quant_config or config.kv_cache_quant_config:
            return None
        return WantedLayers(config.global_quant_config, config.layer_quant_config, tuple(config.exclude), ())
    layers = values.get("layers") or {}
    chosen = {name: scheme(split(value)[0]) for name, value in layers.items() if value != FLOAT}
    floats = [name for name, value in layers.items() if value == FLOAT]
    said = values.get("exclude")
    exclude = (*(said or ()), *(values.get("also_exclude") or ()), *floats)
    return WantedLayers(scheme(values["scheme"]), chosen, exclude, usual if said is None else ())


def words_of(checkpoint: Checkpoint) -> int | None:
    """How many words a model has; None: headers do not tell it."""
    shape = plain_shapes(checkpoint).get(WORDS)
    return None if shape is None else shape[0]


def plain_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The shapes of the matrices of layers by the layers' names, where files name them as the model does; else none."""
    found = plain_tensors(checkpoint).items()
    return {name: shape for name, shape in found if len(shape) == 2 and not name.endswith("norm")}


def plain_tensors(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The same of all weights, norms too."""
    kind = checkpoint.config.get("model_type")
    if kind not in PLAIN or checkpoint.config.get("architectures") != [causal_class(str(kind))]:
        return {}
    found = {name: shape for name, (shape, _) in tensors_in(checkpoint).items() if name.endswith(".weight")}
    shapes = {name.removesuffix(".weight"): shape for name, shape in found.items()}
    return shapes if any(name.startswith("model.layers.0.") for name in shapes) else {}


def tensors_in(checkpoint: Checkpoint) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type, as headers call it, of every tensor."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for file, names in checkpoint.files.items():
        with opened(checkpoint.folder / file, "numpy") as source:
            views = {name: source.get_slice(name) for name in names}
            found |= {name: (tuple(view.get_shape()), view.get_dtype()) for name, view in views.items()}
    return found


def ends_of(name: str) -> Iterator[int]:
    """Where the names of a layer, and of the modules that hold it, end."""
    yield from (one.start() for one in re.finditer(r"\.", name))
    yield len(name)


def check_layer(name: str, shape: tuple[int, ...], config: QLayerConfig, source: str) -> None:
    """A linear layer [out, in] fits what is wanted of it."""
    for stage in config.stages("weight"):
        check_fit(f"{source}: weight of {name!r}", shape, stage)
    for stage in config.stages("input_tensors"):
        granularity = stage.spec.granularity
        if isinstance(granularity, Group) and granularity.axis == -1:
            check_group(f"{source}: input of {name!r}", shape[1], granularity.size, stage.format)
