"""What ``config.json`` and headers show to be wrong is refused before torch is loaded, in the words of those who know
the modules."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quark.errors import QuarkError
from quark.torch import LLMTemplate, transformers_names
from quark.torch.architectures import ARCHITECTURES, PLAIN, globs_of
from quark.torch.export.checkpoint import read_checkpoint
from quark.torch.export.declared import METHODS
from quark.torch.files import methods, plain
from quark.torch.files.headers import EMBEDDING, PART, FolderUse, check_headers, check_layers, check_tensors
from quark.torch.files.prequantized import coded_in
from quark.torch.files.skeleton import read_skeleton
from quark.torch.from_values import config_of
from quark.torch.layers import kind_of
from quark.torch.matching import match_skeleton

SLOW = pytest.mark.slow
WIDTH, WORDS = 32, 64
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float16",
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": WORDS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
BLOCK = {
    **{f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"},
    "mlp.gate_proj": (48, WIDTH),
    "mlp.up_proj": (48, WIDTH),
    "mlp.down_proj": (WIDTH, 48),
    "input_layernorm": (WIDTH,),
    "post_attention_layernorm": (WIDTH,),
}
SHAPES = {
    "model.embed_tokens": (WORDS, WIDTH),
    "lm_head": (WORDS, WIDTH),
    "model.norm": (WIDTH,),
    **{f"model.layers.{k}.{name}": shape for k in range(2) for name, shape in BLOCK.items()},
}
DOWN = "model.layers.1.mlp.down_proj"


def folder(path: Path, config: Mapping[str, Any] = {}, shapes: Mapping[str, Any] = {}) -> Path:
    """A Llama with other fields or shapes; None: left out."""
    kept = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
    named = {n if "qweight" in n else f"{n}.weight": one for n, one in {**SHAPES, **shapes}.items() if one is not None}
    return folder_of(path, kept, named)


def folder_of(path: Path, config: Mapping[str, Any], shapes: Mapping[str, Any]) -> Path:
    """A model of zeros."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return path


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(text)


def indexed(files: Mapping[str, str]) -> Callable[[Path], object]:
    """An index that names a file for every tensor, the first ones as ``files`` says."""
    names = {f"{name}.weight": "model.safetensors" for name in SHAPES}
    return written("model.safetensors.index.json", json.dumps({"weight_map": {**names, **files}}))


def coded(method: object) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method}}


