"""What a job takes, from headers alone: disk to the byte, nothing read, and growth as the formula says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torch_flow.test_files import llama, tensors

from quark.cli import main
from quark.torch import LLMTemplate
from quark.torch.files import quantize_checkpoint
from quark.torch.files.needs import PROCESS, WORKER, WRITER, needs
from quark.torch.files.skeleton import StoredSource
from quark.torch.quantization.config.config import (
    AutoRoundConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
    SmoothQuantConfig,
)

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    llama().to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.mark.parametrize("scheme", ["int4_wo_32", "ptpc_fp8", "mxfp4"])
def test_what_is_written_is_told_to_the_byte(
    scheme: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LLMTemplate.get("llama").get_config(scheme)
    with monkeypatch.context() as patch:
        patch.setattr(StoredSource, "read", lambda *_: pytest.fail("a tensor is read"))
        found = needs(source, config)
    quantize_checkpoint(source, tmp_path / "out", config)
    assert found.written == sum(value.nbytes for value in tensors(tmp_path / "out").values())
    assert found.read == sum(value.nbytes for value in tensors(source).values())
    assert found.weights == sum(p.numel() for name, p in llama().named_parameters() if name.endswith("proj.weight"))
    assert (found.temporary, found.multiplications) == (0, 0)


def test_samples_cost_memory_and_work(source: Path) -> None:
    config: Any = replace(LLMTemplate.get("llama").get_config("int4_wo_32"), algo_config=[GPTQConfig()])
    few, many, long = (needs(source, config, *size) for size in ((8, 16), (16, 16), (8, 32)))
    assert PROCESS < few.memory < many.memory and few.multiplications < many.multiplications == long.multiplications
    hidden = 2 * 8 * 16 * llama().config.hidden_size  # behind two blocks
    assert few.temporary == 2 * (few.weights + hidden) and (few.passes, many.passes) == (3, 3)  # of 2 bytes each
    assert needs(source, config, 8, 16).seconds(1e9, 1e6, 1e8) > needs(source, config).seconds(1e9, 1e6, 1e8) > 0


def test_workers_and_what_algorithms_compare_with_take_memory(source: Path) -> None:
    """A worker is a process that holds a block, with sums where columns are rounded; those behind the eighth wait."""
    plain, own = LLMTemplate.get("llama").get_config("int4_wo_32"), llama().config
    block = sum(p.numel() for name, p in llama().named_parameters() if "layers.0." in name and "proj" in name)
    hidden, squares = 512 * 512 * own.hidden_size, own.intermediate_size**2
    running = 12 * 128 * 512 * (own.hidden_size + own.intermediate_size)  # more than a process takes

    def memory(algorithm: Any, workers: int) -> int:
        return needs(source, replace(plain, algo_config=[algorithm]), 512, 512, 128, workers).memory

    alone = {kind: memory(kind(), 1) for kind in (GPTQConfig, GPTAQConfig, QronosConfig, AutoRoundConfig)}
    assert alone[GPTAQConfig] == alone[QronosConfig]
    assert alone[GPTAQConfig] - alone[GPTQConfig] == 2 * block + 6 * hidden + 14 * squares
    for kind, pair, summed in ((GPTQConfig, 1, 1), (QronosConfig, 2, 1), (AutoRoundConfig, 1, 0)):
        two, eight, nine, ten = (memory(kind(), workers) for workers in (2, 8, 9, 10))
        assert ten - nine == nine - eight == WORKER  # which wait, loaded
        each = WORKER + running + pair * (4 * block + 8 * summed * squares)  # whose samples are a share of all
        assert eight - two == 6 * each and two - alone[kind] >= 2 * WORKER
    written = needs(source, plain, workers=2).memory
    assert written - needs(source, plain).memory >= 2 * WRITER
    few = needs(source, replace(plain, algo_config=[SmoothQuantConfig()]), 8, 16, 4, 2)
    assert few.memory == written  # which smooths in one process, and writes in two


def test_the_plan_is_of_the_samples_that_are_given(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory, disk and time depend on the windows: they can be chosen as for ``quantize-files``, and are told."""
    words = ["torch", "plan", str(source), "--scheme", "int4_wo_32", "-a", "gptq"]
    config: Any = replace(LLMTemplate.get("llama").get_config("int4_wo_32"), algo_config=[GPTQConfig()])
    windows = ["--samples", "6", "--seq-len", "32", "--batch-size", "3"]
    for given, of in (
        ([], (128, 512, 8)),
        (windows, (6, 32, 3)),
        ([*windows, "--workers", "2"], (6, 32, 3, 2)),
    ):
        assert main([*words, *given, "--json"]) == 0
        found, asked = json.loads(capsys.readouterr().out), needs(source, config, *of)
        assert (found["peak_bytes"], found["temporary_bytes"]) == (asked.memory, asked.temporary)
        assert tuple(found["windows"].values()) == of[:3]
    assert main([*words, *given]) == 0
    said = capsys.readouterr()
    assert "quantize-files, 2 workers" in said.out and "6 windows of 32 tokens, 3 at once" in said.out
    assert "of memory, and here" not in said.err
    monkeypatch.setattr("quark.cli.torch_plan.memory", lambda: 1_000_000)
    assert main(words) == 0
    assert "of memory, and here are 1.0 MB; fewer or shorter windows" in capsys.readouterr().err
    assert main(words[:-2]) == 0 and "windows" not in capsys.readouterr().out  # none are needed
