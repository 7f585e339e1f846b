"""What a checkpoint quantized file by file takes: disk exactly, memory and work by a formula; no tensor is read.

    disk      the result, from the form of every tensor; beside it, until the job is done, what is tuned or changed,
              and the hidden states behind the last two blocks
    memory    the process, and a tensor that is rounded and packed, per worker; with samples, what is outside of the
              blocks, one block, the hidden states of all samples, and what an algorithm needs for its largest layer,
              or to learn a block; per worker that is a process, a block and sums of its inputs' squares
    work      runs of the blocks on the samples, sums of squares, rounding, as multiplications

``docs/torch/large_models.md`` has the formula and what was measured beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

from quark.algorithms.rounders import ROUNDERS, rounder_of
from quark.dataclass import dataclass
from quark.torch.algorithms.blocks import find_blocks
from quark.torch.algorithms.crew import PARTS
from quark.torch.config.algorithms import AutoRoundConfig
from quark.torch.config.model import QConfig
from quark.torch.export.checkpoint import Checkpoint, read_checkpoint
from quark.torch.files.decision import CheckpointDecision, decide
from quark.torch.files.quantize import jobs_of
from quark.torch.files.skeleton import Skeleton, StoredSource

PROCESS = 490_000_000  # bytes of a process that has loaded everything
RUNNING = 130_000_000  # bytes more of one that runs a model
HEAP = 32 << 20  # bytes below which a freed tensor stays with the C library until its block goes (glibc's threshold)
DEEP = 24  # blocks after which it keeps no more
ROUNDED = 7  # bytes per weight while it is rounded and packed, piece by piece
TUNED = 28  # bytes per weight of the largest layer that an algorithm works on
SQUARES = 16  # bytes per element of the matrix of its inputs' squares: the sum, and what is made of it
SUMS = 12  # the same of sums that workers hand back, while they are added
PAIRED = 14  # and of those over the inputs of a float copy of the block, which some algorithms compare with
LEARNED = 56  # bytes per weight of a block whose rounding is learned: the values, their gradients, the best so far
WRITER, WORKER = 180_000_000, 400_000_000  # bytes of a process that writes files, and of one that runs blocks
STATE = 12  # bytes per element of a hidden state: what enters a block, what leaves it, and while it runs
RUNS = 6  # of every block on every sample: one per group of layers, one to find these, one to go on
PASSES = (
    3  # over the blocks' files: one to record (the first batch tells what blocks are called with), to work, to write
)


@dataclass(frozen=True)
class Needs:
    """What one job takes.

    Attributes:
        weights: that are quantized.
        read: bytes of the checkpoint.
        written: bytes of the result.
        temporary: bytes beside the result until the job is done.
        passes: how often the blocks are read.
        memory: most bytes resident, by the formula.
        multiplications: of the samples through the blocks, and of the algorithm.
    """

    weights: int
    read: int
    written: int
    temporary: int
    passes: int
    memory: int
    multiplications: int

    def seconds(self, multiplications: float, weights: float, disk: float) -> float:
        """How long it takes where a second is enough for so many multiplications of a large matrix product, so many
        weights that are rounded and packed, and so many bytes of the disk."""
        moved = self.passes * self.read + self.written + 2 * self.temporary
        return self.multiplications / multiplications + self.weights / weights + moved / disk


@dataclass(frozen=True)
class BlockWork:
    """What algorithms keep while they work on a block.

    Attributes:
        summed: sums of squares of what layers read, by which their columns are rounded.
        paired: those of a float copy of the block, too.
        learned: the rounding of all weights of the block is learned together.
    """

    summed: bool = False
    paired: bool = False
    learned: bool = False


def work_of(config: QConfig) -> BlockWork:
    """That of the algorithms of a configuration."""
    chosen = config.algo_config or []
    rows = [rounder_of(one) for one in chosen if one.own is not None or one.name in ROUNDERS]
    learned = any(isinstance(one, AutoRoundConfig) for one in chosen)
    return BlockWork(bool(rows), any(row.paired for row in rows), learned)


def needs(
    source: str | Path, config: QConfig, samples: int = 0, tokens: int = 0, batch: int = 8, workers: int = 1
) -> Needs:
    """What ``quantize_checkpoint`` takes.

    Args:
        source: the checkpoint, of which headers are read.
        config: how it is quantized.
        samples, tokens: windows and their length; 0 where none are needed.
        batch: windows that run at once.
        workers: processes that make files, and share the samples of a block, at once.

    Raises:
        ModelError: the checkpoint cannot be read.
        ConfigError: the configuration does not fit it.
    """
    checkpoint = read_checkpoint(Path(source).expanduser().resolve())
    return needs_of(checkpoint, decide(checkpoint, config), (samples, tokens, batch), workers, work_of(config))


def needs_of(
    checkpoint: Checkpoint,
    decision: CheckpointDecision,
    windows: tuple[int, int, int],
    workers: int,
    work: BlockWork,
) -> Needs:
    """The same of what is decided already; ``windows``: their number, their length, and how many run at once."""
    samples, tokens, batch = windows
    skeleton, weights = decision.skeleton, decision.weights
    jobs = jobs_of(checkpoint, checkpoint.folder, decision, "reorder", "cpu")
    written = sum(item.size for job in jobs for item in job.items())
    read = sum(map(bytes_of, skeleton.tensors.values()))
    single = max((prod(stored.shape) for stored in weights.values()), default=0)
    count = sum(prod(stored.shape) for stored in weights.values())
    copied = max((bytes_of(stored) for name, stored in skeleton.tensors.items() if name not in weights), default=0)
    plain = PROCESS + workers * (max(ROUNDED * single, copied) + (WRITER if workers > 1 else 0))
    if not samples:
        return Needs(count, read, written, 0, 1, plain, 0)
    tuned = tuned_of(skeleton, weights)
    moved = sum(map(bytes_of, tuned.values()))
    running = samples * tokens, min(batch, samples) * tokens
    memory = max(plain, with_samples(skeleton, tuned, running, workers, work))
    kept = 2 * samples * tokens * min((stored.shape[1] * stored.dtype.itemsize for stored in tuned.values()), default=0)
    return Needs(count, read, written, moved + kept, PASSES, memory, products(tuned.values(), samples * tokens))


def bytes_of(stored: StoredSource) -> int:
    """Bytes of a tensor as it is stored."""
    return prod(stored.shape) * stored.dtype.itemsize


def blocks_of(skeleton: Skeleton) -> tuple[str, ...]:
    """What the names of the blocks' tensors begin with."""
    return tuple(f"{name}." for name in find_blocks(skeleton.model).modules if name)


