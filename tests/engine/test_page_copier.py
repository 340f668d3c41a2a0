"""Pages on their way to host memory and back, copied on a device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.engine.executable_cache import ExecutableCache
from jaxserve.engine.host_pages import PageCopy
from jaxserve.engine.kv_offload import OffloadSizes, PageCopier
from jaxserve.models.kv_cache import KVCache, kv_cache_specs
from jaxserve.sharding.mesh import make_mesh
from jaxserve.sharding.placement import named_shardings

PAGES, PAGE_SIZE, PLACES = 6, 4, 5
CONFIG = ModelConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8,
    max_position_embeddings=32,
)  # fmt: skip


def test_a_place_that_is_given_up_and_taken_again_before_a_step_holds_the_later_page() -> None:
    mesh = make_mesh(jax.devices()[:1], 1)
    specs = kv_cache_specs(CONFIG, PAGES, PAGE_SIZE)
    random = np.random.default_rng(0)
    content = [random.standard_normal(spec.shape).astype(np.float32) for spec in (specs.k_pages, specs.v_pages)]
    cache = jax.device_put(KVCache(*map(jnp.asarray, content)), named_shardings(specs, mesh))
    page_bytes = sum(array[:, 0].nbytes for array in content)
    copier = PageCopier(OffloadSizes(page_bytes, page_bytes, PLACES), cache, mesh)
    copier.compile(ExecutableCache(None, jax.devices()[:1], ""), cache)
    free = copier.room()

    cache = copier.run(cache, [PageCopy(True, 1, 3), PageCopy(True, 2, 3), PageCopy(True, 4, 0)])
    cache = copier.run(cache, [PageCopy(False, 5, 3), PageCopy(False, 3, 0)])

    assert copier.room() == free
    for array, before in zip((cache.k_pages, cache.v_pages), content, strict=True):
        np.testing.assert_array_equal(np.asarray(array)[:, 5], before[:, 2])
        np.testing.assert_array_equal(np.asarray(array)[:, 3], before[:, 4])
    copier.close()
