"""Time of GPTQ on one layer: over the factorization and the matrix products that no implementation can avoid, and over
the peer's.

    python -m benchmarks.gptq [--sizes 2048 4096] [--repeats 3] [--peer-python PATH]

int4, groups of 128, one thread. Processor time, so that other work on the machine counts less; the least of a few,
taken in turns. What cannot be avoided is ``torch.linalg.cholesky`` and the feedback of all columns on all later ones,
512 of them a product. The peer is compared over the whole ``quantize_model`` of a model of one layer
(``peers/gptq_job.py``): collecting the inputs, scales, GPTQ, and ours also checks that no row got worse.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import measure, record
from quark.algorithms.columns import columns_of
from quark.algorithms.gptq import gptq
from quark.numerics.affine import Coding, Grid
from quark.numerics.formats import FORMATS
from quark.numerics.granularity import Group

JOB = Path(__file__).parent / "peers" / "gptq_job.py"
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


def seconds(functions: list[Callable[[], object]], repeats: int) -> list[float]:
    """Least processor time of each call, taken in turns."""
    found: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, times in zip(functions, found, strict=True):
            start = time.process_time()
            function()
            times.append(time.process_time() - start)
    return [min(times) for times in found]


def layer(size: int, repeats: int) -> tuple[float, float]:
    """GPTQ, and what cannot be avoided."""
    weight, hessian = problem(size)
    granularity, format = Group(1, 128), FORMATS["int4"]
    tiles = granularity.tile(weight)
    scale, zero = Grid(format, narrow=False).parameters(tiles.amin(-1).numpy(), tiles.amax(-1).numpy())
    grid = columns_of(weight, Coding(format, granularity), torch.tensor(scale), torch.tensor(zero))
    ours, bare = seconds([lambda: gptq(weight, hessian, grid), lambda: unavoidable(weight, hessian)], repeats)
    return ours, bare


def whole(python: str, size: int, repeats: int) -> float:
    """``quantize_model`` in an environment."""
    environment = {**measure.job_environment(python), "OMP_NUM_THREADS": "1"}
    command = [python, str(JOB), str(size), str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{python} {JOB}: {done.stderr[-800:]}")
    return float(lines[0])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-python", help="the interpreter of the peer's environment")
    parser.add_argument("--json", type=Path, help=record.HELP)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in chosen.sizes:
        ours, bare = layer(size, chosen.repeats)
        rows.append([f"{size} x {size}", f"{ours:.2f}", f"{bare:.2f}", f"{ours / bare:.2f}"])
    print(measure.table(["layer", "GPTQ s", "factorization and products s", "ratio"], rows))
    for size in chosen.sizes if chosen.peer_python else []:
        ours, peer = (whole(python, size, chosen.repeats) for python in (sys.executable, chosen.peer_python))
        print(f"{size} x {size}, whole call: {ours:.2f} s, peer {peer:.2f} s, ratio {ours / peer:.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
