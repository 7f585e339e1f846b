"""Wrong values in what configures: quantization_config of a checkpoint, recipes in YAML, external data of a model."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import yaml
from onnx import external_data_helper
from tests.fuzz.causes import Cause, Finding
from tests.fuzz.torch_causes import CONFIG, DEEP, DIGITS, FILE, LONG, TEXTS, tensors
from tests.onnx_flow import models

from quark.onnx.graph.model import load
from quark.onnx.shapeshifter import read as read_recipe

with contextlib.suppress(ImportError):  # before a process is forked for every cause
    import quark.torch.export.reload  # noqa: F401
CONFIGS: list[Cause] = []
RECIPES: list[Cause] = []
EXTERNAL: list[Cause] = []
VALUES: tuple[Any, ...] = (None, -1, 0, 10**30, 1.5, True, "nonsense", "", [], {}, [None], {"a": 1}, LONG)


def read(folder: Path) -> None:
    """Read what a cause has written.

    Raises:
        Finding: external data that are not those that were written.
    """
    if (folder / "recipe.yaml").exists():
        read_recipe(folder / "recipe.yaml")
    elif (folder / "model.onnx").exists():
        model = load(folder / "model.onnx")
        value = model.graph.initializers["w"].const_value
        if value is None or value.numpy().shape != (8, 8):
            raise Finding("w has another shape")
    else:
        from quark.torch.export.checkpoint import read_checkpoint
        from quark.torch.export.reload import scheme_of

        scheme_of(read_checkpoint(folder))


# ---- quantization_config ---------------------------------------------------------------------------------------------

SPEC = {
    "dtype": "int4",
    "is_dynamic": False,
    "qscheme": "per_group",
    "ch_axis": -1,
    "group_size": 32,
    "symmetric": True,
    "round_method": "half_even",
    "scale_type": "float",
    "observer_cls": "PerGroupMinMaxObserver",
}
QUANTIZATION: dict[str, Any] = {
    "quant_method": "quark",
    "global_quant_config": {"weight": SPEC, "input_tensors": None, "output_tensors": None, "bias": None},
    "layer_quant_config": {"*q_proj": {"weight": {**SPEC, "dtype": "int8"}}},
    "layer_type_quant_config": {},
    "exclude": ["lm_head"],
    "algo_config": [],
    "kv_cache_quant_config": {},
    "export": {"weight_format": "real_quantized", "pack_method": "reorder", "kv_cache_group": [], "min_kv_scale": 0.0},
}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values, outer ones too."""
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from leaves(inner, (*path, key))


def with_value(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(QUANTIZATION)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made


def checkpoint(config: Any, folder: Path) -> None:
    (folder / CONFIG).write_text(json.dumps({"architectures": ["X"], "quantization_config": config}), encoding="utf-8")
    (folder / FILE).write_bytes(tensors())


CONFIGS.append(Cause("config", "quantization_config", "as it should be", partial(checkpoint, QUANTIZATION)))
for path in leaves(QUANTIZATION):
    for value in VALUES:
        name = ".".join(map(str, path))
        CONFIGS.append(Cause("config", name, f"{value!r:.20}", partial(checkpoint, with_value(path, value))))
for value in VALUES:
    CONFIGS.append(Cause("config", "quantization_config", f"{value!r:.20}", partial(checkpoint, value)))
    CONFIGS.append(
        Cause("config", "a key too much", f"{value!r:.20}", partial(checkpoint, {**QUANTIZATION, "z": value}))
    )

# ---- recipes ---------------------------------------------------------------------------------------------------------

RECIPE: dict[str, Any] = {
    "input_model_path": "m.onnx",
    "output_model_path": "q.onnx",
    "preprocess_passes": {"fold_batch_norm": {}},
    "passes": [{"remove_input_init": {}}],
}
BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + k)}: &{chr(98 + k)} [*{chr(97 + k)}, *{chr(97 + k)}]\n" for k in range(20)
)
YAMLS = {
    **TEXTS,
    "tabs": b"passes:\n\t- x",
    "a tag that makes objects": b"passes: !!python/object/apply:os.system ['true']",
    "an alias of nothing": b"passes: *x",
    "aliases of aliases": BOMB.encode(),
    "an alias of itself": b"passes: &a [*a]",
    "two documents": b"passes: []\n---\npasses: []\n",
    "a date": b"passes: 2024-99-99",
    "digits as YAML": f"passes: {DIGITS}".encode(),
    "deep flow": f"passes: {DEEP}".encode(),
    "deep blocks": "\n".join(" " * k + "a:" for k in range(2000)).encode(),
    "a key that is a list": b"? [a]\n: b",
    "merge keys": b"<<: 1\npasses: []",
    "a bell": b"passes: \x07",
}


