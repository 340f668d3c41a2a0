"""all_reduce_add_rms_norm against its definition in numpy, and the layout of what devices share."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxserve.kernels.all_reduce_add_rms_norm import all_reduce_add_rms_norm
from jaxserve.kernels.all_reduce_add_rms_norm_mosaic_gpu import all_reduce_add_rms_norm_mosaic_gpu, unsupported_reason
from jaxserve.kernels.peer_exchange import PairwiseSum
from jaxserve.kernels.peer_memory import EMPTY, PeerLayout, address_table, empty_memory, make_peer_memory
from jaxserve.kernels.quantize_rows import Float8Product, Float8Rows, quantize_rows
from tests.kernels.all_reduce_add_rms_norm_cases import AXIS, EPS, check, make_problem, on_mesh

needs_mosaic = pytest.mark.skipif(
    not (0, 11) <= jax.__version_info__ < (0, 12),
    reason=f"jax {jax.__version__} can't lower or interpret this kernel; 0.11 can",
)


def mesh_of(ranks: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:ranks]), (AXIS,))


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize(("ranks", "parts"), [(2, None), (4, 3), (8, None)])
def test_matches_the_definition(ranks: int, parts: int | None, implementation: str | None):
    problem = make_problem(ranks, 3, 256, parts)
    # A rounding of each device's sum, one of each addition, one of the total.
    check(problem, on_mesh(mesh_of(ranks), implementation)(*problem, None), roundings=2 * ranks)


@needs_mosaic
@pytest.mark.parametrize(("ranks", "rows", "size", "parts"), [(2, 3, 1024, None), (4, 2, 2048, 2)])
def test_hopper_kernel_rounds_the_sum_once(ranks: int, rows: int, size: int, parts: int | None):
    """All but the exchange, which nothing but a GPU can run: the interpreter reads what it would bring."""
    x, update, weight = problem = make_problem(ranks, rows, size, parts)
    layout = PeerLayout(ranks, rows, 4 * size)
    kernel = functools.partial(
        all_reduce_add_rms_norm_mosaic_gpu, eps=EPS, layout=layout, interpret=plgpu.InterpretGPUParams()
    )
    table = jnp.zeros((ranks, layout.table_words), jnp.int32)
    check(problem, kernel(jnp.tile(x[None], (ranks, 1, 1)), update, weight, table), roundings=1)


@needs_mosaic
def test_hopper_kernel_scales_what_comes_and_rounds_the_norm() -> None:
    """A product of float8 numbers goes in as it is, and the norm comes out as the next product wants it."""
    ranks, rows, size = 2, 3, 1024
    x, update, weight = make_problem(ranks, rows, size)
    numbers = jnp.pad(update.astype(jnp.float32) * 64.0, ((0, 0), (0, 13), (0, 0)), constant_values=jnp.nan)
    factors = jnp.full((ranks, rows + 13), 0.25, jnp.float32)
    scales = jnp.full((ranks, size), 0.0625, jnp.float32)
    layout = PeerLayout(ranks, rows, 4 * size)
    kernel = functools.partial(
        all_reduce_add_rms_norm_mosaic_gpu, eps=EPS, layout=layout, interpret=plgpu.InterpretGPUParams()
    )
    table, residual = jnp.zeros((ranks, layout.table_words), jnp.int32), jnp.tile(x[None], (ranks, 1, 1))
    plain_total, plain_norm = kernel(residual, update, weight, table)
    total, values, norm_factors = kernel(residual, numbers, weight, table, factors, scales, rounds=True)
    np.testing.assert_array_equal(total, plain_total)
    expected = quantize_rows(plain_norm[0], implementation="xla")
    assert values.shape == (ranks, 16, size)
    np.testing.assert_allclose(norm_factors[0, :rows], expected.factors[:rows], rtol=1e-6)
    wide = values[0, :rows].astype(jnp.float32) * norm_factors[0, :rows, None]
    np.testing.assert_allclose(
        wide, plain_norm[0].astype(jnp.float32), rtol=2.0**-4, atol=2.0**-9 * 448 * float(norm_factors[0, :rows].max())
    )


@pytest.mark.parametrize("rounds", [False, True])
def test_plain_xla_takes_and_gives_the_same_forms(rounds: bool) -> None:
    x, update, weight = make_problem(2, 3, 256)
    unscaled = Float8Product(update.astype(jnp.float32) * 8.0, jnp.full((2, 3), 0.5), jnp.full((2, 256), 0.25))

    def per_device(x: jax.Array, update: jax.Array, unscaled: Float8Product) -> tuple[jax.Array, ...]:
        def run(update: jax.Array | Float8Product) -> tuple[jax.Array, ...]:
            total, normed = all_reduce_add_rms_norm(x, update, weight, EPS, axis=AXIS, peers=None, rounds=rounds)
            return (total, normed.values, normed.factors) if isinstance(normed, Float8Rows) else (total, normed)

        apart = run(Float8Product(*(part[0] for part in unscaled)))
        return tuple(one[None] for one in (*run(update[0]), *apart))

    cut, whole = PartitionSpec(AXIS), PartitionSpec()
    mapped = jax.shard_map(per_device, mesh=mesh_of(2), in_specs=(whole, cut, cut), out_specs=cut, check_vma=False)
    results = jax.jit(mapped)(x, update, unscaled)
    half = len(results) // 2
    for one, other in zip(results[:half], results[half:], strict=True):
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))
    assert results[1].dtype == (jnp.float8_e4m3fn if rounds else x.dtype)


@needs_mosaic
@pytest.mark.parametrize("form", ["bfloat16", "float32 parts", "unscaled"])
def test_the_longest_rows_have_a_kernel_for_eight_devices(form: str) -> None:
    """It is lowered for a GPU, exchange included; what the GPU's compiler makes of it only a GPU's machine can tell."""
    rows, size = 64, 8192  # of Llama-3-70B
    layout = PeerLayout(8, 256, 4 * size)
    shape = jax.ShapeDtypeStruct
    x = shape((1, rows, size), jnp.bfloat16)
    update, more = {
        "bfloat16": (x, ()),
        "float32 parts": (shape((1, 2, rows, size), jnp.float32), ()),
        "unscaled": (
            shape((1, rows, size), jnp.float32),
            (shape((1, rows), jnp.float32), shape((1, size), jnp.float32)),
        ),
    }[form]
    assert unsupported_reason(x.update(shape=x.shape[1:]), update.dtype, layout) is None
    kernel = functools.partial(all_reduce_add_rms_norm_mosaic_gpu, eps=EPS, layout=layout, rounds=form == "unscaled")
    table = shape((1, layout.table_words), jnp.int32)
    traced = jax.jit(kernel).trace(x, update, shape((size,), jnp.float32), table, *more)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


class Sum(str):
    """An addition, written out."""

    def __add__(self, other: str) -> "Sum":
        return Sum(f"({self}{other})")


@pytest.mark.parametrize(("ranks", "order"), [(2, "(01)"), (4, "((01)(23))"), (8, "(((01)(23))((45)(67)))")])
def test_all_devices_add_in_the_same_order_up_to_that_of_two_numbers(ranks: int, order: str) -> None:
    """So all get the same bits: the device of rank r has that of rank r ^ i at place i."""
    for rank in range(ranks):
        sums = PairwiseSum(Sum(rank))
        for place in range(1, ranks):
            sums.add(Sum(rank ^ place))
        assert normal_order(sums.total) == order


def normal_order(text: str) -> str:
    """A sum with the smaller of two parts first, which changes no bit of it."""
    if not text.startswith("("):
        return text
    depth, middle = 0, 1
    while middle == 1 or depth:
        depth += {"(": 1, ")": -1}.get(text[middle], 0)
        middle += 1
    return "(" + "".join(sorted((normal_order(text[1:middle]), normal_order(text[middle:-1])), key=first_digit)) + ")"


def first_digit(text: str) -> str:
    return text.strip("()")[0]


@pytest.mark.parametrize("ranks", [4, 8])
def test_every_device_finds_the_others_by_the_bits_in_which_ranks_differ(ranks: int):
    addresses = [0x7F00_0000_0000 + 0x1234_5678 * rank for rank in range(ranks)]
    table = address_table(addresses)
    assert table.dtype == np.int32
    assert table.shape == (ranks, PeerLayout(ranks, 1, 128).table_words)
    found = table.view(np.int64)
    for rank in range(ranks):
        for place in range(ranks):
            assert found[rank, place] == addresses[rank ^ place]
            # What a device calls `place` calls it by the same number.
            assert found[rank ^ place, place] == addresses[rank]


def test_slots_begin_empty_and_counters_at_zero():
    layout = PeerLayout(2, 3, 256)
    memory = np.asarray(empty_memory(layout))
    counters = layout.counter_bytes // 4
    assert counters >= 3
    assert (memory[:counters] == 0).all()
    assert (memory[counters:] == EMPTY).all()
    assert memory[counters:].nbytes == 2 * 3 * 2 * 256  # even and odd exchanges, rows, senders


def test_memory_beyond_what_an_int32_counts_is_empty_too() -> None:
    """Of eight devices, rows of 8192 float32 and 4096 sequences: 2 GiB."""
    layout = PeerLayout(8, 4096, 4 * 8192)
    assert layout.words == 4096 + 2 * 4096 * 8 * 8192
    traced = str(jax.make_jaxpr(lambda: empty_memory(layout))())  # to make it would take too long
    assert "iota" in traced and " mul " not in traced, "four times the number of a word is beyond an int32"


@pytest.mark.parametrize(
    ("numbers", "match"),
    [((3, 1, 128), "power of two"), ((1, 1, 128), "power of two"), ((2, 0, 128), "max_rows"), ((2, 1, 100), "128")],
)
def test_says_what_layout_does_not_fit(numbers: tuple[int, int, int], match: str):
    with pytest.raises(ValueError, match=match):
        PeerLayout(*numbers)


def test_memory_is_for_all_devices_of_a_mesh():
    layout = PeerLayout(2, 1, 128)
    with pytest.raises(ValueError, match="2 devices"):
        make_peer_memory(mesh_of(4), AXIS, layout)
    with pytest.raises(ValueError, match="2 devices"):
        make_peer_memory(mesh_of(2), "dp", layout)


def test_each_device_gets_its_own_memory_and_all_addresses():
    layout = PeerLayout(4, 2, 128)
    peers = make_peer_memory(mesh_of(4), AXIS, layout)
    assert peers.memory.shape == (4, layout.words)
    tables = np.asarray(peers.table).view(np.int64)
    for shard in peers.memory.addressable_shards:
        rank = jax.devices().index(shard.device)
        assert tables[rank, 0] == shard.data.unsafe_buffer_pointer()
    for shard in peers.table.addressable_shards:
        assert shard.data.shape == (1, layout.table_words)
    assert len(set(tables[0])) == 4


def test_says_what_does_not_fit():
    x, update, weight = make_problem(2, 2, 128)
    call = functools.partial(all_reduce_add_rms_norm, axis=AXIS, peers=None)
    with pytest.raises(ValueError, match="must be alike"):
        call(x, update[0, :1], weight, EPS)
    with pytest.raises(ValueError, match="must be alike"):
        call(x, update, weight, EPS)  # parts are float32
    with pytest.raises(ValueError, match=r"weight\.shape"):
        call(x, update[0], weight[:5], EPS)


def test_says_what_does_not_fit_of_a_product_that_is_still_to_be_scaled() -> None:
    x, update, weight = make_problem(2, 2, 128)
    good = Float8Product(update[0].astype(jnp.float32), jnp.ones(2), jnp.ones(128))
    call = functools.partial(all_reduce_add_rms_norm, axis=AXIS, peers=None)
    with pytest.raises(ValueError, match=r"update\.numbers are float32\(1, 128\)"):
        call(x, good._replace(numbers=good.numbers[:1]), weight, EPS)
    with pytest.raises(ValueError, match=r"update\.factors\.shape=\(1,\)"):
        call(x, good._replace(factors=good.factors[:1]), weight, EPS)
    with pytest.raises(ValueError, match=r"update\.scales\.shape=\(5,\)"):
        call(x, good._replace(scales=good.scales[:5]), weight, EPS)


def test_the_hopper_kernel_is_refused_where_it_cannot_run():
    x, update, weight = make_problem(2, 2, 1024)
    with pytest.raises(NotImplementedError, match="can't run here"):
        all_reduce_add_rms_norm(x, update[0], weight, EPS, axis=AXIS, peers=None, implementation="mosaic_gpu")
    layout = PeerLayout(2, 2, 2048)
    assert unsupported_reason(x, update.dtype, layout) is None
    assert "more than the 1" in (unsupported_reason(x, update.dtype, PeerLayout(2, 1, 2048)) or "")
    assert "longer than" in (unsupported_reason(x, jnp.dtype(jnp.float32), layout) or "")
    assert "multiple of 1024" in (unsupported_reason(x[:, :512], update.dtype, layout) or "")
    assert "neither" in (unsupported_reason(x.astype(jnp.float32), update.dtype, layout) or "")
