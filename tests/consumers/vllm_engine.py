"""What vLLM answers on a GPU with what is written for it: the whole engine, its compiled kernels, logits against ours.

    python tests/consumers/vllm_engine.py write FOLDER [--types llama,mixtral] [--schemes fp8] [--caches fp8]
    PYTHON tests/consumers/vllm_engine.py run FOLDER [--parts 4] > answers.jsonl
    python tests/consumers/vllm_engine.py page answers.jsonl

``write`` runs in this project's environment and needs no GPU: small random models in bfloat16, quantized, exported with
``program="vllm"``, each beside ``NAME.expected.pt``: {"ids": int64 [tokens], "logits": float32 [tokens, vocabulary]} of
the quantized model in memory. ``run`` needs an environment with vLLM and a GPU; nothing of quark is imported there. An
answer is the relative error of the logits, their mean removed: of all positions ("error") and of the median one
("median": where a token of a random model lies between two experts, bfloat16 may choose the other).
"noise" is that of our own model between bfloat16 and float32 ("noise_median"), "worst" the worst relative error of a
linear layer given one input. ``page`` prints the tables of ``docs/results/vllm_gpu.md``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import sys
import time
import traceback
import types
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOKENS = 48
WIDE = {"VOCABULARY": 256, "HIDDEN": 256, "INNER": 512, "HEADS": 4, "KEYS": 2, "HEAD": 64}  # what kernels can hold
TYPES = "llama,qwen3,gemma3_text,mixtral,qwen3_moe,phimoe,deepseek_v3,gpt_oss"
SCHEMES = (
    "fp8,ptpc_fp8,fp8_block,int4_wo_32,int4_wo_128,uint4_wo_128,int8,ptpc_int8,mxfp4,mxfp6_e2m3,mxfp8,nvfp4,"
    "int8_wo_per_channel,int4_fp8_128"
)
FORMATS = ("quark", "compressed-tensors", "awq", "gptq", "fp8", "modelopt")
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # an optional dependency of a gigabyte
    "VLLM_USE_DEEP_GEMM": "0",  # compiles on the spot
    "HF_HUB_OFFLINE": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
BROKEN = "llama/fp8:quark"  # written once more with one scale doubled: must be red


def wide_tiny() -> Any:
    """The module ``tiny`` with sizes that compiled kernels can hold."""
    source = (HERE / "tiny.py").read_text(encoding="utf-8")
    for line in ("VOCABULARY = 128", "HIDDEN, INNER, HEADS, KEYS, HEAD = 64, 128, 4, 2, 16"):
        names = line.partition(" = ")[0]
        if f"\n{line}\n" not in source:
            raise ValueError(f"tiny.py has no line {line!r}")
        source = source.replace(line, f"{names} = {', '.join(str(WIDE[name]) for name in names.split(', '))}")
    module = sys.modules["tiny"] = types.ModuleType("tiny")
    exec(compile(source, str(HERE / "tiny.py"), "exec"), module.__dict__)
    return module


def write(given: argparse.Namespace) -> None:
    """Write every model, and what it answers in memory."""
    import logging
    import warnings

    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    sys.path.insert(0, str(HERE))
    tiny = wide_tiny()
    known = dict(tiny.model_types())
    from vllm_table import ALONE

    for name in given.types.split(","):
        model = tiny.made(name, known[name], MORE.get(name, {})).to(torch.bfloat16)
        if any(key.endswith("e_score_correction_bias") for key in model.state_dict()):
            model.config.topk_method = "noaux_tc"
        ids = torch.randint(3, 250, (TOKENS,), generator=torch.Generator().manual_seed(3))
        goal = given.folder / name / "float:quark"
        goal.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(goal)
        torch.save(told_of(copy.deepcopy(model), ids, {}), f"{goal}.expected.pt")
        cells = [(scheme, "", form, ()) for scheme in given.schemes.split(",") for form in FORMATS]
        cells += [("fp8", cache, form, ()) for cache in given.caches.split(",") if cache for form in FORMATS[:2]]
        if name in ALONE:
            cells = [(ALONE[name][0], "", *ALONE[name][1:])]
        for scheme, cache, form, floats in cells:
            key = f"{scheme}{f'+{cache}' if cache else ''}:{form}"
            why = written(model, scheme, cache, form, given.folder / name / key, floats, ids)
            print(name, key, why or "written", flush=True)
            if f"{name}/{key}" == BROKEN and why is None:
                broken(given.folder / name / key, given.folder / name / f"{scheme} (one scale doubled):{form}")


MORE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "kv_lora_rank": 512, "q_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "qk_head_dim": 192, "head_dim": 64,
    },
}  # fmt: skip


def written(
    model: Any, scheme: str, cache: str, form: str, goal: Path, floats: tuple[str, ...], ids: Any
) -> str | None:
    """Write one model and what it answers; the sentence of a refusal."""
    import torch
    from vllm_table import expected, written_model

    from quark.errors import QuarkError

    data = [torch.randint(3, 250, (2, 64), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    try:
        quantized = written_model(model, scheme, cache, form, goal, floats, data)
    except QuarkError as error:
        return str(error)
    torch.save(told_of(quantized, ids, expected(quantized)), f"{goal}.expected.pt")
    return None


def told_of(model: Any, ids: Any, layers: dict[str, Any]) -> dict[str, Any]:
    """What is compared; "other" is of the same model computed in float32. The model is in float32 afterwards."""
    return {"ids": ids, "layers": layers, "logits": logits(model, ids), "other": logits(model.float(), ids)}


def logits(model: Any, ids: Any) -> Any:
    """float32 [tokens, vocabulary]; the model as it is, and computed in its own type."""
    import torch

    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0].float()


def broken(source: Path, goal: Path) -> None:
    """The same files with one scale of a weight doubled."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, goal, dirs_exist_ok=True)
    path = next(goal.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name.endswith("o_proj.weight_scale"))
    tensors[name] = tensors[name] * 2
    save_file(tensors, path, metadata={"format": "pt"})
    shutil.copy(f"{source}.expected.pt", f"{goal}.expected.pt")


