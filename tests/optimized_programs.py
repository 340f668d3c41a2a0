"""Engines whose programs are compiled as for users: what runs for long pays for what tests/conftest.py leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jaxserve.engine import executable_cache


@contextmanager
def optimized_programs() -> Iterator[None]:
    """For engines that are built in here, on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        options = {"xla_backend_optimization_level": 2}
        patch.setattr(executable_cache, "compile_options", lambda platform, bucket=None: options)
        yield
