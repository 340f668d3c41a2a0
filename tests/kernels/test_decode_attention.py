"""Every implementation of decode_attention against a float64 reference in numpy."""

import dataclasses
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.decode_attention import decode_attention
from jaxserve.kernels.decode_attention_mosaic_gpu import decode_attention_mosaic_gpu
from jaxserve.kernels.decode_attention_plan import TuningConfig
from tests.kernels.decode_attention_cases import CASES, Case, check, make_arrays, reference
from tests.long_cases import named_cases

needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason=f"jax {jax.__version__} can't interpret Mosaic GPU kernels; 0.11 can"
)

# Few, since the interpreter takes seconds for each: together they reach every branch of the kernel.
INTERPRETED = {
    "ragged, padding rows, NaN in what no row reads": Case(),
    "float8 with scales, window and softcap": Case(
        dtype=jnp.float8_e4m3fn, k_scale=0.5, v_scale=3.0, window=90, softcap=2.0, kv_lens=(300, 0, 7)
    ),
    "pages larger than a block, odd group and head_dim": Case(page_size=128, group=3, head_dim=96, kv_lens=(200, 65)),
}


# Between others of their kind that always run.
LONG = (
    "three query heads a KV head", "eight query heads a KV head", "head_dim 128", "page_size 32", "page_size 64",
    "window inside the row", "window of one token", "softcap", "full pages",
)  # fmt: skip


@pytest.mark.parametrize("case", named_cases(CASES, LONG))
def test_matches_the_definition(case: Case):
    check(case, functools.partial(decode_attention, implementation="xla"))


def check_interpreted(case: Case, config: TuningConfig) -> None:
    interpret = plgpu.InterpretGPUParams()
    check(case, functools.partial(decode_attention_mosaic_gpu, config=config, interpret=interpret))


@needs_interpreter
@pytest.mark.parametrize("case", INTERPRETED.values(), ids=INTERPRETED.keys())
def test_hopper_kernel_matches_the_definition(case: Case):
    check_interpreted(case, TuningConfig(stages=2, thread_blocks=3))


@needs_interpreter
def test_hopper_kernel_may_leave_shared_pairs_to_a_second_kernel():
    check_interpreted(Case(kv_lens=(300, 0, 70)), TuningConfig(stages=2, thread_blocks=3, separate_join=True))


@needs_interpreter
def test_hopper_kernel_joins_more_parts_than_it_reads_at_once():
    check_interpreted(Case(kv_lens=(64 * 18,), kv_heads=1), TuningConfig(stages=2, thread_blocks=19))


@needs_interpreter
@pytest.mark.long
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_hopper_kernel_matches_the_definition_in_every_case(case: Case):
    if case.dtype == jnp.float32:
        pytest.skip("the Hopper kernel multiplies 16-bit types only")
    check_interpreted(case, TuningConfig(stages=2, thread_blocks=3))


def test_one_program_serves_every_layer():
    case = Case(dtype=jnp.float32)
    q, k_pages, v_pages, page_table, kv_lens = make_arrays(case)
    k_pages = jnp.nan_to_num(k_pages).at[2].set(jnp.nan_to_num(k_pages[1]) * 2)
    v_pages = jnp.nan_to_num(v_pages).at[2].set(jnp.nan_to_num(v_pages[1]) + 1)

    @jax.jit
    def run(layer):
        return decode_attention(q, k_pages, v_pages, layer, page_table, kv_lens, scale=case.scale, implementation="xla")

    for layer in (1, 2):
        expected = reference(dataclasses.replace(case, layer=layer), q, k_pages, v_pages, page_table, kv_lens)
        np.testing.assert_allclose(np.asarray(run(jnp.int32(layer))), expected, rtol=2e-5, atol=2e-5)
    assert run._cache_size() == 1


def test_chooses_an_implementation_by_itself():
    case = Case(dtype=jnp.float32)
    q, k_pages, v_pages, page_table, kv_lens = arrays = make_arrays(case)
    out = decode_attention(q, k_pages, v_pages, case.layer, page_table, kv_lens, scale=case.scale)
    np.testing.assert_allclose(np.asarray(out), reference(case, *arrays), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((4, 7, 64))}, "q_heads=7 must be a multiple of kv_heads=2"),
        ({"q": jnp.zeros((4, 8, 32))}, "one head_dim"),
        ({"q": jnp.zeros((8, 64))}, r"q must be \[batch"),
        ({"k_pages": jnp.zeros((3, 2, 16, 2, 64), jnp.int8)}, "must agree"),
        ({"page_table": jnp.zeros((3, 4), jnp.int32)}, "page_table must be int32"),
        ({"kv_lens": jnp.zeros((4,), jnp.float32)}, "kv_lens must be int32"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"softcap": 0.0}, "softcap=0.0 must be positive"),
        ({"implementation": "triton"}, "implementation='triton'"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_says_what_is_wrong(change: dict, message: str):
    pages = jnp.zeros((3, 2, 16, 2, 64))
    arguments = {
        "q": jnp.zeros((4, 8, 64)),
        "k_pages": pages,
        "v_pages": pages,
        "layer": 0,
        "page_table": jnp.zeros((4, 4), jnp.int32),
        "kv_lens": jnp.zeros((4,), jnp.int32),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        decode_attention(**arguments | change)


def test_asking_for_the_hopper_kernel_on_a_cpu_says_why_not():
    case = Case()
    q, k_pages, v_pages, page_table, kv_lens = make_arrays(case)
    with pytest.raises(NotImplementedError, match="not a GPU"):
        decode_attention(q, k_pages, v_pages, 0, page_table, kv_lens, scale=1.0, implementation="mosaic_gpu")