def recipe(content: bytes | dict[str, Any], folder: Path) -> None:
    made = content if isinstance(content, bytes) else yaml.safe_dump(content).encode()
    (folder / "recipe.yaml").write_bytes(made)


for damage, content in YAMLS.items():
    RECIPES.append(Cause("recipe", "file", damage, partial(recipe, content)))
for key in (*RECIPE, "nonsense"):
    for value in VALUES:
        RECIPES.append(Cause("recipe", key, f"{value!r:.20}", partial(recipe, {**RECIPE, key: value})))

# ---- external data ---------------------------------------------------------------------------------------------------


def external(key: str, value: str | None, size: int, folder: Path) -> None:
    proto = models.model("g (float[2, 8] x) => (float[2, 8] y) { y = MatMul (x, w) }", {"w": models.normal(8, 8)}, 17)
    external_data_helper.convert_model_to_external_data(proto, location="w.data", size_threshold=0)
    onnx.save(proto, folder / "model.onnx")
    saved = onnx.load(folder / "model.onnx", load_external_data=False)
    entries = {entry.key: entry.value for entry in saved.graph.initializer[0].external_data}
    entries.pop(key, None)
    if value is not None:
        entries[key] = value
    del saved.graph.initializer[0].external_data[:]
    for name, text in entries.items():
        saved.graph.initializer[0].external_data.add(key=name, value=text)
    onnx.save(saved, folder / "model.onnx")
    content = (folder / "w.data").read_bytes()
    (folder / "w.data").write_bytes((content + bytes(4096))[:size])


NUMBERS = (
    None,
    "",
    "0",
    "1",
    "-1",
    "255",
    "256",
    "257",
    "4096",
    str(2**31),
    str(2**62),
    str(2**63),
    str(2**64),
    "1e3",
    "0x10",
    "x",
    " 0",
    DIGITS,
    "٣",
)
PLACES = (
    *(
        None,
        "",
        ".",
        "..",
        "w.data/",
        "./w.data",
        "../w.data",
        "/etc/passwd",
        "/dev/zero",
        "a\0b",
        LONG,
        "nowhere",
        "W.DATA",
    ),
    *("sub/../w.data", "C:\\w.data", "model.onnx", "file:///etc/passwd", "w.data\n", "~/w.data", "🦆"),
)
for number in NUMBERS:
    for key in ("offset", "length"):
        EXTERNAL.append(Cause("external", key, f"{number!r:.20}", partial(external, key, number, 256)))
for location in PLACES:
    EXTERNAL.append(Cause("external", "location", f"{location!a:.30}", partial(external, "location", location, 256)))
for size in (0, 1, 252, 255, 256, 257, 4096):
    EXTERNAL.append(Cause("external", "size of the file", str(size), partial(external, "checksum", None, size)))
for text in ("", "x", "0" * 40, LONG):
    EXTERNAL.append(Cause("external", "checksum", f"{text!r:.20}", partial(external, "checksum", text, 256)))
for key in ("nonsense", "basepath", ""):
    EXTERNAL.append(Cause("external", f"key {key!r}", "present", partial(external, key, "1", 256)))
