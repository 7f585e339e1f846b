"""The language model within one that sees or hears as well, for formats that hold nothing else."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

UNSCALED = ("aya_vision", "cohere2_vision")  # transformers leaves their language model's logit_scale out


class LanguagePart(nn.Module):
    """A language model that transformers has within larger ones only.

    Attributes:
        config: of the language model.
        model, lm_head: its decoder and its head.
    """

    base_model_prefix = "model"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model: nn.Module = nn.Identity()
        self.lm_head: nn.Module = nn.Identity()

    def set_output_embeddings(self, head: nn.Module) -> None:
        """Take a head."""
        self.lm_head = head

    def forward(self, input_ids: torch.Tensor) -> Any:
        """Logits [texts, tokens, words] as ``logits``."""
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids).last_hidden_state))


def language_part(model: Any, known: Collection[str]) -> nn.Module:
    """A causal language model of transformers that shares its layers with ``model``.

    Args:
        model: of transformers.
        known: model types.

    Returns:
        ``model`` itself where its type is known, or that of its language model is not.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    found: Any = model
    alone = text is config or config.model_type in (*UNSCALED, *known) or config.is_encoder_decoder
    if not alone and text.model_type in known and model.get_output_embeddings() is not None:
        from transformers import AutoModelForCausalLM

        if type(text) in AutoModelForCausalLM._model_mapping:
            with torch.device("meta"):
                found = AutoModelForCausalLM.from_config(text)
        else:
            found = LanguagePart(text)
        setattr(found, found.base_model_prefix, model.get_decoder())
        found.set_output_embeddings(model.get_output_embeddings())
        found.train(model.training)
    return found
