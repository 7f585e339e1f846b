"""What transformers makes another network of when it reads a GGUF file is refused before work, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.consumers import tiny
from tests.torch_flow.export.test_gguf import bpe  # noqa: F401
from tests.torch_flow.export.test_refused_before import outcome

from quark.torch import LLMTemplate, export_gguf
from quark.torch.export.before_work import check_before_work

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
TYPES = dict(tiny.model_types())
DELTA = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
QUICK: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True}),  # silently another network until it was refused
    ("mistral", {}),  # with a window of 16 tokens: likewise
    ("mistral", {"sliding_window": None}),
    ("qwen3", {}),  # heads of 16, which transformers takes for 128
    ("qwen3", {"head_dim": 128}),
    ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16}),  # silently another network
    ("falcon_mamba", {}),  # silently Mamba's
    ("qwen3_5_text", DELTA),
    ("olmo2", {}),  # not read at all
    ("phi3", {}),  # its class takes words above 32,000 for granted
]
REFUSED = (
    "transformers makes another network of a GGUF file, without ",
    "transformers reads no GGUF file of this model",
)
MORE = [
    (name, more)
    for name in ("llama", "nemotron", "qwen2", "qwen2_moe", "starcoder2", "minimax_m2", "mistral")
    for more in ({"head_dim": 24}, {"attention_bias": True}, {"mlp_bias": True})
    if (name, more) != ("nemotron", {"head_dim": 24})  # llama.cpp does not load it
]


@pytest.mark.parametrize(("name", "more"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)])
def test_transformers_answers_as_the_model_or_it_is_refused(
    name: str,
    more: dict[str, Any],
    bpe: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    model: Any = tiny.made(name, TYPES[name], {"vocab_size": 300, **more}).float().eval()
    config = LLMTemplate.for_model(model).get_config("int8_wo_per_channel")
    assert not outcome(lambda: check_before_work(model, config, "gguf", "llama.cpp", bpe))
    said = outcome(lambda: check_before_work(model, config, "gguf", "transformers", bpe))
    export_gguf(model, tmp_path / "m", model.config.model_type, bpe, weight_type="F32", float_type="F32")
    pytest.importorskip("accelerate")  # transformers opens no GGUF file without it
    ids = torch.arange(3, 27)[None]
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "m", gguf_file=f"{model.config.model_type}.gguf", dtype=torch.float32
        )
    except (RuntimeError, ValueError, AssertionError):  # of shapes, architectures, words
        assert said.startswith(REFUSED)
        return
    with torch.no_grad():
        ours, found = model(ids).logits, theirs(ids).logits
    near = float((found - ours).norm() / ours.norm()) < 1e-3
    assert near is not said.startswith(REFUSED)
