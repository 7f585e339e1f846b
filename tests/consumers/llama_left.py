"""Why no file is written for an architecture of the ``gguf`` package: a line each.

``test_llama_left.py`` goes through the package's own list, so that an architecture which a new version brings is asked
for, and through transformers' registry, so that a model which it gains is.
"""

from __future__ import annotations

NO_MODEL = "transformers has no model of it: its code comes with checkpoints"
OPEN = "llama.cpp loads it, and no row was made and compared yet"
WITHOUT_MODEL = (
    "arctic", "arwkv7", "baichuan", "bailingmoe", "bailingmoe2", "codeshell", "cogvlm", "deci", "deepseek", "dream",
    "exaone", "grok", "grovemoe", "internlm2", "jais", "jina-bert-v2", "llada", "llada-moe", "maincoder", "minicpm",
    "neo-bert", "nomic-bert-moe", "openelm", "orion", "pangu-embedded", "plamo", "plamo2", "plamo3", "plm", "qwen",
    "refact", "rnd1", "rwkv6", "rwkv6qwen2", "rwkv7", "smallthinker", "xverse",
)  # fmt: skip
LEFT = {
    **dict.fromkeys(WITHOUT_MODEL, NO_MODEL),
    "clip": "no language model: encoders of pictures and sounds, which llama.cpp has in a file of their own (mmproj)",
    "wavtokenizer-dec": "no language model: a decoder of sounds, and transformers has no model of it",
    "gptj": "llama.cpp has no graph of it (`unsupported model architecture: 'gptj'`)",
    "bitnet": "llama.cpp computes another network: SiLU, where BitNet has the square of ReLU (0.3)",
    "phimoe": "llama.cpp computes another network: its router is no SparseMixer (0.6)",
    "llama-embed": "a Llama that looks both ways, which transformers has as code of checkpoints",
    "nemotron_h": "written as `nemotron_h_moe`, which llama.cpp reads without experts too",
    "deepseek2-ocr": f"{OPEN}: transformers has its language model within `deepseek_ocr2` only",
    "chameleon": "llama.cpp gives the words 4 to 8195, of pictures, no probability: its answers are others by intent",
    "dbrx": (
        f"{OPEN}: the experts of a layer are one matrix, which stays float here, 97 % of the weights; and transformers "
        "makes none with its own defaults"
    ),
    "step35": f"{OPEN}: transformers has it within `step3p7` only, with other counts of heads in layers with a window",
    "t5": (
        "llama.cpp's server ends its process (`llama_encode must be called first`), so no answer can be compared; the "
        "encoder alone is written (`t5encoder`)"
    ),
}
