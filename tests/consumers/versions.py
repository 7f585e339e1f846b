"""Our folders in an older transformers, or a newer one: one row of the table in ``docs/results/transformers.md``.

    PYTHONPATH=FOLDER OF THAT TRANSFORMERS:src python tests/consumers/versions.py

Six kinds of models, four schemes in our format, two in compressed-tensors. Everything is
written and read by the transformers of the environment.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from quark.errors import QuarkError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.export.write_as import config_for, export_as

SIZES = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2}
HEADS = {**SIZES, "intermediate_size": 256, "num_attention_heads": 4}
DECODER = {**HEADS, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", DECODER),
    "Mixtral": ("ForCausalLM", {**DECODER, "num_local_experts": 4}),
    "Qwen3Moe": ("ForCausalLM", {**DECODER, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}),
    "GptOss": ("ForCausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Bert": ("ForMaskedLM", HEADS),
    "Mamba": ("ForCausalLM", {**SIZES, "state_size": 8}),
}
FORMS = ("quark", "compressed-tensors")
CELLS = [
    *((one, "quark") for one in ("int4_wo_32", "fp8", "mxfp4", "nvfp4")),
    *((one, FORMS[1]) for one in ("int4_wo_32", "fp8")),
]
IDS = torch.randint(5, 250, (2, 40), generator=torch.Generator().manual_seed(1))


def main() -> None:
    """Print the row, and the cells that are neither right nor refused."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    cells = {
        (name, *cell): outcome(built(name, *row), *cell)
        for name, row in MODELS.items()
        if hasattr(transformers, f"{name}Config")
        for cell in CELLS
    }
    for key, told in cells.items():
        if told not in ("right", "refused"):
            print(*key, told)
    counts = [Counter(told.split()[0] for key, told in cells.items() if key[-1] == form) for form in FORMS]
    columns = (", ".join(f"{n} {kind}" for kind, n in sorted(count.items(), reverse=True)) for count in counts)
    print(f"| {transformers.__version__} | {' | '.join(columns)} |")


def built(name: str, head: str, sizes: dict[str, Any]) -> Any:
    """A small model whose every layer moves the answer."""
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}{head}")(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model.eval()


def outcome(model: Any, scheme: str, form: str) -> str:
    """Right, refused, or what is wrong."""
    try:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            source, made = Path(folder) / "source", Path(folder) / "made"
            model.save_pretrained(source)
            quantized = copy.deepcopy(model)
            config = config_for(
                LLMTemplate.for_model(quantized).get_config(scheme), form, "transformers", torch.float32
            )
            ModelQuantizer(config).quantize_model(quantized, [{"input_ids": IDS}])
            wanted = quantized(IDS)[0]
            export_as(quantized, made, form, source, program="transformers")
            found = type(model).from_pretrained(made, dtype=torch.float32)(IDS)[0]
    except QuarkError:
        return "refused"
    except Exception as error:
        return f"crashed {type(error).__name__}: {str(error)[:200]}"
    apart = float((found - wanted).norm() / (wanted - wanted.mean(-1, keepdim=True)).norm())
    return "right" if apart < 1e-3 else f"wrong {apart:.2g}"


if __name__ == "__main__":
    main()