#: config, shapes, what else is changed, and what is said.
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Path], object] | None, str]] = {
    "empty": ({}, {}, lambda path: [one.unlink() for one in path.iterdir()], "config.json' does not exist"),
    "no_tensors": ({}, {}, lambda path: (path / "model.safetensors").unlink(), "has no safetensors file"),
    "broken_json": ({}, {}, written("config.json", '{"a": 1,'), "config.json' is not JSON"),
    "a_list": ({}, {}, written("config.json", "[]"), "must hold an object"),
    "no_header": ({}, {}, written("model.safetensors", "<html>"), "is not a whole safetensors file"),
    "no_index": ({}, {}, written("model.safetensors.index.json", "{"), "index.json' is not JSON"),
    "absent": ({}, {}, indexed({"lm_head.weight": "b.safetensors"}), "says is in 'b.safetensors'"),
    "outside": ({}, {}, indexed({"lm_head.weight": "../b.safetensors"}), "is not a file of the folder"),
    "two": ({}, {}, written("b.safetensors", ""), "has 2 safetensors files and no index"),
    "adapter": ({}, {}, written("adapter_config.json", "{}"), "the model has an adapter"),
    "settings": ({}, {}, written("generation_config.json", "{"), "generation_config.json' is not JSON"),
    "type": ({"model_type": "lama"}, {}, None, "Did you mean 'llama'? LlamaForCausalLM takes 'llama'"),
    "no_type": ({"model_type": None}, {}, None, "names no model_type. LlamaForCausalLM takes 'llama'"),
    "no_class": ({"architectures": None}, {}, None, "['LlamaForCausalLM'] is usual"),
    "slip": ({"architectures": ["LlamaForCausalLN"]}, {}, None, "Did you mean 'LlamaForCausalLM'?"),
    "two_models": ({"architectures": ["MistralForCausalLM"]}, {}, None, "names two models: model_type is 'llama'"),
    "dtype": ({"dtype": "float8"}, {}, None, "dtype is 'float8', in which no model computes"),
    "epsilon": ({"rms_norm_eps": -1}, {}, None, "rms_norm_eps is -1"),
    "layers": ({"num_hidden_layers": 10**6}, {}, None, "num_hidden_layers is 1000000"),
    "heads": ({"num_attention_heads": -8}, {}, None, "num_attention_heads is -8"),
    "method": (coded("gptk"), {}, None, "unknown quant_method 'gptk'. Did you mean 'gptq'?"),
    "unread": (coded("aqlm"), {}, None, "a model quantized by aqlm is not read here"),
    "no_method": ({"quantization_config": "fp8"}, {}, None, "must be an object that names a quant_method"),
    "float": (coded("awq"), {}, None, "(quant_method is 'awq'), and every tensor beside it is float"),
    "own": (coded("quark"), {}, None, "config.json': a quantization configuration needs the field global_quant_config"),
    "codes": ({}, {DOWN: None, f"{DOWN}.qweight": (4, 4)}, None, "holds the codes of a quantized model"),
    "part": ({}, {DOWN: None}, None, f"lacks the tensor '{DOWN}.weight'"),
    "words": ({}, {"model.embed_tokens": None}, None, "lacks the tensor 'model.embed_tokens.weight'"),
    "more_words": ({"vocab_size": 60}, {}, None, "'model.embed_tokens.weight' is [64, 32] in the files"),
    "deeper": ({"num_hidden_layers": 3}, {}, None, "lacks the tensor 'model.layers.2."),
    "division": ({"num_attention_heads": 3}, {}, None, "is 3, which does not divide hidden_size, 32; 1, 2, 4 would"),
    "head_dim": ({"head_dim": 8}, {}, None, "'model.layers.0.self_attn.q_proj.weight' is [32, 32] in the files"),
    "groups": ({"num_key_value_heads": 1}, {}, None, "k_proj.weight' is [32, 32] in the files"),
    "wider": ({"intermediate_size": 50}, {}, None, "'model.layers.0.mlp.gate_proj.weight' is [48, 32] in the files"),
    "norm": ({}, {"model.norm": (16,)}, None, "'model.norm.weight' is [16] in the files"),
    "head": ({}, {"lm_head": None}, None, "lacks the tensor 'lm_head.weight'"),
    "activation": (
        {"hidden_act": "sillu"},
        {},
        None,
        "hidden_act is 'sillu', which transformers does not have",
    ),
    "flatter": ({"num_hidden_layers": 1}, {}, None, "holds the tensor 'model.layers.1."),
}
WEIGHTS = ["-s", "int8_wo_per_channel"]
COMMANDS: dict[str, list[str]] = {
    "quantize": ["-o", "out", *WEIGHTS],
    "quantize-files": ["-o", "out", *WEIGHTS],
    "plan": WEIGHTS,
    "explain": ["lm_head", *WEIGHTS],
    "convert": ["-o", "out", "--format", "gptq"],
    "evaluate": ["--data", "ids.npy"],
    "sensitivity": [*WEIGHTS, "--data", "ids.npy"],
    "search": ["-o", "plan.yaml", "--target", "kl<=1", "-c", "int8_wo_per_channel", "--data", "ids.npy"],
}
#: What is typed behind the folder of a model that is right, and what is said.
LAYERS: dict[str, tuple[list[str], str]] = {
    "glob": (["-s", "int8_wo_per_channel", "--layer", "*downproj=mxfp4"], "Did you mean '*down_proj'?"),
    "name": (["-s", "int8_wo_per_channel", "--layer", "model.layers.9.mlp.up_proj=mxfp4"], "matches no layer"),
    "holds": (["-s", "int8_wo_per_channel", "--layer", "model.layers.0=mxfp4"], "'model.layers.0.*'"),
    "exclude": (["-s", "int8_wo_per_channel", "--exclude", "*downproj"], "Did you mean '*down_proj'?"),
    "groups": (["-s", "int4_wo_32"], "groups of 32 do not divide the 48 inputs"),
    "blocks": (["-s", "mxfp4", "--format", "compressed-tensors"], "blocks of 32 do not divide"),
}
LEFT = ["--exclude", "*mlp*", "--exclude", "*o_proj", "--exclude", "lm_head"]
#: The same of a model whose queries have 30 rows.
THIN: dict[str, tuple[list[str], str]] = {
    "words": (["-s", "int4_wo_per_channel", "--format", "gptq"], "30 outputs of 4 bits, which do not fill whole words"),
    "vllm": (["-s", "int4_wo_32", "--for", "vllm", *LEFT], "30 outputs of 4 bits, which fill no words"),
}
QUERIES = {f"model.layers.{k}.self_attn.{n}_proj": (30, WIDTH) for k in range(2) for n in "qkv"}
OUTPUTS = {f"model.layers.{k}.self_attn.o_proj": (WIDTH, 30) for k in range(2)}
FILES: dict[str, tuple[str, str]] = {
    "key.yaml": ("scheme: mxfp4\nexlude: [lm_head]\n", "Did you mean 'exclude'?"),
    "key.json": ('{"scheme": "mxfp4", "exlude": []}', "Did you mean 'exclude'?"),
    "broken.json": ('{"scheme": ', "is not JSON"),
    "scheme.yaml": ("scheme: mxfp5\n", "Did you mean 'mxfp"),
    "kind.yaml": ("scheme: mxfp4\nlayers: {'*up_proj': 3}\n", "it must be a scheme"),
    "algorithm.yaml": ("scheme: int4_wo_32\nlayers: {'*up_proj': int4_wo_32+gptk}\n", "'gptk'"),
    "early.yaml": ("scheme: int4_wo_32\nlayers: {'*up_proj': int4_wo_32+awq}\n", "algorithm for single layers 'awq'"),
    "algorithms.yaml": ("scheme: int4_wo_32\nalgorithms: [gptk]\n", "Did you mean 'gptq'?"),
    "samples.yaml": ("scheme: mxfp4\nalgorithms: [gptq]\n", "the algorithm 'gptq' needs samples"),
    "static.yaml": ("scheme: mxfp4\nlayers: {'*upproj': mxfp8}\n", "Did you mean '*up_proj'?"),
    "whole.yaml": ("global_quant_config: {weigth: {dtype: int4}}\n", "weigth"),
}
DATA: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty.txt": (lambda path: path.write_text(""), "is empty"),
    "bytes.txt": (lambda path: path.write_bytes(b"\xff\xfe"), "is not UTF-8 text"),
    "words.npy": (
        lambda path: np.save(path, np.full((2, 8), WORDS)),
        f"the token id {WORDS}, and the model has {WORDS}",
    ),
    "floats.npy": (lambda path: np.save(path, np.zeros((2, 8), np.float32)), "token ids are integers"),
    "lines.jsonl": (lambda path: path.write_text("3\n"), 'is a string, or an object with "text"'),
    "other.csv": (lambda path: path.write_text("1,2"), "has no known kind"),
    "folder.npy": (lambda path: path.mkdir(), "is a folder"),
}
RUN = """
import contextlib, io, json, sys
from quark.cli import main
found = []
for words in json.loads(sys.stdin.read()):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(words)
    found.append([words, code, said.getvalue(), [one for one in ("torch", "transformers") if one in sys.modules]])
print(json.dumps(found))
"""


