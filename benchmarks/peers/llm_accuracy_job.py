"""The peer's algorithms on the 5M-parameter Llama, in the peer's own environment, measured as in
``benchmarks.llm_accuracy``.

PYTHON llm_accuracy_job.py SHARED_DATA SAMPLES WINDOWS SCHEME:ALGORITHM…

prints lines RESULT ["scheme", "algorithm", perplexity, KL divergence, processor seconds]
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.quantization.config import config as specs

LENGTH, PART = 256, 0.92
WEIGHTS = {"int4": "Int4PerGroupSpec", "int3": "Int3PerGroupSpec", "int2": "Int2PerGroupSpec"}


@torch.no_grad()
def logits(model: torch.nn.Module, windows: list[torch.Tensor]) -> torch.Tensor:
    """Log-probabilities, [windows, length, vocabulary]."""
    return torch.cat([model(window).logits for window in windows]).log_softmax(-1)


def main() -> None:
    """All pairs that were named."""
    shared, samples, windows, *jobs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
    torch.set_num_threads(1)
    path = shared / "models" / "shakespeare_llama_5m"
    ids = torch.tensor(
        AutoTokenizer.from_pretrained(path)((shared / "data" / "tinyshakespeare.txt").read_text())["input_ids"]
    )
    cut = int(len(ids) * PART)
    starts = torch.randint(0, cut - LENGTH, (samples,), generator=torch.Generator().manual_seed(0)).tolist()
    data = [{"input_ids": ids[start : start + LENGTH][None]} for start in starts]
    held_out = [ids[cut + k * LENGTH : cut + (k + 1) * LENGTH][None] for k in range(windows)]
    following = torch.cat([window[:, 1:] for window in held_out])
    reference = logits(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), held_out)
    for job in jobs:
        scheme, algorithm = job.split(":")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        config = LLMTemplate.get("llama").get_config(
            scheme="int4_wo_32", algorithm=None if algorithm == "rtn" else algorithm
        )
        weight = getattr(specs, WEIGHTS[scheme])(ch_axis=-1, group_size=32).to_quantization_spec()
        layer = dataclasses.replace(config.global_quant_config, weight=weight)
        config = dataclasses.replace(config, global_quant_config=layer)
        start = time.process_time()
        model = ModelQuantizer(config).quantize_model(model, data)
        seconds = time.process_time() - start
        found = logits(ModelQuantizer.freeze(model), held_out)
        divergence = float((reference.exp() * (reference - found)).sum(-1).mean())
        perplexity = float(torch.exp(-found[:, :-1].gather(2, following[..., None]).mean()))
        print("RESULT " + json.dumps([scheme, algorithm, perplexity, divergence, seconds]), flush=True)


if __name__ == "__main__":
    main()
