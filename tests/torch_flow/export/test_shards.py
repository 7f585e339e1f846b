"""Safetensors files whose tensors are made ahead in threads: the same bytes, few items in memory, errors unchanged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quark.torch.export.shards import MAKERS, Item, made_ahead, write_file


@pytest.fixture(params=[1, 2, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def item(k: int, make) -> Item:
    return Item({f"t{k}": ((4,), torch.float32)}, lambda: {f"t{k}": make(k)})


def test_order_and_values(tmp_path: Path) -> None:
    write_file(tmp_path / "m.safetensors", [item(k, lambda k: torch.full((4,), float(k))) for k in range(20)])
    found = load_file(tmp_path / "m.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == {f"t{k}": [float(k)] * 4 for k in range(20)}


def test_few_items_are_ahead(threads: int) -> None:
    made, lock = [], threading.Lock()

    def make(k: int) -> torch.Tensor:
        with lock:
            made.append(k)
        return torch.zeros(4)

    for used, _ in enumerate(made_ahead([item(k, make) for k in range(30)]), 1):
        with lock:
            assert len(made) - used <= min(threads, MAKERS)
    assert sorted(made) == list(range(30))


def test_the_error_of_an_item(tmp_path: Path) -> None:
    def make(k: int) -> torch.Tensor:
        if k == 3:
            raise ValueError("item 3 is broken")
        return torch.zeros(4)

    with pytest.raises(ValueError, match="item 3 is broken"):
        write_file(tmp_path / "m.safetensors", [item(k, make) for k in range(9)])
