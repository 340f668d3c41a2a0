"""Every implementation of rope_write_kv against its definition in numpy."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.rope_write_kv import rope_write_kv
from jaxserve.kernels.rope_write_kv_mosaic_gpu import rope_write_kv_mosaic_gpu
from tests.kernels.rope_write_kv_cases import CASES, PAGE_SIZE, PAGES, Case, check, make_arrays

needs_mosaic = pytest.mark.skipif(
    not (0, 11) <= jax.__version_info__ < (0, 12),
    reason=f"jax {jax.__version__} can't lower or interpret this kernel; 0.11 can",
)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_matches_the_definition(case: Case):
    check(case, functools.partial(rope_write_kv, implementation="xla"))


@needs_mosaic
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_hopper_kernel_matches_the_definition(case: Case):
    check(case, functools.partial(rope_write_kv_mosaic_gpu, interpret=plgpu.InterpretGPUParams()))


def test_chooses_an_implementation_by_itself():
    check(Case(), rope_write_kv)


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_cache_is_never_copied(tokens: int):
    places = tuple((page, page % PAGE_SIZE) for page in range(tokens))
    arrays = make_arrays(Case(places=places, dtype=jnp.float32))
    kept = {name: array for name, array in arrays.items() if name not in ("k_pages", "v_pages")}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def write_two_layers(k_pages, v_pages, layers, kept):
        outputs = []
        for layer in layers:
            q, k_pages, v_pages = rope_write_kv(
                **kept, k_pages=k_pages, v_pages=v_pages, layer=layer, implementation="xla"
            )
            # What the next layer writes hangs on what attention read here.
            kept = kept | {"qkv": kept["qkv"] + k_pages[0].sum() + v_pages[0].sum()}
            outputs.append(q)
        return outputs, k_pages, v_pages

    memory = (
        write_two_layers.lower(arrays["k_pages"], arrays["v_pages"], [np.int32(0), np.int32(1)], kept)
        .compile()
        .memory_analysis()
    )
    assert memory is not None
    assert memory.alias_size_in_bytes == 2 * arrays["k_pages"].nbytes
    assert memory.temp_size_in_bytes < arrays["k_pages"].nbytes


@needs_mosaic
def test_hopper_kernel_works_on_the_callers_cache():
    write = jax.jit(lambda arrays, layer: rope_write_kv_mosaic_gpu(**arrays, layer=layer))
    arrays = jax.tree.map(jnp.asarray, make_arrays(Case()))
    lowered = write.trace(arrays, jnp.int32(0)).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("#stablehlo.output_operand_alias<") == 2
    assert "stablehlo.scatter" not in lowered and "dynamic_update_slice" not in lowered


@needs_mosaic
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_hopper_kernel_lowers_for_the_gpu(case: Case):
    arrays = jax.tree.map(jnp.asarray, make_arrays(case))
    jax.jit(lambda arrays, layer: rope_write_kv_mosaic_gpu(**arrays, layer=layer)).trace(arrays, jnp.int32(0)).lower(
        lowering_platforms=("cuda",)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": jnp.zeros((4, 2, 2, 64))}, r"qkv must be .* got qkv.shape=\(4, 2, 2, 64\)"),
        ({"qkv": jnp.zeros((4, 2, 6, 32))}, "same kv_heads and head_dim"),
        ({"qkv": jnp.zeros((4, 1, 6, 64))}, "same kv_heads and head_dim"),
        ({"k_pages": jnp.zeros((PAGES, 4, 2, 64))}, r"k_pages must be \[layers"),
        ({"k_pages": jnp.zeros((3, PAGES, 4, 2, 64), jnp.int8)}, "must agree"),
        ({"cosines": jnp.zeros((4, 64))}, r"cosines must be float32 \[tokens=4, head_dim / 2=32\]"),
        ({"sines": jnp.zeros((4, 32), jnp.bfloat16)}, "sines must be float32"),
        ({"pages": jnp.zeros((4,), jnp.float32)}, "pages must be int32"),
        ({"offsets": jnp.zeros((5,), jnp.int32)}, r"offsets must be int32 \[tokens=4\]"),
        ({"implementation": "triton"}, "implementation='triton'"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_says_what_is_wrong(change: dict, message: str):
    pages = jnp.zeros((3, PAGES, 4, 2, 64))
    arguments = {
        "qkv": jnp.zeros((4, 2, 6, 64)),
        "k_pages": pages,
        "v_pages": pages,
        "layer": 0,
        "cosines": jnp.zeros((4, 32)),
        "sines": jnp.zeros((4, 32)),
        "pages": jnp.zeros((4,), jnp.int32),
        "offsets": jnp.zeros((4,), jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        rope_write_kv(**arguments | change)


def test_asking_for_the_hopper_kernel_on_a_cpu_says_why_not():
    with pytest.raises(NotImplementedError, match="not a GPU"):
        check(Case(), functools.partial(rope_write_kv, implementation="mosaic_gpu"))


def test_bfloat16_heads_are_turned_in_float32():
    """A pair turned by a long position's angle is as exact as its own rounding allows, where bfloat16 angles are noise."""
    arrays = jax.tree.map(jnp.asarray, make_arrays(Case(places=((0, 0),), kv_heads=1, group=1)))
    angles = 4097 * 500000.0 ** (-np.arange(0, 64, 2) / 64)
    arrays |= {"cosines": jnp.float32(np.cos(angles))[None], "sines": jnp.float32(np.sin(angles))[None]}
    q, _, _ = rope_write_kv(**arrays, layer=0, implementation="xla")
    first, second = np.split(np.asarray(arrays["qkv"])[0, 0, 0].astype(np.float64), 2)
    expected = np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
    )
    np.testing.assert_allclose(np.asarray(q)[0, 0].astype(np.float64), expected, rtol=2**-8, atol=1e-6)
