"""What each device holds of a model: a slice, and of a KV head that several share a copy."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import EngineConfig, ModelConfig, QuantizationConfig
from jaxserve.engine.build import make_engine_mesh, place_params
from jaxserve.engine.device_batch import Sizes
from jaxserve.engine.runner import zero_cache
from jaxserve.models.kv_cache import kv_bytes_per_token
from jaxserve.models.params import LayerParams, LlamaParams, param_specs
from jaxserve.models.quantization import QuantizedWeight, dequantize
from jaxserve.models.quantize_params import quantize_params
from jaxserve.models.shard_layout import ShardLayout
from jaxserve.progress import NoProgress
from tests.tiny_engine import MODEL_CONFIG, random_params

CONFIG = dataclasses.replace(
    MODEL_CONFIG, vocab_size=61, intermediate_size=256, attention_bias=True, tie_word_embeddings=False
)
NAMES = [None, "int8", "fp8", "int4-32"]


def with_kv_heads(kv_heads: int) -> ModelConfig:
    return dataclasses.replace(CONFIG, num_kv_heads=kv_heads)


@cache
def model(kv_heads: int, name: str | None) -> tuple[ModelConfig, LlamaParams]:
    """A model as a checkpoint has it."""
    config = with_kv_heads(kv_heads)
    dense = random_params(config)
    if name is None:
        return config, dense
    quantization = QuantizationConfig.named(name)
    quantized = jax.tree.map(np.asarray, quantize_params(dense, config, quantization))
    return dataclasses.replace(config, quantization=quantization), quantized


def place(config: ModelConfig, params: LlamaParams, size: int, quantization: str | None = None) -> LlamaParams:
    settings = EngineConfig(tensor_parallel_size=size, quantization=quantization)  # type: ignore[arg-type]
    return place_params(config, params, settings, make_engine_mesh(settings), NoProgress())[1]


def wide(weight: np.ndarray | QuantizedWeight) -> np.ndarray:
    return np.asarray(dequantize(weight) if isinstance(weight, QuantizedWeight) else weight)


def on_device(tree: LlamaParams, device: int) -> LlamaParams:
    return jax.tree.map(lambda array: np.asarray(array.addressable_shards[device].data), tree)


def expected_heads(layer: LayerParams, config: ModelConfig, size: int, device: int) -> tuple[np.ndarray, ...]:
    """A device's wqkv, wo and bqkv, cut by hand out of the whole model's."""
    heads = config.num_heads // size  # query heads of this device
    kv_heads = max(1, config.num_kv_heads // size)
    queries = [device * heads + head for head in range(heads)]
    group = config.group_size
    kv = sorted({head // group for head in queries})
    assert len(kv) == kv_heads
    wqkv, wo, bqkv = wide(layer.wqkv), wide(layer.wo), np.asarray(layer.bqkv)
    columns = [
        [(head, query % group) for query in queries if query // group == head] + [(head, group), (head, group + 1)]
        for head in kv
    ]
    cut_qkv = np.stack([np.stack([wqkv[:, h, column] for h, column in one], 1) for one in columns], 1)
    cut_bias = np.stack([np.stack([bqkv[h, column] for h, column in one]) for one in columns])
    cut_o = np.stack([wo[query // group, query % group] for query in queries])
    return cut_qkv, cut_o.reshape(kv_heads, -1, *cut_o.shape[1:]), cut_bias


def cases() -> list[Any]:
    """All of them; those in which nothing is copied, or that a neighbour stands for, when there is time."""
    return [
        pytest.param(
            *case,
            marks=() if case in ((None, 8, 8), (None, 1, 4), ("int4-32", 1, 8), ("int8", 4, 8)) else pytest.mark.long,
        )
        for case in itertools.product(NAMES, (8, 4, 1), (1, 2, 4, 8))
    ]


@pytest.mark.parametrize(("name", "kv_heads", "size"), cases())
def test_each_device_holds_its_heads_and_its_slices(name: str | None, kv_heads: int, size: int) -> None:
    config, params = model(kv_heads, name)
    placed = place(config, params, size)
    layer = params.layers[1]
    gate_up, down = wide(layer.w_gate_up), wide(layer.w_down)
    ffn, rows = config.intermediate_size // size, -(-config.vocab_size // size)
    for device in range(size):
        mine = on_device(placed, device)
        for found, wanted in zip(
            (mine.layers[1].wqkv, mine.layers[1].wo, mine.layers[1].bqkv),
            expected_heads(layer, config, size, device),
            strict=True,
        ):
            np.testing.assert_array_equal(wide(found), wanted)
        np.testing.assert_array_equal(wide(mine.layers[1].w_gate_up), gate_up[..., device * ffn : (device + 1) * ffn])
        np.testing.assert_array_equal(wide(mine.layers[1].w_down), down[device * ffn : (device + 1) * ffn])
        padded = np.pad(params.embedding, ((0, size * rows - config.vocab_size), (0, 0)))
        np.testing.assert_array_equal(mine.embedding, padded[device * rows : (device + 1) * rows])
        assert mine.lm_head.shape == (config.hidden_size, rows)
        np.testing.assert_array_equal(mine.final_norm, params.final_norm)


@pytest.mark.parametrize("name", [pytest.param("int8", marks=pytest.mark.long), "int4-32"])
def test_quantizing_on_the_way_gives_what_quantizing_before_does(name: str) -> None:
    """Of the dense model's own groups, whatever devices they end up on."""
    config, params = model(1, name)
    before = place(config, params, 8)
    meanwhile = place(*model(1, None), 8, quantization=name)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), meanwhile, before)


