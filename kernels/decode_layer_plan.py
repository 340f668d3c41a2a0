"""How the work of a decode layer is dealt out over the thread blocks of one persistent kernel: numbers only.

Each of the layer's products is a phase. Its work is a row of units, one unit being BLOCK_K rows of one group of weight
columns, groups in turn and k innermost. A thread block takes an even share of that row, whatever it cuts: a few blocks
then hold parts of a group's sums, which are added up, always in the same order, by the workers (the compute warpgroups
of all blocks), each of which owns some tiles of the result's columns.
"""

import dataclasses
import functools
from typing import Any

TILE = 64  # columns of a weight tile: a row of it is 128 bytes, the widest swizzle, and one wgmma has 64 rows of result
BLOCK_K = 64
TILES_PER_WARPGROUP = 2
ROW_ALIGNMENT = 8  # wgmma's columns, and the layout in shared memory
MAX_ROWS = 64
RESULT_COLUMNS = 32  # of a tile of a phase's result, which one worker adds up

MULTIPROCESSORS = 132  # of an H100 or H200
SHARED_BYTES = 227 * 1024
_RESERVED_BYTES = 6 * 1024  # barriers, scales, scratch of reductions, alignment
_MAX_STAGES = 16
_RESULT_REGISTERS = 64  # of a thread, for parts of sums under way from memory


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """The shape of the persistent kernel.

    `blocks` may not exceed the device's multiprocessors: all of them wait for each other. Each has
    `compute_warpgroups` that multiply 128 columns each, a ring of `stages` of weights and one of `x_stages` of x.
    With `prefetch_weights` the first ring of weights is fetched while the kernel before this one may still run.
    """

    blocks: int = MULTIPROCESSORS
    compute_warpgroups: int = 1
    stages: int = 12
    x_stages: int = 4
    prefetch_weights: bool = True

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"{self.blocks=} must be at least 1")
        if self.compute_warpgroups not in (1, 2):
            raise ValueError(f"{self.compute_warpgroups=} must be 1 or 2")
        for name in ("stages", "x_stages"):
            if not 2 <= getattr(self, name) <= _MAX_STAGES:
                raise ValueError(f"{name}={getattr(self, name)} must be in 2..{_MAX_STAGES}")


@dataclasses.dataclass(frozen=True)
class Phase:
    """One product: x [rows, k] times weights [k, parts, columns], gate and up being two parts of one result."""

    name: str
    k: int
    columns: int
    is_swiglu: bool
    blocks: int
    group_columns: int  # of weights, gate and up counted both

    @property
    def steps(self) -> int:
        """Units of a group."""
        return self.k // BLOCK_K

    @property
    def group_results(self) -> int:
        """Columns of the result that a group makes."""
        return self.group_columns // 2 if self.is_swiglu else self.group_columns

    @property
    def groups(self) -> int:
        return self.columns // self.group_results

    @property
    def units(self) -> int:
        return self.groups * self.steps

    @property
    def result_tiles(self) -> int:
        return self.columns // RESULT_COLUMNS

    def start(self, block: Any, divide: Any = int.__floordiv__) -> Any:
        """The first unit of a block; one past the last is the next block's."""
        return divide(block * self.units, self.blocks)

    def owner(self, unit: Any, divide: Any = int.__floordiv__) -> Any:
        """The block that has a unit."""
        return divide((unit + 1) * self.blocks - 1, self.units)

    @functools.cached_property
    def max_segments(self) -> int:
        """Groups that a block has a part of, at most."""
        return max(
            (self.start(block + 1) - 1) // self.steps - self.start(block) // self.steps + 1
            for block in range(self.blocks)
        )

    @functools.cached_property
    def max_owners(self) -> int:
        """Blocks that have a part of one group, at most."""
        return max(
            self.owner((group + 1) * self.steps - 1) - self.owner(group * self.steps) + 1
            for group in range(self.groups)
        )


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything that is static: one compiled kernel belongs to one of these."""

    rows: int
    attended: int
    hidden: int
    ffn: int
    qkv: int | None  # columns of the next layer's product; None after the last layer
    eps: float
    config: TuningConfig
    interpret: Any

    @property
    def on_device(self) -> bool:
        return self.interpret is None

    @property
    def padded_rows(self) -> int:
        return round_up(self.rows, ROW_ALIGNMENT)

    @property
    def tiles(self) -> int:
        """Weight tiles of a stage."""
        return TILES_PER_WARPGROUP * self.config.compute_warpgroups

    @property
    def workers(self) -> int:
        return self.blocks * self.config.compute_warpgroups

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        shapes = [
            ("output", self.attended, self.hidden, False),
            ("gate_up", self.hidden, self.ffn, True),
            ("down", self.ffn, self.hidden, False),
        ]
        if self.qkv is not None:
            shapes.append(("qkv", self.hidden, self.qkv, False))
        return tuple(Phase(*shape, self.blocks, self.tiles * TILE) for shape in shapes)

    @functools.cached_property
    def blocks(self) -> int:
        """No more than there are units of each phase: every block has a part of every phase."""
        columns = self.tiles * TILE
        sizes = [self.hidden * size for size in (self.attended, self.ffn, self.qkv or self.ffn)]
        return min(self.config.blocks, *(size // (columns * BLOCK_K) for size in sizes))

    @property
    def max_segments(self) -> int:
        return max(phase.max_segments for phase in self.phases)

    @property
    def grid_barriers(self) -> int:
        """Two a phase, after the sums' parts and after the result; the last result needs none."""
        return 2 * len(self.phases) - 1

    def rounds(self, phase: Phase) -> int:
        """Tiles of a phase's result that a worker has, at most."""
        return -(-phase.result_tiles // self.workers)

    def rounds_at_once(self, phase: Phase) -> int:
        """Tiles whose parts a worker fetches together: as many as its registers hold."""
        parts = phase.max_owners * (2 if phase.is_swiglu else 1)
        registers = parts * max(1, self.padded_rows * RESULT_COLUMNS // 128)
        return max(1, _RESULT_REGISTERS // registers)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def choose_config(rows: int, blocks: int = MULTIPROCESSORS) -> TuningConfig:
    """Fills the shared memory: the longer the ring of weights, the longer a wait that it hides."""
    padded_rows = round_up(rows, ROW_ALIGNMENT)
    x_stages = 8 if padded_rows <= 16 else 4
    x_bytes = x_stages * padded_rows * BLOCK_K * 2
    kept_bytes = 2 * padded_rows * RESULT_COLUMNS * 2
    stage_bytes = TILES_PER_WARPGROUP * TILE * BLOCK_K * 2
    stages = (SHARED_BYTES - _RESERVED_BYTES - x_bytes - kept_bytes) // stage_bytes
    return TuningConfig(blocks, 1, min(stages, _MAX_STAGES), x_stages)
