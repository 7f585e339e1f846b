"""What the modules of a language model tell: which layers make keys and values, which stay float.

Float are heads, routers, convolutions (patch embeddings, the short convolutions of state-space models), and everything
outside of the language model where it is a part: vision towers, audio encoders, projectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from quark.dataclass import dataclass
from quark.torch.experts import UnfusedExperts, is_fused, opening
from quark.torch.kv_cache import argument_of, role_of
from quark.torch.layers import kind_of

GATE_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class ModuleFacts:
    """What modules tell.

    Attributes:
        kv: globs of the layers that make keys and values.
        q: of those that make queries.
        gate_up: names of the layers that open a gated feed-forward network.
        floats: globs of the layers that stay float.
    """

    kv: list[str]
    q: list[str]
    gate_up: list[str] | None
    floats: list[str]


def read_modules(model: nn.Module) -> ModuleFacts:
    """What the modules of a model tell; nothing about layers that it does not have."""
    blocks = [(name, module) for name, module in model.named_modules() if argument_of(module) and is_innermost(module)]
    layers = [name for name, _ in own_layers(blocks)]
    beside = {name for name, _ in blocks}
    direct = [name for name in layers if name.rpartition(".")[0] in beside]  # not those of recurrent modules within
    globs = dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in direct or layers)
    own = language_model(model)
    made = {f"{own}.{glob}" if in_towers(glob, model) else glob: role_of(glob) for glob in globs}
    kv = [glob for glob, roles in made.items() if roles]
    queries = [glob for glob, roles in made.items() if glob.rpartition(".")[2].startswith(("q", "wq")) and not roles]
    floats = dict.fromkeys([*heads(model), *routers(model), *towers(model)])
    floats |= dict.fromkeys(convolutions(model, list(floats)))
    return ModuleFacts(kv, queries or kv[:1], gates(model), list(floats))


def towers(model: nn.Module) -> list[str]:
    """Globs of what lies beside the language model, where a model is more than one."""
    inner = language_model(model)
    return list(beside(model, inner, heads(model))) if inner else []


def language_model(model: nn.Module) -> str:
    """The name of the language model inside a model that is more than one; nothing of others."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config") or config.is_encoder_decoder:
        return ""
    text, own = config.get_text_config(), model.named_modules()
    inner = next((name for name, part in own if name and type(getattr(part, "config", None)) is type(text)), "")
    return "" if type(text) is type(config) else inner


def in_towers(glob: str, model: nn.Module) -> bool:
    """Whether a glob fits a layer beside the language model: an encoder's keys are not cached."""
    beside = towers(model)
    fitting = [
        name for name, module in model.named_modules() if kind_of(module) is not None and fnmatchcase(name, glob)
    ]
    return any(fnmatchcase(name, tower) for name in fitting for tower in beside)


def beside(module: nn.Module, inner: str, kept: Iterable[str], path: str = "") -> Iterator[str]:
    """Globs of the layers outside of the module called ``inner``, and not in ``kept``."""
    for own, child in module.named_children():
        name = f"{path}.{own}" if path else own
        if inner.startswith(f"{name}."):
            yield from beside(child, inner, kept, name)
        elif name != inner and name not in kept:
            if kind_of(child) is not None:
                yield name
            elif any(kind_of(part) is not None for part in child.modules()):
                yield f"{name}.*"


def convolutions(model: nn.Module, known: list[str]) -> list[str]:
    """Globs of the layers that are not linear and that ``known`` does not hold."""
    layers = [(name, kind_of(module)) for name, module in model.named_modules()]
    own = {name: kind for name, kind in layers if kind is not None and kind.by_default}
    linear = {name.rpartition(".")[2] for name, kind in own.items() if kind.tokens}
    found: dict[str, None] = {}
    for name, kind in own.items():
        if not kind.tokens and not any(fnmatchcase(name, glob) for glob in known):
            last = name.rpartition(".")[2]
            found[name if last in linear or last.isdigit() or "." not in name else f"*.{last}"] = None
    return list(found)