def test_a_group_of_several_heads_is_cut_between_runs_of_its_numbers() -> None:
    config = dataclasses.replace(CONFIG, num_kv_heads=1, head_dim=32, intermediate_size=512)
    quantization = QuantizationConfig("int4", 128)  # four heads
    quantized = dataclasses.replace(config, quantization=quantization)
    params = jax.tree.map(np.asarray, quantize_params(random_params(config), config, quantization))
    placed = place(quantized, params, 4)
    for device in range(4):
        mine = on_device(placed, device).layers[1].wo
        assert mine.scales.shape == (1, 1, config.hidden_size)  # of two heads
        np.testing.assert_array_equal(wide(mine), expected_heads(params.layers[1], config, 4, device)[1])


@pytest.mark.parametrize("group_size", [16, 32, 64, 96, 128])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 256])
def test_parts_of_groups_have_the_order_of_the_groups(head_dim: int, group_size: int) -> None:
    """Multiples of 32 numbers are stored in another order than others, and a device takes them as they are stored."""
    for heads, size in ((6, 2), (6, 3), (6, 6), (8, 2), (8, 4), (8, 8), (12, 4)):
        config = dataclasses.replace(
            CONFIG,
            num_heads=heads,
            num_kv_heads=1,
            head_dim=head_dim,
            intermediate_size=9216,
            quantization=QuantizationConfig("int4", group_size),
        )
        layout = ShardLayout(config, size)
        whole, part = param_specs(config).layers[0].wo, layout.specs().layers[0].wo
        length, cut = heads * head_dim // whole.scales.shape[1], heads // size * head_dim // part.scales.shape[1]
        assert (length % 32 == 0) == (cut % 32 == 0), (heads, size, length, cut)
        assert length % 32 != 0 or head_dim % 32 == 0


@pytest.mark.parametrize(("kv_heads", "size"), [(8, 8), (4, 8), (1, 4)])
def test_pages_are_divided_and_the_copies_counted(kv_heads: int, size: int) -> None:
    config = with_kv_heads(kv_heads)
    mesh = make_engine_mesh(EngineConfig(tensor_parallel_size=size))
    layout = ShardLayout(config, size)
    sizes = Sizes(max_num_seqs=1, pages_per_seq=3, num_pages=6, page_size=4)
    cache = zero_cache(layout.device_config, sizes, mesh, jnp.dtype(jnp.float32))
    a_page = kv_bytes_per_token(config, jnp.dtype(jnp.float32)) * sizes.page_size
    held = {
        sum(pages.addressable_shards[device].data.nbytes for pages in jax.tree.leaves(cache)) for device in range(size)
    }
    assert held == {sizes.num_pages * a_page * max(1, size // kv_heads) // size}
    assert layout.device_config.num_heads == config.num_heads


def test_what_was_laid_out_anew_is_deleted_and_the_rest_stays() -> None:
    config = with_kv_heads(4)
    mesh = make_engine_mesh(EngineConfig(tensor_parallel_size=8))
    source = jax.device_put(random_params(config), ShardLayout(config, 8).source_shardings(mesh))
    place(config, source, 8)
    assert source.layers[0].wqkv.is_deleted()
    assert source.embedding.is_deleted()
    assert not source.layers[0].w_down.is_deleted()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_three_kv_heads_name_the_sizes_that_work(size: int) -> None:
    config = dataclasses.replace(CONFIG, num_heads=6, num_kv_heads=3, intermediate_size=192)
    with pytest.raises(ValueError, match=rf"kv_heads=3 .*tensor_parallel_size={size}; sizes that work: \[1, 3, 6\]"):
        ShardLayout(config, size)
    assert {n for n in range(1, 13) if _fits(config, n)} == {1, 3, 6}


@pytest.mark.parametrize(("changes", "size", "axis", "sizes"), [
    ({"intermediate_size": 66}, 4, "ffn=66", [1, 2]),
    ({"num_heads": 4, "num_kv_heads": 2}, 8, "kv_heads=2", [1, 2, 4]),
    ({"num_heads": 12, "num_kv_heads": 4}, 8, "kv_heads=4", [1, 2, 4]),  # three query heads over two devices
])  # fmt: skip
def test_what_does_not_divide_is_told(changes: dict[str, int], size: int, axis: str, sizes: list[int]) -> None:
    config = dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{axis} .*size={size}; sizes that work: ") as refusal:
        ShardLayout(config, size)
    assert str(refusal.value).endswith(str(sizes))


def _fits(config: ModelConfig, size: int) -> bool:
    try:
        ShardLayout(config, size)
    except ValueError:
        return False
    return True
