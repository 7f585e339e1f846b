"""Writes ``src/quark/config/format_table.tsv``: every scheme in every format, read by the programs themselves.

    python -m benchmarks.format_table export FOLDER               writes the models, and what our export refuses
    python -m benchmarks.format_table transformers FOLDER         reads them with transformers
    python -m benchmarks.format_table llama.cpp FOLDER            with llama.cpp (xllamacpp)
    python -m benchmarks.format_table onnxruntime-genai FOLDER    with onnxruntime-genai
    python -m benchmarks.format_table vllm FOLDER --judge FILE    with lines of JSON that a program of yours has printed
                                                                  for each folder: {"folder", "ok", "schemes", "error"}
    python -m benchmarks.format_table write FOLDER                what was found takes its place in the table

Each step may run in another environment; ``--format`` limits the export to one format, ``--schemes`` the export and
what is written to some schemes. A network of the Llama architecture, 256 wide, in bfloat16 (ONNX: float32). It has no
experts, which is all that the format of gpt_oss (mxfp4) holds: its rows were written by hand and are kept.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import record
from quark.config.file_formats import ANY, EXPORT, FORMATS, PROGRAMS

TABLE = Path(__file__).parents[1] / "src/quark/config/format_table.tsv"
MEASURED = [name for name in FORMATS if name != "mxfp4"]
TOKENS = 24
OF_LAYER = re.compile(r"^(?:\S+ cannot hold '\S+': |'\S+' (?:is )?)")
LENGTH = 150  # of an error in the table
LIMIT = 0.02  # relative error of logits in bfloat16
EQUAL = 1e-5  # the same in float32
READS: dict[str, tuple[str, ...]] = {  # what a program opens at all
    "vllm": ("quark", "compressed-tensors", "awq", "gptq", "gptq_v2", "fp8", "modelopt"),
    "transformers": ("quark", "compressed-tensors", "awq", "gptq", "gptq_v2", "fp8", "modelopt", "gguf"),
    "llama.cpp": ("gguf",),
    "onnxruntime-genai": ("onnx",),
}
WHY = {
    "vllm": {"gguf": "QUANTIZATION_METHODS of vLLM 0.33 has no gguf", "onnx": "safetensors files only"},
    "transformers": {"onnx": "safetensors and GGUF files only"},
    # a loader that is not installed here; gptqmodel's arithmetic is decoded in tests/torch_flow/export/test_gptq.py
    "llama.cpp": dict.fromkeys(set(FORMATS) - {"gguf"}, "GGUF files only"),
    "onnxruntime-genai": dict.fromkeys(set(FORMATS) - {"onnx"}, "ONNX files only"),
}


def main() -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=sorted(STEPS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--judge", type=Path)
    parser.add_argument("--format", choices=MEASURED)
    parser.add_argument("--schemes", nargs="+", default=[])
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--json", type=Path, help=record.HELP)
    given = parser.parse_args()
    STEPS[given.step](given)


def keep(folder: Path, step: str, rows: list[tuple[str, str, str, bool, str]]) -> None:
    """Keep what a step has found."""
    lines = ["\t".join((a, b, c, "yes" if ok else "no", " ".join(shown.split()))) for a, b, c, ok, shown in rows]
    (folder / f"{step}.rows").write_text("\n".join(lines) + "\n", encoding="utf-8")


def short(error: BaseException) -> str:
    """An error in a line, without the layer of this network that it names."""
    text = OF_LAYER.sub("", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:LENGTH]}{'…' if len(text) > LENGTH else ''}"


def export(given: argparse.Namespace) -> None:
    """Every scheme in every format."""
    import torch

    from quark.errors import QuarkError
    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.config.schemes import NAMES
    from quark.torch.export.write_as import config_for, export_as

    rows = []
    for scheme in given.schemes or NAMES:
        for format in [given.format] if given.format else MEASURED:
            model, ids = network(torch.float32 if format == "onnx" else torch.bfloat16)
            config = config_for(LLMTemplate.get("llama").get_config(scheme), format, None, model.dtype)
            ModelQuantizer(config).quantize_model(model, [{"input_ids": ids}])
            goal = given.folder / scheme / format
            reader = "vllm" if format == "compressed-tensors" else None  # what transformers reads wrongly, too
            try:
                export_as(model, goal, format, given.tokenizer, program=reader)
            except QuarkError as error:
                rows.append((scheme, format, EXPORT, False, short(error)))
                continue
            rows.append((scheme, format, EXPORT, True, written(goal, format)))
            beside = [*given.tokenizer.glob("tokenizer*"), *given.tokenizer.glob("*.jinja")]
            for path in beside if format not in ("gguf", "onnx") else ():
                shutil.copyfile(path, goal / path.name)
            with torch.no_grad():
                torch.save(model(ids).logits.float(), given.folder / scheme / f"{format}.logits")
    keep(given.folder, "export", rows)


def written(folder: Path, format: str) -> str:
    """What a file says about itself."""
    if format == "gguf":
        import gguf

        kinds = [tensor.tensor_type.name for tensor in gguf.GGUFReader(next(folder.glob("*.gguf"))).tensors]
        return max(set(kinds) - {"F32", "F16"}, key=kinds.count, default="F16")
    if format == "onnx":
        return "quark_model.onnx"
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    return str(found.get("format") or found.get("quant_algo") or found.get("quant_method"))


def network(dtype: object):  # type: ignore[no-untyped-def]
    """A Llama with random weights, and token ids."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, num_hidden_layers=2, vocab_size=1024, max_position_embeddings=128)
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) / 8)
    return model, torch.arange(2 * TOKENS).reshape(2, TOKENS)


