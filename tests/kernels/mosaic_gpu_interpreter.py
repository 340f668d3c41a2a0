"""Run Mosaic GPU kernels on the CPU, in JAX's interpreter."""

import contextlib
from collections.abc import Iterator

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.core import WGMMAAbstractAccumulatorRef
from jax._src.state.primitives import ref_set


@contextlib.contextmanager
def interpret_mosaic_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpret every Mosaic GPU kernel called inside; skips the test where JAX has no interpreter.

    JAX 0.11's interpreter lacks two things that the compiler has: stores to a wgmma accumulator, and wgmma with its
    left side in registers. Both are put in terms of what it has.
    """
    if not hasattr(plgpu, "force_gpu_interpret_mode"):
        pytest.skip(f"jax {jax.__version__} cannot interpret Mosaic GPU kernels; 0.11 can")
    compiled_wgmma = plgpu.wgmma

    def wgmma(acc, a, b) -> None:
        if isinstance(a, jax.Array):
            acc[...] = acc[...] + jnp.dot(a.astype(jnp.float32), b[...].astype(jnp.float32))
        else:
            compiled_wgmma(acc, a, b)

    monkeypatch.setattr(plgpu, "wgmma", wgmma)
    monkeypatch.setattr(
        WGMMAAbstractAccumulatorRef, "_setitem", lambda self, ref, index, value: ref_set(ref, index, value)
    )
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield
