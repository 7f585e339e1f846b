"""Time of GPTQ on one layer, over the factorization and the matrix products that no implementation can avoid.

    python -m benchmarks.gptq [--sizes 2048 4096]

int4, groups of 128, one thread. Processor time, so that other work on the machine counts less; the least of a few.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks import measure
from quark.algorithms.columns import columns_of
from quark.algorithms.gptq import gptq
from quark.numerics.affine import Grid
from quark.numerics.formats import FORMATS
from quark.numerics.granularity import Group

BLOCK = 512


def problem(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A square weight and the Hessian of correlated inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, size, generator=generator)
    x = x @ (torch.randn(size, size, generator=generator) / size**0.5 + torch.eye(size))
    return torch.randn(size, size, generator=generator), x.T @ x / size


def unavoidable(weight: torch.Tensor, hessian: torch.Tensor) -> None:
    """A Cholesky factorization, and the feedback of all columns on all later ones."""
    factor = torch.linalg.cholesky(hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian)))
    columns = weight.T.contiguous()
    for start in range(0, len(hessian), BLOCK):
        factor[start : start + BLOCK, :start] @ columns[:start]


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Least processor time of a call."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in chosen.sizes:
        weight, hessian = problem(size)
        granularity, format = Group(1, 128), FORMATS["int4"]
        tiles = granularity.tile(weight)
        scale, zero = Grid(format, narrow=False).parameters(tiles.amin(-1).numpy(), tiles.amax(-1).numpy())
        grid = columns_of(weight, format, granularity, torch.tensor(scale), torch.tensor(zero))
        ours = seconds(lambda w=weight, h=hessian, g=grid: gptq(w, h, g), chosen.repeats)  # type: ignore[misc]
        bare = seconds(lambda w=weight, h=hessian: unavoidable(w, h), chosen.repeats)  # type: ignore[misc]
        rows.append([f"{size} x {size}", f"{ours:.2f}", f"{bare:.2f}", f"{ours / bare:.1f}"])
    print(measure.table(["layer", "GPTQ s", "factorization and products s", "ratio"], rows))


if __name__ == "__main__":
    main()