def folders(given: argparse.Namespace, program: str) -> Iterator[tuple[str, str, Path]]:
    """What was written in formats that a program opens."""
    for format in READS[program]:
        for path in sorted(given.folder.glob(f"*/{format}")):
            yield path.parent.name, format, path


def transformers(given: argparse.Namespace) -> None:
    """Logits by transformers."""
    import torch

    from quark.torch.config.schemes import scheme as known

    rows = []
    _, ids = network(torch.bfloat16)
    for scheme, format, path in folders(given, "transformers"):
        expected = torch.load(path.with_suffix(".logits"))
        try:
            works, shown = read_by_transformers(path, ids, expected, known(scheme).input_tensors is not None)
        except Exception as error:  # noqa: BLE001  whatever the program raises is what is asked for
            works, shown = False, short(error)
        rows.append((scheme, format, "transformers", works, shown))
        print(*rows[-1], sep="\t", flush=True)
    keep(given.folder, "transformers", rows)


def read_by_transformers(path: Path, ids, expected, inputs: bool) -> tuple[bool, str]:  # type: ignore[no-untyped-def]
    """Whether the logits are right, and the class of a layer; ``inputs``: activations are quantized."""
    import torch
    from transformers import AutoModelForCausalLM

    more = {"gguf_file": next(path.glob("*.gguf")).name} if path.name == "gguf" else {}
    model, found = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True, **more)
    if strange := next((f"{kind}: {sorted(map(str, keys))[0]}" for kind, keys in found.items() if keys), None):
        return False, f"it leaves scales unread without an error ({strange})"
    with torch.no_grad():
        logits = model(ids).logits.float()
    error = float((logits - expected).norm() / expected.norm())
    layer = model.model.layers[0].mlp.down_proj
    reader = getattr(model, "hf_quantizer", None)
    shown = f"{type(reader).__name__ if reader else 'float'}, {type(layer).__name__}"
    if error <= LIMIT:
        return True, shown
    if inputs and path.name in ("gguf", "fp8"):
        return False, f"{shown}: weights are decoded, activations stay float"
    if inputs and path.name == "compressed-tensors":
        return False, f"it rounds the scales of blocks of inputs otherwise: logits differ by {error:.0%} in bfloat16"
    return False, f"{shown}: logits differ by {error:.0%}"


def vllm(given: argparse.Namespace) -> None:
    """What a judge has printed about each folder, in the order of the folders."""
    lines = [json.loads(line) for line in given.judge.read_text(encoding="utf-8").splitlines()]
    rows = []
    for (scheme, format, _), line in zip(folders(given, "vllm"), lines, strict=True):
        shown = ", ".join(line.get("schemes") or []) if line["ok"] else short_text(line.get("error") or str(line))
        rows.append((scheme, format, "vllm", bool(line["ok"]), shown or "loaded by its own method"))
    keep(given.folder, "vllm", rows)


def short_text(text: str) -> str:
    """A text in a cell."""
    return text if len(text) <= LENGTH else f"{text[:LENGTH]}…"