def gates(model: nn.Module) -> list[str] | None:
    """Names of the two layers that open a gated feed-forward network, where modules hold both, or stacks of them."""
    apart = any(set(GATE_UP) <= set(parent._modules) for parent in model.modules())
    stacked = any(is_fused(parent) and opening(parent) == "gate_up_proj" for parent in model.modules())
    return list(GATE_UP) if apart or stacked else None


def is_innermost(module: nn.Module) -> bool:
    """Whether no module inside is handed a cache too: an attention module, not a block."""
    return not any(argument_of(child) for child in module.modules() if child is not module)


def own_layers(blocks: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """The layers inside modules, with full names."""
    for block, module in blocks:
        for name, child in module.named_modules():
            if name and kind_of(child) is not None:
                yield f"{block}.{name}", child


def head_of(model: nn.Module) -> Any:
    """The layer that a model names as its output; None: nothing (an encoder reads tokens, and gives features)."""
    return getattr(model, "get_output_embeddings", lambda: None)()


def heads(model: nn.Module) -> list[str]:
    """Names of the layers whose output is as long as the vocabulary."""
    head = head_of(model)
    names = [name for name, module in model.named_modules() if module is head and head is not None]
    names += [name for name in tied_layers(model) if name not in names]
    if names:
        return names
    words = vocabularies(model)
    apart = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, UnfusedExperts))
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name, module in linear if module.out_features in words and not name.startswith(apart)]


def word_embeddings(model: nn.Module) -> nn.Module | None:
    """What the model names as its input; None: nothing, as many with pictures or sound do."""
    try:
        found: nn.Module | None = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # transformers' answer where it does not know them
        return None
    return found


def vocabularies(model: nn.Module) -> set[int]:
    """How many words there are: of the embeddings that the model names as its input; places and kinds are no words.
    Of a model that names none: of all of its embeddings."""
    embeddings = word_embeddings(model)
    one = [embeddings] if isinstance(embeddings, nn.Embedding) else model.modules()
    return {module.num_embeddings for module in one if isinstance(module, nn.Embedding)}


def tied_layers(model: nn.Module) -> list[str]:
    """Names of the linear layers that transformers ties to an embedding: they are heads too."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    modules = dict(model.named_modules(remove_duplicate=False))
    pairs = [(target.removesuffix(".weight"), source.removesuffix(".weight")) for target, source in ties.items()]
    linear = [target for target, source in pairs if isinstance(modules.get(source), nn.Embedding)]
    return [name for name in linear if isinstance(modules.get(name), nn.Linear)]


def routers(model: nn.Module) -> list[str]:
    """Globs of the layers beside experts that choose among them: their outputs are few, and go through a softmax."""
    found: dict[str, None] = {}
    for parent in model.modules():
        experts = next((child for name, child in parent.named_children() if "expert" in name), None)
        if experts is not None:
            found |= dict.fromkeys(f"*.{name}" for name in router_layers(parent, expert_count(experts)))
    return list(found)


def router_layers(parent: nn.Module, count: int) -> Iterator[str]:
    """Names, inside the module that holds ``count`` experts, of the layers that choose among them."""
    for name, child in parent.named_children():
        if kind_of(child) is not None and getattr(child, "out_features", 1 << 30) <= max(256, count):
            yield name
        elif "expert" not in name:
            inside = ((path, layer) for path, layer in child.named_modules() if path and kind_of(layer) is not None)
            yield from (f"{name}.{path}" for path, layer in inside if getattr(layer, "out_features", 0) == count)


def expert_count(experts: nn.Module) -> int:
    """How many experts a module holds."""
    if isinstance(experts, UnfusedExperts):
        return experts.num_experts
    if isinstance(experts, nn.ModuleList | nn.ModuleDict):
        return len(experts)
    stacked = [value.shape[0] for value in experts.parameters(recurse=False) if value.dim() == 3]
    return stacked[0] if stacked else 0
