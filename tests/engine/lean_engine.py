"""Real engines over the tiny model with few compiled programs: one size of each kind, one kind of sampling for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.build_drafting import Model, make_drafting
from jaxserve.engine.build_heads import place_head
from jaxserve.engine.client import EngineClient
from jaxserve.engine.device_batch import Sizes
from jaxserve.engine.draft_lengths import DraftLengths
from jaxserve.engine.draft_showing import ShowingSeconds
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.runner import ModelRunner
from jaxserve.engine.scheduler import Scheduler
from jaxserve.models.draft_head import DraftHead
from jaxserve.models.params import LlamaParams
from jaxserve.models.shard_layout import ShardLayout
from jaxserve.progress import NoProgress
from jaxserve.sharding.mesh import make_mesh
from jaxserve.speculative_config import SpeculativeConfig
from tests.tiny_engine import MODEL_CONFIG, tiny_params


@contextmanager
def lean_engine(
    speculative: SpeculativeConfig | None = None,
    draft: Model | DraftHead | None = None,
    *,
    lengths: DraftLengths | None = None,
    showing_seconds: ShowingSeconds | None = None,
    caching: bool = True,
    tensor_parallel_size: int = 1,
    params: LlamaParams | None = None,
    layerwise: bool = True,
) -> Iterator[EngineClient]:
    """72 tokens of KV cache for three sequences of up to 64: they cannot all stay.

    Args:
        draft: on the host, with a config that needs no other layout for several devices.
        params: of the model; None: those of `tiny_params`.
        lengths: chooses how many tokens are drafted; None: always as many as can be.
        showing_seconds: what showing a drafter prompts is said to take; None: nothing.
        caching: whether prompts that begin alike share pages.
        layerwise: whether a forward pass is several programs, as on a CPU; else it is one, as on a GPU.
    """
    limits = SchedulerLimits(
        max_num_seqs=3, max_num_batched_tokens=16, max_prefill_rows=3, max_model_len=64, page_size=4, num_pages=18
    )
    sizes = Sizes(max_num_seqs=3, pages_per_seq=16, num_pages=18, page_size=4)
    length = 0 if speculative is None else speculative.num_speculative_tokens
    buckets = Buckets(
        decode_rows=(3,),
        mixed_decode_rows=(2,),
        prefill_tokens=(16,),
        prefill_rows=3,
        sample_rows=(5,),
        sampling_modes=("full",),
        masked_modes=("full",),
        draft_lengths=(length,) if length else (),
        drafting_rows=(3,) if length else (),
        verify_modes=("full",),
        shown_decode_rows=(3,) if length else (),
        shown_prefill_tokens=(20,) if length else (),  # more than steps have, as are the rows: both are resized
    )
    mesh = make_mesh(jax.devices("cpu"), tensor_parallel_size)
    target = Model(MODEL_CONFIG, _placed(Model(MODEL_CONFIG, params or tiny_params()), mesh))
    drafting = None
    if speculative is not None:
        placed: Model | DraftHead | None = draft
        if isinstance(draft, DraftHead):
            placed = place_head(draft, jnp.dtype(jnp.float32), mesh)
        elif draft is not None:
            placed = Model(draft.config, _placed(draft, mesh))
        drafting = make_drafting(speculative, target, placed, sizes, mesh, jnp.dtype(jnp.float32))
    runner = ModelRunner(
        MODEL_CONFIG,
        target.params,
        mesh=mesh,
        sizes=sizes,
        buckets=buckets,
        cache_dtype=jnp.dtype(jnp.float32),
        layerwise=layerwise,
        drafting=drafting,
    )
    runner.warm_up(NoProgress())
    if speculative is not None and lengths is None:
        lengths = DraftLengths(speculative.method, (length,), 3, adaptive=False)
    engine = EngineClient(
        config=EngineConfig(seed=0),
        model_config=MODEL_CONFIG,
        scheduler=Scheduler(
            limits,
            drafting=lengths,
            showing_seconds=None if runner.showing_seconds is None else showing_seconds or (lambda rows, tokens: 0.0),
            prefix_caching=caching,
        ),
        runner=runner,
        device_kind="cpu",
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.shutdown()


def _placed(model: Model, mesh: Mesh) -> LlamaParams:
    return jax.device_put(model.params, ShardLayout(model.config, mesh.size).shardings(mesh))
