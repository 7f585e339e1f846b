"""What a job on a network goes on with: any change that could change an output is refused by name, nothing else is."""

from __future__ import annotations

import copy
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import ConfigError
from quark.files.journal import Journal
from quark.search.trials import Trying
from quark.torch import digest
from quark.torch.auto import TorchGoal, auto
from quark.torch.digest import identity_of, identity_of_model
from quark.torch.language import load_model
from quark.torch.search import search
from quark.torch.sensitivity import sensitivity

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


class Stopped(Exception):
    """What ends a job in the middle."""


def samples(seed: int = 1) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(0, 48, (1, 8), generator=generator)} for _ in range(4)]


def tried(folder: Path, data: Any, ledger: Path, **other: Any) -> Any:
    return sensitivity(folder, data, ["int4_wo_32"], **other, trying=Trying(ledger=ledger)).trials


def searched(folder: Path, data: Any, ledger: Path, **other: Any) -> Any:
    found = search(folder, data, ["int4_wo_32", "fp8"], "kl<=1e9", **other, trying=Trying(ledger=ledger))
    return found.layers, found.value, found.reported


def found(folder: Path, data: Any, ledger: Path, **other: Any) -> Any:
    goal = TorchGoal(**{"purpose": "transformers", "ledger": ledger, "seconds": 1e-9, **other})
    outcome = auto(load_model(folder), data, goal)
    return outcome.winner.name, outcome.winner.value, outcome.reported


#: A job, and what of its settings is an input: the name of it in the sentence.
JOBS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (tried, {"left_float": {"exclude": ["*q_proj"]}}, "configuration: exclude"),
    (searched, {"config": {"scheme": "fp8", "kv_cache": "fp8"}}, "configuration: "),
    (found, {"purpose": "llama.cpp"}, "purpose"),
]
#: Fields of a config.json, none of which is in a tensor of the checkpoint.
FIELDS = {
    "rms_norm_eps": 0.1,
    "hidden_act": "gelu",
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("job, settings, words", JOBS, ids=["sensitivity", "search", "auto"])
def test_an_input_that_changes_after_a_kill_is_refused(
    job: Callable[..., Any], settings: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, kept, ledger = tmp_path / "model", tmp_path / "kept", tmp_path / "l.json"
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=48, **SIZES)).save_pretrained(kept)
    shutil.copytree(kept, source)
    whole = job(source, samples(), tmp_path / "whole.json")
    finish = Journal.finish

    def ends(self: Journal, key: str, value: Any) -> None:
        finish(self, key, value)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish", ends)
        with pytest.raises(Stopped):
            job(source, samples(), ledger)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.json")}

    def refused(said: str, data: Any, **other: Any) -> None:
        with pytest.raises(ConfigError, match=said):
            job(source, data, ledger, **other)
        assert {path: path.read_bytes() for path in tmp_path.glob("*.json")} == before, said

    for field, value in FIELDS.items():
        values = json.loads((kept / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**values, field: value}))
        refused(f"config.json.{field}", samples())
    shutil.copy(kept / "config.json", source / "config.json")
    content = bytearray((kept / "model.safetensors").read_bytes())
    content[-2] ^= 1
    (source / "model.safetensors").write_bytes(content)
    refused("another model", samples())
    shutil.copy(kept / "model.safetensors", source / "model.safetensors")
    refused("another data", samples(seed=2))
    refused(words, samples(), **settings)
    with monkeypatch.context() as patch:
        patch.setattr(digest, "version", lambda name: "0.1")
        refused("another release of openquark", samples())
    values = json.loads((kept / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**values, "transformers_version": "4.0.0"}))
    assert job(source, samples(), ledger) == whole


class Norm(nn.Module):
    """A layer of every kind of state."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.sizes, self.kind, self._power = 1e-5, [2, (3, 4)], torch.float32, 2
        self.activation = torch.nn.functional.silu
        self.offset = torch.ones(2)
        self.step = functools.partial(torch.add, alpha=2)
        self.inner: Any = lambda x: x + self._power
        self.register_buffer("angles", torch.ones(3), persistent=False)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any arithmetic, with a set of names whose order differs between processes."""
        return x if self.kind in {"one", "two", "three"} else x * self.scale


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), Norm(), nn.Dropout(0.1))


class Other(Norm):
    """Another class, with the same attributes."""


def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Other arithmetic."""
    return x + self.scale


#: What is changed in the layer, and the input that then is another one.
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "number": (lambda layer: setattr(layer, "eps", 1e-6), "layers"),
    "private number": (lambda layer: setattr(layer, "_power", 3), "layers"),
    "list": (lambda layer: setattr(layer, "sizes", [2, (3, 5)]), "layers"),
    "type": (lambda layer: setattr(layer, "kind", torch.float16), "layers"),
    "function": (lambda layer: setattr(layer, "activation", torch.nn.functional.gelu), "layers"),
    "arguments": (lambda layer: setattr(layer, "step", functools.partial(torch.add, alpha=3)), "layers"),
    "lambda": (lambda layer: setattr(layer, "inner", lambda x: x - 1), "layers"),
    "plain tensor": (lambda layer: layer.offset.add_(1), "layers"),
    "buffer that is not saved": (lambda layer: layer.angles.add_(1), "layers"),
    "buffer": (lambda layer: layer.mean.add_(1), "model"),
    "class": (lambda layer: setattr(layer, "__class__", Other), "layers"),
    "new attribute": (lambda layer: setattr(layer, "more", True), "layers"),
}


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


@pytest.mark.parametrize("name", CHANGES)
def test_everything_that_an_output_depends_on_counts(name: str) -> None:
    change, where = CHANGES[name]
    changed = network()
    change(changed[1])
    assert differing(identity_of_model(network()), identity_of_model(changed)) == [where]


@pytest.mark.parametrize("name, value", [("forward", forward), ("scale", 2.0)])
def test_code_and_values_of_classes_count(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity_of_model(network())
    monkeypatch.setattr(Norm, name, value)
    assert differing(before, identity_of_model(network())) == ["layers"]


def test_running_training_copying_and_hooks_do_not_count() -> None:
    model = network()
    before = identity_of_model(model)
    model.train()(torch.ones(3)).sum().backward()
    model[0].register_forward_hook(lambda *given: None)
    assert identity_of_model(model) == before == identity_of_model(copy.deepcopy(model))


PRINTED = """
import transformers
from tests.torch_flow.test_network_identity import SIZES, identity_of_model, network, torch
torch.manual_seed(0)
llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=48, **SIZES))
print(identity_of_model(network()), identity_of_model(llama))
"""


def test_it_is_the_same_in_every_process() -> None:
    """Sets of names come in another order there."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PRINTED], env=environment, cwd=Path(__file__).parents[2], capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-500:]
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=48, **SIZES))
    assert done.stdout.decode().strip() == f"{identity_of_model(network())} {identity_of_model(llama)}"


@pytest.mark.parametrize(("bytes", "counts"), [(3, True), (2**40, False)])
def test_what_is_not_copied_along_is_not_read(bytes: int, counts: bool, tmp_path: Path) -> None:
    """A sparse file of a terabyte among the others of a folder was digested for hours."""
    with (tmp_path / "LICENSE").open("wb") as file:
        file.truncate(bytes)
    (tmp_path / "notes.txt").write_text("a")
    found = identity_of(SimpleNamespace(folder=tmp_path, files=[]), {}, "cpu", None)  # type: ignore[arg-type]
    assert "notes.txt" in found and ("LICENSE" in found) is counts
