"""add_rms_norm on the card: the Hopper kernel, and the fall-back."""

import functools
import logging

import jax.numpy as jnp
import pytest

from jaxserve.kernels.add_rms_norm import add_rms_norm
from tests.kernels.add_rms_norm_cases import EPS, SHAPES, check, make_arrays

pytestmark = pytest.mark.usefixtures("hopper")


@pytest.mark.parametrize(("rows", "size"), [*SHAPES, (64, 4096), (320, 4096)])
def test_hopper_kernel_matches_the_definition(rows: int, size: int):
    check(make_arrays(rows, size), functools.partial(add_rms_norm, eps=EPS, implementation="mosaic_gpu"))


@pytest.mark.parametrize("rows", [1, 16])
def test_hopper_kernel_adds_parts_up(rows: int):
    check(make_arrays(rows, 4096, parts=4), functools.partial(add_rms_norm, eps=EPS, implementation="mosaic_gpu"))


def test_falls_back_where_the_kernel_cannot_run_and_says_so_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check(make_arrays(2, 128, jnp.float32), functools.partial(add_rms_norm, eps=EPS))
    assert [record.levelname for record in caplog.records if "plain XLA" in record.message] == ["WARNING"]
