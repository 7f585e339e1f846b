"""Checkpoints quantized file by file: the same bits as in memory, little memory, resumable, nothing deleted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.errors import ConfigError, DataError, ModelError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.export.api import export_safetensors, import_model_from_safetensors
from quark.torch.export.checkpoint import read_checkpoint
from quark.torch.files import block_files, quantize, quantize_checkpoint
from quark.torch.files.skeleton import read_skeleton
from quark.torch.language import check_ids, load_model
from quark.torch.quantization.config.config import QConfig, QLayerConfig

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
HEADS = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
SCHEMES = [
    "int4_wo_32",
    "uint4_wo_32",
    "int8_wo_per_channel",
    "ptpc_fp8",
    "mxfp4",
    "mxfp6_e2m3",
    "int4_fp8",
    "amdfp4",
    "bfp16",
]
IDS = torch.randint(5, 120, (2, 12), generator=torch.Generator().manual_seed(1))


def llama(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**HEADS, **sizes})).eval()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint in several files, with a file beside."""
    folder = tmp_path_factory.mktemp("source")
    llama().to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("of the float model")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def bits(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        assert value.dtype == other[name].dtype and value.shape == other[name].shape, name
        assert bits(value) == bits(other[name]), name


def in_memory(source: Path, config: QConfig, folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    ModelQuantizer(config).quantize_model(model)
    export_safetensors(model, folder)
    return model


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_bits_as_in_memory(scheme: str, source: Path, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme)
    model = in_memory(source, config, tmp_path / "memory")
    ModelQuantizer(config).direct_quantize_checkpoint(source, tmp_path / "files")
    assert_same(tensors(tmp_path / "files"), tensors(tmp_path / "memory"))
    one, other = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("files", "memory"))
    assert one["quantization_config"] == other["quantization_config"]
    names = {path.name for path in (tmp_path / "files").iterdir()}
    assert {"tokenizer.json", "model.safetensors.index.json", "generation_config.json"} <= names
    assert not names & {"README.md", "quark_progress.json"}
    with torch.no_grad():
        loaded = import_model_from_safetensors(None, tmp_path / "files")
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_static_activations_with_one_block_in_memory(scheme: str, source: Path, tmp_path: Path) -> None:
    """The bits of the model in memory; at no time do two blocks have weights."""
    config = LLMTemplate.get("llama").get_config(scheme)
    samples = [{"input_ids": IDS[k : k + 1]} for k in range(2)]
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    ModelQuantizer(config).quantize_model(model, samples)
    export_safetensors(model, tmp_path / "memory")
    loaded: list[int] = []
    before = block_files.load

    def watched(skeleton: Any, *rest: Any) -> None:
        before(skeleton, *rest)
        blocks = skeleton.model.layers
        loaded.append(
            sum(any(not value.is_meta and value.dim() > 1 for value in block.parameters()) for block in blocks)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_files, "load", watched)
        ModelQuantizer(config).direct_quantize_checkpoint(source, tmp_path / "files", dataloader=samples)
    assert set(loaded) == {0, 1} and len(loaded) == 1 + len(samples) * len(model.model.layers)
    assert_same(tensors(tmp_path / "files"), tensors(tmp_path / "memory"))
    assert not [path.name for path in (tmp_path / "files").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("name", "fields", "arguments"),
    [
        ("LlamaForCausalLM", {}, {"kv_cache_scheme": "fp8"}),
        ("LlamaForCausalLM", {"kv_cache_post_rope": True}, {"kv_cache_scheme": "fp8"}),
        ("LlamaForCausalLM", {}, {"attention_scheme": "fp8"}),
        ("GPTNeoXForCausalLM", {}, {"kv_cache_scheme": "fp8"}),  # one layer makes keys and values
    ],
)
def test_static_scales_inside_attention(
    name: str, fields: dict[str, Any], arguments: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    cls(cls.config_class(**HEADS)).save_pretrained(tmp_path / "source", max_shard_size="100KB")
    kernel = "eager" if "attention_scheme" in arguments else None
    model = cls.from_pretrained(tmp_path / "source", attn_implementation=kernel).eval()
    config = replace(LLMTemplate.for_model(model).get_config("int4_wo_32", **arguments), **fields)
    ModelQuantizer(config).quantize_model(model, [IDS])
    export_safetensors(model, tmp_path / "memory")
    with pytest.raises(DataError, match="needs samples"):
        ModelQuantizer(config).direct_quantize_checkpoint(tmp_path / "source", tmp_path / "files")
    ModelQuantizer(config).direct_quantize_checkpoint(tmp_path / "source", tmp_path / "files", dataloader=[IDS])
    made = tensors(tmp_path / "files")
    assert sum("output_scale" in key for key in made) >= 3
    assert_same(made, tensors(tmp_path / "memory"))
    import_model_from_safetensors(None, tmp_path / "files")


def test_static_activations_need_samples(source: Path, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config("int8")
    with pytest.raises(DataError, match="static range, which needs samples"):
        ModelQuantizer(config).direct_quantize_checkpoint(source, tmp_path / "files")
    assert not (tmp_path / "files").exists()
    with pytest.raises(DataError, match="empty"):
        ModelQuantizer(config).direct_quantize_checkpoint(source, tmp_path / "files", dataloader=[])


def test_weights_of_siblings_in_several_files_share_their_scale(source: Path, tmp_path: Path) -> None:
    template = LLMTemplate.get("llama")
    weight = template.get_config("nvfp4").global_quant_config.weight
    groups = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]
    config = QConfig(QLayerConfig(weight=weight), exclude=["lm_head"], shared_scale_groups=groups)
    in_memory(source, config, tmp_path / "memory")
    quantize_checkpoint(source, tmp_path / "files", config)
    made = tensors(tmp_path / "files")
    assert_same(made, tensors(tmp_path / "memory"))
    q, k = (made[f"model.layers.1.self_attn.{name}.weight_scale_2"] for name in ("q_proj", "k_proj"))
    assert q == k
    typo = QConfig(QLayerConfig(weight=weight), exclude=["lm_head"], shared_scale_groups=[["q_proj", "k_porj"]])
    with pytest.raises(ConfigError, match="k_porj"):
        quantize_checkpoint(source, tmp_path / "typo", typo)


def test_files_at_once_are_the_same(source: Path, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config("int4_wo_32")
    for name, workers in (("one", 1), ("two", 2)):
        quantize_checkpoint(source, tmp_path / name, config, workers=workers)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_processes_of_an_earlier_call_find_relative_folders(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LLMTemplate.get("llama").get_config("int4_wo_32")
    for name in ("first", "second"):
        folder = tmp_path / name
        shutil.copytree(source, folder / "model")
        monkeypatch.chdir(folder)
        quantize_checkpoint("model", "quantized", config, workers=2)
        shutil.rmtree(folder / "model")
    assert_same(tensors(tmp_path / "first" / "quantized"), tensors(tmp_path / "second" / "quantized"))


def test_a_single_file_and_an_unknown_architecture(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    state = {
        "blocks.0.up.weight": torch.randn(64, 32), "blocks.0.up.bias": torch.randn(64),
        "blocks.0.norm.weight": torch.ones(32),
        "embed.weight": torch.randn(50, 32), "head.weight": torch.randn(50, 32), "steps": torch.arange(3),
    }  # fmt: skip
    save_file(state, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"architectures": ["OfMine"], "model_type": "mine"}))
    config = QConfig(LLMTemplate.get("llama").get_config("int8_wo_per_channel").global_quant_config, exclude=["head"])
    quantize_checkpoint(source, tmp_path / "target", config)
    made = tensors(tmp_path / "target")
    scale = state["blocks.0.up.weight"].abs().amax(1) / 127.5
    assert torch.equal(made["blocks.0.up.weight_scale"], scale)
    assert torch.equal(
        made["blocks.0.up.weight"],
        (state["blocks.0.up.weight"] / scale[:, None]).round().clamp(-128, 127).to(torch.int8),
    )
    for name in set(state) - {"blocks.0.up.weight"}:
        assert torch.equal(made[name], state[name])
    with pytest.raises(ConfigError, match="blocks"):
        quantize_checkpoint(source, tmp_path / "other", QConfig(config.global_quant_config, exclude=["block.0.up"]))


def test_experts_of_old_names_become_those_in_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    fields = {**HEADS, "num_local_experts": 4, "num_hidden_layers": 1}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**fields)).eval()
    model.save_pretrained(tmp_path / "source")
    assert any(".w1." in name for name in tensors(tmp_path / "source"))
    config = LLMTemplate.get("mixtral").get_config("int8_wo_per_channel")
    in_memory(tmp_path / "source", config, tmp_path / "memory")
    quantize_checkpoint(tmp_path / "source", tmp_path / "files", config)
    assert_same(tensors(tmp_path / "files"), tensors(tmp_path / "memory"))


MIXTURES: dict[str, dict[str, Any]] = {  # architectures whose files hold experts stacked, or by other names
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "Llama4ForCausalLM": {"num_local_experts": 4, "intermediate_size_mlp": 96, "head_dim": 16},
    "GraniteMoeForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("scheme", ["int4_wo_32", "nvfp4"])
def test_stacked_experts_become_the_bits_in_memory(name: str, scheme: str, tmp_path: Path) -> None:
    """nvfp4: its static scales of inputs are those of the experts together, and of those that no token reached."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    fields = {**HEADS, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0, **MIXTURES[name]}
    cls(cls.config_class(**fields)).save_pretrained(tmp_path / "source", max_shard_size="200KB")
    model = cls.from_pretrained(tmp_path / "source").eval()
    config, samples = LLMTemplate.for_model(model).get_config(scheme), [IDS[:1, :3]]
    ModelQuantizer(config).quantize_model(model, samples)
    export_safetensors(model, tmp_path / "memory")
    ModelQuantizer(config).direct_quantize_checkpoint(tmp_path / "source", tmp_path / "files", dataloader=samples)
    made = tensors(tmp_path / "files")
    assert_same(made, tensors(tmp_path / "memory"))
    assert sum(key.endswith("experts.3.down_proj.weight_scale") for key in made) == 2 - name.startswith("Ernie")
    loaded = import_model_from_safetensors(None, tmp_path / "files")
    model.set_attn_implementation("eager")
    # the sums of a weight that is stored transposed differ in the last bit; its values do not
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


def test_experts_that_stay_float_stay_stacked(tmp_path: Path) -> None:
    torch.manual_seed(0)
    cls, fields = transformers.GptOssForCausalLM, {**HEADS, "intermediate_size": 96, **MIXTURES["GptOssForCausalLM"]}
    cls(cls.config_class(**fields)).save_pretrained(tmp_path / "source")
    config = LLMTemplate.get("gpt_oss").get_config("int8_wo_per_channel", exclude_layers=["lm_head", "*experts*"])
    in_memory(tmp_path / "source", config, tmp_path / "memory")
    quantize_checkpoint(tmp_path / "source", tmp_path / "files", config)
    made, name = tensors(tmp_path / "files"), "model.layers.0.mlp.experts.gate_up_proj"
    assert_same(made, tensors(tmp_path / "memory"))
    assert torch.equal(made[name], tensors(tmp_path / "source")[name])


def test_a_killed_job_goes_on_where_it_was(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed for certain: ``tests/test_kills.py``."""
    config, write, begun = LLMTemplate.get("llama").get_config("int4_wo_32"), quantize.write_file, []

    def third(path: Path, items: Any) -> None:
        begun.append(path)
        if len(begun) == 3:
            path.write_bytes(b"half a file")
            raise KeyboardInterrupt
        write(path, items)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(quantize, "write_file", third)
        quantize_checkpoint(source, tmp_path / "target", config)
    there = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "target").glob("*.safetensors")}
    assert len(there) == 2 and not (tmp_path / "target" / "config.json").exists()
    with pytest.raises(ConfigError, match=r"an unfinished job.*another configuration: "):
        quantize_checkpoint(source, tmp_path / "target", LLMTemplate.get("llama").get_config("int8_wo_per_channel"))
    quantize_checkpoint(source, tmp_path / "target", config)
    quantize_checkpoint(source, tmp_path / "whole", config)
    assert {path.name for path in (tmp_path / "target").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "target" / path.name).read_bytes()
    assert all((tmp_path / "target" / name).stat().st_mtime_ns == when for name, when in there.items())


