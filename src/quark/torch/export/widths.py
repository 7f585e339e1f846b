"""Lengths of weights that a format, or the program that reads it, cannot hold: shapes alone tell, and so
before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

from quark.errors import ConfigError, as_a
from quark.numerics.elements import Int
from quark.numerics.formats import Block
from quark.numerics.granularity import Block2D
from quark.torch.stage import Stages

WORD = 32  # bits
SIDES = {  # of a weight that the codes of a format are packed along; formats that hold linear layers alone
    "compressed-tensors": (), "awq": ("outputs",), **dict.fromkeys(("gptq", "gptq_v2"), ("outputs", "inputs")),
    "modelopt": (), "fp8": (),
}  # fmt: skip
#: Siblings that classes of vLLM read as one layer (packed_modules_mapping of its models; stacked experts).
READ_AS_ONE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_a", "in_proj_b"),
)


def check_widths(name: str, stages: Stages, outputs: int, inputs: int, format: str) -> None:
    """A weight [out, in] fits a format.

    Raises:
        ConfigError: blocks that do not divide its rows, or words that would be left half empty.
    """
    if not stages or format not in SIDES:
        return
    check_blocks(name, stages, inputs, format)
    if SIDES[format]:
        lengths = {"outputs": outputs, "inputs": inputs}
        sides = {side: lengths[side] for side in SIDES[format]}
        check_words(f"{name}.weight", as_a(Int, stages[0].format).bits, sides)


def check_for_vllm(name: str, stages: Stages, outputs: int, format: str) -> None:
    """A weight of so many outputs is one that vLLM loads.

    Raises:
        ConfigError: ``check_filled``, ``check_height``.
    """
    if format == "quark":
        check_filled(name, stages, outputs)
    check_height(name, stages, outputs)


def check_blocks(name: str, stages: Stages, columns: int, what: str) -> None:
    """Blocks divide the rows of a weight, for programs that read no shorter last block.

    Raises:
        ConfigError: they do not.
    """
    for stage in stages:
        if isinstance(stage.format, Block) and columns % stage.format.size:
            raise ConfigError(
                f"{what} cannot hold {name!r}: it has rows of {columns} numbers, which blocks of {stage.format.size} "
                f"do not divide; the format quark has it"
            )


def check_words(name: str, bits: int, sides: Mapping[str, int]) -> None:
    """The sides of a weight that codes are packed along fill words of 32 bits.

    Raises:
        ConfigError: one does not.
    """
    for what, length in sides.items():
        if length * bits % WORD:
            raise ConfigError(f"{name!r} has {length} {what} of {bits} bits, which do not fill whole words of 32 bits")


def check_filled(name: str, stages: Stages, outputs: int) -> None:
    """Integers of which several outputs share a word fill words: vLLM takes the rest of the last one for outputs, too.

    Raises:
        ConfigError: they do not.
    """
    bits = min((stage.format.bits for stage in stages if isinstance(stage.format, Int)), default=WORD)
    if bits < 8 and outputs * bits % WORD:
        raise ConfigError(
            f"{name!r} has {outputs} outputs of {bits} bits, which fill no words of {WORD}, and vLLM takes the rest "
            f"for outputs (QuarkW4A16Int4); --format compressed-tensors has them"
        )


def check_height(name: str, stages: Stages, outputs: int) -> None:
    """No block of rows is shared by two layers that vLLM reads as one; the last of them may end short, but for experts.

    Raises:
        ConfigError: one would be.
    """
    own, ends = name.rpartition(".")[2], {one: names[-1] for names in READ_AS_ONE for one in names}
    if own not in ends:
        return
    height = next((one.spec.granularity.rows for one in stages if isinstance(one.spec.granularity, Block2D)), 1)
    if outputs % height and (own != ends[own] or ".experts." in name):
        raise ConfigError(
            f"{name!r} has {outputs} outputs, which {height} does not divide, and vLLM reads it with others as one "
            f"layer (ValueError: Weight output_partition_size = {outputs} is not divisible by weight quantization "
            f"block_n, fp8_utils.py); --scheme ptpc_fp8, with a scale per row, is read, or --exclude '*.{own}' and "
            f"its siblings"
        )
