"""What ``config.json`` says of the tensors of a plain model (``quark.torch.architectures.PLAIN``) without its modules.

By its fields, and where it lacks one by the default in the source of its class. What neither tells passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quark.errors import ModelError, nearest
from quark.torch.transformers_names import ConfigSource, activations

WORDS, HEAD = "model.embed_tokens", "lm_head"
ACTIVATIONS = ("hidden_act", "hidden_activation")
#: Last parts of names -> what the lengths of a weight are called in ``lengths``, in the order that models have them.
SIDES: dict[str, tuple[str, ...]] = {
    "embed_tokens": ("words", "hidden"),
    "q_proj": ("queries", "hidden"),
    "k_proj": ("keys", "hidden"),
    "v_proj": ("keys", "hidden"),
    "o_proj": ("hidden", "queries"),
    "dense": ("hidden", "queries"),
    "qkv_proj": ("queries and keys", "hidden"),
    **dict.fromkeys(("gate_proj", "up_proj", "fc1", "c_fc"), ("inner", "hidden")),
    "gate_up_proj": ("two inner", "hidden"),
    **dict.fromkeys(("down_proj", "fc2", "c_proj"), ("hidden", "inner")),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"), ("hidden",)),
    **dict.fromkeys(("post_feedforward_layernorm", "norm"), ("hidden",)),
    "lm_head": ("words", "hidden"),
}


def lengths(config: Mapping[str, Any], source: ConfigSource) -> dict[str, int]:
    """Lengths of sides of weights, of those that are known."""

    def size(name: str) -> int | None:
        value = config.get(name, source.fields.get(name))
        return value if type(value) is int and value > 0 else None

    hidden, inner, heads = size("hidden_size"), size("intermediate_size"), size("num_attention_heads")
    keys = heads if filled(config, source, "num_key_value_heads") else size("num_key_value_heads")
    head, usual = size("head_dim"), hidden // heads if hidden and heads else None
    if filled(config, source, "head_dim"):
        head = usual
    elif "head_dim" not in source.fields and head != usual:  # some classes take what is no field, others pass it over
        head = None
    found = {
        "words": size("vocab_size"),
        "hidden": hidden,
        "inner": inner,
        "two inner": inner and 2 * inner,
        "queries": heads and head and heads * head,
        "keys": keys and head and keys * head,
        "queries and keys": heads and keys and head and (heads + 2 * keys) * head,
    }
    return {name: value for name, value in found.items() if value is not None}


def filled(config: Mapping[str, Any], source: ConfigSource, name: str) -> bool:
    """Whether a class makes a field of others, since neither the file says it nor a default does."""
    return config.get(name) is None and source.fields.get(name) is None


def check_fields(folder: Path, config: Mapping[str, Any], source: ConfigSource) -> None:
    """Refuse heads that do not divide the hidden size, where the class wants that, and an unknown activation.

    Raises:
        ModelError: the field, its value and what is allowed.
    """
    file, known = str(folder / "config.json"), lengths(config, source)
    heads, hidden = config.get("num_attention_heads"), known.get("hidden")
    if source.divides and type(heads) is int and heads > 0 and hidden and hidden % heads:
        fit = [one for one in range(1, hidden + 1) if hidden % one == 0]
        near = sorted(sorted(fit, key=lambda one: abs(one - heads))[:3])
        raise ModelError(
            f"{file!r}: num_attention_heads is {heads}, which does not divide hidden_size, {hidden}; "
            f"{', '.join(map(str, near))} would"
        )
    field = next((name for name in ACTIVATIONS[::-1] if name in source.fields), None)
    chosen = config.get(field) if field else None
    if isinstance(chosen, str) and activations() and chosen not in activations():
        raise ModelError(
            f"{file!r}: {field} is {chosen!r}, which transformers does not have.{nearest(chosen, activations())}"
        )


def check_shapes(
    folder: Path, config: Mapping[str, Any], source: ConfigSource, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse a tensor of another shape than the fields give it.

    Args:
        folder, config: of the model.
        source: of its configuration.
        shapes: of weights, by the names of their modules.

    Raises:
        ModelError: the first one that has.
    """
    known, order = lengths(config, source), list(SIDES)
    named = {name: last for name in shapes if (last := name.rpartition(".")[2]) in SIDES}
    for name in sorted(named, key=lambda one: order.index(named[one])):
        wanted = [known.get(side) for side in SIDES[named[name]]]
        if None not in wanted and list(shapes[name]) != wanted:
            raise misshapen(folder, f"{name}.weight", shapes[name], [one for one in wanted if one])


def has_head(config: Mapping[str, Any], source: ConfigSource) -> bool:
    """Whether the head is a tensor of its own."""
    return config.get("tie_word_embeddings", source.fields.get("tie_word_embeddings")) is False


def misshapen(folder: Path, name: str, found: Any, wanted: Any) -> ModelError:
    """What is said of a tensor of another shape than its model has."""
    shapes = f"{list(found)} in the files, and {str(folder / 'config.json')!r} asks for {list(wanted)}"
    return ModelError(f"{str(folder)!r}: the tensor {name!r} is {shapes}")


def lacks(folder: Path, name: str) -> ModelError:
    """What is said of a tensor that is not there."""
    return ModelError(f"{str(folder)!r} lacks the tensor {name!r}, which {str(folder / 'config.json')!r} asks for")


def placeless(folder: Path, name: str) -> ModelError:
    """What is said of a tensor of a layer that the model does not have."""
    return ModelError(
        f"{str(folder)!r} holds the tensor {name!r}, for which {str(folder / 'config.json')!r} has no layer"
    )