def test_no_refusal_by_headers_loads_torch(tmp_path: Path) -> None:
    """One process types all: every command with every folder, every file and option with one that is right."""
    np.save(tmp_path / "ids.npy", np.zeros((2, 8), np.int64))
    typed: list[tuple[list[str], str]] = []
    for name, (config, shapes, change, said) in FOLDERS.items():
        path = folder(tmp_path / name, config, shapes)
        if change is not None:
            change(path)
        typed += [(["torch", command, name, *words], said) for command, words in COMMANDS.items()]
    folder(tmp_path / "good")
    typed += [(["torch", "plan", "good", *words], said) for words, said in LAYERS.values()]
    typed += [(["torch", "quantize-files", "good", "-o", "out", *words], said) for words, said in LAYERS.values()]
    folder(tmp_path / "thin", {"head_dim": 15}, {**QUERIES, **OUTPUTS})
    typed += [(["torch", "plan", "thin", *words], said) for words, said in THIN.values()]
    (folder(tmp_path / "tokens") / "tokenizer.json").write_text("{}")
    gguf = ["torch", "quantize", "tokens", "-o", "out", *WEIGHTS, "--format", "gguf"]
    typed.append((gguf, "has a tokenizer of the type None"))
    for command, words in COMMANDS.items():
        wrong = ["int8_per_channel" if word == "int8_wo_per_channel" else word for word in words]
        if wrong != words:
            typed.append((["torch", command, "good", *wrong], "int8_per_channel'"))
    typed.append((["torch", "search", "good", *COMMANDS["search"], "-s", "mxpf4"], "unknown --scheme 'mxpf4'"))
    typed.append((["torch", "sensitivity", "good", *COMMANDS["sensitivity"], "--metric", "sqnrr"], "--metric 'sqnrr'"))
    for name, (text, said) in FILES.items():
        (tmp_path / name).write_text(text)
        typed.append((["torch", "quantize", "good", "-o", "out", "--config", name], said))
    (tmp_path / "good" / "tokenizer.json").write_text("{}")
    for name, (write, said) in DATA.items():
        write(tmp_path / name)
        for command in ("quantize", "quantize-files", "evaluate", "sensitivity", "search"):
            words = [word for word in COMMANDS[command] if word not in ("--data", "ids.npy")]
            typed.append((["torch", command, "good", *words, "--data", name], said))
    given = json.dumps([words for words, _ in typed])
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, input=given, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("[["), done.stdout[:2000] + done.stderr
    mistaken = [
        (words, code, said, loaded)
        for (words, code, said, loaded), (_, wanted) in zip(json.loads(done.stdout), typed, strict=True)
        if code != 1 or wanted not in said or loaded or not said.startswith("error: ")
    ]
    assert not mistaken, "\n".join(map(str, mistaken))
    assert not (tmp_path / "out").exists()


