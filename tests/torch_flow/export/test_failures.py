"""Exports that fail part way: whatever the format and the moment, nothing is left that looks like a model.

The disk is full for real: the system refuses to let a file grow beyond a size (``RLIMIT_FSIZE``), so the library that
writes the format meets the error itself. A second failure is that finished files cannot be moved to their place.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from tests.torch_flow.export.networks import IDS, llama
from tests.torch_flow.export.test_reload import LLM, layer, quantized
from torch import nn

from quark.errors import ConfigError, OutputError
from quark.torch import export_compressed_tensors, export_gguf, export_onnx, export_safetensors
from quark.torch.export import onnx_model
from quark.torch.files import quantize_checkpoint
from quark.torch.quantization.config.config import FP8E4M3PerTensorSpec, Int4PerGroupSpec, QConfig, QLayerConfig

tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = 3000  # bytes that a file may have: less than any of the models takes, more than a configuration does
FP8 = layer(FP8E4M3PerTensorSpec(), FP8E4M3PerTensorSpec())
Export = Callable[[Path, Path], None]


def language(config: QLayerConfig) -> nn.Module:
    return quantized(llama(), QConfig(config, exclude=["lm_head"]))


def safetensors(config: QLayerConfig = LLM["int4"], **settings: object) -> Export:
    return lambda target, source: export_safetensors(language(config), target, **settings)  # type: ignore[arg-type]


def to_gguf(target: Path, source: Path) -> None:
    pytest.importorskip("gguf")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({f"w{k}": k for k in range(256)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    if not (source / "tokenizer.json").exists():
        tokenizer.save(str(source / "tokenizer.json"))
    export_gguf(language(layer(Int4PerGroupSpec(-1, 32))), target, "llama", source)


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    """torch's exporter takes a second for the one graph of this file, and nothing here fails in it: asked once."""
    known, trace = list[onnx.ModelProto](), onnx_model.trace

    def once(*given: Any) -> onnx.ModelProto:
        known.extend([] if known else [trace(*given)])
        made = onnx.ModelProto()
        made.CopyFrom(known[0])
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_model, "trace", once)
        yield


def to_onnx(target: Path, source: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).eval()
    made = quantized(model, QConfig(layer(Int4PerGroupSpec(-1, 16))))
    export_onnx(made, target, torch.ones(2, 64))


def to_diffusers(target: Path, source: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    unet = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(16, 16), norm_num_groups=8,
        layers_per_block=1, down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    )  # fmt: skip
    export_safetensors(quantized(unet.eval(), QConfig(layer(FP8E4M3PerTensorSpec()))), target)


EXPORTS: dict[str, Export] = {
    "real_quantized": safetensors(),
    "shards": safetensors(max_shard_size=20_000),
    "fake_quantized": safetensors(weight_format="fake_quantized"),
    "fp8": safetensors(FP8, custom_mode="fp8"),
    "awq": safetensors(custom_mode="awq"),
    "compressed-tensors": lambda target, source: export_compressed_tensors(language(LLM["int4"]), target),
    "gguf": to_gguf,
    "onnx": to_onnx,
    "diffusers": to_diffusers,
}


@contextmanager
def full_disk(size: int = SMALL) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A folder for the target, one that is there with a user's file in it, one for a tokenizer."""
    new, kept, source = tmp_path / "new", tmp_path / "kept", tmp_path / "source"
    kept.mkdir()
    source.mkdir()
    (kept / "notes.txt").write_text("mine")
    return new, kept, source


@pytest.mark.parametrize("name", EXPORTS)
def test_a_full_disk_leaves_nothing(name: str, tmp_path: Path) -> None:
    new, kept, source = folders(tmp_path)
    export = EXPORTS[name]
    export(tmp_path / "first", source)  # and imports what it needs, while files may be written
    for target in (new, kept):
        with full_disk(), pytest.raises(OutputError, match=f"{target.name}' cannot be written") as caught:
            export(target, source)
        assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.EFBIG
    assert not new.exists()
    assert [path.name for path in kept.iterdir()] == ["notes.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "kept", "source"]
    export(new, source)
    assert sorted(path.name for path in new.iterdir()) == sorted(path.name for path in (tmp_path / "first").iterdir())


@pytest.mark.parametrize("name", ["shards", "gguf", "onnx with data"])
def test_files_that_cannot_be_moved_leave_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, kept, source = folders(tmp_path)
    monkeypatch.setattr(onnx_model, "EXTERNAL", 0)
    export = to_onnx if name == "onnx with data" else EXPORTS[name]
    replace, left = os.replace, [0]

    def fails(old: Path, new: Path) -> None:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        replace(old, new)

    monkeypatch.setattr(os, "replace", fails)
    for target, moved in ((new, 0), (kept, 0 if name == "gguf" else 1)):
        left[0] = moved
        with pytest.raises(OutputError, match="No space left"):
            export(target, source)
    assert not new.exists()
    assert [path.name for path in kept.iterdir()] == ["notes.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "source"]


def test_data_of_another_model_is_not_taken_for_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_model, "EXTERNAL", 0)
    to_onnx(tmp_path / "m", tmp_path)
    (tmp_path / "m" / "quark_model.onnx").unlink()
    with pytest.raises(ConfigError, match=r"quark_model\.onnx\.data' already exists"):
        to_onnx(tmp_path / "m", tmp_path)
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["quark_model.onnx.data"]


def test_an_interrupted_job_on_files_is_no_model_and_goes_on(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "float", max_shard_size="100KB")
    config = QConfig(LLM["int4"], exclude=["lm_head"])
    quantize_checkpoint(tmp_path / "float", tmp_path / "whole", config)
    with full_disk(), pytest.raises(OutputError):
        quantize_checkpoint(tmp_path / "float", tmp_path / "half", config)
    assert not (tmp_path / "half" / "config.json").exists()
    assert not list((tmp_path / "half").glob("*.safetensors"))
    quantize_checkpoint(tmp_path / "float", tmp_path / "half", config)
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "half" / path.name).read_bytes() == path.read_bytes()


def test_the_model_is_as_it_was(tmp_path: Path) -> None:
    model = language(LLM["int4"])
    with torch.no_grad():
        before = model(IDS).logits
    with full_disk(), pytest.raises(OutputError):
        export_safetensors(model, tmp_path / "m")
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)
