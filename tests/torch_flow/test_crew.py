"""Workers share the work on a block, and the bits are those of a serial run: every algorithm that tunes, on experts."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import pytest
import torch
from torch import nn

from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.algorithms import crew, inputs, squares
from quark.torch.algorithms.blocks import BlockRun, Stream
from quark.torch.algorithms.registry import ALGORITHMS
from quark.torch.files import quantize_checkpoint

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 8, "vocab_size": 64}
HEADS = {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4}
FEW = {"num_iterations": 4, "iters": 2}
SAMPLES = [torch.randint(0, 64, (1, 5 + k), generator=torch.Generator().manual_seed(k)) for k in range(11)]
TUNING = {row.config.name: row.config for row in ALGORITHMS if row.tunes}


@pytest.fixture(scope="module")
def experts() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SIZES, **HEADS, num_key_value_heads=2)
    model: nn.Module = transformers.Qwen3MoeForCausalLM(config).eval()
    return model


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what threads were handed."""
    seen, whole = list[str](), crew._at_work

    def watched(driver: Any, function: Any, *task: Any) -> Any:
        seen.append(getattr(function, "__name__", ""))
        return whole(driver, function, *task)

    monkeypatch.setattr(crew, "_at_work", watched)
    return seen


def quantized(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    settings = TUNING[name]()
    settings = replace(settings, **{field.name: FEW[field.name] for field in fields(settings) if field.name in FEW})
    config = replace(LLMTemplate.get("qwen3_moe").get_config("int4_wo_32"), algo_config=[settings])
    made: nn.Module = ModelQuantizer(config).quantize_model(copy.deepcopy(model), SAMPLES)
    return {key: value.clone() for key, value in made.state_dict().items()}


def assert_same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    assert not [name for name, value in some.items() if not torch.equal(value, others[name])]


@pytest.mark.parametrize("name", TUNING)
def test_threads_find_the_bits_of_a_serial_run(name: str, experts: nn.Module, tasks: list[str]) -> None:
    serial = quantized(experts, name)
    assert not tasks
    with joblib.parallel_config("threading", n_jobs=3):
        assert_same(quantized(experts, name), serial)
    alone = {"hqq"}  # of one weight and the next, on no sample
    whole = {"gptq", "gptaq", "qronos"}
    assert bool(tasks) == (name not in alone)
    assert ("round_group" in tasks) == ("collect_parts" in tasks) == (name in whole)


@pytest.mark.slow
def test_processes_find_the_bits_of_a_serial_run(experts: nn.Module, tmp_path: Path) -> None:
    """On files, whose blocks are sent as they are; and Dask's own in ``test_clusters.py``."""
    experts.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    config = replace(LLMTemplate.get("qwen3_moe").get_config("int4_wo_32"), algo_config=[TUNING["gptaq"]()])
    for workers in (1, 2):
        quantize_checkpoint(tmp_path / "model", tmp_path / str(workers), config, samples=SAMPLES, workers=workers)
    one, two = (sorted((tmp_path / name).iterdir()) for name in "12")
    assert [path.name for path in one] == [path.name for path in two]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def process_and_threads(run: BlockRun, k: int) -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_process_computes_with_the_threads_of_its_driver() -> None:
    run = BlockRun("", nn.Linear(2, 2), Stream([torch.ones(1, 2)] * 4))
    found = crew.each_sample(process_and_threads, run, 2)
    assert os.getpid() not in {process for process, _ in found}
    assert {threads for _, threads in found} == {1}


def written(some: str, others: str) -> str:
    return f"({some} + {others})"


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("tasks", [1, 2, 4, 8])
def test_sums_are_those_of_the_same_pairs_however_many_work(count: int, tasks: int) -> None:
    names = [str(k) for k in range(count)]
    shares = crew.halves(names, tasks)
    assert [name for own in shares for name in own] == names and len(shares) <= tasks
    found = [crew.joined(own, len(own), crew.PARTS, written) for own in shares]
    assert crew.joined(found, count, tasks, written) == crew.joined(names, count, crew.PARTS, written)


@pytest.mark.parametrize(("workers", "expected"), [(1, 1), (2, 2), (3, 4), (4, 4), (8, 8), (40, 8)])
def test_as_many_tasks_as_workers_or_a_few_more(workers: int, expected: int) -> None:
    assert crew.at_once(workers) == expected
    with joblib.parallel_config("threading", n_jobs=workers):
        assert crew.at_once(None) == expected


@pytest.mark.parametrize("count", [0, 1, 3, 8, 9, 20])
def test_parts_are_all_samples_once_in_their_order(count: int) -> None:
    stream = Stream(list(range(count)), {"a": [((k,), {}) for k in range(count)], "b": [((), {})] * count})
    parts = [crew.on(BlockRun("a", nn.Identity(), stream), part) for part in crew.parts_of(count)]
    assert len(parts) == min(count, crew.PARTS)
    assert [k for part in parts for k in part.stream.hidden] == list(range(count))
    assert [args for part in parts for args, _ in part.stream.calls["a"]] == [(k,) for k in range(count)]
    assert all(set(part.stream.calls) == {"a"} for part in parts)


def test_a_twin_shares_tensors_and_nothing_that_hooks_see() -> None:
    block, seen = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval(), list[int]()
    other = crew.twin(block)
    block[0].register_forward_pre_hook(lambda *_: seen.append(1))
    other(torch.ones(3, 2))
    assert not seen
    tensors = zip((*block.parameters(), *block.buffers()), (*other.parameters(), *other.buffers()), strict=True)
    assert all(one.data_ptr() == two.data_ptr() for one, two in tensors)


@pytest.mark.parametrize(("most", "expected"), [(1 << 30, 8), (4 * 3 * 32**2 - 1, 1), (4 * 3 * 32**2, 8)])
def test_sums_of_many_experts_are_taken_once(most: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of each are in memory, where they are sums over parts; those of one group of layers are small."""
    monkeypatch.setattr(inputs, "TOGETHER", most)
    block = nn.ModuleDict({name: nn.Linear(32, 8, bias=False) for name in "abc"})
    block.forward = lambda x: [layer(x) for layer in block.values()]  # type: ignore[method-assign]
    seen, whole = [], inputs.collect_part
    monkeypatch.setattr(inputs, "collect_part", lambda run, *rest: seen.append(len(run)) or whole(run, *rest))
    run = BlockRun("block", block, Stream([torch.ones(1, 32)] * 8, {"block": [((None,), {})] * 8}))
    groups = [inputs.SharedInput((name,)) for name in "abc"]
    with torch.no_grad():
        sums = inputs.collect(run, groups)
        assert len(seen) == expected
        alone = inputs.collect(run, groups[:1])
    assert {group: own.count for group, own in sums.items()} == dict.fromkeys(groups, 8)
    assert len(seen) == expected + 8
    assert torch.equal(alone[groups[0]].hessian, torch.full((32, 32), 8.0))


@pytest.mark.parametrize("size", [1, 127, 128, 129, 300, 2100])
def test_sums_of_squares_are_those_of_whole_products(size: int) -> None:
    """Of whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(size)
    batches = [torch.randint(-9, 10, (5, size), generator=generator).float() for _ in range(3)]
    total = torch.zeros(size, size)
    for rows in batches:
        squares.add_squares(total, rows)
    squares.complete(total)
    whole = torch.cat(batches)
    assert torch.equal(total, whole.T @ whole)


def test_a_failure_in_a_worker_is_the_user_s_to_see() -> None:
    def broken(run: BlockRun, k: int) -> None:
        raise ValueError(f"sample {k} is broken")

    run = BlockRun("", nn.Identity(), Stream([torch.ones(1)] * 2))
    with joblib.parallel_config("threading", n_jobs=2), pytest.raises(ValueError, match=r"sample [01] is broken"):
        crew.each_sample(partial(broken), run, None)
