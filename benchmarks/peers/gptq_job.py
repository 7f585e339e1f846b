"""GPTQ of one linear layer through the public interface; runs unchanged with this package and with the peer.

PYTHON gptq_job.py SIZE [REPEATS]

prints the least processor time of ``quantize_model`` (inputs collected, scales, GPTQ), one thread, as RESULT SECONDS
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import GPTQConfig, Int4PerGroupSpec, QConfig, QLayerConfig

SAMPLES, LENGTH, GROUP = 4, 256, 128


class Block(nn.Module):
    """One layer, called as decoder blocks are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(size, size, bias=False)

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor]:
        """The layer."""
        return (self.fc(hidden_states),)


class Decoder(nn.Module):
    """One block, where ``layers`` names it."""

    device = torch.device("cpu")  # which the peer asks a model for

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(size)])

    def forward(self, x: torch.Tensor, **_: object) -> torch.Tensor:
        """The block."""
        return self.layers[0](x)[0]


def main() -> None:
    """The least of a few."""
    size, repeats = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = [torch.randn(1, LENGTH, size) for _ in range(SAMPLES)]
    weight = Int4PerGroupSpec(ch_axis=-1, group_size=GROUP).to_quantization_spec()
    algorithm = GPTQConfig(inside_layer_modules=["fc"], model_decoder_layers="layers")
    config = QConfig(global_quant_config=QLayerConfig(weight=weight), algo_config=[algorithm])
    found = []
    for _ in range(repeats):
        model = Decoder(size).eval()
        start = time.process_time()
        ModelQuantizer(config).quantize_model(model, samples)
        found.append(time.process_time() - start)
    print(f"RESULT {min(found)}", flush=True)


if __name__ == "__main__":
    main()
