"""Every implementation of decode_layer against float64 numpy, and the plan of its work."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.decode_layer import decode_layer
from jaxserve.kernels.decode_layer_mosaic_gpu import decode_layer_mosaic_gpu
from jaxserve.kernels.decode_layer_plan import Cut, Problem, TuningConfig, choose_config, shared_bytes
from tests.kernels.decode_layer_cases import EPS, Case, check, make_arrays, reference

needs_interpreter = pytest.mark.skipif(
    not (0, 11) <= jax.__version_info__ < (0, 12),
    reason=f"jax {jax.__version__} can't lower or interpret this kernel; 0.11 can",
)

# Two blocks are as many as the interpreter's threads allow. Cut in two, every phase has a group in two blocks' hands; a
# phase of one block leaves the other out.
_LAST = Cut(2, 2, "last")
INTERPRETED = {
    "one row": (Case(rows=1), TuningConfig((Cut(2, 2),) * 4, stages=3, x_stages=2)),
    "odd rows, the last layer": (
        Case(rows=13, qkv=None, ffn=384),
        TuningConfig((Cut(2, 2),) * 4, stages=2, x_stages=3),
    ),
    "two compute warpgroups": (
        Case(rows=16, ffn=128, qkv=256),
        TuningConfig((Cut(4, 2),) * 4, compute_warpgroups=2, stage_tiles=4, stages=2, x_stages=2),
    ),
    "one block": (
        Case(rows=3, hidden=128, ffn=128, qkv=128),
        TuningConfig((Cut(2, 1),) * 4, stages=4, x_stages=4),
    ),
    "who is last finishes, multiplying ahead": (
        Case(rows=3, hidden=384, ffn=192, qkv=192),
        TuningConfig((_LAST, Cut(2, 1, "last"), _LAST, Cut(1, 2, "last")), stages=3, x_stages=3, multiplies_ahead=True),
    ),
    "tiles along k, small copies, two compute warpgroups": (
        Case(rows=16, ffn=128, qkv=256),
        TuningConfig(
            (_LAST, Cut(4, 1, "last"), _LAST, Cut(2, 2)),
            compute_warpgroups=2,
            stage_tiles=4,
            stages=2,
            x_stages=3,
            copy_rows=16,
            multiplies_ahead=True,
        ),
    ),
}

LLAMA = Problem(8, 4096, 4096, 14336, 6144, EPS, choose_config(8), None)
SMALL = Problem(8, 256, 256, 384, 384, EPS, TuningConfig((Cut(2, 7), Cut(2, 5), Cut(1, 3), Cut(2, 7))), None)


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
        assert phase.start(phase.blocks + 1) == phase.units
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
    assert 190 * 1024 <= shared_bytes(rows, config) <= 222 * 1024


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_warpgroups": 3}, "compute_warpgroups"),
        ({"cuts": (Cut(),) * 3}, "must be 4"),
        ({"stages": 1}, "stages=1"),
        ({"x_stages": 40}, "x_stages=40"),
        ({"copy_rows": 24}, "copy_rows=24"),
        ({"extent": "half"}, "extent='half'"),
        ({"stage_tiles": 3}, "stage_tiles=3.*cut.tiles=2 of output"),
        ({"compute_warpgroups": 2}, "cut.tiles=2 of gate_up"),
        ({"stage_tiles": 8, "multiplies_ahead": True}, "x_stages=4.*must hold more than"),
    ],
)
def test_says_what_is_wrong_with_a_tuning(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        TuningConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tiles": 3}, "tiles=3"), ({"blocks": 0}, "blocks=0"), ({"join": "first"}, "join='first'")],
)
def test_says_what_is_wrong_with_a_cut(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Cut(**options)


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
