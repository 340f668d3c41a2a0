"""Programs that are compiled as for users: what runs for long pays for what tests/conftest.py leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jaxserve.engine import executable_cache

OPTIMIZED = {"xla_backend_optimization_level": 3}  # XLA's own default, as an option of one program


@contextmanager
def optimized_programs() -> Iterator[None]:
    """For engines that are built in here, on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executable_cache, "compile_options", lambda platform, bucket=None: OPTIMIZED)
        yield