GROUPS = {"dtype": "int4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32}
SAME = {
    "a name": {"layers": {"model.layers.9.mlp.up_proj": "mxfp4"}},
    "a glob": {"layers": {"*downproj": "mxfp4"}},
    "a module": {"layers": {"model.layers.0": "mxfp4"}},
    "an embedding": {"layers": {"model.embed_tokens": "mxfp4"}},
    "excluded": {"exclude": ["*downproj"]},
    "excluded besides": {"also_exclude": ["*up_prj"]},
    "float": {"layers": {"*up_prj": "float"}},
    "a module without tensors": {"also_exclude": ["*rotary_emb", "*act_fn"]},
    "everything": {"exclude": ["*"]},
    "groups": {"scheme": "int4_wo_32"},
    "groups, but none there": {"scheme": "int4_wo_32", "also_exclude": ["*down_proj"]},
    "groups of one layer": {"layers": {"*down_proj": "int4_wo_32"}},
    "an exact name before a glob": {"layers": {"*down_proj": "int4_wo_32", DOWN: "mxfp4"}},
    "groups of inputs": {"global_quant_config": {"input_tensors": GROUPS, "weight": GROUPS}},
    "blocks": {"layers": {"*down_proj": "Q4_K"}},
    "blocks that end short": {"scheme": "mxfp4"},
    "the head": {"scheme": "int4_wo_per_channel", "exclude": []},
    "a whole one": {"global_quant_config": {"weight": GROUPS}, "exclude": ["lm_head"]},
}


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except QuarkError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("tied", [False, True])
def test_headers_say_what_modules_say(tied: bool, tmp_path: Path) -> None:
    """What is refused by both is refused in the same words; what modules let pass, headers let pass."""
    shapes = {"lm_head": None} if tied else {}
    checkpoint = read_checkpoint(folder(tmp_path / "model", {"tie_word_embeddings": tied}, shapes))
    model, passed = read_skeleton(checkpoint).model, set()
    for name, values in SAME.items():
        values = values if "global_quant_config" in values else {"scheme": "int8_wo_per_channel", **values}
        early = said(lambda values=values: check_layers(checkpoint, values))
        late = said(lambda values=values: match_skeleton(model, config_of(values, model)))
        assert early in ("", late), name
        passed |= set() if early else {name}
    few = {"groups, but none there", "blocks that end short", "the head", "everything"}
    assert passed == {"an embedding", "a module without tensors", *few}


@pytest.mark.parametrize("method", methods.METHODS)
def test_float_tensors_are_of_no_method(method: str, tmp_path: Path) -> None:
    """What headers refuse so is what decoders find nothing in."""
    whole = {"quant_method": method, "bits": 4, "group_size": 32, "quant_algo": "FP8", "config_groups": {}}
    whole |= {"format": "dense"} if method == "compressed-tensors" else {}
    checkpoint = read_checkpoint(folder(tmp_path / "model", {"quantization_config": whole}))
    early = said(lambda: check_headers(checkpoint.folder, FolderUse()))
    assert "every tensor beside it is float" in early
    assert said(lambda: coded_in(checkpoint)) == early


TENSORS = ("part", "words", "more_words", "deeper", "flatter", "head_dim", "groups", "wider", "norm", "head")


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_are_refused_as_the_modules_refuse_them(name: str, tmp_path: Path) -> None:
    config, shapes, _, wanted = FOLDERS[name]
    checkpoint = read_checkpoint(folder(tmp_path / "model", config, shapes))
    assert wanted in said(lambda: check_tensors(checkpoint))
    assert wanted in said(lambda: read_skeleton(checkpoint))


def test_what_is_read_with_the_modules_passes(tmp_path: Path) -> None:
    """Of a type that is no plain one headers decide nothing."""
    made = folder(tmp_path / "model", {"model_type": "mllama", "architectures": ["MllamaForCausalLM"]}, {DOWN: None})
    assert check_headers(made, FolderUse()) is not None


def test_the_names_are_those_of_transformers() -> None:
    from transformers.models.auto import configuration_auto, modeling_auto
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    assert set(transformers_names.model_types()) == set(configuration_auto.CONFIG_MAPPING_NAMES)
    real: dict[str, set[str]] = {}
    for table in (one for name, one in vars(modeling_auto).items() if re.fullmatch("MODEL_.*MAPPING_NAMES", name)):
        for kind, names in table.items():
            for name in [names] if isinstance(names, str) else names:
                real.setdefault(name, set()).add(kind)
    assert transformers_names.classes() == real
    assert transformers_names.causal_class("llama") == "LlamaForCausalLM"
    assert transformers_names.quantization_methods() >= set(AUTO_QUANTIZATION_CONFIG_MAPPING)
    assert ("quark", *methods.METHODS) == METHODS


@pytest.mark.parametrize("kind", PLAIN)
def test_headers_tell_all_layers_of_a_plain_type(kind: str) -> None:
    """The model in memory has the names of its files, and linear layers where these hold matrices."""
    import transformers

    from quark.torch.export.original import names_of

    config = transformers.CONFIG_MAPPING[kind](num_hidden_layers=3)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:3]
    with torch.device("meta"):
        model = getattr(transformers, str(transformers_names.causal_class(kind)))._from_config(config)
    state, outside = model.state_dict(), names_of(model)
    template = LLMTemplate.get(kind) if kind in ARCHITECTURES else LLMTemplate.for_model(model)
    assert template.exclude_layers_name == list(globs_of(kind).exclude)
    assert all(outside.outside(name) == name for name in state)
    matrices = {
        name.removesuffix(".weight") for name, one in state.items() if name.endswith(".weight") and one.dim() == 2
    }
    layers = {name: module for name, module in model.named_modules() if kind_of(module) is not None}
    assert matrices == set(layers)
    assert {name for name in matrices if not EMBEDDING.search(name)} == {
        name for name, module in layers.items() if isinstance(module, nn.Linear)
    }
    parts: dict[str, set[str]] = {}
    for name in state:
        if found := PART.fullmatch(name):
            parts.setdefault(found[1], set()).add(found[2])
    assert set(parts) == {"0", "1", "2"} and len({frozenset(one) for one in parts.values()}) == 1
    source = transformers_names.config_source(kind)
    assert source is not None
    for told in ({}, config.to_dict()):  # by the defaults in the source; by what is written
        known = plain.lengths(told, source)
        assert set(known) == {side for sides in plain.SIDES.values() for side in sides}
        for name, value in state.items():
            last = name.removesuffix(".weight").rpartition(".")[2]
            if name.endswith(".weight") and last in plain.SIDES:
                assert tuple(value.shape) == tuple(known.get(x) for x in plain.SIDES[last]), name
    assert plain.has_head(config.to_dict(), source) == (not config.tie_word_embeddings) == plain.has_head({}, source)


