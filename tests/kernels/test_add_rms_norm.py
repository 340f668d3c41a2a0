"""Every implementation of add_rms_norm against its definition in numpy."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from jaxserve.kernels.add_rms_norm import add_rms_norm
from jaxserve.kernels.add_rms_norm_mosaic_gpu import add_rms_norm_mosaic_gpu
from tests.kernels.add_rms_norm_cases import EPS, SHAPES, check, make_arrays

needs_mosaic = pytest.mark.skipif(
    not (0, 11) <= jax.__version_info__ < (0, 12),
    reason=f"jax {jax.__version__} can't lower or interpret this kernel; 0.11 can",
)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("rows", "size"), [*SHAPES, (4, 37)])
def test_matches_the_definition(rows: int, size: int, dtype: type):
    check(make_arrays(rows, size, dtype), functools.partial(add_rms_norm, eps=EPS))


@needs_mosaic
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_hopper_kernel_matches_the_definition(rows: int, size: int):
    interpreted = functools.partial(add_rms_norm_mosaic_gpu, eps=EPS, interpret=plgpu.InterpretGPUParams())
    check(make_arrays(rows, size), interpreted)


def test_adds_parts_up():
    check(make_arrays(3, 256, parts=4), functools.partial(add_rms_norm, eps=EPS))


@needs_mosaic
def test_hopper_kernel_adds_parts_up():
    interpreted = functools.partial(add_rms_norm_mosaic_gpu, eps=EPS, interpret=plgpu.InterpretGPUParams())
    check(make_arrays(3, 256, parts=4), interpreted)


def test_says_what_does_not_fit():
    x, update, weight = make_arrays(2, 128)
    with pytest.raises(ValueError, match="must be alike"):
        add_rms_norm(x, update[:1], weight, EPS)
    with pytest.raises(ValueError, match="must be alike"):
        add_rms_norm(x, update[None], weight, EPS)  # parts are float32
    with pytest.raises(ValueError, match=r"weight\.shape"):
        add_rms_norm(x, update, weight[:5], EPS)
    with pytest.raises(ValueError, match="implementation="):
        add_rms_norm(x, update, weight, EPS, implementation="cuda")  # pyright: ignore[reportArgumentType]


def test_the_hopper_kernel_is_refused_where_it_cannot_run():
    with pytest.raises(NotImplementedError, match="can't run here"):
        add_rms_norm(*make_arrays(1, 100), EPS, implementation="mosaic_gpu")
