"""Networks for the tests of exports."""

from __future__ import annotations

import torch
from torch import nn

IDS = torch.arange(24).reshape(2, 12)


class Mixed(nn.Module):
    """Embedding, linear layers with and without bias, a convolution, a normalization."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.embedding, self.fc, self.conv = nn.Embedding(40, 64), nn.Linear(64, 48), nn.Conv2d(16, 32, 3, padding=1)
        self.norm, self.out = nn.BatchNorm2d(32), nn.Linear(32, 24, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        self.eval()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.fc(self.embedding(ids)).reshape(ids.shape[0], 16, 3, -1)
        return self.out(self.norm(self.conv(x)).mean((2, 3)))


def llama(dtype: torch.dtype = torch.float32, tie: bool = False, **sizes: int):
    """Two layers of the Llama architecture with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 256,
        **sizes,
    }
    model = LlamaForCausalLM._from_config(LlamaConfig(**shape, tie_word_embeddings=tie), dtype=dtype).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(ids).logits
