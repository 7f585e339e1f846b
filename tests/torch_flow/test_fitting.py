"""A config.json that does not fit its tensors: every number of it changed, refused by name or really harmless."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.errors import ModelError
from quark.torch.export.checkpoint import read_checkpoint
from quark.torch.files.skeleton import read_skeleton
from quark.torch.language import load_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gemma3_text": {**SIZES, "head_dim": 8, "sliding_window": 8},
}
IDS = (torch.arange(24) * 7 % 64)[None]
#: The fields that say how large tensors are, or how many: the files know better.
KNOWN = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "num_key_value_heads")


def folder_of(kind: str, folder: Path) -> Any:
    """A tiny model of a type in a folder; what its config.json holds."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(4 if value.dim() > 1 else 1)
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def numbers(node: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from numbers(value, (*before, name))
        elif isinstance(value, int):
            yield (*before, name), value


def values_for(old: int) -> list[Any]:
    return [not old, "text", None, 2] if isinstance(old, bool) else [0, -1, 2 * old, 1 << 40, "text", None]


def put(folder: Path, config: Any, path: tuple[str, ...], value: Any) -> None:
    changed = json.loads(json.dumps(config))
    node = changed
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(changed))


def refused(folder: Path, action: Any) -> bool:
    """Whether an action is refused, in a sentence that names the folder."""
    try:
        action()
    except ModelError as error:
        assert str(folder) in str(error) and "\n" not in str(error)
        return True
    return False


@torch.no_grad()
def answers(folder: Path) -> torch.Tensor:
    return load_model(folder)(IDS).logits


@pytest.mark.parametrize("name", KNOWN)
def test_a_size_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    config = folder_of("llama", tmp_path)
    for value in (0, -1, 2 * config[name], 1 << 40):
        put(tmp_path, config, (name,), value)
        assert refused(tmp_path, lambda: load_model(tmp_path)), (name, value)
        assert refused(tmp_path, lambda: read_skeleton(read_checkpoint(tmp_path))), (name, value)


@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias", "tie_word_embeddings"])
def test_a_switch_that_does_not_fit_is_refused_or_harmless(name: str, tmp_path: Path) -> None:
    config = folder_of("llama", tmp_path)
    wanted = answers(tmp_path)
    put(tmp_path, config, (name,), not config[name])
    if not refused(tmp_path, lambda: load_model(tmp_path)):
        assert torch.equal(answers(tmp_path), wanted)
    elif name != "tie_word_embeddings":
        assert refused(tmp_path, lambda: read_skeleton(read_checkpoint(tmp_path)))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [("gpt2", "tie_word_embeddings", False), ("gpt2", "n_head", -1), ("mixtral", "num_experts_per_tok", 0),
     ("mixtral", "num_experts_per_tok", 5), ("mixtral", "num_local_experts", 0),
     ("mixtral", "num_local_experts", 1 << 40)],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused_by_both_readers(kind: str, name: str, value: int, tmp_path: Path) -> None:
    put(tmp_path, folder_of(kind, tmp_path), (name,), value)
    assert refused(tmp_path, lambda: load_model(tmp_path))
    assert refused(tmp_path, lambda: read_skeleton(read_checkpoint(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_number_is_refused_or_does_what_it_says(kind: str, tmp_path: Path) -> None:
    """No traceback of another library, whatever a number becomes; what the files' reader refuses the other does too."""
    config = folder_of(kind, tmp_path)
    for path, old in numbers(config):
        for value in values_for(old):
            put(tmp_path, config, path, value)
            loaded = refused(tmp_path, lambda: load_model(tmp_path))
            read = refused(tmp_path, lambda: read_skeleton(read_checkpoint(tmp_path)))
            assert loaded or not read, (path, value)
