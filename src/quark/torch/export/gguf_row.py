"""What a row of the table of GGUF's architectures says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import numpy as np

from quark.dataclass import dataclass
from quark.torch.export.gguf_changes import Change


@dataclass(frozen=True)
class Architecture:
    """A model type.

    Attributes:
        name: of the architecture in GGUF.
        interleaved: rotary embedding turns neighbours of a head, so rows of queries and keys change their order.
        shifted: norms multiply with 1 + weight, and the file has the sum.
        window: llama.cpp knows its sliding window.
        activations: values of ``hidden_act`` that llama.cpp computes.
        expert_length: key of the configuration with the width of an expert, where it is written.
        fixed: what llama.cpp takes for granted: values of the configuration, where it has the key, or functions of it.
        small_eps: keys of the epsilons of norms, where transformers has others in some norms and llama.cpp one for all:
            up to 1e-5 both answer alike.
        biases: keys of ``BIASES`` that it reads both ways; the others are False for granted.
        period: every so many layers one sees all tokens, the others a window; 0: nothing is taken for granted.
        gating: how scores of experts are made, where llama.cpp is told: a name of ``gguf.ExpertGatingFuncType``.
        partial: a part of each head may be rotated.
        long: llama.cpp has the two sets of factors of LongRoPE, and takes one by the length of its context.
        divisors: llama.cpp reads what the frequencies of rotary embedding are divided by (Llama 3.1).
        yarn_unit: what llama.cpp is told for an ``mscale_all_dim`` of 1; 0: it has none.
        numbers: further keys of the configuration, and their method of ``GGUFWriter``.
        constants: methods of ``GGUFWriter``, and what the model has in its code.
        encoder: the classes of transformers that end where llama.cpp does, with a hidden state for each token; empty:
            a decoder, whose class is not asked for.
        whole_heads: heads together are as wide as what passes between layers.
        left: beginnings of names of tensors that llama.cpp does not compute with.
        also: an architecture of the ``gguf`` package whose names llama.cpp reads here, too.
        behind_padding: positions are counted behind the number of the padding token, and the file has the rows from
            there.
        around: windows lie on both sides of a token, and the first layer of every period sees all.
        derived: methods of ``GGUFWriter``, and how what they are told follows from a configuration.
        by_head: rows of a fused projection of queries, keys and values lie head by head.
        changed: endings of names of tensors, and what the file has of their values, by the configuration.
        across: endings of names of matrices whose columns move by heads, and the key with the width of these: no block
            of numbers may cross a head.
        split: endings of names of tensors that are several in the file, by the names of these which rows of a tensor
            each has.
        scaled: endings of names of matrices, and by what their rows are multiplied, by the configuration: numbers that
            llama.cpp does not read, and that go into the scales of codes.
        both_ways: the row of a model of this type that looks both ways (``use_bidirectional_attention``).
        unread: names of tensors that llama.cpp wants in a file and computes nothing with, and their shapes, by the
            configuration; the model has none of them.
        told: endings of names of parameters that are no tensors of the file but numbers, one a layer, and their method.
    """

    name: str
    interleaved: bool = False
    shifted: bool = False
    window: bool = False
    activations: tuple[str, ...] = ("silu",)
    expert_length: str = ""
    fixed: Mapping[str, object] = field(default_factory=dict)
    small_eps: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    period: int = 0
    gating: str = ""
    partial: bool = False
    long: bool = False
    divisors: bool = False
    yarn_unit: float = 0.0
    numbers: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    encoder: tuple[str, ...] = ()
    whole_heads: bool = False
    left: tuple[str, ...] = ()
    also: str = ""
    behind_padding: bool = False
    around: bool = False
    derived: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    by_head: bool = False
    changed: Mapping[str, Change] = field(default_factory=dict)
    across: Mapping[str, str] = field(default_factory=dict)
    split: Mapping[str, Mapping[str, Change]] = field(default_factory=dict)
    told: Mapping[str, str] = field(default_factory=dict)
    both_ways: Architecture | None = None
    unread: Callable[[Any], Mapping[str, tuple[int, ...]]] = field(default=lambda _: {})
    scaled: Mapping[str, Callable[[Any], np.ndarray]] = field(default_factory=dict)

    def parts_of(self, name: str) -> Mapping[str, Change]:
        """The tensors of the file that one of the model is, where it is several."""
        return next((parts for ending, parts in self.split.items() if name.endswith(ending)), {})

    def factor_of(self, name: str, config: Any) -> np.ndarray | None:
        """By what the rows of a tensor are multiplied, float32 [rows, 1] or [1, 1]; None: they are not."""
        found = next((factor(config) for ending, factor in self.scaled.items() if name.endswith(ending)), None)
        return None if found is None or (found == 1).all() else found.astype(np.float32).reshape(-1, 1)