def tuned_of(skeleton: Skeleton, weights: Mapping[str, StoredSource]) -> dict[str, StoredSource]:
    """The matrices in the blocks that algorithms work on."""
    inside = blocks_of(skeleton)
    return {
        name: stored
        for name, stored in weights.items()
        if name.startswith(inside) and name.endswith(".weight") and len(stored.shape) == 2
    }


def with_samples(
    skeleton: Skeleton, tuned: Mapping[str, StoredSource], tokens: tuple[int, int], workers: int, work: BlockWork
) -> int:
    """Bytes at the peak while blocks are worked on; ``tokens`` of all samples, and of those that run together."""
    inside = blocks_of(skeleton)
    outside = sum(bytes_of(stored) for name, stored in skeleton.tensors.items() if not name.startswith(inside))
    blocks = [[one for name, one in tuned.items() if name.startswith(block)] for block in inside]
    shapes = [row.shape for row in tuned.values()]
    if not shapes:
        return PROCESS + RUNNING + outside
    block = max(sum(map(bytes_of, own)) for own in blocks)
    squares = max(width for _, width in shapes) ** 2 if work.summed else 0
    hidden = STATE * tokens[0] * min(width for _, width in shapes)
    running = 12 * tokens[1] * max(out + width for out, width in shapes)
    base = PROCESS + RUNNING + outside + 2 * block + hidden + work.paired * (block + hidden // 2)
    learned = LEARNED * max(sum(prod(one.shape) for one in own) for own in blocks) if work.learned else 0
    worked = max(learned, on_layers(shapes, len(blocks)) if work.summed or not work.learned else 0)
    alone = base + running + worked + work.paired * PAIRED * squares
    if workers == 1 or not (work.summed or work.learned):
        return alone
    busy, pair = min(workers, PARTS), 1 + work.paired
    each = WORKER + running + pair * (2 * block + hidden // busy + 8 * squares)
    shared = base + pair * SUMS * squares + busy * each
    return max(alone + busy * WORKER, shared) + (workers - busy) * WORKER


def on_layers(shapes: Iterable[tuple[int, ...]], blocks: int) -> int:
    """Bytes of what rounds columns of the largest layer, and of what the C library keeps of smaller ones: the more, the
    more blocks there are."""
    layers = [(4 * out * width, TUNED * out * width + SQUARES * width * width) for out, width in shapes]
    kept = max((work for size, work in layers if size < HEAP), default=0)
    return max(work for _, work in layers) + kept * min(blocks, DEEP) // DEEP


def products(rows: Iterable[StoredSource], tokens: int) -> int:
    """Multiplications: samples through layers, sums of squares of their inputs, rounding."""
    shapes = [row.shape for row in rows]
    runs = RUNS * tokens * sum(out * width for out, width in shapes)
    squares = tokens * sum(width * width for _, width in shapes) // 2  # two layers mostly share their inputs
    return runs + squares + sum(2 * out * width * width + width**3 for out, width in shapes)
