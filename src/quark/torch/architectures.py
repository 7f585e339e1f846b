"""What is special in known language models: names of the layers that make queries, keys and values, and of those that
stay float. An architecture without a row is read from its modules (``quark.torch.template``).
"""

from __future__ import annotations

from dataclasses import replace

from quark.dataclass import dataclass


@dataclass(frozen=True)
class LayerGlobs:
    """Globs of the layers of a kind of language model.

    Attributes:
        kv: that make keys and values (one, if they are fused).
        q: that makes queries.
        exclude: that stay float.
        gate_up: last parts of the names of the layers that open a feed-forward network.
    """

    kv: tuple[str, ...] = ("*k_proj", "*v_proj")
    q: str = "*q_proj"
    exclude: tuple[str, ...] = ("lm_head",)
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")


GATE = "*.gate"
SHARED_GATE = "*.shared_expert_gate"
ROUTER = "*router*"
EYES = ("*vision*", "*visual*", "*multi_modal_projector*", "*mm_projector*", "*audio*")

SMALL = ("*altup*", "*laurel*", "*per_layer_model_projection")  # of Gemma 3n: rows of 4 and 64 numbers, and beside them

DENSE = LayerGlobs()
MOE = LayerGlobs(exclude=("lm_head", GATE, SHARED_GATE))
ROUTED = LayerGlobs(exclude=("lm_head", ROUTER))
SEEING = LayerGlobs(exclude=("lm_head", "*.lm_head", *EYES))
SEEING_MOE = LayerGlobs(exclude=("lm_head", "*.lm_head", GATE, SHARED_GATE, ROUTER, *EYES))
LATENT = LayerGlobs(kv=("*kv_b_proj",), q="*q_b_proj", exclude=("lm_head", "*self_attn*", GATE))
GPT = LayerGlobs(("*query_key_value",), "*query_key_value", ("lm_head", "embed_out"), ("dense_h_to_4h",))

ARCHITECTURES: dict[str, LayerGlobs] = {}
#: Types whose files name tensors as the model in memory does, and hold linear layers beside embeddings and norms: their
#: headers tell all layers (``quark.torch.files.headers``). A test makes each of them.
PLAIN = (
    *("apertus", "arcee", "bitnet", "cohere", "cohere2", "cwm", "diffllama", "ernie4_5", "exaone4", "gemma", "gemma2"),
    *("gemma3_text", "glm", "glm4", "granite", "granite_swa", "helium", "hyperclovax", "internlm3", "iquestcoder"),
    *("jais2", "llama", "ministral3", "mistral", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3"),
    *("seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma"),
)

for architecture, names in (
    (DENSE, ("cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "gemma4", "glm", "hunyuan_v1_dense", "instella")),
    (DENSE, ("lfm2", "llama", "mistral", "ministral", "muse_glimmer", "olmo", "olmo2", "qwen2", "qwen3", "qwen3_5")),
    (DENSE, ("qwen4_exp_text", "smollm3", "stablelm")),
    (replace(DENSE, exclude=("lm_head", *SMALL)), ("gemma3n_text",)),
    (replace(DENSE, exclude=("lm_head", GATE, "*kv_b_proj", "*f_b_proj", "*g_b_proj")), ("kimi_linear",)),
    (replace(SEEING, exclude=(*SEEING.exclude, *SMALL)), ("gemma3n",)),
    (LayerGlobs(gate_up=("fc1",)), ("opt", "phi")),
    (LayerGlobs(gate_up=("c_fc",)), ("starcoder2",)),
    (LayerGlobs(gate_up=("fc_in",)), ("gptj",)),
    (LayerGlobs(("*qkv_proj",), "*qkv_proj", gate_up=("gate_up_proj",)), ("phi3",)),
    (LayerGlobs(("*c_attn",), "*c_attn", gate_up=("w1", "w2")), ("qwen",)),
    (LayerGlobs(("*c_attn",), "*c_attn", gate_up=("c_fc",)), ("gpt2",)),
    (GPT, ("gpt_neox", "bloom", "falcon")),
    (replace(GPT, exclude=("*output_layer",)), ("chatglm",)),
    (MOE, ("glm4_moe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen4_exp", "minimax_m2", "mixtral")),
    (ROUTED, ("gpt_oss", "granitemoehybrid", "grok-1")),
    (LayerGlobs(("*Wqkv",), "*Wqkv", ("lm_head", ROUTER), ("w1", "v1")), ("dbrx",)),
    (SEEING, ("gemma3", "gemma4_unified", "mllama", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")),
    (SEEING_MOE, ("llama4", "minimax_m3_vl", "qwen3_vl_moe")),
    (LATENT, ("deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_vl_v2")),
    (LATENT, ("glm4_moe_lite", "glm_moe_dsa", "glm5_next", "kimi_k2", "kimi_k25", "kimi_k3")),
):
    ARCHITECTURES.update(dict.fromkeys(names, architecture))


def globs_of(kind: str) -> LayerGlobs:
    """Those of a plain type, which need no row where nothing is special."""
    return ARCHITECTURES.get(kind, DENSE)
