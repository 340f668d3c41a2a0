"""How the work of a decode layer is dealt out over the thread blocks of one persistent kernel: numbers only.

Each of the layer's products is a phase. Its work is a row of units, groups in turn and k innermost; a group is some
weight columns, side by side. A thread block takes an even share of that row, whatever it cuts: a few blocks then hold
parts of a group's sums, which are added up, always in the same order.

Shares that cut every group alike have all blocks walk through the same rows of the weights together: what they read at
one time then lies side by side in memory. So a phase may leave out a few thread blocks.
"""

import dataclasses
import functools
from typing import Any, Literal

from jaxserve.kernels.grid_barrier import GROUP_COUNTERS

TILE = 64  # columns of a weight tile: a row of it is 128 bytes, the widest swizzle, and one wgmma has 64 rows of result
BLOCK_K = 64  # rows of a weight tile
ROW_ALIGNMENT = 8  # wgmma's columns, and the layout in shared memory
MAX_ROWS = 64
MAX_COPY_COLUMNS = 256  # of one copy by the copy engine
PHASES = ("output", "gate_up", "down", "qkv")

MULTIPROCESSORS = 132  # of an H100 or H200
SHARED_BYTES = 227 * 1024
_RESERVED_BYTES = 6 * 1024  # barriers, scales, scratch of reductions, alignment
_MAX_STAGES = 16
_RESULT_REGISTERS = 64  # of a thread, for parts of sums under way from memory
_LEAST_RESULT_COLUMNS = 32

# Who adds up a group's parts: all workers, some columns each, once all parts of the phase are there; or whoever leaves
# a group's last part.
Join = Literal["all", "last"]
# What is done at all; less than "layer" is for measurements: the results are then worth nothing.
Extent = Literal["layer", "products", "weights"]


@dataclasses.dataclass(frozen=True)
class Cut:
    """How one phase is dealt out: groups of `tiles` weight tiles over `blocks` thread blocks; who adds up the parts."""

    tiles: int = 2
    blocks: int = MULTIPROCESSORS
    join: Join = "all"

    def __post_init__(self) -> None:
        if self.tiles not in (1, 2, 4, 8):
            raise ValueError(f"{self.tiles=} must be 1, 2, 4 or 8")
        if self.blocks < 1:
            raise ValueError(f"{self.blocks=} must be at least 1")
        if self.join not in ("all", "last"):
            raise ValueError(f"{self.join=} must be 'all' or 'last'")


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """The shape of the persistent kernel.

    `cuts` are the phases', of which none may have more blocks than the device has multiprocessors: all wait for each
    other. `compute_warpgroups` share the columns of a group. A block has a ring of `stages` of `stage_tiles` weight
    tiles, and one of `x_stages` of x, 64 columns each. A phase whose groups have fewer tiles than a stage has them
    follow each other along k. A copy fetches `copy_rows` rows of a tile; then come the same rows of the next tile.
    With `multiplies_ahead` a stage is given back when the one after it is being multiplied. With `prefetch_weights` the
    first ring of weights is fetched while the kernel before this one may still run.
    """

    cuts: tuple[Cut, ...] = (Cut(), Cut(), Cut(), Cut())
    compute_warpgroups: int = 1
    stage_tiles: int = 2
    stages: int = 12
    x_stages: int = 4
    copy_rows: int = BLOCK_K
    multiplies_ahead: bool = False
    prefetch_weights: bool = True
    extent: Extent = "layer"

    def __post_init__(self) -> None:
        if len(self.cuts) != len(PHASES):
            raise ValueError(f"{self.cuts=} must be {len(PHASES)}, of {', '.join(PHASES)}")
        if self.compute_warpgroups not in (1, 2):
            raise ValueError(f"{self.compute_warpgroups=} must be 1 or 2")
        if self.copy_rows not in (8, 16, 32, 64):
            raise ValueError(f"{self.copy_rows=} must be 8, 16, 32 or 64")
        if self.extent not in ("layer", "products", "weights"):
            raise ValueError(f"{self.extent=} must be 'layer', 'products' or 'weights'")
        for name in ("stages", "x_stages"):
            if not 2 <= getattr(self, name) <= _MAX_STAGES:
                raise ValueError(f"{name}={getattr(self, name)} must be in 2..{_MAX_STAGES}")
        for name, cut in zip(PHASES, self.cuts, strict=True):
            if self.stage_tiles % cut.tiles:
                raise ValueError(f"{self.stage_tiles=} must be a multiple of {cut.tiles=} of {name}")
            shares = self.compute_warpgroups * (2 if name == "gate_up" else 1)
            if cut.tiles % shares:
                raise ValueError(f"{cut.tiles=} of {name} must be a multiple of {shares}: {self.compute_warpgroups=}")
            if self.multiplies_ahead and self.x_stages <= self.stage_tiles // cut.tiles:
                raise ValueError(f"{self.x_stages=} must hold more than a unit's {self.stage_tiles // cut.tiles}")


