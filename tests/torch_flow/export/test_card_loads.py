"""What a card says about loading, carried out: the class that it names gives the model that was written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from quark.cli import main

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
MODELS = {
    "BertModel": {"vocab_size": 40, "max_position_embeddings": 64},
    "BertForSequenceClassification": {"vocab_size": 40, "max_position_embeddings": 64},
    "LlamaForCausalLM": {"vocab_size": 40, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_class_of_a_card_loads_every_tensor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    cls(cls.config_class(**SMALL, **MODELS[name])).save_pretrained(tmp_path / "model")
    command = ["torch", "quantize", str(tmp_path / "model"), "-o", str(tmp_path / "out")]
    assert main([*command, "--scheme", "int8_wo_per_channel"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [name]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        space: dict[str, object] = {}
        exec(code.replace('dtype="auto"', 'dtype="auto", output_loading_info=True'), space)
        found = space["model"]
        if isinstance(found, tuple):
            assert type(found[0]).__name__ == name
            assert not any(found[1].values())
