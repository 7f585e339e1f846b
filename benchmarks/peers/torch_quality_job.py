"""The peer's perplexity of the 5M-parameter Llama, scheme by scheme, in the peer's own environment.

PYTHON torch_quality_job.py SHARED_DATA WINDOWS SCHEME…        prints lines RESULT ["scheme", perplexity or error]
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quark.torch import LLMTemplate, ModelQuantizer

WINDOW = 256


@torch.no_grad()
def perplexity(model: torch.nn.Module, ids: torch.Tensor, windows: int) -> float:
    """The same windows as in ``benchmarks.torch_quality``."""
    total = 0.0
    for k in range(0, windows * WINDOW, WINDOW):
        part = ids[k : k + WINDOW + 1]
        logits = model(input_ids=part[None, :-1]).logits[0].double()
        total += float(torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum"))
    return math.exp(total / (windows * WINDOW))


def main() -> None:
    """All schemes that were named."""
    shared, windows, *schemes = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    path = shared / "models" / "shakespeare_llama_5m"
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = torch.tensor(tokenizer((shared / "data" / "tinyshakespeare.txt").read_text())["input_ids"])
    cut = int(len(ids) * 0.92)
    samples = [{"input_ids": ids[None, k : k + WINDOW]} for k in range(0, 8 * WINDOW, WINDOW)]
    for name in schemes:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        try:
            config = LLMTemplate.get("llama").get_config(scheme=name)
            model = ModelQuantizer(config).quantize_model(model, samples)
            found: object = perplexity(ModelQuantizer.freeze(model), ids[cut:], windows)
        except Exception as error:  # noqa: BLE001  (what the peer raises is its result)
            found = f"{type(error).__name__}: {str(error)[:80]}"
        print("RESULT " + json.dumps([name, found]), flush=True)


if __name__ == "__main__":
    main()
