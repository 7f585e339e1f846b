"""What llama.cpp answers: log probabilities of all words behind parts of a text, and the words that it goes on with.

    python tests/consumers/llama_judge.py FILE.gguf IDS.json

One process a file, for llama.cpp ends its process where a file is wrong. IDS.json is a list of token ids; the answer is
one line of JSON. Keys and values of attention stay float32 and flash attention, which rounds them to float16, is off,
so that nothing but the network can differ.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.request import Request, urlopen

FIRST, STEPS = 8, 12  # the shortest part of the text; words that follow it


def asked(server: Any, **fields: Any) -> dict[str, Any]:
    """The answer to a request."""
    settings = {"temperature": 0, "return_tokens": True, "ignore_eos": True, "cache_prompt": False, **fields}
    request = Request(
        f"{server.listening_address}/completion", json.dumps(settings).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def main(path: str, ids: list[int]) -> None:
    """Print {"logprobs": [[[id, logprob], ..], ..] behind every part of ``ids``, "tokens": the words that follow}."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.n_ctx, parameters.n_parallel, parameters.cpuparams.n_threads = 256, 1, 1
    parameters.warmup = False
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(parameters)
    parts = []
    for length in range(FIRST, len(ids) + 1):
        told = asked(server, prompt=ids[:length], n_predict=1, n_probs=1000)
        steps = told.get("completion_probabilities") or [{"top_logprobs": []}]
        parts.append([[entry["id"], entry["logprob"]] for entry in steps[0]["top_logprobs"]])
    more = asked(server, prompt=ids, n_predict=STEPS)
    print(json.dumps({"logprobs": parts, "tokens": more["tokens"]}), flush=True)


if __name__ == "__main__":
    with open(sys.argv[2], encoding="utf-8") as file:
        main(sys.argv[1], json.load(file))
