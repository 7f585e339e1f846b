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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "results" / "llama_cpp.md"
VOCABULARY = 300
WIDER = {16: 64, 32: 64, 64: 256, 128: 512}  # sizes of ``tiny``: blocks of K-quants have 256 numbers
SMALL = re.compile("chunk|image|patch|state_size")  # which stay
SCHEMES = {"F32": "", "Q8_0": "int8_wo_per_channel", "Q4_0": "int4_wo_32", "Q4_K": "Q4_K"}
EXACT = 0.0001  # of log probabilities, their mean removed, where nothing is rounded that is seen
TYPICAL = 0.5  # of what rounding costs: some numbers lie between two codes and fall the other way by a last bit
TEXTS = (range(5, 45), range(45, 85), range(85, 125))  # words
SHARE = 0.9  # of the positions are within all of that; a router's near tie falls the other way at single ones
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
FOURTH = {"num_hidden_layers": 4, "layer_types": [SLIDING, SLIDING, SLIDING, FULL]}
DELTA = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + [FULL], "linear_num_value_heads": 8}
LLAMA4: dict[str, Any] = {
        "num_hidden_layers": 4, "layer_types": ["chunked_attention"] * 3 + [FULL], "attention_chunk_size": 8192,
        "no_rope_layers": [1, 1, 1, 0], "moe_layers": None,
    }  # fmt: skip
