"""What transformers makes of our AWQ and GPTQ files with gptqmodel: small random models of float16, read and compared.

    python tests/consumers/gptqmodel_table.py --packages FOLDER... [--types llama,mixtral]

The folders hold gptqmodel and optimum, with what they import (``pip install --no-deps --target``; gptqmodel from its
source archive, which needs no building on a CPU). Every model type that transformers has a causal language model for
is built; written to ``docs/results/gptqmodel.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib.metadata
import io
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "results" / "gptqmodel.md"
SCHEME, FORMATS, LIMIT, LONG = "int4_wo_32", ("gptq", "awq"), 5e-3, 200
HEAD = """# What transformers makes of AWQ and GPTQ files

Written by `tests/consumers/gptqmodel_table.py`. Small random models of transformers' registry of causal language
models, in float16, quantized with `{scheme}` for transformers, loaded there with gptqmodel {gptqmodel} and optimum
{optimum} on a CPU, and asked for logits (relative error to our own import, their mean removed; right within {limit},
since the kernels round to float16 on their way). *refused* is our own sentence, before any work. `xlnet`
in float16 does not run once transformers has loaded it, quantized or not; nor do `deberta`
and `mra`, which are not here.
"""


def main() -> None:
    """Go through all, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="+", required=True)
    parser.add_argument("--types", default="")
    given = parser.parse_args()
    sys.path[:0] = [str(HERE)]
    sys.path += given.packages
    warnings.simplefilter("ignore")
    import tiny
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    logging.disable(logging.CRITICAL)
    found: dict[str, dict[str, str]] = {}
    for name in given.types.split(",") if given.types else list(CAUSAL):
        try:
            model = tiny.tiny_model(name, CAUSAL[name]).half()
        except Exception as error:
            print(name, "not built", str(error)[:LONG], file=sys.stderr)
            continue
        found[name] = {form: cell(tiny, copy.deepcopy(model), form) for form in FORMATS}
        print(name, *found[name].values(), sep="\t", file=sys.stderr, flush=True)
        gc.collect()
    if not given.types:
        PAGE.write_text(page(found), encoding="utf-8")


def cell(tiny: Any, model: Any, form: str) -> str:
    """A model type in a format: its error, or why there is none."""
    import torch
    from cell import difference

    from quark.errors import QuarkError
    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.export.before_work import check_before_work
    from quark.torch.export.write_as import config_for, export_as
    from quark.torch.files.foreign import quantized_model

    inputs = tiny.inputs_of(model)
    with tempfile.TemporaryDirectory() as path, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(path) / "made"
        try:
            config = config_for(LLMTemplate.for_model(model).get_config(SCHEME), form, "transformers", torch.float16)
            check_before_work(model, config, form, "transformers", Path(path))
            quantized = ModelQuantizer(config).quantize_model(model, [inputs])
            export_as(quantized, folder, form, path, program="transformers")
        except QuarkError as error:
            return f"refused: {error}"
        try:
            loaded, left = type(model).from_pretrained(folder, dtype="auto", output_loading_info=True)
            error = difference(tiny.answer(loaded.eval(), inputs), tiny.answer(quantized_model(folder), inputs))
        except Exception as error:
            return f"crash: {type(error).__name__}: {error}"
    unread = next((f"{kind} {sorted(map(str, keys))[0]}" for kind, keys in left.items() if keys), "")
    return f"right: {error:.0e}" if error <= LIMIT and not unread else f"**no**: {error:.0e} {unread}"


def page(found: dict[str, dict[str, str]]) -> str:
    """The page of documents."""
    versions = {name: importlib.metadata.version(name) for name in ("gptqmodel", "optimum")}
    lines = [HEAD.format(scheme=SCHEME, limit=LIMIT, **versions)]
    lines += ["| model type | gptq | awq |", "|---|---|---|"]
    whys = []
    for name, cells in found.items():
        told = [text.replace(": ", " (", 1) + ")" if text.startswith(("right", "**no**")) else text.partition(":")[0]
                for text in cells.values()]  # fmt: skip
        lines.append(f"| `{name}` | {' | '.join(told)} |")
        whys += [f"- `{name}`, {form}: {' '.join(text.split())[:LONG]}" for form, text in cells.items()
                 if not text.startswith("right")]  # fmt: skip
    return "\n".join([*lines, "", "## What is not right", "", *whys, ""])


if __name__ == "__main__":
    main()