def run(given: argparse.Namespace) -> None:
    """Every folder in a process of its own, ``--parts`` at a time; a line of JSON each."""
    os.environ.update(ENVIRONMENT)
    import vllm.model_executor.models.llama
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.gpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    folders = sorted(str(path)[: -len(".expected.pt")] for path in given.folder.glob("*/*.expected.pt"))
    waiting = [folder for folder in folders if not given.only or any(word in folder for word in given.only.split(","))]
    how, running = context(), {}
    while waiting or running:
        while waiting and len(running) < given.parts:
            folder = waiting.pop(0)
            running[folder] = how.Process(target=told, args=(folder,)), time.time() + given.seconds
            running[folder][0].start()
        for folder, (child, end) in list(running.items()):
            if child.is_alive() and time.time() > end:
                child.kill()
            if not child.is_alive():
                child.join()
                del running[folder]
                if child.exitcode:
                    print(json.dumps({"folder": key_of(folder), "fault": f"ended with {child.exitcode}"}), flush=True)
        time.sleep(0.05)


def context() -> Any:
    """Forked processes, which have vLLM already, unless its import has begun with CUDA: then started ones."""
    import torch

    fork = get_context("fork")
    child = fork.Process(target=lambda: os._exit(int(torch.cuda._is_in_bad_fork())))
    child.start()
    child.join()
    print(f"forked: {not child.exitcode}", file=sys.stderr, flush=True)
    return get_context("spawn") if child.exitcode else fork


