"""Blocks that an interrupted job has behind it are not run again, and what was kept of them is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pairs import thinned
from tests.torch_flow.test_files import HEADS, llama
from tests.torch_flow.test_tuned_files import SAMPLES, config
from torch import nn

from quark.errors import ConfigError
from quark.files.journal import Journal
from quark.torch.algorithms import autoround, bias, reconstruct, scaling, tune
from quark.torch.algorithms.blocks import Stream, find_blocks, record
from quark.torch.files import quantize_checkpoint
from quark.torch.files.block_files import BlocksInFiles
from quark.torch.quantization.config.config import (
    AdaQuantConfig,
    AdaRoundConfig,
    AutoRoundConfig,
    AWQConfig,
    BiasCorrectionConfig,
    GPTQConfig,
    QronosConfig,
    SmoothQuantConfig,
)

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("few_candidates")
LAYERS = HEADS["num_hidden_layers"]
WORK = {"gptq": (GPTQConfig(), tune, "tune_block"), "qronos": (QronosConfig(), tune, "tune_block")}
WORK |= {"autoround": (AutoRoundConfig(iters=2), autoround, "learn_block")}
WORK |= {"adaround": (AdaRoundConfig(num_iterations=2), reconstruct, "train_block")}
WORK |= {"adaquant": (AdaQuantConfig(num_iterations=2), reconstruct, "train_block")}
WORK |= {"bias_correction": (BiasCorrectionConfig(), bias, "correct_block")}
WORK |= {"awq": (AWQConfig(), scaling, "read_block"), "smoothquant": (SmoothQuantConfig(), scaling, "read_block")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    llama().to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    return folder


def interrupted(name: str, source: Path, goal: Path, patch: pytest.MonkeyPatch) -> None:
    """A job that ends when it comes to its last block."""
    algorithm, module, function = WORK[name]
    whole, left = getattr(module, function), [LAYERS]

    def until_the_last(*args: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return whole(*args)

    with patch.context() as some:
        some.setattr(module, function, until_the_last)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(source, goal, config(algorithm), samples=SAMPLES)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", thinned(WORK, 2))
def test_what_is_done_is_not_run_again(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(name, source, tmp_path / "files", monkeypatch)
    loaded: list[str] = []
    load, (algorithm, module, _) = BlocksInFiles.load, WORK[name]
    walk = "choices" if module is scaling else "walk"
    whole = getattr(module, walk)

    def noted(self: BlocksInFiles, name: str) -> None:
        loaded.append(name)
        load(self, name)

    def watched(*args: Any, **settings: Any) -> Any:
        with monkeypatch.context() as some:
            some.setattr(BlocksInFiles, "load", noted)
            return whole(*args, **settings)

    with monkeypatch.context() as some:
        some.setattr(module, walk, watched)
        quantize_checkpoint(source, tmp_path / "files", config(algorithm), samples=SAMPLES)
    assert loaded == [f"model.layers.{LAYERS - 1}"]
    quantize_checkpoint(source, tmp_path / "whole", config(algorithm), samples=SAMPLES)
    assert contents(tmp_path / "files") == contents(tmp_path / "whole")


def test_hidden_states_that_are_damaged_are_noticed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that flipped is told; a file that lost its end with the power is that of before."""
    interrupted("gptq", source, tmp_path / "files", monkeypatch)
    (last,) = {max(tmp_path.glob("files/*/*.safetensors"), key=lambda path: int(path.stem))}
    whole = last.read_bytes()
    assert b"blocks done" in whole
    last.write_bytes(bytes([*whole[:-1], whole[-1] ^ 1]))
    with pytest.raises(ConfigError, match="damaged"):
        quantize_checkpoint(source, tmp_path / "files", config(GPTQConfig()), samples=SAMPLES)
    last.write_bytes(whole[: len(whole) // 2])
    quantize_checkpoint(source, tmp_path / "files", config(GPTQConfig()), samples=SAMPLES)
    quantize_checkpoint(source, tmp_path / "whole", config(GPTQConfig()), samples=SAMPLES)
    assert contents(tmp_path / "files") == contents(tmp_path / "whole")


def test_an_entry_that_is_forgotten_is_gone_with_its_file(tmp_path: Path) -> None:
    import numpy as np

    journal = Journal(tmp_path / "state.json", {"job": "1"})
    journal.finish_arrays("hidden", {"x": np.ones(3)})
    journal.forget("hidden")
    journal.forget("never kept")
    assert journal.file("hidden") is None and Journal(tmp_path / "state.json", {"job": "1"}).file("hidden") is None
    journal.settle()
    assert not list(tmp_path.glob("*/*.safetensors"))


class Chain(nn.Module):
    """Blocks that are called with a number: the length of the input, or what the blocks before made of it."""

    def __init__(self, follows: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.follows, self.runs = follows, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x, x.mean() if self.follows else torch.tensor(float(len(x))))
        return x


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.runs = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.linear(x) + number


@pytest.mark.parametrize("follows", [False, True])
def test_blocks_run_for_a_record_only_where_their_arguments_need_it(follows: bool) -> None:
    torch.manual_seed(0)
    model, samples = Chain(follows).eval(), [torch.randn(k, 4) for k in (2, 3, 4)]
    wanted: list[list[torch.Tensor]] = [[] for _ in model.parts]
    for part, seen in zip(model.parts, wanted, strict=True):
        part.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[1]))
    for sample in samples:
        model(sample)
    values, before = [list(seen) for seen in wanted], model.parts[0].runs
    blocks, stream = record(model, find_blocks(model), samples)
    assert isinstance(stream, Stream) and blocks.path == "parts"
    assert model.parts[0].runs - before == (len(samples) if follows else 1)
    for calls, numbers in zip(stream.calls.values(), values, strict=True):
        assert [args[1].item() for args, _ in calls] == [number.item() for number in numbers]
    assert all(torch.equal(x, y) for x, y in zip(stream.hidden, samples, strict=True))
