"""What the tests on a card share."""

import jax
import pytest


@pytest.fixture
def hopper() -> None:
    """Skips on other GPUs."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability != "9.0":
        pytest.skip(f"needs a Hopper GPU, this one has compute capability {capability}")
