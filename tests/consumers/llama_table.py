"""What llama.cpp makes of our files: small random models, written as GGUF, run, compared, and the page written.

    python tests/consumers/llama_table.py --judge FOLDER [--types llama,mixtral]

FOLDER is that of ``pip install --no-deps --target FOLDER xllamacpp`` (llama.cpp as a wheel). Every model type that
transformers has a causal language model for and that we have a row for is built; written to
``docs/results/llama_cpp.md``.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "results" / "llama_cpp.md"
VOCABULARY = 300
WIDER = {16: 64, 32: 64, 64: 256, 128: 512}  # sizes of ``tiny``: blocks of K-quants have 256 numbers
SMALL = re.compile("chunk|image|patch|state_size")  # which stay
SCHEMES = {"F32": "", "Q8_0": "int8_wo_per_channel", "Q4_0": "int4_wo_32", "Q4_K": ""}
LIMITS = {"F32": 0.01}  # of log probabilities, their mean removed; llama.cpp rounds activations to int8 for the others
ROUNDED = 0.1
SHARE = 0.9  # of the positions: a router's near tie falls the other way at single ones
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
FOURTH = {"num_hidden_layers": 4, "layer_types": [SLIDING, SLIDING, SLIDING, FULL]}
AS_PUBLISHED: dict[str, dict[str, Any]] = {  # where the class's defaults made small are no model that is published
    "cohere2": FOURTH,
    "olmo3": FOURTH,
    "smollm3": {"num_hidden_layers": 4, "layer_types": [FULL] * 4, "no_rope_layers": [1, 1, 1, 0]},
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3_text": {"query_pre_attn_scalar": 64, "num_hidden_layers": 6, "layer_types": [SLIDING] * 5 + [FULL]},
    "qwen3_moe": {"norm_topk_prob": True},
    "olmoe": {"num_key_value_heads": 4},
    "dots1": {"num_key_value_heads": 4, "n_shared_experts": 1, "sliding_window": None, "layer_types": [FULL] * 2},
    "exaone4": {"sliding_window": None, "layer_types": [FULL] * 2},
    "mistral": {"sliding_window": None},
    "ministral": {"sliding_window": 256},
    "ministral3": {
        "rope_parameters": {**YARN, "rope_theta": 1e6, "mscale": 1, "mscale_all_dim": 1, "llama_4_scaling_beta": 0.1}
    },
    "deepseek_v3": {"n_group": 2, "rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0}},
}
HEAD = """# What llama.cpp makes of our files

Written by `tests/consumers/llama_table.py`. Small random models, two decoder layers or one period of them, {count}
of transformers' registry; each is written as GGUF, loaded by llama.cpp (xllamacpp {version}) and asked for the log
probabilities of all {words} words behind 33 parts of a text and for the 12 words that follow. A cell is the relative
error of the log probabilities, their mean removed, to the model in memory whose values the file holds: the median
position; nine of ten are within {exact} (F32) or {rounded} (the others: llama.cpp rounds activations to int8). Behind
it the perplexity of the text there and here, and how many of the 12 words are the same. **no** is anything else.
"""


def main() -> None:
    """Write the models, let llama.cpp answer, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", required=True)
    parser.add_argument("--types", default="")
    given = parser.parse_args()
    sys.path.insert(0, str(HERE))
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    import tiny

    widen(tiny)
    from quark.torch.export.gguf_table import ARCHITECTURES

    types = dict(tiny.model_types())
    wanted = given.types.split(",") if given.types else sorted(set(ARCHITECTURES) & set(types))
    found = {}
    for name in wanted:
        found[name] = cells(tiny, name, types[name], given.judge)
        print(name, found[name], flush=True)
    if not given.types:
        PAGE.write_text(page(found, given.judge), encoding="utf-8")


def widen(tiny: Any) -> None:
    """Models of ``tiny`` with rows that blocks of 256 divide, and room for a tokenizer."""
    rows = [
        (words, VOCABULARY if "vocab_size" in words else size if SMALL.search(words) else WIDER.get(size, size))
        for words, size in tiny.RULES
    ]
    tiny.PATTERNS = [(re.compile(rf"(.*_)?({words.replace(' ', '|')})"), size) for words, size in rows]
    tiny.HIDDEN, tiny.INNER, tiny.HEAD = (WIDER[size] for size in (tiny.HIDDEN, tiny.INNER, tiny.HEAD))
    tiny.ABSENT |= {"head_dim": tiny.HEAD, "vocab_size": VOCABULARY}
    plain = tiny.tiny_config
    tiny.tiny_config = lambda name, cls, more: plain(name, cls, {**AS_PUBLISHED.get(name, {}), **more})


def add_tokenizer(folder: Path) -> None:
    """Byte-level BPE whose tokens are all whole letters, for llama.cpp tells no probabilities beside parts of one."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = [sign for sign in pre_tokenizers.ByteLevel.alphabet() if ord(sign) < 127] + ["Ġ", "Ċ"]
    special = ["<|endoftext|>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=295, special_tokens=special, initial_alphabet=alphabet)  # type: ignore[call-arg]
    text = (
        "the quick brown fox jumps over the lazy dog while quantized models answer questions about numbers and scales"
    )
    made.train_from_iterator([text] * 4, trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def cells(tiny: Any, name: str, cls: str, judge: str) -> dict[str, Any]:
    """The line of a model type."""
    try:
        model = tiny.tiny_model(name, cls)
    except ValueError as error:
        return {"F32": f"not built: {error}"}
    with tempfile.TemporaryDirectory() as folder:
        add_tokenizer(Path(folder))
        return {kind: cell(model, kind, Path(folder), judge) for kind in SCHEMES}


def cell(model: Any, kind: str, folder: Path, judge: str) -> dict[str, Any] | str:
    """A model in a type: what llama.cpp answers against what is in memory; a sentence where it does not."""
    from quark.errors import QuarkError

    goal, ids = folder / kind, list(range(5, 45))
    try:
        wanted = written(copy.deepcopy(model), kind, folder, goal)
    except QuarkError as error:
        return f"refused: {error}"
    path = next(goal.glob("*.gguf"))
    (folder / "ids.json").write_text(json.dumps(ids))
    told = subprocess.run(
        [sys.executable, str(HERE / "llama_judge.py"), str(path), str(folder / "ids.json")],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": judge}, check=False,
    )  # fmt: skip
    lines = [line for line in told.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return "llama.cpp: " + next((line for line in told.stderr.splitlines() if "rror" in line), told.stderr[-200:])
    return compared(wanted, ids, json.loads(lines[-1]), LIMITS.get(kind, ROUNDED))


def written(model: Any, kind: str, folder: Path, goal: Path) -> Any:
    """Write a model, and give the one whose values the file holds."""
    import tiny

    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.export.api import export_gguf
    from quark.torch.export.formats import check_formats
    from quark.torch.export.gguf_mix import take_values, types_of
    from quark.torch.export.gguf_model import taken_apart
    from quark.torch.export.write_as import check_experts, config_for, export_as

    name, scheme = model.config.model_type, SCHEMES[kind]
    if not scheme:
        apart = taken_apart(model)
        types = types_of(apart, {"*": kind}, [])  # as --gguf-type does: all linear layers but the output
        loss = export_gguf(model, goal, name, folder, layer_types=types, float_type="F32")
        take_values(apart, types, loss.rescued)
        return apart
    check_formats([scheme], "gguf", "llama.cpp")
    config = LLMTemplate.for_model(model).get_config(scheme)
    check_experts(model, config, "gguf", "llama.cpp", folder)
    config = config_for(config, "gguf", "llama.cpp", model.dtype)
    quantized = ModelQuantizer(config).quantize_model(model, [tiny.inputs_of(model)])
    export_as(quantized, goal, "gguf", folder, program="llama.cpp")
    return quantized


def compared(model: Any, ids: list[int], told: dict[str, Any], limit: float) -> dict[str, Any]:
    """Errors by position, perplexities, words in common."""
    import torch

    first = len(ids) + 1 - len(told["logprobs"])
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        text = torch.tensor([ids])
        for _ in told["tokens"]:
            text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    errors, surprise, mine = [], [], []
    for position, answers in enumerate(told["logprobs"], first - 1):
        known = dict(answers)
        if len(known) < VOCABULARY // 2:
            continue
        found, wanted = torch.tensor(list(known.values())), ours[position][list(known)]
        found, wanted = found - found.mean(), wanted - wanted.mean()
        errors.append(float((found - wanted).norm() / wanted.norm()))
        if position + 1 < len(ids) and ids[position + 1] in known:
            surprise.append(-known[ids[position + 1]])
            mine.append(-float(ours[position, ids[position + 1]]))
    near = sum(error <= limit for error in errors)
    same = sum(a == b for a, b in zip(told["tokens"], text[0, len(ids) :].tolist(), strict=True))
    worth = [float(torch.tensor(values).mean().exp()) for values in (surprise, mine)]
    right = len(errors) >= 20 and near >= SHARE * len(errors)
    return {"right": right, "error": float(torch.tensor(errors).median()), "perplexity": worth, "same": same}


def text_of(value: dict[str, Any] | str) -> str:
    """A cell."""
    if isinstance(value, str):
        return value.partition(":")[0] if value.startswith("refused") else "**no**"
    there, here = value["perplexity"]
    body = f"{value['error']:.1g} ({there:.4g}, {here:.4g}; {value['same']})"
    return body if value["right"] else f"**no**: {body}"


def page(found: dict[str, dict[str, Any]], judge: str) -> str:
    """The page of documents."""
    import importlib.metadata

    from gguf import MODEL_ARCH_NAMES

    from quark.torch.export.gguf_table import ARCHITECTURES

    versions = {one.name: one.version for one in importlib.metadata.distributions(path=[judge])}
    head = HEAD.format(
        count=len(found), version=versions["xllamacpp"], words=VOCABULARY, exact=LIMITS["F32"], rounded=ROUNDED
    )
    rows = [
        f"| `{name}` | " + " | ".join(text_of(row.get(kind, "")) for kind in SCHEMES) + " |"
        for name, row in found.items()
    ]
    whys = [
        f"- `{name}` {kind}: {value}"
        for name, row in found.items()
        for kind, value in row.items()
        if isinstance(value, str)
    ]
    left = sorted(set(MODEL_ARCH_NAMES.values()) - {row.name for row in ARCHITECTURES.values()} - {"clip"})
    lines = [head, "| model type | " + " | ".join(SCHEMES) + " |", "|---" * (len(SCHEMES) + 1) + "|", *rows, ""]
    lines += ["## What is not read", "", *whys, ""] if whys else []
    lines += [
        "## What is not written", "",
        "Names of the `gguf` package without a row in `gguf_table.py`; a model type that would need one is refused "
        "before any work, with the types that can be written: " + ", ".join(f"`{name}`" for name in left) + ".", "",
    ]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