@dataclasses.dataclass(frozen=True)
class Phase:
    """One product: x [rows, k] times weights [k, parts, columns], gate and up being two parts of one result."""

    name: str
    k: int
    columns: int  # of the result
    padded_rows: int
    cut: Cut
    k_tiles: int  # of a unit
    warpgroups: int

    @property
    def is_swiglu(self) -> bool:
        return self.name == "gate_up"

    @property
    def parts(self) -> int:
        """Of a result: gate and up."""
        return 2 if self.is_swiglu else 1

    @property
    def unit_k(self) -> int:
        return self.k_tiles * BLOCK_K

    @property
    def steps(self) -> int:
        """Units of a group."""
        return self.k // self.unit_k

    @property
    def group_results(self) -> int:
        """Columns of the result that a group makes."""
        return self.cut.tiles * TILE // self.parts

    @property
    def groups(self) -> int:
        return self.columns // self.group_results

    @property
    def units(self) -> int:
        return self.groups * self.steps

    @property
    def blocks(self) -> int:
        return min(self.cut.blocks, self.units)

    @property
    def warpgroup_tiles(self) -> int:
        return self.cut.tiles // self.warpgroups

    @property
    def warpgroup_results(self) -> int:
        return self.group_results // self.warpgroups

    def start(self, block: Any, divide: Any = int.__floordiv__, minimum: Any = min) -> Any:
        """The first unit of a block; one past the last is the next block's. Blocks that the phase leaves out have none."""
        return divide(minimum(block, self.blocks) * self.units, self.blocks)

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

    @functools.cached_property
    def result_columns(self) -> int:
        """Columns of the result that a warpgroup adds up at a time: few where all share the work."""
        if self.cut.join == "all":
            return _LEAST_RESULT_COLUMNS
        columns = min(self.warpgroup_results, MAX_COPY_COLUMNS)
        while columns > _LEAST_RESULT_COLUMNS and self.part_registers(columns) > _RESULT_REGISTERS:
            columns //= 2
        return columns

    @property
    def result_tiles(self) -> int:
        return self.columns // self.result_columns

    def part_registers(self, columns: int) -> int:
        """Of a thread, for all parts of so many columns of the result."""
        return self.max_owners * self.parts * max(1, self.padded_rows * columns // 128)


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
    def workers(self) -> int:
        return self.blocks * self.config.compute_warpgroups

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        sizes = [(self.attended, self.hidden), (self.hidden, self.ffn), (self.ffn, self.hidden)]
        if self.qkv is not None:
            sizes.append((self.hidden, self.qkv))
        config = self.config
        return tuple(
            Phase(name, *size, self.padded_rows, cut, config.stage_tiles // cut.tiles, config.compute_warpgroups)
            for name, size, cut in zip(PHASES, sizes, config.cuts, strict=False)
        )

    @property
    def blocks(self) -> int:
        return max(phase.blocks for phase in self.phases)

    @property
    def max_segments(self) -> int:
        return max(phase.max_segments for phase in self.phases)

    @property
    def part_columns(self) -> int:
        return max(phase.cut.tiles for phase in self.phases) * TILE

    @property
    def grid_barriers(self) -> int:
        """Two a phase, after the sums' parts and after the result; the last result needs none."""
        return 2 * len(self.phases) - 1

    def first_group_counter(self, index: int) -> int:
        """The counters of a phase's groups, one for each compute warpgroup, come after those of the phases before."""
        return self.config.compute_warpgroups * sum(phase.groups for phase in self.phases[:index])

    def rounds(self, phase: Phase) -> int:
        """Tiles of a phase's result that a worker has, at most, where all share the work."""
        return -(-phase.result_tiles // self.workers)

    def rounds_at_once(self, phase: Phase) -> int:
        """Tiles whose parts a worker fetches together: as many as its registers hold."""
        return max(1, _RESULT_REGISTERS // phase.part_registers(phase.result_columns))

    def misfit(self) -> str | None:
        """Why the sizes can't be cut like this, or None if they can."""
        for phase in self.phases:
            if phase.columns % phase.group_results or phase.k % phase.unit_k:
                return (
                    f"{phase.name}'s {phase.k} x {phase.columns} must be multiples of "
                    f"{phase.unit_k} x {phase.group_results}"
                )
        groups = self.first_group_counter(len(self.phases))
        if groups > GROUP_COUNTERS:
            return f"the phases have {groups} groups of columns, more than {GROUP_COUNTERS}"
        return None


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def shared_bytes(rows: int, config: TuningConfig) -> int:
    """Shared memory of a block apart from barriers and the like: the rings, the residual, results on their way out."""
    padded_rows = round_up(rows, ROW_ALIGNMENT)
    widest = max(_LEAST_RESULT_COLUMNS, _RESULT_REGISTERS * 128 // padded_rows)
    kept_columns = config.cuts[0].tiles * TILE + sum(min(cut.tiles * TILE, widest) for cut in config.cuts[2:])
    x_bytes = config.x_stages * padded_rows * BLOCK_K * 2
    return config.stages * config.stage_tiles * TILE * BLOCK_K * 2 + x_bytes + padded_rows * kept_columns * 2


def longest_ring(rows: int, config: TuningConfig) -> TuningConfig:
    """The same with as many stages of weights as the shared memory holds."""
    shortest = dataclasses.replace(config, stages=2)
    left = SHARED_BYTES - _RESERVED_BYTES - shared_bytes(rows, shortest)
    stages = 2 + left // (config.stage_tiles * TILE * BLOCK_K * 2)
    return dataclasses.replace(config, stages=min(stages, _MAX_STAGES))


def choose_config(rows: int) -> TuningConfig:
    """Fills the shared memory: the longer the ring of weights, the longer a wait that it hides."""
    return longest_ring(rows, TuningConfig(x_stages=8 if rows <= 16 else 4))
