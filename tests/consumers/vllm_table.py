"""What vLLM reads of what is written for it: models exported with ``program="vllm"``, judged, and the page written.

    python tests/consumers/vllm_table.py FOLDER --python PYTHON [--types llama,mixtral] [--schemes fp8] [--caches fp8]

PYTHON is that of an environment with vLLM 0.33 (installed without its dependencies) beside the torch of this project;
``AMD_QUARK`` is the folder of ``pip install --no-deps --target FOLDER amd-quark``, whose arithmetic vLLM's emulation of
MXFP4 and MXFP6 calls. Small random models in bfloat16; written to ``docs/results/vllm.md``.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "results" / "vllm.md"
TYPES = "llama,qwen3,gemma3_text,mixtral,qwen3_moe,phimoe,deepseek_v3,gpt_oss,granitemoehybrid,jamba,bloom"
FORMATS = ("quark", "compressed-tensors")
ALONE = {"gpt_oss": ("mxfp4_weight_only", "mxfp4", ("*self_attn*",))}  # a scheme, the only format, what stays float
FLOAT = {"jamba": ("*.mamba.*",), "bloom": ("*query_key_value",)}  # what vLLM has in float, which is refused otherwise
SCHEMES = "fp8,ptpc_fp8,int4_wo_32,uint4_wo_32,int8,ptpc_int8,mxfp4,mxfp4_fp8,mxfp6_e2m3,mxfp8,nvfp4"
LIMITS = (1e-3, 0.005)  # relative error of a layer's output: weights alone; what bfloat16 values and products leave
NEAR = 2**-18  # of a number: as far as a product with the reciprocal of a scale is from a quotient, and more
LONG = 240  # of a reason
HEAD = """# What vLLM makes of our files

Written by `tests/consumers/vllm_table.py`. Small random models in bfloat16, exported for vLLM, then read by the classes
of vLLM 0.33 on a CPU (configuration, parameters, weights, `process_weights_after_loading`); the outputs of its linear
layers, those that it fuses as one, are compared with the layers that were evaluated (relative error; compiled operators
that a CPU lacks are computed in plain torch, from the codes and scales that vLLM has loaded). *weights*: vLLM's
emulation leaves activations in float, and the weights are right. *no backend*: vLLM has the class, and no kernel for
experts on a CPU, even emulated. Experts are not run: each projection of each expert is decoded from what vLLM has
loaded and compared; *loaded* stands where their layout has no decoder in `vllm_experts.py`. Scales of caches are
compared layer by layer. *refused* is our own sentence, before anything is written. What vLLM holds in float stays float
here, and is refused otherwise: `*.mamba.*` of jamba, `*query_key_value` of bloom, `*self_attn*` of gpt_oss in its own
format.