#: Fields of a small model -> other values; early is said what the modules say, or nothing.
CHANGES: list[dict[str, Any]] = [
    *({"num_attention_heads": count} for count in (1, 3, 4, 64)),
    *({"num_key_value_heads": count} for count in (None, 1, 3, 4)),
    *({"head_dim": size} for size in (None, 8, 24)),
    {"num_attention_heads": 4, "head_dim": 8},
    *({name: 40} for name in ("hidden_size", "intermediate_size", "vocab_size")),
    *({name: "geluu"} for name in plain.ACTIVATIONS),
    *({"tie_word_embeddings": tied} for tied in (None, False, True)),
    {"num_hidden_layers": 1},
]


@pytest.mark.parametrize("kind", [k if k in ("llama", "phi3") else pytest.param(k, marks=SLOW) for k in PLAIN])
def test_what_fields_say_is_what_modules_say(kind: str, tmp_path: Path) -> None:
    import transformers

    sizes = {name: CONFIG[name] for name in CONFIG if name.startswith(("num_", "hidden_s", "inter", "vocab"))}
    missed: set[str] = set()
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    for head in (False, True):
        config = transformers.CONFIG_MAPPING[kind](**sizes, **tokens, head_dim=16, tie_word_embeddings=not head)
        with torch.device("meta"):
            model = getattr(transformers, str(transformers_names.causal_class(kind)))._from_config(config)
        ties = getattr(model, "all_tied_weights_keys", {})
        shapes = {name: tuple(one.shape) for name, one in model.state_dict().items() if name not in ties}
        written = {**config.to_dict(), "architectures": [transformers_names.causal_class(kind)], "dtype": "float16"}
        for change in [{}, *CHANGES]:
            made = folder_of(tmp_path, {k: v for k, v in {**written, **change}.items() if v is not None}, shapes)
            early = said(lambda made=made: check_headers(made, FolderUse()))
            late = said(lambda made=made: read_skeleton(read_checkpoint(made)))
            assert bool(early) <= bool(late) and (change or not early), (change, early, late)
            missed |= {str(change)} if late and not early else set()
            if "the tensor" in early and ".weight'" in late and "num_attention_heads" not in change:
                assert early == late, change
    assert len(missed) <= (1 if kind == "llama" else 8), missed
