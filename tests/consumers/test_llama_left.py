"""Every architecture of the ``gguf`` package is written, or there is a reason."""

from __future__ import annotations

import re

import pytest
from tests.consumers.llama_left import LEFT, NO_MODEL, WITHOUT_MODEL

from quark.torch.export.gguf_table import ARCHITECTURES

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")


def bare(name: str) -> str:
    """A name without what people spell otherwise."""
    return re.sub(r"[-_.]", "", name.lower())


def test_every_architecture_of_the_package_has_a_row_or_a_reason() -> None:
    alone = [*ARCHITECTURES.values(), *(row.both_ways for row in ARCHITECTURES.values() if row.both_ways)]
    rows = {name for row in alone for name in (row.name, row.also) if name}
    assert {*gguf.MODEL_ARCH_NAMES.values()} == {*gguf.MODEL_ARCH_NAMES.values()} & (rows | LEFT.keys())
    assert not rows & LEFT.keys(), "a reason for what is written"
    assert LEFT.keys() <= {*gguf.MODEL_ARCH_NAMES.values()}, "a reason for what the package does not have"
    assert all(gguf.MODEL_TENSORS[key] for key in gguf.MODEL_ARCH_NAMES)


@pytest.mark.parametrize("name", WITHOUT_MODEL)
def test_transformers_has_no_model_of_what_is_said_to_have_none(name: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert LEFT[name] == NO_MODEL
    assert bare(name) not in {bare(known) for known in CONFIG_MAPPING_NAMES}
