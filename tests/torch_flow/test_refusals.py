"""What is refused by names alone, before torch is loaded: the tables are those of the schemes; nothing is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quark import parallel
from quark.algorithms.names import TORCH
from quark.cli import torch_refusals as refusals
from quark.config.file_formats import tried
from quark.torch.algorithms.registry import ALGORITHMS
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.config.schemes import NAMES, scheme
from quark.torch.files import quantize
from quark.torch.files.loading import import_model_from_safetensors
from quark.torch.language import load_model

STATIC = tuple(name for name in NAMES if refusals.is_static(scheme(name), "input_tensors"))
STATIC_CACHES = ("fp8", "fp8_per_head", "int8", "int4_per_channel")


def test_names_of_algorithms_are_those_of_the_flow() -> None:
    without = {"hqq", "rotation", "bias_correction"}  # weights alone; a sample is made where there is none
    known = {row.config.name for row in ALGORITHMS}
    assert known - without == set(refusals.SAMPLED)
    assert {TORCH.get(name, name) for name in refusals.ALGORITHMS} == known
    assert set(NAMES) <= tried()
    assert {"fp8", "int8", "nvfp4"} < set(STATIC) and "mxfp4" not in STATIC


REFUSED = [
    ["quantize-files", "model", "-o", "out", "-s", "fp8"],
    ["quantize", "model", "-o", "out", "-s", "nvfp4"],
    ["quantize", "model", "-o", "out", "-s", "int4_wo_129"],
    ["quantize-files", "model", "-o", "out", "-s", "int4_wo_32", "--layer", "*down_proj"],
    ["quantize", "model", "-o", "out", "-s", "int4_wo_32", "-a", "awq"],
    ["quantize", "model", "-o", "model", "-s", "int4_wo_32"],
    ["quantize", "model", "-o", "out", "-s", "int4_wo_32", "-a", "gptk"],
    ["quantize", "model", "-o", "out", "-s", "int4_wo_32", "--format", "ggu"],
    ["quantize", "model", "-o", "out", "-s", "int4_wo_32", "--device", "gpu"],
    ["quantize", "model", "-o", "out", "-s", "int4_wo_32", "--device", "cuda:first"],
    ["quantize", "model", "-o", "out", "-s", "int8_wo_per_channel", "--for", "llama.cpp", "--format", "quark"],
    ["quantize-files", "model", "-o", "out", "-s", "int8_wo_per_channel", "--format", "awq"],
    ["quantize-files", "model", "-o", "out", "-s", "int4_wo_32", "--kv-cache", "int8", "--for", "vllm"],
    ["plan", "model", "-s", "int4_wo_32", "--layer", "*=mxfp4", "--format", "gptq"],
    ["quantize-files", "mode", "-o", "out", "-s", "int4_wo_32"],
    ["evaluate", "mode", "--data", "text"],
    ["evaluate", "model", "--data", "text"],
    ["sensitivity", "model", "-s", "int4_wo_32"],
    ["search", "model", "-s", "int4_wo_32", "-o", "plan.yaml"],
    ["quantize", "model", "-o", "out", "-s", "int4_wo_32", "--for", "vlm"],
    ["quantize-files", "model", "-o", "out", "-s", "int4_wo_32", "--for", "vlm"],
    ["quantize", "model", "-o", "out", "-s", "int4_wo_32", "-a", "gptq", "--data", "no.txt"],
    ["quantize-files", "model", "-o", "out", "-s", "fp8", "--data", "no.txt"],
    ["quantize", "model", "-o", "out", "-s", "int4_wo_32", "--plan-from", "no.json"],
    ["quantize-files", "model", "-o", "out", "-s", "int4_wo_32", "--plan-from", "a_text"],  # no plan
    ["sensitivity", "model", "-s", "int4_wo_32", "--data", "no.txt"],
    ["sensitivity", "model", "-c", "int4_wo_33", "--data", "a_text"],
    ["search", "model", "-s", "int4_wo_32", "-o", "plan.yaml", "--data", "a_text"],
    ["search", "model", "-s", "int4_wo_32", "-o", "plan.yaml", "--data", "a_text", "--target", "kl<=1", "--for", "vlm"],
    ["quantize", "model", "-o", "out", "-s", "Q4_K", "--for", "llama.cpp"],  # without a vocabulary
    ["quantize-files", "model", "-o", "out", "-s", "int8_wo_per_channel", "--format", "gguf"],
    ["plan", "mode", "-s", "int4_wo_32"],
    ["plan", "model", "-s", "int4_wo_33"],
    ["plan", "model", "-s", "int4_wo_32", "--for", "vlm"],
    ["explain", "model", "lm_head", "-s", "int4_wo_33"],
    ["convert", "model", "-o", "out", "--format", "nothing"],
    ["convert", "model", "-o", "out", "--for", "nobody"],
]
TYPED = ("model", "-o", "out", "-s")
REFUSED += [
    [command, *TYPED, *words]
    for command in ("quantize", "quantize-files")
    for words in (
        *([name] for name in STATIC),
        *(["int4_wo_32", "-a", name] for name in refusals.SAMPLED),
        *(["int4_wo_32", "--kv-cache", name] for name in STATIC_CACHES),
    )
]


def test_no_refusal_loads_torch(tmp_path: Path) -> None:
    """One process types all of them; none opens the file with the tensors."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no tensors")
    (tmp_path / "a_text").write_text("words")
    code = f"""
import sys
from quark.cli import main
opened = []
sys.addaudithook(lambda event, given: opened.append(given[0]) if event == "open" else None)
codes = [main(["torch", *words]) for words in {REFUSED!r}]
read = [name for name in opened if str(name).endswith("model.safetensors")]
print(codes, [m for m in ("torch", "transformers") if m in sys.modules] + read)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [f"{[1] * len(REFUSED)} []"], done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_text", "model"]


BUILT = [({"cuda": None, "hip": None}, True), ({"cuda": "12.8"}, False), ({}, False)]


@pytest.mark.parametrize("built, refused", BUILT)
def test_a_device_that_torch_was_built_without_is_refused(
    built: dict[str, str | None], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "torch_version", lambda: {"__version__": "2.0", **built} if built else {})
    refusals.check_device("cpu")
    if not refused:
        refusals.check_device("cuda:1")
        return
    with pytest.raises(refusals.ConfigError, match=r"--device cuda:1: the torch 2\.0 .* built without it"):
        refusals.check_device("cuda:1")


@pytest.mark.parametrize(
    ("name", "said"), [("meta", "holds no values"), ("nonsense", "'nonsense'"), ("vulkan", "'vulkan'")]
)
def test_devices_that_are_not_there_are_refused_before_anything_is_read(name: str, said: str, tmp_path: Path) -> None:
    """Of every torch: the first has no values, the second is none, for the third torch has to be built anew."""
    calls = (
        lambda: quantize.quantize_checkpoint(tmp_path / "none", tmp_path / "new", QConfig(QLayerConfig()), device=name),
        lambda: load_model(tmp_path, name),
        lambda: import_model_from_safetensors(None, tmp_path, device=name),
    )
    for call in calls:
        with pytest.raises(refusals.ConfigError, match=said):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("system", "refused"), [("linux", True), ("darwin", False)])
def test_a_device_of_another_system_is_refused(system: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals.sys, "platform", system)
    if not refused:
        refusals.check_device("mps")
        return
    with pytest.raises(refusals.ConfigError, match="--device mps is for macOS"):
        refusals.check_device("mps")


def test_the_version_of_torch_is_read_without_loading_it() -> None:
    assert refusals.torch_version()["__version__"] == str(torch.__version__)
    assert refusals.torch_version()["cuda"] == torch.version.cuda


def test_no_more_workers_than_can_be_started() -> None:
    with pytest.raises(refusals.ConfigError, match="workers is 100000; at most 1024"):
        list(parallel.results([], 100_000))


def test_layers_of_their_own_are_for_those_who_know_the_model() -> None:
    """Whether any layer keeps the static scheme is not seen in the names."""
    refusals.check_samples("fp8", None, (), ("*=int4_wo_32",))
    with pytest.raises(refusals.DataError, match="static activations"):
        refusals.check_samples("fp8", None, (), ())
