"""What onnxruntime-genai makes of our graphs: small random models with int4 weights, run, compared, and written down.

    python tests/consumers/genai_table.py [--types llama,mixtral]

Every model type that transformers has a causal language model for is built, the ones that genai's own builder knows
first; what is refused before any work is told by its sentence. Written to ``docs/results/genai.md``.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "results" / "genai.md"
SCHEME, STEPS, LIMIT, LONG = "int4_wo_32", 12, 1e-3, 200
NEVER = 127  # a token that ends nothing
HEAD = """# What onnxruntime-genai makes of our graphs

Written by `tests/consumers/genai_table.py`. Small random models of transformers' registry of causal language models,
quantized with `{scheme}` for onnxruntime-genai {version}, loaded there and asked for the logits behind a text of 24
tokens (relative error to the model in memory, their mean removed; right within {limit}) and for the {steps} tokens that
follow greedily (fewer where the text ends), which must be the same. *builder*: the program's own model builder knows
the type. *refused* is our own sentence, before any work.
"""


def main() -> None:
    """Write the graphs, let the program run them, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="")
    given = parser.parse_args()
    sys.path.insert(0, str(HERE))
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    import tiny
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    known = builder_knows()
    chosen = given.types.split(",") if given.types else [name for name, cls in CAUSAL.items() if cls in known]
    found = {}
    for name in chosen:
        found[name] = (CAUSAL[name] in known, cell(tiny, name, CAUSAL[name]))
        print(name, *found[name], flush=True)
        gc.collect()
    if not given.types:
        PAGE.write_text(page(found), encoding="utf-8")


def builder_knows() -> set[str]:
    """Classes of transformers that genai's model builder asks for by name."""
    import importlib.util
    import re

    spec = importlib.util.find_spec("onnxruntime_genai")
    assert spec is not None and spec.origin is not None
    text = (Path(spec.origin).parent / "models" / "builder.py").read_text(encoding="utf-8")
    return set(re.findall(r"architectures\[0\] == \"(\w+)\"", text))


def cell(tiny: Any, name: str, cls: str) -> dict[str, Any] | str:
    """A model type."""
    from quark.errors import QuarkError

    try:
        model = tiny.tiny_model(name, cls)
    except Exception as error:
        return f"not built: {error}"[:LONG]
    with tempfile.TemporaryDirectory() as folder:
        try:
            quantized = written(tiny, copy.deepcopy(model), Path(folder))
        except QuarkError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"crash: {type(error).__name__}: {error}"
        try:
            return run(quantized, tiny.inputs_of(model)["input_ids"][:1], Path(folder) / "out")
        except Exception as error:
            return f"genai: {type(error).__name__}: {error}"


def written(tiny: Any, model: Any, folder: Path) -> Any:
    """Quantize a model and write its graph; the model is given back."""
    from quark.config.file_formats import check_formats
    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.export.before_work import check_before_work
    from quark.torch.export.write_as import export_as

    check_formats([SCHEME], "onnx", "onnxruntime-genai")
    config = LLMTemplate.for_model(model).get_config(SCHEME)
    check_before_work(model, config, "onnx", "onnxruntime-genai", folder)
    quantized = ModelQuantizer(config).quantize_model(model, [tiny.inputs_of(model)])
    for settings in (quantized.config, quantized.generation_config):
        settings.eos_token_id = NEVER
    export_as(quantized, folder / "out", "onnx", folder, program="onnxruntime-genai")
    return quantized


def run(model: Any, ids: Any, folder: Path) -> dict[str, Any]:
    """The program's logits and tokens against the model's."""
    import numpy as np
    import onnxruntime_genai as genai
    import torch

    program = genai.Model(str(folder))
    settings = genai.GeneratorParams(program)
    settings.set_search_options(max_length=ids.shape[1] + STEPS, do_sample=False, repetition_penalty=1.0)
    generator = genai.Generator(program, settings)
    generator.append_tokens(ids.numpy().astype(np.int32))
    logits = torch.from_numpy(np.asarray(generator.get_logits()))[0, -1].double()
    while not generator.is_done():
        generator.generate_next_token()
    tokens = [int(token) for token in generator.get_sequence(0)[ids.shape[1] :]]
    text = ids
    with torch.no_grad():
        wanted = model(ids).logits[0, -1].double()
        for _ in tokens:
            text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    logits, wanted = logits - logits.mean(), wanted - wanted.mean()
    error = float((logits - wanted).norm() / wanted.norm())
    same = sum(a == b for a, b in zip(tokens, text[0, ids.shape[1] :].tolist(), strict=True))
    return {"right": error <= LIMIT and same == len(tokens), "error": error, "same": f"{same} of {len(tokens)}"}


def page(found: dict[str, tuple[bool, dict[str, Any] | str]]) -> str:
    """The page of documents."""
    import importlib.metadata

    version = importlib.metadata.version("onnxruntime-genai")
    lines = [HEAD.format(scheme=SCHEME, version=version, limit=LIMIT, steps=STEPS)]
    lines += ["| model type | builder | is | logits | same tokens |", "|---|---|---|---|---|"]
    whys = []
    for name, (known, value) in found.items():
        said = "yes" if known else "no"
        if isinstance(value, str):
            lines.append(f"| `{name}` | {said} | {value.partition(':')[0]} | | |")
            whys.append(f"- `{name}`: {' '.join(value.split())[:LONG]}")
        else:
            word = "right" if value["right"] else "**no**"
            lines.append(f"| `{name}` | {said} | {word} | {value['error']:.0e} | {value['same']} |")
    return "\n".join([*lines, "", "## What is not run", "", *whys, ""])


if __name__ == "__main__":
    main()
