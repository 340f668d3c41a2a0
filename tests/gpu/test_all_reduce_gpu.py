"""all_reduce_add_rms_norm on cards: between several, and on one that plays them all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.kernels.all_reduce_add_rms_norm_mosaic_gpu import all_reduce_add_rms_norm_mosaic_gpu
from jaxserve.kernels.peer_memory import PeerLayout, PeerMemory, address_table, empty_memory, make_peer_memory
from tests.kernels.all_reduce_add_rms_norm_cases import AXIS, EPS, Problem, check, make_problem, on_mesh

pytestmark = pytest.mark.usefixtures("hopper")

MAX_ROWS = 256  # more than there are multiprocessors


@pytest.fixture(params=[2, 4, 8])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    if len(jax.devices()) < request.param:
        pytest.skip(f"needs {request.param} GPUs, {len(jax.devices())} are here")
    return Mesh(np.asarray(jax.devices()[: request.param]), (AXIS,))


@pytest.fixture
def peers(mesh: Mesh) -> PeerMemory:
    return make_peer_memory(mesh, AXIS, PeerLayout(mesh.size, MAX_ROWS, 4 * 8192))


def empty_words(memory: jax.Array, layout: PeerLayout) -> bool:
    """Whether nothing is left in any slot."""
    return bool((np.asarray(memory)[:, layout.counter_bytes // 4 :] == np.uint32(0xFFFFFFFF)).all())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_card_exchanges_with_itself(ranks: int):
    """Several exchanges with one memory, of different sizes."""
    layout = PeerLayout(ranks, 16, 4 * 8192)
    memory = jax.block_until_ready(jnp.tile(empty_memory(layout)[None], (ranks, 1)))
    first = memory.unsafe_buffer_pointer()
    table = jnp.asarray(address_table([first + 4 * layout.words * rank for rank in range(ranks)]))
    for seed, (rows, size, parts) in enumerate([(1, 8192, None), (3, 1024, None), (16, 4096, None), (2, 8192, 4)] * 2):
        x, update, weight = problem = make_problem(ranks, rows, size, parts, seed)
        copies = jnp.tile(x[None], (ranks, 1, 1))
        results = all_reduce_add_rms_norm_mosaic_gpu(copies, update, weight, table, eps=EPS, layout=layout)
        check(problem, results, roundings=1)
    # The first row's exchanges, and the last row's.
    assert np.asarray(memory)[:, 0].tolist() == [8] * ranks
    assert np.asarray(memory)[:, 15].tolist() == [2] * ranks
    assert empty_words(memory, layout)


@pytest.mark.parametrize(
    ("rows", "size", "parts"), [(1, 4096, None), (64, 4096, None), (256, 4096, None), (2, 8192, None), (16, 4096, 4)]
)
def test_matches_the_definition(mesh: Mesh, peers: PeerMemory, rows: int, size: int, parts: int | None):
    problem = make_problem(mesh.size, rows, size, parts)
    check(problem, on_mesh(mesh, "mosaic_gpu")(*problem, peers), roundings=1)


def test_exchanges_of_all_sizes_may_be_launched_ahead(mesh: Mesh, peers: PeerMemory):
    kernel = on_mesh(mesh, "mosaic_gpu")
    problems = [make_problem(mesh.size, rows, 4096, seed=rows) for rows in (1, 2, 7, 32, 64)]
    for problem in problems:  # the first run of a program loads it: before anything is launched ahead
        jax.block_until_ready(kernel(*problem, peers))
    launched: list[tuple[Problem, tuple[jax.Array, jax.Array]]] = []
    for turn in range(100):
        problem = problems[turn * 7 % len(problems)]
        launched.append((problem, kernel(*problem, peers)))
    for problem, results in launched:
        check(problem, results, roundings=1)
    assert empty_words(peers.memory, peers.layout)


def test_what_looks_like_an_empty_slot_goes_over(mesh: Mesh, peers: PeerMemory):
    x, update, weight = make_problem(mesh.size, 2, 4096)
    nan = jax.lax.bitcast_convert_type(jnp.uint16(0xFFFF), jnp.bfloat16)
    update = update.at[:, 1].set(nan)
    total, normed = on_mesh(mesh, "mosaic_gpu")(x, update, weight, peers)
    assert np.isnan(np.asarray(total, np.float32)[:, 1]).all()
    check((x[:1], update[:, :1], weight), (total[:, :1], normed[:, :1]), roundings=1)


def test_more_rows_than_there_is_memory_for_go_through_xla(mesh: Mesh, peers: PeerMemory):
    problem = make_problem(mesh.size, MAX_ROWS + 1, 4096)
    check(problem, on_mesh(mesh, None)(*problem, peers), roundings=2 * mesh.size)


def test_exchanges_within_a_program_follow_each_other(mesh: Mesh, peers: PeerMemory):
    """A chain in one program, as a model's layers are, is what the same steps are in numpy."""
    x, update, weight = make_problem(mesh.size, 4, 4096)
    step = on_mesh(mesh, "mosaic_gpu")

    @jax.jit
    def chain(x: jax.Array, peers: PeerMemory) -> jax.Array:
        for _ in range(9):
            x = step(x, update, weight, peers)[0][0] * jnp.bfloat16(0.5)
        return x

    exact = np.asarray(x, np.float64)
    for _ in range(9):
        exact = (exact + np.asarray(update, np.float64).sum(axis=0)) / 2
    np.testing.assert_allclose(np.asarray(chain(x, peers), np.float64), exact, rtol=2.0**-6, atol=2.0**-6)