SLIDES: dict[str, Any] = {"num_hidden_layers": 6, "layer_types": [SLIDING, SLIDING, FULL] * 2}
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
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"]},
    "mistral4": {"head_dim": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64},
    "granitemoeshared": {"shared_intermediate_size": 256},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 256},
    "exaone_moe": {**FOURTH, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "afmoe": {**FOURTH, "mup_enabled": True},
    **dict.fromkeys(("llama4", "llama4_text"), LLAMA4),
    "gemma3n_text": {
        "num_hidden_layers": 5, "layer_types": [SLIDING] * 4 + [FULL], "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.95] * 5, "laurel_rank": 64, "hidden_size_per_layer_input": 256,
        "intermediate_size": 512, "vocab_size_per_layer_input": 250,
    },
    "gemma4_text": {**SLIDES, "sliding_window": 16, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    "glm_moe_dsa": {"mlp_layer_types": ["dense", "sparse"], "q_lora_rank": 256, "kv_lora_rank": 256},
    "kimi_linear": {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", FULL],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "linear_num_heads": 4, "linear_head_dim": 64,
        "num_key_value_heads": 4, "kv_lora_rank": 256,
    },
    "mimo_v2_flash": {
        "num_hidden_layers": 4, "layer_types": [FULL, SLIDING, SLIDING, FULL], "head_dim": 128, "v_head_dim": 64,
        "attention_value_scale": 0.5,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    },
    "falcon_h1": {  # powers of two: others round scales to float16 once more, of which the text speaks
        "embedding_multiplier": 4.0, "lm_head_multiplier": 0.25, "mlp_multipliers": [0.5, 0.25],
        "key_multiplier": 0.5, "attention_in_multiplier": 2.0, "attention_out_multiplier": 0.5,
        "ssm_in_multiplier": 2.0, "ssm_out_multiplier": 0.5, "ssm_multipliers": [0.25, 0.5, 0.125, 0.5, 0.25],
    },
    "nemotron_h": {"layer_types": ["linear_attention", "moe", FULL, "moe"], "time_step_min": 1e-9},
    "qwen2_vl_text": {"rms_norm_eps": 1e-6},
    "qwen2_5_vl_text": {"rms_norm_eps": 1e-6},
    "lfm2": {"layer_types": ["conv", FULL]},
    "lfm2_moe": {"layer_types": ["conv", FULL]},
    "qwen3_next": DELTA,
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"), DELTA),
    "deepseek_v3": {
        "n_group": 2, "q_lora_rank": 256, "kv_lora_rank": 256,
        "rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}  # fmt: skip
HEAD = """# What llama.cpp makes of our files

Written by `tests/consumers/llama_table.py`. Small random models, two decoder layers or one period of them, {count}
of transformers' registry; each is written as GGUF, loaded by llama.cpp (xllamacpp {version}) and asked for the log
probabilities of all {words} words behind 33 parts of a text and for the 12 words that follow.

Before a product with a quantized weight llama.cpp rounds the other factor to 8 bits (`Q8_0`, `Q8_K`). That is its
arithmetic, not the file's, so the first number of a cell compares with the model in memory whose linear layers round
what they read in the same way (`tests/consumers/llama_rounding.py`): the relative error of the log probabilities, their
mean removed, at the median position. The second number is the distance to the model that rounds no activations, the one
that was evaluated: what llama.cpp's arithmetic costs this small random model. A few of all numbers lie between two
codes and fall the other way by a last bit, so the first number is at most half of the second, and nine of ten positions
are within the second (or within {exact}). More of them fall the other way where networks are deeper: a cell that is not
within those bounds is asked two other texts, is right if it is in both, and then marked `again`. Of 48 texts
of 9 tokens (Llama, Qwen3, Gemma 3 of two layers; Q4_0, Q8_0; tied heads quantized too) 40 are answered within 2e-6, and
in each of the other eight (0.001 to 0.02) a number lies within 1e-4 of the middle of two codes; where one number of
Llama's was made to fall the other way, 0.007 became 5e-7. What is not quantized is F32.
Behind them the perplexity of the text there and here, and how many of the 12 words are the same.
**no** is anything else.

One tensor that is broken on purpose (`--broken scale`: one scale in every row; `nibbles`: 12 bytes of every row;
`rows`: two rows, or two experts, exchanged) turns every quantized cell of `llama`, `mixtral`, `granitemoe` and
`gemma3_text` into **no**.

Flash attention, which llama.cpp enables by default and which rounds to float16, is off here; with it the F32 column
has 0.001. Two more things are llama.cpp's own: GELU, that by tanh, from a table of float16 (up to 0.0004 in F32, second
number; Falcon, GPT-NeoX and MPT have that by erf), and YaRN with whole bounds for `gpt_oss`, whose configuration has
`truncate: false` (0.001).

Kinds of rotary embedding are asked by `tests/consumers/llama_rope.py`: plain, of a part of each head, `linear`,
`dynamic`, `llama3`, `proportional`, `longrope`, and `yarn` with other settings. What llama.cpp does not read in an
architecture (`llama3`, parts of heads), or has as a constant (bounds of `yarn`), is refused before anything is
written. Every other entry of a configuration is changed in turn by `tests/consumers/llama_entries.py`: llama.cpp
answers alike, or it is refused.

`nemotron_h` is asked with a `time_step_min` of 1e-9: transformers has that least step in a text but not in the words
that follow, llama.cpp nowhere (the published 0.001: 0.0002 to 0.0009).

Of the gates of `gemma3n_text` llama.cpp takes the deviation of a sample (0.004 here, where there are 512, second
number of F32; 8,192 and more are published). It is asked with five layers; with 25, of which the last five take keys
and values of others, F32 is within 0.0004 where norms of queries are a tenth.

`falcon_h1` is asked with multipliers that are powers of two: llama.cpp does not read them, so they go into scales,
and float16 rounds those once more where they are others (by 2^-11; F32 has any within 0.00001).

What is not quantized is written as float16 by the commands; `tests/consumers/llama_halves.py` asks such files.

Of a model that sees or hears the file holds the language model, and both are asked a text (`gemma3`, `llava`); norms of
Qwen2-VL have no epsilon in llama.cpp, so that it is refused above 1e-6 (0.0003, second number).

Of words that follow none that ends a text is taken there, so a model whose likeliest next word is `<|endoftext|>` goes
on with others (`mamba2`).
"""


def main() -> None:
    """Write the models, let llama.cpp answer, write the page."""
    parser = parser_of(__doc__)
    parser.add_argument("--broken", default="", choices=["", *BREAKS], help="break one tensor of every quantized file")
    parser.add_argument("--keep", type=Path, help="a JSON file of finished rows, which are not run again")
    given = parser.parse_args()
    tiny, types = begun()
    from quark.torch.export.gguf_table import ARCHITECTURES, DECODERS

    decoders = [name for name in sorted(DECODERS) if ends_in_words(types, name)]
    decoders += [name for name in types if name not in ARCHITECTURES and within(name) in DECODERS]
    wanted = given.types.split(",") if given.types else decoders
    kept = json.loads(given.keep.read_text()) if given.keep and given.keep.exists() else {}
    found = {}
    for name in wanted:
        found[name] = kept.get(name) or cells(tiny, name, types[name], given.judge, BREAKS.get(given.broken))
        print(name, found[name], flush=True)
        if given.keep:
            given.keep.write_text(json.dumps(found))
    if not given.types and not given.broken:
        PAGE.write_text(page(found, given.judge), encoding="utf-8")


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """The arguments of every judge."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", required=True)
    parser.add_argument("--types", default="")
    return parser


def begun() -> tuple[Any, dict[str, str]]:
    """``tiny`` with models that are wide enough, and the model types that it builds; libraries fall silent."""
    sys.path.insert(0, str(HERE))
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    import tiny

    widen(tiny)
    return tiny, dict(tiny.model_types())


def ends_in_words(types: Mapping[str, str], name: str) -> bool:
    """Whether a class of transformers that is no part of a larger one makes logits of a model type."""
    return "Text" not in types.get(name, "Text") and name in types


def within(name: str) -> str:
    """The model type of the language model in a larger one; empty: none."""
    from transformers import CONFIG_MAPPING

    from quark.torch.export.language_part import UNSCALED

    try:
        config = CONFIG_MAPPING[name]()
        text = config.get_text_config(decoder=True)
    except Exception:  # configurations without defaults raise what they will
        return ""
    alone = text is config or config.is_encoder_decoder or name in UNSCALED
    return "" if alone else str(text.model_type)


def widen(tiny: Any) -> None:
    """Models of ``tiny`` with rows that blocks of 256 divide, and room for a tokenizer."""
    rows = [
        (words, VOCABULARY if "vocab_size" in words else size if SMALL.search(words) else WIDER.get(size, size))
        for words, size in tiny.RULES
    ]
    tiny.PATTERNS = [(re.compile(rf"(.*_)?({words.replace(' ', '|')})"), size) for words, size in rows]
    tiny.HIDDEN, tiny.INNER, tiny.HEAD = (WIDER[size] for size in (tiny.HIDDEN, tiny.INNER, tiny.HEAD))
    tiny.ABSENT |= {"head_dim": tiny.HEAD, "vocab_size": VOCABULARY}
    within, plain = tiny.entry, tiny.tiny_config
    tiny.entry = lambda name, value, sees: published(within(name, value, sees))
    tiny.tiny_config = lambda name, cls, more: plain(name, cls, {**AS_PUBLISHED.get(name, {}), **more})


def published(value: Any) -> Any:
    """An entry of a configuration; one of the language model within as its kind is published."""
    return {**value, **AS_PUBLISHED.get(value["model_type"], {})} if model_type_in(value) else value


def model_type_in(value: Any) -> bool:
    """Whether an entry is a configuration."""
    return isinstance(value, dict) and "model_type" in value


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


def broken(path: Path, change: Callable[[Any], None]) -> None:
    """Change the bytes of one quantized tensor, the last that goes up in an MLP."""
    import gguf

    tensors = [one for one in gguf.GGUFReader(path, "r+").tensors if "ffn_up" in one.name]
    if tensors[-1].tensor_type.name not in ("F32", "F16"):
        change(tensors[-1].data)
        tensors[-1].data.flush()


def swap_nibbles(data: Any) -> None:
    """The two halves of the last 12 bytes of every row, which are codes in all of these types."""
    data[..., -12:] = (data[..., -12:] >> 4) | (data[..., -12:] << 4)


def double_scale(data: Any) -> None:
    """The first scale of every row, one exponent more."""
    data[..., 1] += 4


def exchange_rows(data: Any) -> None:
    """Two experts, or two neighbouring rows, exchanged."""
    data[:2] = data[:2][::-1].copy()


BREAKS = {"scale": double_scale, "nibbles": swap_nibbles, "rows": exchange_rows}


def cells(tiny: Any, name: str, cls: str, judge: str, change: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """The line of a model type."""
    try:
        model = tiny.tiny_model(name, cls)
    except ValueError as error:
        return {"F32": f"not built: {error}"}
    with tempfile.TemporaryDirectory() as folder:
        add_tokenizer(Path(folder))
        return {kind: cell(model, kind, Path(folder), judge, change) for kind in SCHEMES}


def cell(model: Any, kind: str, folder: Path, judge: str, change: Callable[[Any], None] | None) -> dict[str, Any] | str:
    """A model in a type: what llama.cpp answers against what is in memory; a sentence where it does not."""
    from quark.errors import QuarkError

    goal = folder / kind
    try:
        wanted, kinds = written(copy.deepcopy(model), kind, folder, goal)
    except QuarkError as error:
        return f"refused: {error}"
    path = next(goal.glob("*.gguf"))
    if change is not None:
        broken(path, change)
    asks = (asked(copy.deepcopy(wanted), kinds, list(text), path, folder, judge) for text in TEXTS)
    first = next(asks)
    if isinstance(first, str) or first["right"]:
        return first
    more = list(asks)
    return {**first, "again": True, "right": all(isinstance(one, dict) and one["right"] for one in more)}


def asked(model: Any, kinds: dict[str, str], ids: list[int], path: Path, folder: Path, judge: str) -> Any:
    """What llama.cpp answers to a text, against a model; a sentence where it does not."""
    told = told_by(path, ids, folder, judge)
    return told if isinstance(told, str) else compared(model, kinds, ids, told)


def told_by(path: Path, ids: list[int], folder: Path, judge: str) -> dict[str, Any] | str:
    """What llama.cpp answers to a text; a sentence where it does not."""
    (folder / "ids.json").write_text(json.dumps(ids))
    told = subprocess.run(
        [sys.executable, str(HERE / "llama_judge.py"), str(path), str(folder / "ids.json")],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": judge}, check=False,
    )  # fmt: skip
    lines = [line for line in told.stdout.splitlines() if line.startswith("{")]
    words = ("ASSERT", "unsupported", "rror")
    whys = (line for word in words for line in (told.stdout + told.stderr).splitlines() if word in line)
    return json.loads(lines[-1]) if lines else "llama.cpp: " + next(whys, told.stderr[-200:])


def of_all(model: Any, ids: list[int], told: dict[str, Any]) -> list[float]:
    """Errors of what was told to a model, of all positions."""
    import torch

    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return errors_of(answers_in(told, ids), wanted)


def answers_in(told: dict[str, Any], ids: list[int]) -> dict[int, dict[int, float]]:
    """Log probabilities of words by positions."""
    return {place: dict(found) for place, found in enumerate(told["logprobs"], len(ids) - len(told["logprobs"]))}


def written(model: Any, kind: str, folder: Path, goal: Path) -> tuple[Any, dict[str, str]]:
    """Write a model; give the one whose values the file holds, and the types of its linear layers."""
    import tiny

    from quark.config.file_formats import check_formats
    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.export.api import export_gguf
    from quark.torch.export.before_work import check_before_work
    from quark.torch.export.write_as import config_for
    from quark.torch.quantized_layer import quantized_layers

    name, scheme = model.config.model_type, SCHEMES[kind]
    if not scheme:
        export_gguf(model, goal, name, folder, weight_type=kind, float_type=kind)
        return model, {}
    check_formats([scheme], "gguf", "llama.cpp")
    config = LLMTemplate.for_model(model).get_config(scheme)
    check_before_work(model, config, "gguf", "llama.cpp", folder)
    config = config_for(config, "gguf", "llama.cpp", model.dtype)
    quantized = ModelQuantizer(config).quantize_model(model, [tiny.inputs_of(model)])
    lost = export_gguf(quantized, goal, name, folder, float_type="F32")
    layers = [name for name, _ in quantized_layers(quantized)]
    return quantized, {name: "F32" if f"{name}.weight" in lost.rescued else kind for name in layers}


def compared(model: Any, kinds: dict[str, str], ids: list[int], told: dict[str, Any]) -> dict[str, Any]:
    """Errors to llama.cpp's arithmetic and to what was evaluated, perplexities, words in common."""
    import torch
    from llama_rounding import compute_as_llama

    text = torch.tensor([ids])
    with torch.no_grad():
        evaluated = model(text).logits[0].float().log_softmax(-1)
        compute_as_llama(model, kinds)
        rounded = model(text).logits[0].float().log_softmax(-1)
        for _ in told["tokens"]:
            text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    answers = answers_in(told, ids)
    errors, cost = errors_of(answers, rounded), errors_of(answers, evaluated)
    following = {place: ids[place + 1] for place in answers if place + 1 < len(ids)}
    pairs = [(answers[place][word], float(evaluated[place, word])) for place, word in following.items()
             if word in answers[place]]  # fmt: skip
    middle, rounding = (float(torch.tensor(values).median()) for values in (errors, cost))
    limit = max(EXACT, rounding)
    within = sum(error <= limit for error in errors)
    return {
        "right": len(errors) >= 20 and within >= SHARE * len(errors) and middle <= TYPICAL * limit,
        "error": middle,
        "most": sorted(errors)[int(SHARE * len(errors))] if errors else float("nan"),
        "cost": rounding,
        "perplexity": torch.tensor(pairs).mean(0).neg().exp().tolist(),
        "same": sum(a == b for a, b in zip(told["tokens"], text[0, len(ids) :].tolist(), strict=True)),
    }


def errors_of(answers: dict[int, dict[int, float]], wanted: Any) -> list[float]:
    """Relative errors of log probabilities, their mean removed, of the positions with answers."""
    import torch

    errors = []
    for place, known in answers.items():
        if len(known) >= VOCABULARY // 2:
            there, here = torch.tensor(list(known.values())), wanted[place][list(known)]
            there, here = there - there.mean(), here - here.mean()
            errors.append(float((there - here).norm() / here.norm()))
    return errors


def text_of(value: dict[str, Any] | str) -> str:
    """A cell."""
    if isinstance(value, str):
        return value.partition(":")[0] if value.startswith("refused") else "**no**"
    there, here = value["perplexity"]
    body = f"{value['error']:.0e}, {value['cost']:.1g} ({there:.4g}, {here:.4g}; {value['same']})"
    return f"{'again: ' * value.get('again', False)}{body}" if value["right"] else f"**no**: {body}"


def page(found: dict[str, dict[str, Any]], judge: str) -> str:
    """The page of documents."""
    import importlib.metadata

    from gguf import MODEL_ARCH_NAMES
    from llama_left import LEFT

    versions = {one.name: one.version for one in importlib.metadata.distributions(path=[judge])}
    unbuilt = [name for name, row in found.items() if str(row["F32"]).startswith("not built")]
    found = {name: row for name, row in found.items() if name not in unbuilt}
    head = HEAD.format(count=len(found), version=versions["xllamacpp"], words=VOCABULARY, exact=EXACT)
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
    lines = [head, "| model type | " + " | ".join(SCHEMES) + " |", "|---" * (len(SCHEMES) + 1) + "|", *rows, ""]
    lines += ["## What is not read", "", *whys, ""] if whys else []
    lines += ["Not asked, for nobody makes small models of them here; their language models are of types in the table: "
              + ", ".join(f"`{name}`" for name in unbuilt) + ".", ""] if unbuilt else []  # fmt: skip
    lines += [
        "## What is not written", "",
        f"Of the {len(MODEL_ARCH_NAMES)} architectures of the `gguf` package those without a row in `gguf_table.py`, "
        "and why (`tests/consumers/llama_left.py`; a test goes through the package's list). A model type that would "
        "need one is refused before any work.", "", *(f"- `{name}`: {why}" for name, why in sorted(LEFT.items())), "",
    ]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
