"""Every kind of rotary embedding in every architecture, by llama.cpp: right, or refused before a file is written.

    python tests/consumers/llama_rope.py --judge FOLDER [--types llama,qwen3] [--kinds yarn;llama3]

FOLDER as for ``llama_table.py``. Small random models of float32, so that nothing but the network can differ. A line a
model type and kind: the relative error of log probabilities at the median position, the sentence of the refusal, or
**no**. The exit code is 1 where there is a **no**.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
KINDS: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 5e5},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
    "longrope, long": {"rope_type": "longrope", "original_max_position_embeddings": 32},
    "longrope, short": {"rope_type": "longrope", "original_max_position_embeddings": 256, "factor": 2.0},
    "yarn": YARN,
    "yarn, no length": {"rope_type": "yarn", "factor": 8.0},
    "yarn, beta": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn, whole": {**YARN, "truncate": False},
    "yarn, mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn, both": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, attention": {**YARN, "attention_factor": 1.3},
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LOCAL = "local "  # of layers that see a window, where these have an embedding of their own
KINDS |= {f"{LOCAL}{kind}": KINDS[kind] for kind in ("theta", "partial", "linear", "yarn")}
LONG = {"short": 64, "long": 8}
LIMIT = 0.001


def main() -> int:
    """Go through both."""
    import llama_table

    parser = llama_table.parser_of(__doc__)
    parser.add_argument("--kinds", default="")
    given = parser.parse_args()
    tiny, types = llama_table.begun()
    from quark.torch.export.gguf_table import ARCHITECTURES

    bad = False
    for name in given.types.split(",") if given.types else sorted(set(ARCHITECTURES) & set(types)):
        for kind in given.kinds.split(";") if given.kinds else KINDS:
            if kind.startswith(LOCAL) and not by_layer(name):
                continue
            found = cell(tiny, name, types[name], kind, given.judge)
            bad |= found.startswith("**no**")
            print(name, kind, found, sep="\t", flush=True)
    return int(bad)


def by_layer(name: str) -> bool:
    """Whether layers of a model type that see a window have an embedding of their own."""
    from transformers import CONFIG_MAPPING

    return "sliding_attention" in (getattr(CONFIG_MAPPING[name](), "rope_parameters", None) or {})


def cell(tiny: Any, name: str, cls: str, kind: str, judge: str) -> str:
    """One model."""
    rope = KINDS[kind]
    more: dict[str, Any] = {"rope_parameters": {"rope_theta": 1e4, **rope}, "max_position_embeddings": 256}
    if rope["rope_type"] == "longrope":  # a head of 64 numbers, or the part of one
        pairs = range(16 if name == "minicpm3" else 32)
        factors = {f"{kind}_factor": [1 + number / size for number in pairs] for kind, size in LONG.items()}
        more["rope_parameters"] |= factors
    if by_layer(name):
        both = (PLAIN, more["rope_parameters"]) if kind.startswith(LOCAL) else (more["rope_parameters"], PLAIN)
        more["rope_parameters"] = dict(zip(("full_attention", "sliding_attention"), both, strict=True))
    plain, ids = tiny.tiny_config, list(range(5, 125))
    tiny.tiny_config = lambda name, cls, given: plain(name, cls, {**given, **more})
    try:
        model = tiny.tiny_model(name, cls)
    except ValueError as error:
        return f"not built: {error}"[:100]
    finally:
        tiny.tiny_config = plain
    return answered(model, name, ids, judge)


def answered(model: Any, name: str, ids: list[int], judge: str, kind: str = "F32", limit: float = LIMIT) -> str:
    """The error of llama.cpp's answers to a model's file, or why there are none.

    Args:
        model: of the type ``name``.
        ids: tokens that both answer.
        judge: the folder that xllamacpp is installed in.
        kind: the type of the file's numbers.
        limit: the largest error that is right.
    """
    import llama_table

    from quark.errors import QuarkError
    from quark.torch.export.api import export_gguf

    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        llama_table.add_tokenizer(folder)
        try:
            export_gguf(model, folder / "made", name, folder, weight_type=kind, float_type=kind)
        except QuarkError as error:
            return f"refused: {error}"
        told = llama_table.told_by(next((folder / "made").glob("*.gguf")), ids, folder, judge)
    return f"**no**: {told}" if isinstance(told, str) else error_of(model, ids, told, limit)


def error_of(model: Any, ids: list[int], told: dict[str, Any], limit: float) -> str:
    """The error at the median position, with llama.cpp's table of GELU."""
    import llama_table
    import torch
    from llama_rounding import compute_as_llama

    model = copy.deepcopy(model)
    compute_as_llama(model, {})
    middle = float(torch.tensor(llama_table.of_all(model, ids, told)).median())
    return f"{middle:.0e}" if middle <= limit else f"**no**: {middle:.0e}"


if __name__ == "__main__":
    sys.exit(main())
