"""Every reader of checkpoints against every broken file: refused, with the file or the tensor named."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.torch_flow.export.networks import llama
from tests.torch_flow.export.test_reload import LLM, layer, quantized

from quark.errors import ModelError, QuarkError
from quark.torch import export_safetensors, import_model_from_safetensors
from quark.torch.export.checkpoint import read_checkpoint
from quark.torch.files import quantize_checkpoint
from quark.torch.language import load_model
from quark.torch.quantization.config.config import FP8E4M3PerTensorSpec, QConfig

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")
INDEX = "model.safetensors.index.json"
TENSOR = "model.layers.0.mlp.up_proj.weight"
CONFIGS = {"quark": LLM["int4"], "awq": LLM["int4"], "fp8": layer(FP8E4M3PerTensorSpec())}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of several files for each kind of reader."""
    folder = tmp_path_factory.mktemp("written")
    for mode, config in CONFIGS.items():
        model = quantized(llama(), QConfig(config, exclude=["lm_head"]))
        export_safetensors(model, folder / mode, custom_mode=mode, max_shard_size=60_000)
    llama().save_pretrained(folder / "float", max_shard_size="100KB")
    return {path.name: path for path in folder.iterdir()}


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "import into a model": ("quark", lambda folder: import_model_from_safetensors(llama(), folder)),
    "import of a whole model": ("quark", lambda folder: import_model_from_safetensors(None, folder)),
    "import of awq": ("awq", lambda folder: import_model_from_safetensors(llama(), folder)),
    "import of fp8": ("fp8", lambda folder: import_model_from_safetensors(llama(), folder)),
    "command line": ("quark", load_model),
    "file to file": ("float", lambda folder: quantize_checkpoint(folder, folder.parent / "out", QConfig(LLM["int4"]))),
}


def shard_of(folder: Path) -> Path:
    """The file with ``TENSOR`` or its codes."""
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    return folder / next(file for name, file in places.items() if name.startswith(TENSOR.removesuffix("weight")))


def truncated(folder: Path) -> str:
    path = shard_of(folder)
    path.write_bytes(path.read_bytes()[:-7])
    return f"{path.name}' is not a whole safetensors file"


def lying(folder: Path) -> str:
    path = shard_of(folder)
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    first = next(name for name in header if name != "__metadata__")
    header[first]["shape"] = [1 << 40, 3]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
    return f"{path.name}' is not a whole safetensors file"


def corrupt(folder: Path) -> str:
    path = shard_of(folder)
    path.write_bytes(bytes(range(256)) * 40)
    return f"{path.name}' is not a whole safetensors file"


def missing(folder: Path) -> str:
    path = shard_of(folder)
    path.unlink()
    return f"{path.name}' is missing"


def lost(folder: Path) -> str:
    path = shard_of(folder)
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if "up_proj" in name)
    save_file({other: value for other, value in tensors.items() if other != name}, path)
    return f"{path.name}' has no tensor '{name}'"


def escaping(folder: Path) -> str:
    index = json.loads((folder / INDEX).read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../../../etc/passwd"
    (folder / INDEX).write_text(json.dumps(index))
    return f"tensor '{name}' is said to be in '../../../etc/passwd'"


class Bomb:
    """Says so when it is unpickled."""

    exploded = False

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return setattr, (Bomb, "exploded", True)


def pickled(folder: Path) -> str:
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    return "pickled weights, which are never loaded"


FAULTS = {fault.__name__: fault for fault in (truncated, lying, corrupt, missing, lost, escaping, pickled)}


def copied(source: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("reader", READERS)
def test_refused_by_name(reader: str, fault: str, written: dict[str, Path], tmp_path: Path) -> None:
    kind, read = READERS[reader]
    folder = copied(written[kind], tmp_path)
    sentence = FAULTS[fault](folder)
    with pytest.raises(ModelError) as caught:
        read(folder)
    assert sentence in str(caught.value)
    assert str(folder) in str(caught.value)
    assert not Bomb.exploded
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="names that are bytes")
@pytest.mark.parametrize("reader", READERS)
def test_a_name_that_is_no_text_is_told(reader: str, written: dict[str, Path], tmp_path: Path) -> None:
    """Not that its files are damaged: the library that opens them takes UTF-8 alone."""
    kind, read = READERS[reader]
    folder = copied(written[kind], tmp_path).rename(tmp_path / os.fsdecode(b"m\xff"))
    with pytest.raises(QuarkError, match=r"m.udcff.*is no UTF-8 text: give another path"):
        read(folder)
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("reader", READERS)
def test_the_same_folders_are_read_when_nothing_is_broken(
    reader: str, written: dict[str, Path], tmp_path: Path
) -> None:
    kind, read = READERS[reader]
    found = read(copied(written[kind], tmp_path))
    weights = found.state_dict() if isinstance(found, torch.nn.Module) else read_checkpoint(tmp_path / "out").names
    assert any(name.startswith(TENSOR.removesuffix("weight")) for name in weights)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers(value: float, written: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(written["quark"], tmp_path)
    name = f"{TENSOR}_scale"
    path = next(folder / file for file, names in read_checkpoint(folder).files.items() if name in names)
    tensors = load_file(path)
    tensors[name][0, 0] = value
    save_file(tensors, path)
    with pytest.raises(ModelError, match=f"{name}' has scales that are not finite"):
        import_model_from_safetensors(llama(), folder)


def test_pickled_float_models_are_not_loaded(tmp_path: Path) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights are never loaded"):
        load_model(tmp_path)