def told(folder: str) -> None:
    """The answer of one folder as a line."""
    print(json.dumps(answer(folder)), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the engine's own threads are not waited for


def key_of(folder: str) -> str:
    """TYPE/SCHEME:FORMAT."""
    return "/".join(folder.split("/")[-2:])


def answer(folder: str) -> dict[str, Any]:
    """What vLLM answers with one folder."""
    import torch
    from vllm import LLM, SamplingParams

    start = time.time()
    try:
        expected = torch.load(f"{folder}.expected.pt")
        engine = LLM(
            model=folder, dtype="bfloat16", max_model_len=64, max_num_seqs=1, skip_tokenizer_init=True,
            enforce_eager=True,
            gpu_memory_utilization=0.1, max_logprobs=-1, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 26,
        )  # fmt: skip
        how = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
        ids = expected["ids"].tolist()
        made = engine.generate([{"prompt_token_ids": ids}], how, use_tqdm=False)[0].prompt_logprobs
        size = expected["logits"].shape[-1]
        found = torch.tensor([[step[token].logprob for token in range(size)] for step in made[1:]])
        line = dict(zip(("error", "median"), errors(found, expected["logits"][:-1]), strict=True))
        line |= dict(
            zip(("noise", "noise_median"), errors(expected["other"][:-1], expected["logits"][:-1]), strict=True)
        )
        line |= engine.apply_model(partial(layers_of, wanted=expected["layers"]))[0]
    except Exception as error:  # whatever vLLM raises is what is asked for
        frames = [f"{os.path.basename(one.filename)}:{one.lineno}" for one in traceback.extract_tb(error.__traceback__)]
        text = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        line = {"fault": text, "at": " < ".join(frames[:-6:-1])}
    return {"folder": key_of(folder), **line, "seconds": round(time.time() - start, 1)}


def errors(found: Any, wanted: Any) -> tuple[float, float]:
    """Relative error of logits [tokens, vocabulary], their mean removed: of all, of the median token."""
    a, b = (x - x.mean(-1, keepdim=True) for x in (found, wanted))
    return float((a - b).norm() / b.norm()), float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median())


def layers_of(model: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """The linear layers on the device, each on its input of ``wanted``: the worst relative error, and their classes."""
    import torch
    from vllm.model_executor.layers.linear import LinearBase

    found, classes = {}, set()
    for name, module in model.named_modules():
        if not isinstance(module, LinearBase):
            continue
        head, _, last = name.rpartition(".")
        names = [f"{head}.{part}" for part in FUSED.get(last, (last,))]
        classes.add(type(getattr(module, "scheme", module.quant_method)).__name__)
        if all(one in wanted for one in names):
            with torch.no_grad():
                made = module(wanted[names[0]][0].to("cuda"))
            made = (made[0] if isinstance(made, tuple) else made).float().cpu()
            right = torch.cat([wanted[one][1] for one in names], -1).float()
            found[name] = float((made - right).norm() / right.norm())
    worst = max(found, key=found.__getitem__, default=None)
    return {"layers": len(found), "worst": found.get(worst), "at_layer": worst, "classes": sorted(classes)}


FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def page(given: argparse.Namespace) -> None:
    """A table of all lines: error of the median token, that of our model between its types, the worst layer."""
    lines = [json.loads(line) for line in given.folder.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    found = {line["folder"]: line for line in lines}
    types = sorted({key.split("/")[0] for key in found})
    rows = sorted({key.split("/")[1] for key in found})
    print(f"| scheme in format | {' | '.join(types)} |", "|---" * (len(types) + 1) + "|", sep="\n")
    for row in rows:
        print(f"| {row.replace(':', ' in ')} | {' | '.join(word(found.get(f'{name}/{row}')) for name in types)} |")


def word(line: dict[str, Any] | None) -> str:
    """A cell."""
    if line is None:
        return "–"
    if "fault" in line:
        return "**no**"
    more = [line.get("noise_median"), line.get("worst")]
    return " / ".join([f"{line['median']:.3f}", *(f"{value:.2g}" for value in more if value is not None)])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("write", "run", "page"))
    parser.add_argument("folder", type=Path, help="of the models; page: the file of answers")
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--caches", default="fp8,fp8_per_head")
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=90, help="of one folder")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    {"write": write, "run": run, "page": page}[given.command](given)


if __name__ == "__main__":
    main()
