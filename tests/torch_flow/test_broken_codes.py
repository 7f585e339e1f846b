"""Folders that other programs have quantized, a tensor or a word damaged: one sentence, or values as they were.

Every kind of folder that can be decoded, every part of a coded weight, every damage of a table; nothing by name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.torch_flow.test_other_programs import FOLDERS, folder_of
from tests.torch_flow.test_prequantized import FORMATS, source
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from quark.cli import main
from quark.errors import QuarkError
from quark.torch import import_model_from_safetensors
from quark.torch.files.foreign import model_to_run
from quark.torch.files.prequantized import dequantize_checkpoint

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore")
WEIGHT = "model.layers.0.mlp.down_proj."
OURS = {f"{format} {schemes[0]}": (format, schemes[0]) for format, schemes in FORMATS.items()}
OURS |= {"gptq channels": ("gptq", "int8_wo_per_channel"), "fp8 blocks": ("fp8", "fp8_block")}
KINDS = [*(kind for kind in FOLDERS if "beside" not in kind), *OURS]
QUICK = ("nf4 nested", "nvfp4", "fp8 blocks")
CASES = [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in KINDS]
Tensors = dict[str, torch.Tensor]


def longer(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.reshape(-1).view(torch.uint8)] * 2).view(x.dtype).reshape(x.shape[0] * 2, *x.shape[1:])


#: What becomes of a tensor; None: it is taken away.
DAMAGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "missing": lambda x: None,
    "no values": lambda x: x.reshape(-1)[:0],
    "one value": lambda x: x.reshape(-1)[:1],
    "half of the rows": lambda x: x[: len(x) // 2] if x.dim() else x.reshape(1, 1, 1),
    "twice the rows": lambda x: longer(x) if x.dim() else x.repeat(7),
    "flat": lambda x: x.reshape(-1) if x.dim() != 1 else x[:, None],
    "another axis": lambda x: x[..., None],
    "int64": lambda x: torch.full(x.shape, 1 << 40, dtype=torch.int64),
    "negative": lambda x: torch.full(x.shape, -3, dtype=torch.int32),
    "bool": lambda x: torch.ones(x.shape, dtype=torch.bool),
    "nan": lambda x: torch.full(x.shape, torch.nan),
}
ANOTHER_VALUE = ("int64", "negative", "bool", "nan")
#: Words of a description, and what is put in their place.
WORDS: list[Any] = [None, 0, -1, 10**30, 2.5, "x", [], {}, [0, 0], [10**12, 1], True]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("kind") / "q"
            folder_of(kind, made[kind]) if kind in FOLDERS else source(OURS[kind][1], OURS[kind][0], made[kind])
        return made[kind]

    return folder


def changed(folder: Path, goal: Path, tensors: Tensors | None = None, config: Any = None) -> Path:
    shutil.rmtree(goal, ignore_errors=True)
    shutil.copytree(folder, goal)
    if tensors is not None:
        save_file({name: value.contiguous() for name, value in tensors.items()}, goal / "model.safetensors")
    if config is not None:
        (goal / "config.json").write_text(json.dumps(config))
    return goal


def outcome(folder: Path, goal: Path) -> Tensors | str:
    """The values, or the sentence; anything else that is raised is a defect."""
    shutil.rmtree(goal, ignore_errors=True)
    try:
        dequantize_checkpoint(folder, goal)
    except QuarkError as error:
        assert not goal.exists() and len(str(error)) < 1200 and str(error).strip()
        return str(error)
    return load_file(goal / "model.safetensors")


def fits(made: Tensors, whole: Tensors) -> bool:
    """Whether a model would take the float folder; what lacks a tensor, or has another shape, is refused by name."""
    return {key: one.shape for key, one in made.items()} == {key: one.shape for key, one in whole.items()}


def moved(change: Callable[[torch.Tensor], torch.Tensor | None], x: torch.Tensor) -> bool:
    """Whether all values are there, in another shape of as many."""
    found = change(x)
    return found is not None and found.numel() == x.numel()


def by_library(config: Any, left: Tensors, whole: Tensors) -> Tensors:
    """The values where fewer scales are a layout of their own: transformers reads blocks of FP8 off the scales."""
    if config["quantization_config"]["quant_method"] != "fp8":
        return whole
    decode, end = Fp8Dequantize(None)._dequantize_one, "_scale_inv"
    scaled = {name.removesuffix(end) for name in left if name.endswith(end)}
    return whole | {name: decode(left[name], left[f"{name}{end}"], torch.float32) for name in scaled}


def same(made: Tensors, wanted: Tensors) -> bool:
    return all(torch.equal(made[key].float(), value) for key, value in wanted.items())


@pytest.mark.parametrize("kind", CASES)
def test_damaged_parts_of_a_weight(kind: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    given = load_file(folders(kind) / "model.safetensors")
    config = json.loads((folders(kind) / "config.json").read_text())
    whole, wrong = outcome(folders(kind), tmp_path / "f"), []
    assert not isinstance(whole, str)
    whole = {key: value.float() for key, value in whole.items()}
    for name in (name for name in given if name.startswith(WEIGHT)):
        for damage, change in DAMAGES.items():
            found = change(given[name])
            left = {key: value for key, value in given.items() if key != name} | (
                {} if found is None else {name: found}
            )
            try:
                made = outcome(changed(folders(kind), tmp_path / "d", left), tmp_path / "f")
            except Exception as error:
                wrong.append(f"{name.removeprefix(WEIGHT)}, {damage}: {type(error).__name__}: {str(error)[:80]}")
                continue
            if isinstance(made, str) or damage in ANOTHER_VALUE or not fits(made, whole) or moved(change, given[name]):
                continue
            if not same(made, whole) and not same(made, by_library(config, left, whole)):
                wrong.append(f"{name.removeprefix(WEIGHT)}, {damage}: other values, no word")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", CASES)
def test_damaged_words_of_a_description(kind: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    config, wrong = json.loads((folders(kind) / "config.json").read_text()), []
    for key in config["quantization_config"]:
        for value in WORDS:
            said = {**config["quantization_config"], key: value}
            try:
                outcome(
                    changed(folders(kind), tmp_path / "d", None, {**config, "quantization_config": said}),
                    tmp_path / "f",
                )
            except Exception as error:
                wrong.append(f"{key}, {value!r:.20}: {type(error).__name__}: {str(error)[:80]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK[1:])) for kind in KINDS]
)
def test_damaged_folders_as_models(kind: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """What carries codes over, or computes with them, has the same sentences."""
    given, wrong = load_file(folders(kind) / "model.safetensors"), []
    for name in (name for name in given if name.startswith(WEIGHT)):
        for damage, change in DAMAGES.items():
            found = change(given[name])
            left = {key: value for key, value in given.items() if key != name}
            folder = changed(folders(kind), tmp_path / "d", left if found is None else {**left, name: found})
            try:
                model_to_run(folder)
            except QuarkError as error:
                assert str(error).strip()
            except Exception as error:
                wrong.append(f"{name.removeprefix(WEIGHT)}, {damage}: {type(error).__name__}: {str(error)[:80]}")
    assert not wrong, "\n".join(wrong)


def is_unfinished(folder: Path) -> bool:
    return (folder / "quark_progress.json").exists() and not (folder / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_folders_file_by_file(
    kind: str, folders: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``quantize-files`` decodes and codes anew: a folder that loads, or one sentence and nothing but its progress."""
    given, wrong = load_file(folders(kind) / "model.safetensors"), []
    config = json.loads((folders(kind) / "config.json").read_text())
    made: dict[str, tuple[Tensors | None, Any]] = {}
    for name in (name for name in given if name.startswith(WEIGHT)):
        for damage, change in DAMAGES.items():
            found, left = change(given[name]), {key: value for key, value in given.items() if key != name}
            made[f"{name}, {damage}"] = left if found is None else {**left, name: found}, None
    for key in config.get("quantization_config", {}):
        said = {**config["quantization_config"], key: "x"}
        made[f"{key}, a word"] = None, {**config, "quantization_config": said}
    for what, (tensors, words) in made.items():
        folder, out = changed(folders(kind), tmp_path / "d", tensors, words), tmp_path / "out" / "q"
        shutil.rmtree(out.parent, ignore_errors=True)
        try:
            code = main(["torch", "quantize-files", str(folder), "-o", str(out), "-s", "int8_wo_per_channel"])
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {str(error)[:80]}")
            continue
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        if code == 0:
            import_model_from_safetensors(None, out)
        elif code != 1 or len(errors) != 1 or not (is_unfinished(out) or not any(out.parent.glob("*"))):
            wrong.append(f"{what}: exit {code}, {errors}, {sorted(out.parent.rglob('*'))}"[:200])
    assert not wrong, "\n".join(wrong)
