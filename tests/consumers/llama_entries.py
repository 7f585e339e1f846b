"""Every entry of a configuration changed in turn, in every architecture, by llama.cpp: right, or refused before a file.

    python tests/consumers/llama_entries.py --judge FOLDER [--types llama,qwen3]

FOLDER as for ``llama_table.py``. Small random models of float32, as ``llama_rope.py`` has them; an entry that changes
no answer of transformers is passed over. A line a change: the relative error of log probabilities at the median
position, the sentence of the refusal, or **no**. The exit code is 1 where there is a **no**.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
IDS = list(range(5, 45))
KEPT = (  # parts of names of entries that stay: sizes of ``tiny``, what training reads, what other judges change
    "dropout", "pdrop", "initializer", "coef", "output_", "return_", "use_cache", "token_id", "pretraining", "tie_word",
    "vocab_size", "hidden_size", "num_hidden_layers", "n_embd", "n_layer", "n_positions", "max_position", "max_seq",
    "architectures", "version", "model_type", "dtype", "chunk_size", "is_encoder", "use_mamba", "use_associative",
    "rescale", "time_step_init", "residual_in", "num_attention_heads", "n_head", "d_model", "layer_types",
    "layers_block", "rope_parameters", "attn_implementation", "summary_", "num_logits", "jitter", "mtp_", "nextn",
)  # fmt: skip
FUNCTIONS = ("relu", "gelu", "silu", "gelu_new")


def main() -> int:
    """Go through types and entries."""
    import llama_rope
    import llama_table

    parser = llama_table.parser_of(__doc__)
    given = parser.parse_args()
    tiny, types = llama_table.begun()
    from quark.torch.export.gguf_table import ARCHITECTURES

    decoders = sorted(name for name, row in ARCHITECTURES.items() if name in types and not row.encoder)
    bad = False
    for name in given.types.split(",") if given.types else decoders:
        for entry, was, value, model in changed(tiny, name, types[name]):
            found = llama_rope.answered(model, name, IDS, given.judge)
            bad |= found.startswith("**no**")
            print(name, entry, was, value, found, sep="\t", flush=True)
    return int(bad)


def values_beside(name: str, value: Any) -> list[Any]:
    """Other values of an entry."""
    if name.startswith("_") or any(part in name for part in KEPT):
        return []
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [value * 2 + 0.05]
    if isinstance(value, int):
        return [value * 2 or 2, value - 1 if value > 1 else 1 - value]
    if isinstance(value, list) and value and all(isinstance(one, float) for one in value):
        return [[one * 2 + 0.05 for one in value]]
    if isinstance(value, str) and "act" in name:
        return [one for one in FUNCTIONS if one != value]
    if value is None and "bidirectional" in name:
        return [True, "all"]
    return [2.0] if value is None and any(part in name for part in ("clip", "cap", "factor", "scal")) else []


def changed(tiny: Any, name: str, cls: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """(entry, its value, another value, the model with it) of the changes that transformers answers otherwise."""
    base = tiny.tiny_model(name, cls)
    shapes, answer = shapes_of(base), answer_of(base)
    for entry, was in base.config.to_dict().items():
        for value in values_beside(entry, was):
            plain = tiny.tiny_config
            tiny.tiny_config = lambda one, two, more, key=entry, new=value, plain=plain: plain(
                one, two, {**more, key: new}
            )
            try:
                model = tiny.tiny_model(name, cls)
                if getattr(model.config, entry, None) != value:
                    continue
                found = answer_of(model)
            except (*tiny.FAULTS, ArithmeticError, AssertionError):  # transformers has no such model
                continue
            finally:
                tiny.tiny_config = plain
            if shapes_of(model) != shapes or float((found - answer).norm()) > 1e-6 * float(answer.norm()):
                yield entry, was, value, model


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model."""
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def answer_of(model: Any) -> Any:
    """What transformers answers."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([IDS])).logits


if __name__ == "__main__":
    sys.exit(main())
