"""Medusa heads against their paper's formula."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve.models.medusa import MedusaConfig, medusa_logits, medusa_specs
from jaxserve.sharding.collectives import Collectives
from jaxserve.sharding.mesh import make_mesh
from jaxserve.sharding.placement import named_shardings, partition_specs
from tests.models.head_cases import drawn, medusa_reference


@pytest.mark.parametrize(("num_blocks", "devices"), [(1, 1), (2, 2)])
def test_scores_are_those_of_the_paper(num_blocks: int, devices: int) -> None:
    config = MedusaConfig(num_heads=3, num_blocks=num_blocks, hidden_size=16, vocab_size=24)
    specs = medusa_specs(config)
    params = drawn(specs)
    hidden = np.random.default_rng(1).standard_normal((5, 16)).astype(np.float32)
    mesh = make_mesh(jax.devices("cpu"), devices)
    whole = PartitionSpec()
    scores = jax.jit(
        jax.shard_map(
            lambda params, hidden: [
                partial(medusa_logits, collectives=Collectives(devices))(head, hidden) for head in params.heads
            ],
            mesh=mesh,
            in_specs=(partition_specs(specs), whole),
            out_specs=whole,
            check_vma=False,
        )
    )(jax.device_put(params, named_shardings(specs, mesh)), hidden)
    np.testing.assert_allclose(np.stack(scores), medusa_reference(params, hidden), rtol=1e-4, atol=1e-5)


def test_a_size_that_is_not_positive_is_named() -> None:
    with pytest.raises(ValueError, match="num_blocks=0"):
        MedusaConfig(num_heads=3, num_blocks=0, hidden_size=16, vocab_size=24)