def test_nothing_that_is_there_is_touched(source: Path, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config("int4_wo_32")
    target = tmp_path / "target"
    target.mkdir()
    (target / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"thesis\.txt"):
        quantize_checkpoint(source, target, config)
    assert [path.name for path in target.iterdir()] == ["thesis.txt"]
    quantize_checkpoint(source, tmp_path / "done", config)
    with pytest.raises(ConfigError, match="not empty"):
        quantize_checkpoint(source, tmp_path / "done", config)
    with pytest.raises(ConfigError, match="is a file"):
        quantize_checkpoint(source, target / "thesis.txt", config)


def test_what_needs_samples_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    template = LLMTemplate.get("llama")
    with pytest.raises(DataError, match="needs samples"):
        quantize_checkpoint(source, tmp_path / "target", template.get_config("fp8"))
    with pytest.raises(DataError, match="samples"):
        quantize_checkpoint(source, tmp_path / "target", template.get_config("int4_wo_32", algorithm="gptq"))
    with pytest.raises(ConfigError, match="group_size=128 does not divide"):
        quantize_checkpoint(source, tmp_path / "target", template.get_config("int4_wo_128"))
    with pytest.raises(ModelError, match="not a folder"):
        quantize_checkpoint(tmp_path / "nowhere", tmp_path / "target", template.get_config("int4_wo_32"))
    assert not (tmp_path / "target").exists()


def test_tied_heads_are_explained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**HEADS, "tie_word_embeddings": True}))
    model.save_pretrained(tmp_path / "source")
    config = LLMTemplate.get("llama").get_config("int4_wo_32", exclude_layers=[])
    with pytest.raises(ModelError, match=r"lm_head.*exclude it"):
        quantize_checkpoint(tmp_path / "source", tmp_path / "target", config)
    quantize_checkpoint(tmp_path / "source", tmp_path / "target", LLMTemplate.get("llama").get_config("int4_wo_32"))


