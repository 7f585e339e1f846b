"""Algorithms on checkpoints: the bits of the model in memory, one decoder block at a time, resumable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torch_flow.test_files import HEADS, assert_same, llama, tensors
from torch import nn

from quark.errors import ConfigError, DataError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.algorithms import scaling, tune
from quark.torch.algorithms.blocks import Stream, equal_arguments, find_blocks, record
from quark.torch.export.api import export_safetensors, import_model_from_safetensors
from quark.torch.files import block_files, changed, quantize_checkpoint, static, tuned
from quark.torch.files.block_files import BlocksInFiles
from quark.torch.quantization.config.config import (
    AdaRoundConfig,
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    BiasCorrectionConfig,
    GPTAQConfig,
    GPTQConfig,
    HQQConfig,
    QConfig,
    QronosConfig,
    RotationConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
)

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("few_candidates")
TUNED = "model.layers.1.mlp.up_proj.weight"
SAMPLES = [{"input_ids": torch.randint(5, 120, (2, 12), generator=torch.Generator().manual_seed(k))} for k in range(3)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint in several files."""
    folder = tmp_path_factory.mktemp("source")
    llama().to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture(scope="module")
def two_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two decoder blocks, the least that have one before and one behind, and large channels to smooth."""
    folder = tmp_path_factory.mktemp("two_blocks")
    model = llama(num_hidden_layers=2).to(torch.bfloat16)
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.detach()[::16] *= 8
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture(scope="module")
def rounded(two_blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], torch.Tensor]:
    """A weight of a scheme that no algorithm changed."""

    @cache
    def weight(scheme: str) -> torch.Tensor:
        folder = tmp_path_factory.mktemp("rounded") / scheme
        quantize_checkpoint(two_blocks, folder, config([], scheme))
        return tensors(folder)[TUNED]

    return weight


def config(algorithms: Any, scheme: str = "int4_wo_32") -> QConfig:
    every = algorithms if isinstance(algorithms, list) else [algorithms]
    return replace(LLMTemplate.get("llama").get_config(scheme), algo_config=every)


def in_memory(source: Path, settings: QConfig, folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    export_safetensors(ModelQuantizer(settings).quantize_model(model, SAMPLES), folder)


ALGORITHMS = {
    "gptq": (GPTQConfig(), "int4_wo_32"),
    "gptq, groups refitted": (GPTQConfig(desc_act=False, static_groups=False), "uint4_wo_32"),
    "gptaq": (GPTAQConfig(), "mxfp4"),
    "qronos": (QronosConfig(), "int4_wo_32"),
    "adaround": (AdaRoundConfig(num_iterations=20), "int4_wo_32"),
    "autoround": (AutoRoundConfig(iters=3, lr=0.05, batch_size=2), "int4_wo_32"),
    "awq": (AWQConfig(), "int4_wo_32"),
    "smooth, then gptq": ([SmoothQuantConfig(alpha=0.5), GPTQConfig()], "int4_wo_32"),
    "autosmoothquant": (AutoSmoothQuantConfig(), "uint4_wo_32"),
    "rotation": (RotationConfig(r2=True, r4=True, only_if_better=False), "int4_wo_32"),
    "rotation, where better, then awq and qronos": (
        [RotationConfig(r2=True, r4=True), AWQConfig(), QronosConfig()],
        "int4_wo_32",
    ),
    "hqq": (HQQConfig(), "int4_wo_32"),
    "awq, then hqq": ([AWQConfig(), HQQConfig()], "int4_wo_32"),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_same_bits_as_in_memory(
    name: str, two_blocks: Path, rounded: Callable[[str], torch.Tensor], tmp_path: Path
) -> None:
    algorithms, scheme = ALGORITHMS[name]
    settings = config(algorithms, scheme)
    in_memory(two_blocks, settings, tmp_path / "memory")
    quantize_checkpoint(two_blocks, tmp_path / "files", settings, samples=SAMPLES)
    assert_same(tensors(tmp_path / "files"), tensors(tmp_path / "memory"))
    assert not torch.equal(tensors(tmp_path / "files")[TUNED], rounded(scheme))


@pytest.mark.parametrize("algorithm", [GPTQConfig(), QronosConfig()], ids=lambda algorithm: algorithm.name)
def test_a_killed_job_does_not_tune_a_block_again(
    algorithm: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, tuned = config(algorithm), []
    whole = tune.tune_block

    def killed(context: Any, rounder: Any, inside: Any, run: Any, *rest: Any) -> Any:
        tuned.append(run.name)
        if len(tuned) == 2:
            raise KeyboardInterrupt
        return whole(context, rounder, inside, run, *rest)

    monkeypatch.setattr(tune, "tune_block", killed)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "files", settings, samples=SAMPLES)
    quantize_checkpoint(source, tmp_path / "files", settings, samples=SAMPLES)
    assert tuned == [f"model.layers.{k}" for k in (0, 1, 1, 2)]
    in_memory(source, settings, tmp_path / "memory")
    assert_same(tensors(tmp_path / "files"), tensors(tmp_path / "memory"))
    assert not list((tmp_path / "files").glob(".*"))


def test_a_killed_job_does_not_search_a_block_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the second block of the last search; the bytes are those of a job that nobody killed."""
    settings, searched, goal = config([SmoothQuantConfig(), AWQConfig()]), [], tmp_path / "files"
    whole, count = scaling.read_block, HEADS["num_hidden_layers"] + 2

    def killed(context: Any, run: Any, *rest: Any) -> Any:
        searched.append(run.name)
        if len(searched) == count:
            raise KeyboardInterrupt
        return whole(context, run, *rest)

    monkeypatch.setattr(scaling, "read_block", killed)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, goal, settings, samples=SAMPLES)
    quantize_checkpoint(source, goal, settings, samples=SAMPLES)
    assert searched[count - 1 :] == [f"model.layers.{k}" for k in (1, 1, 2)]
    monkeypatch.setattr(scaling, "read_block", whole)
    quantize_checkpoint(source, tmp_path / "whole", settings, samples=SAMPLES)
    files = sorted(path.name for path in goal.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert all((goal / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in files)


@pytest.mark.parametrize(
    ("algorithms", "tries"),
    [([GPTQConfig()], "none"), ([RotationConfig(r2=True, only_if_better=False), AWQConfig()], "some")],
    ids=["gptq", "awq"],
)
def test_one_block_at_a_time_has_values(
    algorithms: list[Any], tries: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a block is worked on, the others are without memory; none is read more often than it must be."""
    seen, load = [], BlocksInFiles.load

    def watched(self: BlocksInFiles, name: str) -> None:
        load(self, name)
        blocks = [
            key for key, block in self.blocks.items() if any(not p.is_meta and p.dim() > 1 for p in block.parameters())
        ]
        seen.append(blocks == [name])

    monkeypatch.setattr(BlocksInFiles, "load", watched)
    quantize_checkpoint(source, tmp_path / "files", config(algorithms), samples=SAMPLES)
    layers = HEADS["num_hidden_layers"]
    least = layers * 2  # once for the recording of the first sample, once for the work
    assert all(seen)
    assert len(seen) == least if tries == "none" else len(seen) > least


@pytest.mark.parametrize(
    "settings",
    [config([GPTQConfig()]), config([RotationConfig(r2=True, only_if_better=False), AWQConfig()]), config([], "fp8")],
    ids=["tuned", "changed", "static"],
)
def test_everything_is_read_to_the_device_of_the_job(
    settings: QConfig, two_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other name of the CPU tells which device was asked for; what it is for is tested where a GPU is."""
    seen: list[Any] = []

    def watched(whole: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append(args[place:])
            return whole(*args)

        return call

    for name, place in (("load", 4), ("move_buffers", 1), ("load_file", 1)):
        for module in (block_files, static, tuned, changed):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, watched(getattr(module, name), place))
    quantize_checkpoint(two_blocks, tmp_path / "files", settings, device="cpu:0", samples=SAMPLES)
    assert len(seen) > 4 and set(seen) == {("cpu:0",)}


@pytest.mark.parametrize(
    "settings",
    [config([AutoRoundConfig(iters=2)]), config([RotationConfig(), AWQConfig(), QronosConfig()])],
    ids=["autoround", "guarded, chosen and paired"],
)
def test_hidden_states_wait_where_they_are_told_to(
    settings: QConfig, two_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A type of their own stands for the host's memory: what reads them there, or keeps others, is an error."""
    quantize_checkpoint(two_blocks, tmp_path / "as they are", settings, samples=SAMPLES)
    moved: list[torch.Tensor] = []

    def called(stream: Stream, hidden: torch.Tensor, module: nn.Module) -> torch.Tensor:
        assert hidden.dtype == torch.float64
        moved.append(hidden)
        return hidden.bfloat16()

    monkeypatch.setattr(Stream, "waiting", lambda stream, hidden: hidden.double())
    monkeypatch.setattr(Stream, "called", called)
    quantize_checkpoint(two_blocks, tmp_path / "files", settings, samples=SAMPLES)
    assert moved and not BlocksInFiles({}, nn.Module(), {}, tmp_path, None).host  # type: ignore[arg-type]
    assert BlocksInFiles({}, nn.Module(), {}, tmp_path, None, "cuda:1").host  # type: ignore[arg-type]
    assert_same(tensors(tmp_path / "files"), tensors(tmp_path / "as they are"))


def seen_by(caught: list[Any], block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    caught.append(kwargs)


@torch.no_grad()
def test_samples_share_equal_arguments_of_blocks() -> None:
    model = llama()
    same = torch.ones_like(SAMPLES[0]["input_ids"])
    other = same.clone()
    other[:, 3:5] = 0
    masks = [same] * 4 + [other] * 2
    samples = [{**sample, "attention_mask": mask} for sample, mask in zip(SAMPLES * 2, masks, strict=True)]
    _, stream = record(model, find_blocks(model), samples)
    for name, block in find_blocks(model).modules.items():
        tables = {id(kwargs["position_embeddings"][0]) for _, kwargs in stream.calls[name]}
        kept = [kwargs.get("attention_mask") for _, kwargs in stream.calls[name]]
        assert len(tables) == 2  # that of the first sample, which runs apart, and that of the others
        assert len({id(mask) for mask in kept[1:4]}) == 1 and kept[4] is kept[5] is not kept[3]
        caught: list[Any] = []
        handle = block.register_forward_pre_hook(partial(seen_by, caught), with_kwargs=True)
        for sample in samples:
            model(**sample, use_cache=False)
        handle.remove()
        for call, (_, kwargs) in zip(caught, stream.calls[name], strict=True):
            assert equal_arguments({**call, "hidden_states": None}, {**kwargs, "hidden_states": None})


def test_biases_and_a_tied_head(tmp_path: Path) -> None:
    """Bias correction after a rotation, which unties the head: the bits of the model in memory, and its answers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    more = {"num_attention_heads": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more)).eval()
    model.save_pretrained(tmp_path / "source", max_shard_size="60KB")
    settings = config([RotationConfig(only_if_better=False), BiasCorrectionConfig()])
    in_memory(tmp_path / "source", settings, tmp_path / "memory")
    quantize_checkpoint(tmp_path / "source", tmp_path / "files", settings, samples=SAMPLES)
    found = tensors(tmp_path / "files")
    assert_same(found, tensors(tmp_path / "memory"))
    before = model.state_dict()
    biases = [name for name in found if name.endswith("proj.bias")]
    assert any(not torch.equal(found[name], before[name]) for name in biases)
    with torch.no_grad():
        answers = [
            import_model_from_safetensors(None, tmp_path / name)(**SAMPLES[0]).logits for name in ("files", "memory")
        ]
    assert torch.equal(*answers)


def test_what_cannot_work_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    cases = [
        (config(SVDQuantConfig()), SAMPLES, ConfigError, "'svdquant' puts modules beside the layers"),
        (config(AWQConfig()), None, DataError, "'awq' needs samples"),
        (config(GPTQConfig()), None, DataError, "'gptq' needs samples"),
        (config(GPTQConfig(), "int8"), SAMPLES, ConfigError, "not static ones"),
        (
            replace(config(GPTQConfig()), algo_config=[GPTQConfig(), QronosConfig()]),
            SAMPLES,
            ConfigError,
            "one algorithm that tunes",
        ),
    ]
    for settings, samples, error, message in cases:
        with pytest.raises(error, match=message):
            quantize_checkpoint(source, tmp_path / "files", settings, samples=samples)
    assert not (tmp_path / "files").exists()
