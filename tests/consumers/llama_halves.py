"""Every architecture as a file of float16 or bfloat16, the types that commands write, by llama.cpp: it runs, and near.

    python tests/consumers/llama_halves.py --judge FOLDER [--types llama,qwen3] [--float BF16]

FOLDER as for ``llama_table.py``, whose files are of float32, which hides what llama.cpp cannot multiply otherwise. A
line a model type: the relative error of log probabilities at the median position, or **no**. The exit code is 1 where
there is a **no**.
"""

from __future__ import annotations

import sys

LIMIT = 0.05  # numbers and what they are multiplied by are rounded; bfloat16 has 8 bits of them


def main() -> int:
    """Go through all."""
    import llama_rope
    import llama_table

    parser = llama_table.parser_of(__doc__)
    parser.add_argument("--float", default="F16")
    given = parser.parse_args()
    tiny, types = llama_table.begun()
    from quark.torch.export.gguf_table import DECODERS

    decoders = [name for name in sorted(DECODERS) if llama_table.ends_in_words(types, name)]
    ids, bad = list(llama_table.TEXTS[0]), False
    for name in given.types.split(",") if given.types else decoders:
        model = tiny.tiny_model(name, types[name])
        found = llama_rope.answered(model, name, ids, given.judge, given.float, LIMIT)
        bad |= found.startswith("**no**")
        print(name, found, sep="\t", flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