MEASURE = """
import sys
from quark.report.process import resident
from quark.torch import LLMTemplate
from quark.torch.files import quantize_checkpoint
config = LLMTemplate.get("llama").get_config("int8_wo_per_channel")
quantize_checkpoint(sys.argv[1] + "/small", sys.argv[2] + "/small", config)
before = resident()
quantize_checkpoint(sys.argv[1] + "/large", sys.argv[2] + "/large", config)
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory by /proc")
def test_memory_stays_under_three_quarters_of_a_file(tmp_path: Path) -> None:
    """A small model comes first: the code of the architecture, which its first use imports, is 140 MB by itself."""
    fields = {**HEADS, "vocab_size": 256, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source" / "large", max_shard_size="100MB")
    del model
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "source" / "small")
    sizes = [path.stat().st_size for path in (tmp_path / "source" / "large").glob("*.safetensors")]
    assert len(sizes) >= 2
    (tmp_path / "target").mkdir()
    run = [sys.executable, "-c", MEASURE, str(tmp_path / "source"), str(tmp_path / "target")]
    more = int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    assert more < 0.75 * max(sizes), f"{more / 1e6:.0f} MB, of files of {max(sizes) / 1e6:.0f} MB"


FLOORS = """
import sys
from quark.cli import main
from quark.report.process import present
from quark.torch.files.block_files import BlocksInFiles
floors, drop = [], BlocksInFiles.drop
def noted(self, name):
    drop(self, name)
    floors.append(present())
