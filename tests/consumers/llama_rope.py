"""Every kind of rotary embedding in every architecture, by llama.cpp: right, or refused before a file is written.

    python tests/consumers/llama_rope.py --judge FOLDER [--types llama,qwen3] [--kinds yarn;llama3]

FOLDER as for ``llama_table.py``. Small random models of float32, so that nothing but the network can differ. A line a
model type and kind: the relative error of log probabilities at the median position, the sentence of the refusal, or
**no**. The exit code is 1 where there is a **no**.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
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
LONG = {"short": 64, "long": 8}
LIMIT = 0.001


def main() -> int:
    """Go through both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", required=True)
    parser.add_argument("--types", default="")
    parser.add_argument("--kinds", default="")
    given = parser.parse_args()
    sys.path.insert(0, str(HERE))
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    import llama_table
    import tiny

    from quark.torch.export.gguf_table import ARCHITECTURES

    llama_table.widen(tiny)
    types = dict(tiny.model_types())
    bad = False
    for name in given.types.split(",") if given.types else sorted(set(ARCHITECTURES) & set(types)):
        for kind in given.kinds.split(";") if given.kinds else KINDS:
            found = cell(tiny, name, types[name], KINDS[kind], given.judge)
            bad |= found.startswith("**no**")
            print(name, kind, found, sep="\t", flush=True)
    return int(bad)


def cell(tiny: Any, name: str, cls: str, rope: dict[str, Any], judge: str) -> str:
    """One model."""
    more = {"rope_parameters": {"rope_theta": 1e4, **rope}, "max_position_embeddings": 256}
    if rope["rope_type"] == "longrope":  # a head of 64 numbers, or the part of one
        pairs = range(16 if name == "minicpm3" else 32)
        factors = {f"{kind}_factor": [1 + number / size for number in pairs] for kind, size in LONG.items()}
        more["rope_parameters"] |= factors
    plain, ids = tiny.tiny_config, list(range(5, 125))
    tiny.tiny_config = lambda name, cls, given: plain(name, cls, {**given, **more})
    try:
        model = tiny.tiny_model(name, cls)
    except ValueError as error:
        return f"not built: {error}"[:100]
    finally:
        tiny.tiny_config = plain
    return answered(model, name, ids, judge)


def answered(model: Any, name: str, ids: list[int], judge: str) -> str:
    """The error of llama.cpp's answers to a model's file, or why there are none.

    Args:
        model: of the type ``name``.
        ids: tokens that both answer.
        judge: the folder that xllamacpp is installed in.
    """
    import llama_table

    from quark.errors import QuarkError
    from quark.torch.export.api import export_gguf

    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        llama_table.add_tokenizer(folder)
        try:
            export_gguf(model, folder / "made", name, folder, weight_type="F32", float_type="F32")
        except QuarkError as error:
            return f"refused: {error}"
        (folder / "ids.json").write_text(json.dumps(ids))
        command = [sys.executable, str(HERE / "llama_judge.py"), str(next((folder / "made").glob("*.gguf")))]
        told = subprocess.run(
            [*command, str(folder / "ids.json")],
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": judge}, check=False,
        )  # fmt: skip
    lines = [line for line in told.stdout.splitlines() if line.startswith("{")]
    why = next((line for line in told.stderr.splitlines() if "rror" in line or "ASSERT" in line), told.stderr[-120:])
    return error_of(model, ids, json.loads(lines[-1])) if lines else f"**no**: {why}"


def error_of(model: Any, ids: list[int], told: dict[str, Any]) -> str:
    """The error at the median position, with llama.cpp's table of GELU."""
    import llama_table
    import torch
    from llama_rounding import compute_as_llama

    model = copy.deepcopy(model)
    compute_as_llama(model, {})
    answers = {place: dict(found) for place, found in enumerate(told["logprobs"], len(ids) - len(told["logprobs"]))}
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    middle = float(torch.tensor(llama_table.errors_of(answers, wanted)).median())
    return f"{middle:.0e}" if middle <= LIMIT else f"**no**: {middle:.0e}"


if __name__ == "__main__":
    sys.exit(main())
