"""Broken checkpoints: refused, with the file and the tensor named; a failed export leaves nothing."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.torch_flow.models import TwoLayers

from quark.errors import ConfigError, ModelError, OutputError, QuarkError
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.export import shards
from quark.torch.quantization.config.config import Int4PerGroupSpec, QConfig, QLayerConfig

INDEX = "model.safetensors.index.json"


def quantized() -> TwoLayers:
    config = QConfig(QLayerConfig(weight=Int4PerGroupSpec(-1, 8).to_quantization_spec()))
    return ModelQuantizer(config).quantize_model(TwoLayers())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export_safetensors(quantized(), tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    export_safetensors(quantized(), tmp_path / "s", max_shard_size=400)
    assert len(list((tmp_path / "s").glob("*.safetensors"))) > 1
    return tmp_path / "s"


def refused(folder: Path, match: str, kind: type[QuarkError] = ModelError) -> None:
    with pytest.raises(kind, match=match):
        import_model_from_safetensors(TwoLayers(), folder)


def change_config(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text())
    change(data["quantization_config"])
    path.write_text(json.dumps(data))


def change_header(path: Path, change: Callable[[dict], None]) -> None:
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_file(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(folder, "model.safetensors' is not a whole safetensors file")


def test_header_that_says_it_is_huge(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])
    refused(folder, "is not a whole safetensors file")


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["fc1.weight"].update(shape=[1 << 40, 4]),
        lambda header: header["fc1.weight"].update(data_offsets=[0, 8]),
        lambda header: header["fc1.weight"].update(dtype="F64"),
        lambda header: header["fc1.weight"].update(data_offsets=[-8, 8]),
        lambda header: header.pop("fc1.weight"),
    ],
    ids=["shape", "offsets", "dtype", "negative", "hole"],
)
def test_header_that_lies(folder: Path, change: Callable[[dict], None]) -> None:
    change_header(folder / "model.safetensors", change)
    refused(folder, "model.safetensors' is not a whole safetensors file")


def test_garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 20)
    refused(folder, "is not a whole safetensors file")


def test_missing_shard(sharded: Path) -> None:
    next(iter(sorted(sharded.glob("*.safetensors")))).unlink()
    refused(sharded, r"model-00001-of-0000\d\.safetensors' is missing")


def test_shard_that_lacks_a_tensor(sharded: Path) -> None:
    path = sharded / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = sorted(set(index["weight_map"].values()))[0]
    path.write_text(json.dumps(index))
    refused(sharded, "has no tensor 'ghost'")


def test_shard_with_more_than_the_index_says(sharded: Path) -> None:
    path = sharded / INDEX
    index = json.loads(path.read_text())
    del index["weight_map"]["fc1.bias"]
    path.write_text(json.dumps(index))
    refused(sharded, "has a tensor 'fc1.bias', which")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", 3])
def test_paths_out_of_the_folder(sharded: Path, name: object) -> None:
    path = sharded / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["fc1.weight"] = name
    path.write_text(json.dumps(index))
    refused(sharded, "tensor 'fc1.weight' is said to be in .* not a file of the folder")


def test_pickles_are_never_opened(folder: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "exploded",))

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    refused(folder, "pytorch_model.bin may hold pickled weights, which are never loaded")
    assert not (tmp_path / "exploded").exists()


def test_tensor_of_another_shape_or_type(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "fc1.weight": tensors["fc1.weight"][:4].clone()}, path)
    refused(folder, r"tensor 'fc1.weight' has the shape \[4, 4\], and the model needs \[16, 4\]")
    save_file({**tensors, "fc1.weight": tensors["fc1.weight"].to(torch.int64)}, path)
    refused(folder, "tensor 'fc1.weight' is torch.int64, and the model needs torch.int32")


def test_missing_and_surplus_tensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: value for name, value in tensors.items() if name != "fc2.weight_scale"}, path)
    refused(folder, "lacks 1 tensors of the model; the first is 'fc2.weight_scale'")
    save_file({**tensors, "fc3.weight": torch.zeros(1)}, path)
    refused(folder, "no place for the tensor 'fc3.weight'")


def test_config_that_is_broken(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    refused(folder, "config.json' is not JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, "config.json' must hold an object")
    (folder / "config.json").write_text("{}")
    refused(folder, r"codes of a quantized model \('fc1.weight_scale'\), and neither 'config.json'")
    (folder / "config.json").unlink()
    refused(folder, r"codes of a quantized model \('fc1.weight_scale'\), and neither 'config.json'")
    refused(folder / "nowhere", "is not a folder")


def test_unknown_method_scheme_and_format(folder: Path) -> None:
    change_config(folder, lambda found: found.update(quant_method="quak"))
    refused(folder, "Did you mean 'quark'", ConfigError)
    change_config(folder, lambda found: found.update(quant_method="quark"))
    change_config(folder, lambda found: found["global_quant_config"]["weight"].update(dtype="int5"))
    refused(folder, "config.json.*int5", ConfigError)
    change_config(folder, lambda found: found["global_quant_config"]["weight"].update(dtype="int4"))
    change_config(folder, lambda found: found["export"].update(pack_method="shuffle"))
    refused(folder, "pack_method 'shuffle'", ConfigError)
    change_config(folder, lambda found: found.update(export={"pack_metod": "order"}))
    refused(folder, "config.json.*pack_metod", ConfigError)


def test_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized()
    monkeypatch.setattr(shards, "check_made", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OutputError, match="disk full"):
        export_safetensors(model, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "tokenizer.json").write_text("mine")
    with pytest.raises(OutputError, match="disk full"):
        export_safetensors(model, tmp_path / "kept")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "tokenizer.json"]


def test_a_model_is_never_written_over(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="holds a model already"):
        export_safetensors(quantized(), folder)
    assert (folder / "model.safetensors").read_bytes() == before
    (folder.parent / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        export_safetensors(quantized(), folder.parent / "file")


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tokenizer.json").write_text("mine")
    export_safetensors(quantized(), tmp_path / "m")
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "mine"
    import_model_from_safetensors(TwoLayers(), tmp_path / "m")


def test_a_failed_import_says_so_before_anything_is_used(folder: Path) -> None:
    with pytest.raises(ConfigError, match="multi_device"):
        import_model_from_safetensors(TwoLayers(), folder, multi_device=True)