Numbers of an input that lie exactly between two codes are left out: vLLM multiplies with the reciprocal of a scale, so
that they fall the other way (2 or 3 of 1,024 in bfloat16; 0.02 of an output under nvfp4, 0.009 under fp8). What is
left, 0.003 to 0.004, is bfloat16; a cell is right up to 0.005.
"""


def main() -> None:
    """Write the models, let vLLM read them, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", required=True)
    for name, default in (("types", TYPES), ("schemes", SCHEMES), ("caches", "fp8")):
        parser.add_argument(f"--{name}", default=default)
    given = parser.parse_args()
    sys.path.insert(0, str(HERE))
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    refused = dict(exported(given))
    folders = sorted(path for path in given.folder.glob("*/*") if path.is_dir())
    command = [given.python, str(HERE / "vllm_judge.py"), *map(str, folders)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout
    judged = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    PAGE.write_text(page({line["folder"]: line for line in judged} | refused), encoding="utf-8")


def exported(given: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Write every model; what our export refuses is given, by its name."""
    import tiny
    import torch

    types = dict(tiny.model_types())
    for name in given.types.split(","):
        model = tiny.tiny_model(name, types[name]).to(torch.bfloat16)
        if any(key.endswith("e_score_correction_bias") for key in model.state_dict()):
            model.config.topk_method = "noaux_tc"  # as in the original's config.json; vLLM asks for it
        pairs = [(scheme, "") for scheme in given.schemes.split(",")]
        pairs += [("fp8", cache) for cache in given.caches.split(",") if cache]
        cells = [(scheme, cache, form, FLOAT.get(name, ())) for scheme, cache in pairs for form in FORMATS]
        if name in ALONE:
            scheme, form, floats = ALONE[name]
            cells.append((scheme, "", form, floats))
        for scheme, cache, form, floats in cells:
            key = f"{name}/{scheme}{f' + {cache} cache' if cache else ''}:{form}"
            if (why := written(model, scheme, cache, form, given.folder / key, floats)) is not None:
                yield key, {"refused": why}


def written(model: Any, scheme: str, cache: str, form: str, goal: Path, floats: tuple[str, ...] = ()) -> str | None:
    """Write one model and what its layers compute; the sentence of a refusal."""
    import tiny
    import torch

    from quark.errors import QuarkError
    from quark.torch.kv_cache import exported_scales

    if goal.exists():
        return None
    try:
        quantized = written_model(model, scheme, cache, form, goal, floats, [tiny.inputs_of(model)])
    except QuarkError as error:
        return str(error)
    torch.save(expected(quantized), f"{goal}.expected.pt")
    if cache:
        torch.save(exported_scales(quantized), f"{goal}.caches.pt")
    return None


def written_model(
    model: Any, scheme: str, cache: str, form: str, goal: Path, floats: tuple[str, ...], data: list[Any]
) -> Any:
    """A copy of the model quantized and written for vLLM, as the command line does both; or QuarkError."""
    from quark.config.file_formats import check_caches, check_formats
    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.export.before_work import check_before_work
    from quark.torch.export.write_as import config_for, export_as

    check_formats([scheme], form, "vllm")
    check_caches(cache or None, form, "vllm")
    config = LLMTemplate.for_model(model).get_config(scheme, kv_cache_scheme=cache or None)
    config = dataclasses.replace(config, exclude=[*config.exclude, *floats])
    config = config_for(config, form, "vllm", model.dtype)
    check_before_work(model, config, form, "vllm", goal.parent)
    quantized = ModelQuantizer(config).quantize_model(copy.deepcopy(model), data)
    export_as(quantized, goal, form, goal.parent, program="vllm")
    return quantized


def expected(model: Any) -> dict[str, tuple[Any, ...]]:
    """By names in files: input of a layer, its output, and its output without quantized activations."""
    import torch

    from quark.torch.export.original import names_of
    from quark.torch.quantized_layer import quantized_layers

    names, made = names_of(model), {}
    for name, layer in quantized_layers(model):
        weight = layer.fake_quantized()._parameters["weight"].detach()  # type: ignore[union-attr]
        generator = torch.Generator().manual_seed(weight.shape[-1])  # layers that vLLM fuses have one input
        x = away_from_ties(layer, torch.randn(8, weight.shape[-1], generator=generator).to(torch.bfloat16))
        with torch.no_grad():
            quantizer, layer.output_quantizer = layer.output_quantizer, None  # that of a cache acts behind RoPE
            plain = torch.nn.functional.linear(x, weight.to(x.dtype), layer.bias)
            made[names.layer(name)] = (x, layer(x), plain)
            layer.output_quantizer = quantizer
    return made


def away_from_ties(layer: Any, x: Any) -> Any:
    """``x`` without the numbers that lie between two codes: vLLM multiplies with reciprocals, and they fall the other
    way."""
    import torch

    if layer.input_quantizer is None:
        return x
    with torch.no_grad():
        lower, upper = (layer.input_quantizer(x.float() * (1 + off)) for off in (-NEAR, NEAR))
    return torch.where((upper - lower).abs() > 4 * NEAR * x.abs(), 0, x)


def word(line: dict[str, Any]) -> str:
    """A cell."""
    return f"{plain_word(line)}{', loaded' if line.get('experts_left') else ''}"


def plain_word(line: dict[str, Any]) -> str:
    """A cell, but for experts."""
    if "refused" in line:
        return "refused"
    if not line["ok"]:
        return "no backend" if "backend supports" in line["error"] else "**no**"
    if not line["run"] and not line["experts_right"]:
        return "not run"
    if line["worst"] <= LIMITS[1]:
        return f"{line['worst']:.1g}"
    return "weights" if line["weights"] <= LIMITS[0] else f"**{line['worst']:.1g}**"


def page(found: dict[str, dict[str, Any]]) -> str:
    """The page of documents."""
    names = sorted({key.split("/")[0] for key in found})
    columns = sorted({key.split("/")[1].replace(":", " in ") for key in found})
    lines = [HEAD, f"| in | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for column in columns:
        cells = [found.get(f"{name}/{column.replace(' in ', ':')}") for name in names]
        lines.append(f"| {column} | {' | '.join('–' if cell is None else word(cell) for cell in cells)} |")
    reasons: dict[str, list[str]] = {}
    for key, line in sorted(found.items()):
        if not line.get("ok"):
            text = line.get("refused") or f"{line['error']} ({line['at']})"
            reasons.setdefault(text[:LONG], []).append(f"`{key}`")
    lines += ["", "## What is not read", ""]
    lines += [f"- {text}: {', '.join(keys)}" for text, keys in reasons.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
