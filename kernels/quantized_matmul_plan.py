"""How the Hopper kernel for products with quantized weights can cut them, and which it takes."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxserve.kernels.decode_matmul_finish import ROW_ALIGNMENT, TILE, round_up

Form = Literal["float8", "float8-wide", "int8", "int4"]

ROW_BYTES = 128  # of a weight tile: the widest swizzle
MAX_ROWS = 64
MAX_TILES = 4  # of a thread block: the copy engine's box is 256 rows tall
MAX_WARPGROUPS = 4  # that compute in a thread block: more would have too few registers
MIN_STAGES = 2
GROUP_LENGTHS = (32, 64, 128)

SPLITS = (1, 2, 3, 4, 5, 6, 7, 8)

# What a thread block may take of a Hopper multiprocessor's shared memory.
SHARED_BYTES = 227 * 1024
_SHARED_ALIGNMENT = 1024  # of each array
_BARRIER_BYTES = 8
MULTIPROCESSORS = 132  # of an H100 or H200

X_DTYPES: dict[Form, Any] = {
    "float8": jnp.float8_e4m3fn,
    "float8-wide": jnp.float16,
    "int8": jnp.bfloat16,
    "int4": jnp.bfloat16,
}
W_DTYPES: dict[Form, Any] = {
    "float8": jnp.float8_e4m3fn,
    "float8-wide": jnp.float8_e4m3fn,
    "int8": jnp.int8,
    "int4": jnp.int4,
}


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How a product is cut.

    Args:
        split: thread blocks that share the k dimension.
        stages: tiles that each of them keeps in flight.
        units: of a thread block, which own outputs and share the tiles of x.
        tiles: of 64 outputs that a warpgroup multiplies side by side. A unit owns as many, but of gate and up always one
            each, by one warpgroup or by two.
        turns: warpgroups that take turns with the steps along k of the same outputs; what they have is added up in shared
            memory.
        row_bytes: of a weight's row that a step fetches. Half of the most leaves room for more stages.
        clustered: whether the blocks that share k are a cluster. Others wait for each other by a counter in memory, so that
            all blocks of the kernel must find room at once; but these can be as many as there are multiprocessors. (Two such
            kernels at once would wait for each other's room: a step's products come one after the other.)
    """

    split: int
    stages: int
    units: int = 1
    tiles: int = 1
    turns: int = 1
    row_bytes: int = ROW_BYTES
    clustered: bool = True

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"{self.split=} must be one of {SPLITS}")
        if self.stages < MIN_STAGES:
            raise ValueError(f"{self.stages=} must be at least {MIN_STAGES}")
        if self.units < 1 or self.tiles not in (1, 2):
            raise ValueError(f"{self.units=} must be at least 1 and {self.tiles=} 1 or 2")
        if self.turns < 1 or self.stages % self.turns:
            raise ValueError(f"{self.stages=} must be a multiple of {self.turns=}")
        if self.row_bytes not in (ROW_BYTES // 2, ROW_BYTES):
            raise ValueError(f"{self.row_bytes=} must be {ROW_BYTES // 2} or {ROW_BYTES}")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything that is static: one compiled kernel belongs to one of these."""

    form: Form
    rows: int
    k: int
    columns: int  # of the result
    group_length: int  # int4: inputs that share scales
    is_swiglu: bool
    has_residual: bool
    out_dtype: jnp.dtype
    config: TuningConfig
    interpret: Any

    def __post_init__(self) -> None:
        config = self.config
        if self.form == "int4" and self.block_k % self.group_length:
            raise ValueError(f"{self.group_length=} must divide the {self.block_k} inputs of a step, by {config=}")
        if self.k % (self.block_k * config.split * config.turns):
            raise ValueError(f"{self.k=} must be a multiple of {self.block_k} times {config.split=} {config.turns=}")
        if self.units * self.tiles > MAX_TILES or self.warpgroups > MAX_WARPGROUPS:
            raise ValueError(f"{config=} makes more than {MAX_TILES} tiles or {MAX_WARPGROUPS} warpgroups of a block")
        if self.columns % self.block_columns:
            raise ValueError(f"{self.columns=} must be a multiple of {self.block_columns}, by {config=}")
        if not config.clustered and not 1 < config.split <= MULTIPROCESSORS * self.block_columns // self.columns:
            raise ValueError(f"{config=} makes one part of k, or more than {MULTIPROCESSORS} blocks of {self.columns=}")
        if self.shared_bytes(config.stages) > SHARED_BYTES:
            raise ValueError(
                f"{config=} takes {self.shared_bytes(config.stages)} of {SHARED_BYTES} bytes of shared memory, by "
                f"{self.rows=} and {self.form=}: fewer stages take less"
            )

    @property
    def on_device(self) -> bool:
        return self.interpret is None

    @property
    def split(self) -> int:
        return self.config.split

    @property
    def clustered(self) -> bool:
        """Whether blocks that share k are a cluster: always where the kernel is interpreted, one block after the other."""
        return self.config.clustered or not self.on_device

    @property
    def padded_rows(self) -> int:
        return round_up(self.rows, ROW_ALIGNMENT)

    @property
    def units(self) -> int:
        return self.config.units

    @property
    def turns(self) -> int:
        return self.config.turns

    @property
    def own_tiles(self) -> int:
        """Of a unit's tiles, those that one warpgroup multiplies side by side."""
        return self.config.tiles

    @property
    def helpers(self) -> int:
        """Warpgroups of a unit; the first of them gathers what they have."""
        return self.turns * self.tiles // self.own_tiles

    @property
    def warpgroups(self) -> int:
        """That compute in a thread block."""
        return self.units * self.helpers

    @property
    def tiles(self) -> int:
        """Of a unit."""
        return self.parts if self.is_swiglu else self.config.tiles

    @property
    def out_columns(self) -> int:
        return TILE if self.is_swiglu else self.tiles * TILE

    @property
    def parts(self) -> int:
        """Gate and up, or the weights."""
        return 2 if self.is_swiglu else 1

    @property
    def block_columns(self) -> int:
        """Columns of the result that all units of a thread block own."""
        return self.units * self.out_columns

    @property
    def rows_per_rank(self) -> int:
        return round_up(-(-self.padded_rows // self.split), ROW_ALIGNMENT)

    @property
    def rows_at_once(self) -> int:
        """Of the result, in shared memory."""
        many = MAX_ROWS // 2
        return many if self.rows_per_rank == 2 * many and not self.has_residual else self.rows_per_rank

    @property
    def block_k(self) -> int:
        """Inputs of a weight tile."""
        return block_k(self.form) * self.config.row_bytes // ROW_BYTES

    @property
    def steps(self) -> int:
        return self.k // (self.block_k * self.split)

    @property
    def groups_per_step(self) -> int:
        """Runs of inputs in a step whose products are scaled on their own."""
        return self.block_k // self.group_length if self.form == "int4" else 1

    @property
    def copies_per_step(self) -> int:
        """Of weights and x, and the groups' scales."""
        return 3 if self.form == "int4" else 2

    @property
    def releases_late(self) -> bool:
        """Whether a warpgroup gives up what it multiplies only once its next products are on their way.

        So the tensor cores never wait for weights to be widened, but the stage is refilled later. Products read widened
        weights from registers while they run, and a loop's body has one set of these for each product of a step: the last
        one of a step must be done before its own turn comes again, which takes another product in between.
        """
        return self.form != "float8" and self.config.stages >= 3 * self.turns and self.products_per_step > 1

    @property
    def products_per_step(self) -> int:
        """Of a warpgroup that widens weights: one for each slab of each tile."""
        return self.own_tiles * (self.block_k // self.slab)

    @property
    def stage_bytes(self) -> int:
        """Of shared memory: what a step fetches."""
        return sum(self._stage_arrays_bytes)

    @property
    def fixed_bytes(self) -> int:
        """Of shared memory: the result, and what all helpers but the first have for that one."""
        return sum(self._fixed_arrays_bytes)

    def shared_bytes(self, stages: int) -> int:
        """Of shared memory: all that a thread block takes with so many stages in the place of the tuning's."""
        arrays = (*self._fixed_arrays_bytes, *(stages * array_bytes for array_bytes in self._stage_arrays_bytes))
        # Two of each stage; and of each unit those for what helpers left, for the cluster and for the residual.
        barriers = 2 * stages + 3 * self.units
        return sum(round_up(array_bytes, _SHARED_ALIGNMENT) for array_bytes in arrays) + barriers * _BARRIER_BYTES

    @property
    def _stage_arrays_bytes(self) -> tuple[int, int, int]:
        """A step's weights, x and scales of groups."""
        outputs = self.parts * self.block_columns
        x_bytes = self.padded_rows * self.block_k * jnp.dtype(X_DTYPES[self.form]).itemsize
        scale_bytes = 2 * self.groups_per_step * outputs if self.form == "int4" else 0
        return outputs * self.config.row_bytes, x_bytes, scale_bytes

    @property
    def _fixed_arrays_bytes(self) -> tuple[int, int]:
        left_bytes = (self.helpers - 1) * self.units * self.own_tiles * TILE * self.padded_rows * 4
        return self.rows_at_once * self.block_columns * self.out_dtype.itemsize, left_bytes

    @property
    def slab(self) -> int:
        """Inputs that are widened and go to the tensor cores at once: a row of x's tiles, 128 bytes or less."""
        return min(ROW_BYTES // jnp.dtype(X_DTYPES[self.form]).itemsize, self.block_k // self.groups_per_step)


def block_k(form: Form) -> int:
    """Inputs of the largest weight tile."""
    return 2 * ROW_BYTES if form == "int4" else ROW_BYTES


def misfit(
    form: Form,
    rows: int,
    k: int,
    columns: int,
    config: TuningConfig,
    *,
    is_swiglu: bool,
    has_residual: bool = False,
    group_length: int = 128,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> str | None:
    """Why a cut goes neither into the shape nor into shared memory, which the kernel would raise; None if it does."""
    try:
        Problem(form, rows, k, columns, group_length, is_swiglu, has_residual, jnp.dtype(out_dtype), config, None)
    except ValueError as error:
        return str(error)
    return None


def form_of(values: Array, quantize_activations: bool) -> Form:
    if values.dtype == jnp.float8_e4m3fn:
        return "float8" if quantize_activations else "float8-wide"
    return "int8" if values.dtype == jnp.int8 else "int4"


def unsupported_reason(
    x: Array, values: Array, scales: Array, quantize_activations: bool, out_dtype: jnp.dtype
) -> str | None:
    """Why the kernel can't take validated arguments of `quantized_matmul` or its SwiGLU form, or None if it can."""
    rows, k = x.shape
    form, columns = form_of(values, quantize_activations), values.shape[-2]
    if jax.__version_info__ >= (0, 12):
        return f"jax {jax.__version__} wants stores of whole cache lines, which the kernel does not make; 0.11 does not"
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}, must be bfloat16"
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        return f"{out_dtype=} is neither bfloat16 nor float32"
    if not 1 <= rows <= MAX_ROWS:
        return f"{rows=} is not in 1..{MAX_ROWS}"
    if k % block_k(form) or columns % TILE:
        return f"{k=} must be a multiple of {block_k(form)} and {columns=} of {TILE}"
    if form == "int4" and k // scales.shape[0] not in GROUP_LENGTHS:
        return f"groups of {k // scales.shape[0]} inputs are not of {GROUP_LENGTHS}"
    return None
