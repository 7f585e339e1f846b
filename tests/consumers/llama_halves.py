"""Every architecture as a file of float16 or bfloat16, the types that commands write, by llama.cpp: it runs, and near.

    python tests/consumers/llama_halves.py --judge FOLDER [--types llama,qwen3] [--float BF16]

FOLDER as for ``llama_table.py``, whose files are of float32, which hides what llama.cpp cannot multiply otherwise. A
line a model type: the relative error of log probabilities at the median position, or **no**. The exit code is 1 where
there is a **no**.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path

HERE = Path(__file__).parent
LIMIT = 0.05  # numbers and what they are multiplied by are rounded; bfloat16 has 8 bits of them


def main() -> int:
    """Go through all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", required=True)
    parser.add_argument("--types", default="")
    parser.add_argument("--float", default="F16")
    given = parser.parse_args()
    sys.path.insert(0, str(HERE))
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    import llama_table
    import tiny
    import torch

    from quark.torch.export.api import export_gguf
    from quark.torch.export.gguf_table import DECODERS

    llama_table.widen(tiny)
    types, ids, bad = dict(tiny.model_types()), list(llama_table.TEXTS[0]), False
    decoders = [name for name in sorted(DECODERS) if llama_table.ends_in_words(types, name)]
    for name in given.types.split(",") if given.types else decoders:
        model = tiny.tiny_model(name, types[name])
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            llama_table.add_tokenizer(folder)
            export_gguf(model, folder / "made", name, folder, weight_type=given.float, float_type=given.float)
            told = llama_table.told_by(next((folder / "made").glob("*.gguf")), ids, folder, given.judge)
        error = told if isinstance(told, str) else float(torch.tensor(llama_table.of_all(model, ids, told)).median())
        right = isinstance(error, float) and error <= LIMIT
        bad |= not right
        print(name, f"{error:.0e}" if right else f"**no**: {error}", sep="\t", flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