BlocksInFiles.drop = noted
assert main(["torch", "quantize-files", *sys.argv[1:]]) == 0
print(len(floors), floors[-1] - floors[len(floors) // 2])
"""
JOBS = ("fp8 --kv-cache fp8", *(f"int4_wo_32 -a {name}" for name in ("gptq", "gptaq", "qronos", "smoothquant", "awq")))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory now by /proc")
@pytest.mark.parametrize("job", JOBS)
def test_memory_of_a_block_goes_with_the_block(job: str, tmp_path: Path) -> None:
    """The C library keeps what is freed in small pieces; a quarter of the blocks' bytes over half of their visits is
    what hidden states and caches take."""
    fields = {**HEADS, "vocab_size": 256, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 24}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source", max_shard_size="50MB")
    stored = sum(value.numel() * 2 for value in model.model.layers.parameters())
    del model
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 256, (8, 128)))
    words = [tmp_path / "source", "-o", tmp_path / "target", "--data", tmp_path / "ids.npy", "--seq-len", "128"]
    run = [sys.executable, "-c", FLOORS, *map(str, words), "-s", *job.split(), "--samples", "8", "--batch-size", "4"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    visits, more = map(int, done.stdout.splitlines()[-1].split())
    assert visits >= 48 and more < stored / 4, f"{more / 1e6:.0f} MB more, of {stored / 1e6:.0f} MB of blocks"


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_eight_bits_without_a_scale_are_values_of_the_type_of_the_model(dtype: torch.dtype, tmp_path: Path) -> None:
    """As transformers reads them; without a type they are refused by name."""
    name = "model.layers.0.mlp.up_proj.weight"
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "a")
    path, settings = tmp_path / "a" / "model.safetensors", tmp_path / "a" / "config.json"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].to(dtype)}, path, {"format": "pt"})
    config = LLMTemplate.get("llama").get_config("int8_wo_per_channel")
    quantize_checkpoint(tmp_path / "a", tmp_path / "files", config)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    export_safetensors(ModelQuantizer(config).quantize_model(model), tmp_path / "memory")
    one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in ("files", "memory"))
    assert one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())
    told = {
        key: value for key, value in json.loads(settings.read_text()).items() if key not in ("dtype", "torch_dtype")
    }
    settings.write_text(json.dumps(told))
    with pytest.raises(ModelError, match=f"{name}' has the type {dtype}"):
        quantize_checkpoint(tmp_path / "a", tmp_path / "other", config)


KINDS = {
    "nemotron_h": "a prefix that is renamed is no missing one",
    "bamba": "states of convolutions",
    "neomme": "a float layer that is tied to a quantized one has a tensor of its own",
    "qwen3_vl_moe_text": "experts of a model without a head are no heads, though their outputs are as many as words",
    "hunyuan_v1_moe": "a router within a module of its own stays float beside experts that are taken apart",
}


@pytest.mark.parametrize("kind", KINDS)
def test_types_that_files_and_memory_treated_differently(kind: str, tmp_path: Path) -> None:
    from tests.consumers import tiny

    tiny.made(kind, dict(tiny.model_types())[kind], {}).save_pretrained(tmp_path / "source")
    model = load_model(tmp_path / "source")
    skeleton = read_skeleton(read_checkpoint(tmp_path / "source")).model
    config, of_files = (LLMTemplate.for_model(one).get_config("int8_wo_per_channel") for one in (model, skeleton))
    quantize_checkpoint(tmp_path / "source", tmp_path / "files", of_files)
    export_safetensors(ModelQuantizer(config).quantize_model(model), tmp_path / "memory")
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("files", "memory"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


def test_a_head_that_is_tied_to_a_quantized_embedding_stays_with_its_values(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**HEADS, "tie_word_embeddings": True})).eval()
    model.save_pretrained(tmp_path / "source")
    config = replace(
        LLMTemplate.get("llama").get_config("int8_wo_per_channel"),
        layer_quant_config={
            "*embed_tokens": LLMTemplate.get("llama").get_config("int8_wo_per_channel").global_quant_config
        },
    )
    quantize_checkpoint(tmp_path / "source", tmp_path / "files", config)
    wanted = ModelQuantizer(config).quantize_model(load_model(tmp_path / "source"))(IDS).logits
    assert torch.equal(load_model(tmp_path / "files")(IDS).logits, wanted)


@pytest.mark.parametrize(
    ("positions", "length", "fits"), [(-1, 600, True), (0, 600, True), (32, 32, True), (32, 33, False)]
)
def test_windows_are_as_long_as_the_positions_that_a_model_has_learned(
    positions: int, length: int, fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """XLNet says -1: it has none that end."""
    model = torch.nn.Module()
    model.config = SimpleNamespace(max_position_embeddings=positions)  # type: ignore[assignment]
    with nullcontext() if fits else pytest.raises(DataError, match=f"{length} tokens.*--seq-len {positions}"):
        check_ids(model, [torch.zeros(length, dtype=torch.int64)])
    assert not caplog.records
    model.config.rope_parameters = {"rope_type": "default"}  # type: ignore[union-attr]
    check_ids(model, [torch.zeros(length, dtype=torch.int64)])  # rotations go on behind the last position
    assert [f"--seq-len {positions}" in one.getMessage() for one in caplog.records] == [True] * (not fits)
