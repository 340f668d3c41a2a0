"""Eight devices with a KV head each and the eight query heads that go with it, as Llama-3-70B lies on eight cards."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.checkpoint.inspection import device_memory
from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.engine.build import build_engine
from jaxserve.engine.build_drafting import Model
from jaxserve.models import llama
from jaxserve.models.batch import Batch
from jaxserve.models.kv_cache import KVCache, kv_cache_specs
from jaxserve.models.params import LlamaParams, init_params, param_specs
from jaxserve.models.presets import preset_config
from jaxserve.models.quantize_params import quantize_params
from jaxserve.models.shard_layout import ShardLayout
from jaxserve.progress import NoProgress
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.collectives import Collectives
from jaxserve.sharding.mesh import TENSOR_AXIS, make_mesh
from jaxserve.sharding.placement import named_shardings, partition_specs
from jaxserve.speculative_config import SpeculativeConfig
from tests.models.paged_model import PagedModel
from tests.tiny_engine import ONE_SEQUENCE, ask, random_params, tiny_engine

BFLOAT16 = jnp.dtype(jnp.bfloat16)
FLOAT8 = QuantizationConfig("fp8")
TINY = ModelConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=64, num_kv_heads=8, head_dim=8,
    max_position_embeddings=128,
)  # fmt: skip
CONFIG = dataclasses.replace(ONE_SEQUENCE, quantization="fp8")
ASKED = [
    (prompt, SamplingParams(max_tokens=18, ignore_eos=True, **drawn))
    for prompt in ([3, 4, 5, 6, 7], list(range(2, 30)))
    for drawn in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.95, "seed": 11})
]


@cache
def answers(size: int) -> list[list[int]]:
    config = dataclasses.replace(CONFIG, tensor_parallel_size=size)
    with tiny_engine(config, TINY, random_params(TINY), mode="filtered") as engine:
        return [ask(engine, *request) for request in ASKED]


def test_one_kv_head_on_each_device_gives_the_same_tokens() -> None:
    """In float8, activations too."""
    config = dataclasses.replace(TINY, quantization=FLOAT8)
    params = quantize_params(random_params(TINY), TINY, FLOAT8)
    found = []
    for size in (1, 8):
        model = PagedModel(config, params, capacity=24, tensor_parallel_size=size)
        first = int(model.prefill([3, 4, 5, 6, 7])[-1].argmax())
        found.append(model.greedy(first, 16)[0])
    assert found[1] == found[0] and len(set(found[0])) > 4


@pytest.mark.long
@pytest.mark.parametrize("size", [4, 8])
def test_an_engine_gives_the_same_tokens_greedy_and_drawn(size: int) -> None:
    assert answers(size) == answers(1)


@pytest.mark.long
def test_a_draft_model_over_eight_devices_changes_no_token() -> None:
    speculative = SpeculativeConfig("draft_model", 3, model="of the test", quantization="fp8")
    config = dataclasses.replace(CONFIG, tensor_parallel_size=8, speculative_config=speculative)
    draft = Model(TINY, random_params(TINY))  # the target itself, so that drafts are kept
    engine = build_engine(TINY, random_params(TINY), config, NoProgress(), draft=draft)
    try:
        assert [ask(engine, *request) for request in ASKED] == answers(8)
        stats = engine.stats().speculative
        assert stats is not None and stats.num_accepted_tokens > 20
    finally:
        engine.shutdown()


def held(declarations: Any, size: int) -> dict[str, tuple[int, int]]:
    """Elements of each array and of a device's part of it, by path; every device has as many."""
    mesh = make_mesh(jax.devices(), size)
    shardings = jax.tree.leaves(named_shardings(declarations, mesh))
    specs = jax.tree_util.tree_leaves_with_path(declarations)
    return {
        jax.tree_util.keystr(path): (spec.size, jax.ShapeDtypeStruct(sharding.shard_shape(spec.shape), bool).size)
        for (path, spec), sharding in zip(specs, shardings, strict=True)
    }


@pytest.mark.parametrize("name", ["llama-3-70b", "llama-3-8b"])
@pytest.mark.parametrize("size", [4, 8])
def test_every_array_of_a_large_model_is_cut_without_padding_or_copies(name: str, size: int) -> None:
    """Nothing is allocated. Norms are on every device, and scales of outputs where the inputs are what is cut."""
    config = dataclasses.replace(preset_config(name), quantization=FLOAT8)
    layout = ShardLayout(config, size)
    assert layout.specs() == param_specs(config) and layout.device_config == config
    for path, (whole, part) in held(layout.specs(), size).items():
        is_copied = "norm" in path or path.endswith((".wo.scales", ".w_down.scales"))
        assert part == (whole if is_copied else whole // size), path
    for path, (whole, part) in held(kv_cache_specs(config, 8192, 16), size).items():
        assert part == whole // size, path


def test_weights_that_are_made_have_the_shapes_that_are_declared() -> None:
    config = dataclasses.replace(preset_config("llama-3-70b"), quantization=FLOAT8)
    made = jax.eval_shape(partial(init_params, config, 0, BFLOAT16))
    declared = param_specs(config)
    assert jax.tree.structure(made) == jax.tree.structure(declared)
    total = 0
    for array, spec in zip(jax.tree.leaves(made), jax.tree.leaves(declared), strict=True):
        assert (array.shape, array.dtype) == (spec.shape, spec.element_type(BFLOAT16))
        total += array.size * array.dtype.itemsize
    copied = 80 * 4 * 4 * 8192 + 4 * 8192  # two norms and two rows of scales in each layer, the final norm
    assert device_memory(config, 8, "bfloat16").weights == (total - copied) // 8 + copied


def test_a_step_of_64_sequences_fits_together_on_every_device() -> None:
    """The whole pass of Llama-3-70B over eight devices is traced, and not run."""
    config = dataclasses.replace(preset_config("llama-3-70b"), quantization=FLOAT8)
    mesh, rows, pages = make_mesh(jax.devices(), 8), 64, 128

    def declared(specs: Any) -> Any:
        return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.element_type(BFLOAT16)), specs)

    def numbers(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def per_device(params: LlamaParams, cache: KVCache, batch: Batch) -> tuple[jax.Array, KVCache]:
        assert params.layers[0].wqkv.shape == (8192, 1, 10, 128)  # one KV head, and its eight query heads
        hidden, cache = llama.forward(params, cache, batch, config=config, collectives=Collectives(8))
        return llama.logits(params, hidden, collectives=Collectives(8)), cache

    batch = Batch(
        token_ids=numbers(rows), positions=numbers(rows), write_pages=numbers(rows), write_offsets=numbers(rows),
        decode_page_table=numbers(rows, pages), decode_kv_lens=numbers(rows), prefill_page_table=numbers(0, pages),
        prefill_query_starts=numbers(1), prefill_kv_lens=numbers(0),
    )  # fmt: skip
    whole = jax.sharding.PartitionSpec()
    weights, cache = param_specs(config), kv_cache_specs(config, 8192, 16)
    mapped = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(partition_specs(weights), partition_specs(cache), whole),
        out_specs=(whole, partition_specs(cache)),
        check_vma=False,
    )
    logits, written = jax.eval_shape(mapped, declared(weights), declared(cache), batch)
    assert (logits.shape, TENSOR_AXIS) == ((rows, 128_256), mesh.axis_names[0])
    assert written.k_pages.shape == (80, 8192, 16, 8, 128)