def llama_cpp(given: argparse.Namespace) -> None:
    """Whether llama.cpp opens a file."""
    import subprocess
    import sys

    rows = []
    for scheme, format, path in folders(given, "llama.cpp"):
        file = next(path.glob("*.gguf"))
        code = (
            "import os, sys, xllamacpp as x; p = x.CommonParams(); p.model.path = sys.argv[1]; p.n_ctx = 64; "
            "p.warmup = False; s = x.Server(p); print('opened', flush=True); os._exit(0)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False)
        opened = "opened" in done.stdout
        shown = written(path, format) if opened else done.stderr[-LENGTH:]
        rows.append((scheme, format, "llama.cpp", opened, shown))
    keep(given.folder, "llama.cpp", rows)


def onnxruntime_genai(given: argparse.Namespace) -> None:
    """Logits of the last token by onnxruntime-genai."""
    import numpy as np
    import onnxruntime_genai as genai
    import torch

    rows = []
    _, ids = network(torch.float32)
    for scheme, format, path in folders(given, "onnxruntime-genai"):
        expected = torch.load(path.with_suffix(".logits"))[:, -1]
        try:
            program = genai.Model(str(path))
            settings = genai.GeneratorParams(program)
            settings.set_search_options(max_length=TOKENS + 1, batch_size=len(ids), do_sample=False)
            generator = genai.Generator(program, settings)
            generator.append_tokens(ids.numpy().astype(np.int32))
            logits = torch.from_numpy(generator.get_logits())[:, -1]
            error = float((logits - expected).norm() / expected.norm())
            works, shown = error <= LIMIT, program.type
            if not works:
                works, shown = held_alike(scheme, path, logits, error)
        except Exception as error:  # noqa: BLE001  whatever the program raises is what is asked for
            works, shown = False, short(error)
        rows.append((scheme, format, "onnxruntime-genai", works, shown))
        print(*rows[-1], sep="\t", flush=True)
    keep(given.folder, "onnxruntime-genai", rows)


def held_alike(scheme: str, path: Path, logits, error: float) -> tuple[bool, str]:  # type: ignore[no-untyped-def]
    """Whether logits differ by nothing but values half-way between codes: the program computes the same graph as ONNX
    Runtime, whose quantizers make what torch's make of the same numbers, and which is right between them."""
    import torch

    from benchmarks.pinned import apart, observed, pinned, run
    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.export.write_as import config_for

    model, ids = network(torch.float32)
    config = config_for(LLMTemplate.get("llama").get_config(scheme), "onnx", None, model.dtype)
    ModelQuantizer(config).quantize_model(model, [{"input_ids": ids}])
    file = path / "quark_model.onnx"
    _, worst, held = pinned(model, file, ids)
    same = apart(logits, run(observed(file, [])[0], ids)["logits"][:, -1])
    if worst == 0 and max(held, same) <= EQUAL:
        return True, "decoder (of two codes equally near to a value it may take the other)"
    return False, f"logits differ by {error:.0%}"


def write(given: argparse.Namespace) -> None:
    """The table, in which what was found takes the place of what it said of the same formats and programs."""
    head, *before = TABLE.read_text(encoding="utf-8").splitlines()
    lines = []
    for step in ("export", "vllm", "transformers", "llama.cpp", "onnxruntime-genai"):
        found = given.folder / f"{step}.rows"
        lines += found.read_text(encoding="utf-8").splitlines() if found.exists() else []
    for program in PROGRAMS:
        away = [format for format in FORMATS if format in WHY[program]]
        lines += [f"{ANY}\t{format}\t{program}\tno\t{WHY[program][format]}" for format in away]
    first = 0 if given.schemes else 1
    found = {tuple(line.split("\t")[:3]): line for line in lines}
    again = {key[first:] for key in found}
    rows = {tuple(line.split("\t")[:3]): line for line in before}
    kept = {key: line for key, line in rows.items() if key in found or key[first:] not in again}
    TABLE.write_text("\n".join([head, *{**kept, **found}.values()]) + "\n", encoding="utf-8")


STEPS: dict[str, Callable[[argparse.Namespace], None]] = {
    "export": export,
    "transformers": transformers,
    "vllm": vllm,
    "llama.cpp": llama_cpp,
    "onnxruntime-genai": onnxruntime_genai,
    "write": write,
}

if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
