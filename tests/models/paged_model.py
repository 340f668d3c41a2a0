"""One sequence through the forward pass as the engine runs it: under shard_map, over pages, in padded batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.config import ModelConfig
from jaxserve.kernels.peer_memory import PeerLayout, PeerMemory, make_peer_memory
from jaxserve.models import llama
from jaxserve.models.batch import Batch
from jaxserve.models.kv_cache import KVCache, kv_cache_specs
from jaxserve.models.params import LayerParams, LlamaParams, param_specs
from jaxserve.sharding.collectives import Collectives
from jaxserve.sharding.mesh import TENSOR_AXIS, make_mesh
from jaxserve.sharding.placement import named_shardings, partition_specs
from tests.optimized_programs import OPTIMIZED

_SPARE_PAGES = 3
_WHOLE = PartitionSpec()  # replicated


class PagedModel:
    """A model with the cache of one sequence, whose pages lie in the pool in no order.

    Args:
        capacity: longest sequence in tokens.
        fill: what every page holds before anything is written.
        padding_token: id of the tokens that fill a batch up.
        by_layer: run one program for every layer in turn, not one for the whole pass.
        cache_dtype: element type of the cache.
        peer_rows: tokens of a batch whose sums over devices are left to the norms, at most; 0: none are.
        chunk: when given, every batch has one decode row and room for so many tokens of a prompt, whichever of them are
            padding: one program then does for both.
        is_optimized: compile as for users, not in a hurry as elsewhere in the tests (see tests/conftest.py): for much to
            compute, or tolerances of a few roundings.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: LlamaParams,
        *,
        capacity: int,
        page_size: int = 8,
        fill: float = 0.0,
        padding_token: int = 0,
        tensor_parallel_size: int = 1,
        by_layer: bool = False,
        cache_dtype: Any = jnp.float32,
        peer_rows: int = 0,
        chunk: int | None = None,
        is_optimized: bool = False,
    ) -> None:
        mesh = make_mesh(jax.devices(), tensor_parallel_size)
        pages_per_seq = -(-capacity // page_size)
        self.num_pages = pages_per_seq + _SPARE_PAGES
        self.page_size = page_size
        self.padding_token = padding_token
        self._chunk = chunk
        self.length = 0  # tokens whose keys and values are in the cache
        order = np.random.default_rng(0).permutation(self.num_pages).astype(np.int32)
        self.pages, self.spare_pages = order[:pages_per_seq], order[pages_per_seq:]
        cache_specs = kv_cache_specs(config, self.num_pages, page_size)
        cache = KVCache(  # two arrays, since both are donated
            k_pages=jnp.full(cache_specs.k_pages.shape, fill, cache_dtype),
            v_pages=jnp.full(cache_specs.v_pages.shape, fill, cache_dtype),
        )
        self._params = jax.device_put(params, named_shardings(param_specs(config), mesh))
        self.cache = jax.device_put(cache, named_shardings(cache_specs, mesh))
        self._forward = (_pass_by_layer if by_layer else _whole_pass)(config, mesh, is_optimized)
        if peer_rows:
            layout = PeerLayout(tensor_parallel_size, peer_rows, 128)
            self._forward = functools.partial(self._forward, peers=make_peer_memory(mesh, TENSOR_AXIS, layout))

    def prefill(self, token_ids: Sequence[int], *, bucket: int | None = None, rows: int = 1) -> np.ndarray:
        """Logits [tokens, vocab] of a prompt, or of its next chunk, padded to `bucket` tokens and `rows` rows."""
        bucket = bucket or self._chunk or len(token_ids)
        starts = np.full(rows + 1, len(token_ids), np.int32)
        starts[0] = 0
        kv_lens = np.zeros(rows, np.int32)
        kv_lens[0] = self.length + len(token_ids)
        decode_rows = 0 if self._chunk is None else 1
        nothing, none = self._page_table(decode_rows, live=0), np.zeros(decode_rows, np.int32)
        return self._run(token_ids, decode_rows, bucket, nothing, none, self._page_table(rows), starts, kv_lens)

    def decode(self, token_id: int, *, rows: int = 1) -> np.ndarray:
        """Logits [vocab] after one more token, in a batch of `rows` of which the others are padding."""
        kv_lens = np.zeros(rows, np.int32)
        kv_lens[0] = self.length + 1
        chunk = self._chunk or 0
        prefill_rows = min(chunk, 1)
        nothing, none = self._page_table(prefill_rows, live=0), np.zeros(prefill_rows, np.int32)
        starts = np.zeros(prefill_rows + 1, np.int32)
        return self._run([token_id], 0, rows + chunk, self._page_table(rows), kv_lens, nothing, starts, none)[0]

    def greedy(self, token_id: int, steps: int, *, rows: int = 1) -> tuple[list[int], np.ndarray]:
        """The tokens [steps + 1] from `token_id` on, each the likeliest after the one before, and the steps' logits."""
        tokens, logits = [token_id], []
        for _ in range(steps):
            logits.append(self.decode(tokens[-1], rows=rows))
            tokens.append(int(logits[-1].argmax()))
        return tokens, np.stack(logits)

    def _page_table(self, rows: int, live: int = 1) -> np.ndarray:
        table = np.full((rows, len(self.pages)), self.spare_pages[0], np.int32)
        table[:live] = self.pages
        return table

    def _run(
        self,
        token_ids: Sequence[int],
        before: int,
        size: int,
        decode_page_table: np.ndarray,
        decode_kv_lens: np.ndarray,
        prefill_page_table: np.ndarray,
        prefill_query_starts: np.ndarray,
        prefill_kv_lens: np.ndarray,
    ) -> np.ndarray:
        """Logits of tokens that stand behind `before` padding tokens and have room for `size`."""
        count = len(token_ids)
        if count > size or self.length + count > len(self.pages) * self.page_size:
            raise ValueError(f"{count} tokens after {self.length} do not fit {size=} or {len(self.pages)} pages")
        here = slice(before, before + count)
        ids = np.full(before + size, self.padding_token, np.int32)
        ids[here] = token_ids
        positions = np.zeros(before + size, np.int32)
        positions[here] = np.arange(self.length, self.length + count)
        write_pages = np.full(before + size, self.num_pages, np.int32)
        write_pages[here] = self.pages[positions[here] // self.page_size]
        batch = Batch(
            token_ids=ids,
            positions=positions,
            write_pages=write_pages,
            write_offsets=positions % self.page_size,
            decode_page_table=decode_page_table,
            decode_kv_lens=decode_kv_lens,
            prefill_page_table=prefill_page_table,
            prefill_query_starts=prefill_query_starts,
            prefill_kv_lens=prefill_kv_lens,
        )
        logits, self.cache = self._forward(self._params, self.cache, jax.tree.map(jnp.asarray, batch))
        self.length += count
        return np.asarray(logits)[here]


@functools.cache  # jit then compiles every shape once for all models of a config
def _whole_pass(config: ModelConfig, mesh: Mesh, is_optimized: bool) -> Callable[..., tuple[jax.Array, KVCache]]:
    """(params, cache, batch, peers=None) -> (logits, cache) as one program, as on accelerators."""
    collectives = Collectives(mesh.shape[TENSOR_AXIS])
    params_specs, cache_specs = partition_specs(param_specs(config)), _cache_specs(config)

    def per_device(
        params: LlamaParams, cache: KVCache, batch: Batch, peers: PeerMemory | None
    ) -> tuple[jax.Array, KVCache]:
        hidden, cache, _ = llama.forward_with_taps(
            params, cache, batch, config=config, collectives=collectives, peers=peers
        )
        return llama.logits(params, hidden, collectives=collectives), cache

    inputs = params_specs, cache_specs, _WHOLE, PartitionSpec(TENSOR_AXIS)
    program = _program(per_device, mesh, inputs, (_WHOLE, cache_specs), is_optimized, donated=1)
    return lambda params, cache, batch, peers=None: program(params, cache, batch, peers)


@functools.cache
def _pass_by_layer(config: ModelConfig, mesh: Mesh, is_optimized: bool) -> Callable[..., tuple[jax.Array, KVCache]]:
    """The same with one program for every layer, as on a CPU: a deep model compiles in a fraction of the time."""
    collectives = Collectives(mesh.shape[TENSOR_AXIS])
    params_specs, cache_specs = partition_specs(param_specs(config)), _cache_specs(config)

    def begin(params: LlamaParams, batch: Batch) -> jax.Array:
        return llama.embed_tokens(params, batch, collectives=collectives)

    def one_layer(
        layer: LayerParams, index: jax.Array, x: jax.Array, cache: KVCache, batch: Batch
    ) -> tuple[jax.Array, KVCache]:
        rope = llama.rotary_tables(batch, config=config)
        return llama.decoder_layer(layer, index, x, cache, batch, rope, config=config, collectives=collectives)

    def end(params: LlamaParams, x: jax.Array) -> jax.Array:
        return llama.logits(params, llama.final_norm(params, x, config=config), collectives=collectives)

    layer_specs = (params_specs.layers[0], _WHOLE, _WHOLE, cache_specs, _WHOLE)
    run_begin = _program(begin, mesh, (params_specs, _WHOLE), _WHOLE, is_optimized)
    run_layer = _program(one_layer, mesh, layer_specs, (_WHOLE, cache_specs), is_optimized, donated=3)
    run_end = _program(end, mesh, (params_specs, _WHOLE), _WHOLE, is_optimized)

    def run(params: LlamaParams, cache: KVCache, batch: Batch) -> tuple[jax.Array, KVCache]:
        x = run_begin(params, batch)
        for index, layer in enumerate(params.layers):
            x, cache = run_layer(layer, jnp.int32(index), x, cache, batch)
        return run_end(params, x), cache

    return run


def _cache_specs(config: ModelConfig) -> KVCache:
    return partition_specs(kv_cache_specs(config, 1, 1))  # the sizes do not matter


def _program(
    function: Callable[..., Any], mesh: Mesh, inputs: Any, outputs: Any, is_optimized: bool, donated: int | None = None
) -> Any:
    mapped = jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donated, compiler_options=OPTIMIZED if is_optimized else None)
