"""How the Hopper kernel for products with quantized weights cuts them, and which it takes."""

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
MAX_SPLIT = 4
MIN_STAGES = 2
GROUP_LENGTHS = (32, 64, 128)

_MULTIPROCESSORS = 132
_RING_BYTES = 104 * 1024  # two blocks fit into a multiprocessor's shared memory
_MAX_STAGES = 12

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
    """How a product is cut: `split` thread blocks share the k dimension, each keeps `stages` tiles in flight."""

    split: int
    stages: int

    def __post_init__(self) -> None:
        if self.split not in (1, 2, 4):
            raise ValueError(f"{self.split=} must be 1, 2 or 4")
        if self.stages < MIN_STAGES:
            raise ValueError(f"{self.stages=} must be at least {MIN_STAGES}")


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

    @property
    def on_device(self) -> bool:
        return self.interpret is None

    @property
    def split(self) -> int:
        return self.config.split

    @property
    def padded_rows(self) -> int:
        return round_up(self.rows, ROW_ALIGNMENT)

    @property
    def tiles(self) -> int:
        return tiles_per_block(self.columns, self.is_swiglu)

    @property
    def out_columns(self) -> int:
        return TILE if self.is_swiglu else self.tiles * TILE

    @property
    def rows_per_rank(self) -> int:
        return round_up(-(-self.padded_rows // self.split), ROW_ALIGNMENT)

    @property
    def block_k(self) -> int:
        return block_k(self.form)

    @property
    def steps(self) -> int:
        return self.k // (self.block_k * self.split)

    @property
    def groups_per_step(self) -> int:
        """Runs of inputs in a step whose products are scaled on their own."""
        return self.block_k // self.group_length if self.form == "int4" else 1

    @property
    def copies_per_step(self) -> int:
        return 1 + self.tiles * (2 if self.form == "int4" else 1)


def block_k(form: Form) -> int:
    """Inputs of a weight tile."""
    return 2 * ROW_BYTES if form == "int4" else ROW_BYTES


def tiles_per_block(columns: int, is_swiglu: bool) -> int:
    """Gate and up, or two neighbours where the columns allow it: x is then fetched half as often."""
    return 2 if is_swiglu or columns % (2 * TILE) == 0 else 1


def choose_config(form: Form, rows: int, k: int, columns: int, *, is_swiglu: bool) -> TuningConfig:
    """Picks by shape alone, so that every start compiles the same program: enough blocks for every multiprocessor."""
    tiles = tiles_per_block(columns, is_swiglu)
    blocks = columns // (TILE if is_swiglu else tiles * TILE)
    split = 1
    while split < MAX_SPLIT and blocks * split < _MULTIPROCESSORS and k % (2 * split * block_k(form)) == 0:
        split *= 2
    x_bytes = round_up(rows, ROW_ALIGNMENT) * block_k(form) * jnp.dtype(X_DTYPES[form]).itemsize
    stage_bytes = tiles * TILE * ROW_BYTES + x_bytes
    return TuningConfig(split, stages=max(MIN_STAGES, min(_RING_BYTES // stage_bytes, _MAX_STAGES)))


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
