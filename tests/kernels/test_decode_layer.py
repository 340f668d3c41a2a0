"""Every implementation of decode_layer against float64 numpy, and the plan of its work."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.decode_layer import decode_layer
from jaxserve.kernels.decode_layer_mosaic_gpu import decode_layer_mosaic_gpu
from jaxserve.kernels.decode_layer_plan import Problem, TuningConfig, choose_config
from tests.kernels.decode_layer_cases import EPS, Case, check, make_arrays, reference

needs_interpreter = pytest.mark.skipif(
    not (0, 11) <= jax.__version_info__ < (0, 12),
    reason=f"jax {jax.__version__} can't lower or interpret this kernel; 0.11 can",
)

# Two blocks are as many as the interpreter's threads allow. Cut in two, every phase has a group in two blocks' hands.
INTERPRETED = {
    "one row": (Case(rows=1), TuningConfig(2, 1, 3, 2)),
    "odd rows, the last layer": (Case(rows=13, qkv=None, ffn=384), TuningConfig(2, 1, 2, 3)),
    "two compute warpgroups": (Case(rows=16, ffn=128, qkv=256), TuningConfig(2, 2, 2, 2)),
    "one block": (Case(rows=3, hidden=128, ffn=128, qkv=128), TuningConfig(1, 1, 4, 4)),
}

LLAMA = Problem(8, 4096, 4096, 14336, 6144, EPS, choose_config(8), None)
SMALL = Problem(8, 256, 256, 384, 384, EPS, TuningConfig(7), None)


@pytest.mark.parametrize("case", [Case(), Case(rows=1), Case(rows=13, qkv=None), Case(rows=200, ffn=90, hidden=70)])
def test_matches_the_definition(case: Case):
    arrays = make_arrays(case)
    result = decode_layer(*arrays, eps=EPS, implementation="xla")  # pyright: ignore[reportArgumentType]
    x, qkv = reference(arrays)
    check(result.x, x, 4e-3)
    check(result.qkv, qkv, 8e-3)


@needs_interpreter
@pytest.mark.parametrize(("case", "config"), INTERPRETED.values(), ids=INTERPRETED.keys())
def test_hopper_kernel_matches_the_definition(case: Case, config: TuningConfig):
    arrays = make_arrays(case)
    x, qkv, _ = decode_layer_mosaic_gpu(
        *arrays,  # pyright: ignore[reportArgumentType]
        eps=EPS,
        config=config,
        interpret=plgpu.InterpretGPUParams(),
    )
    expected_x, expected_qkv = reference(arrays)
    check(x, expected_x, 4e-3)
    check(qkv, expected_qkv, 8e-3)


@pytest.mark.parametrize("problem", [LLAMA, SMALL], ids=["llama", "small"])
def test_every_unit_belongs_to_one_block_that_owners_name(problem: Problem):
    for phase in problem.phases:
        starts = [phase.start(block) for block in range(phase.blocks + 1)]
        assert starts[0] == 0 and starts[-1] == phase.units
        shares = np.diff(starts)
        assert shares.min() >= 1 and shares.max() - shares.min() <= 1
        owners = np.repeat(np.arange(phase.blocks), shares)
        assert [phase.owner(unit) for unit in range(phase.units)] == owners.tolist()
        groups = owners.reshape(phase.groups, phase.steps)
        assert phase.max_owners == max(len(set(group)) for group in groups.tolist())
        owned = [{unit // phase.steps for unit in np.flatnonzero(owners == block)} for block in range(phase.blocks)]
        assert phase.max_segments == max(len(groups) for groups in owned)


@pytest.mark.parametrize("rows", [1, 8, 24, 64])
def test_the_chosen_tuning_fills_the_shared_memory_and_no_more(rows: int):
    config = choose_config(rows)
    padded_rows = -(-rows // 8) * 8
    used = config.stages * 16384 + config.x_stages * padded_rows * 128
    assert 190 * 1024 <= used <= 222 * 1024


@pytest.mark.parametrize("options", [{"blocks": 0}, {"compute_warpgroups": 3}, {"stages": 1}, {"x_stages": 40}])
def test_says_what_is_wrong_with_a_tuning(options: dict[str, int]):
    with pytest.raises(ValueError, match=next(iter(options))):
        TuningConfig(**options)


def test_asking_for_the_hopper_kernel_on_a_cpu_says_why_not():
    with pytest.raises(NotImplementedError, match="not a GPU"):
        decode_layer(*make_arrays(Case()), eps=EPS, implementation="mosaic_gpu")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attended": jnp.zeros((2, 4, 8))}, r"must be \[rows, attended\]"),
        ({"residual": jnp.zeros((3, 16))}, r"residual is float32\(3, 16\), must be float32\(4, 16\)"),
        ({"wo": jnp.zeros((8, 16), jnp.bfloat16)}, "wo is bfloat16"),
        ({"mlp_norm": jnp.zeros(8)}, "mlp_norm is"),
        ({"w_gate_up": jnp.zeros((16, 3, 24))}, "w_gate_up is"),
        ({"w_down": jnp.zeros((16, 16))}, "w_down is"),
        ({"next_norm": None}, "both"),
        ({"next_wqkv": jnp.zeros((8, 32))}, "next_wqkv is"),
        ({"counters": jnp.zeros(3, jnp.int32)}, "counters are"),
        ({"implementation": "triton"}, "implementation='triton'"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_says_what_is_wrong(change: dict[str, Any], message: str):
    arguments: dict[str, Any] = {
        "attended": jnp.zeros((4, 8)),
        "residual": jnp.zeros((4, 16)),
        "wo": jnp.zeros((8, 16)),
        "mlp_norm": jnp.zeros(16),
        "w_gate_up": jnp.zeros((16, 2, 24)),
        "w_down": jnp.zeros((24, 16)),
        "next_norm": jnp.zeros(16),
        "next_wqkv": jnp.zeros((16, 32)),
    }
    with pytest.raises(ValueError, match=message):
        decode_layer(**arguments | change, eps=EPS)
