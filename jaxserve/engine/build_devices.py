"""What a configuration says of devices and element types, once the devices are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.sharding.mesh import devices_of_hosts, make_mesh


def select_devices(config: EngineConfig) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """The devices that the configuration asks for.

    Raises:
        RuntimeError: `device="gpu"` without a GPU that jax can use.
    """
    if config.device == "cpu":
        return jax.devices("cpu")
    if config.device == "gpu":
        try:
            return jax.devices("gpu")
        except RuntimeError as error:
            raise RuntimeError(
                "device 'gpu' was asked for, but jax sees none: install the extra 'cuda13' and check the driver "
                "(nvidia-smi) and CUDA_VISIBLE_DEVICES, or use --device cpu"
            ) from error
    return jax.devices()


def make_engine_mesh(config: EngineConfig, replica: int = 0) -> Mesh:
    """The devices of one replica."""
    if config.nnodes > 1:
        devices = devices_of_hosts(select_devices(config), config.nnodes, config.tensor_parallel_size)
        return make_mesh(devices, config.tensor_parallel_size)
    return make_mesh(
        select_devices(config),
        config.tensor_parallel_size,
        data_parallel_size=config.data_parallel_size,
        replica=replica,
    )


def resolve_dtype(config: EngineConfig, mesh: Mesh) -> jnp.dtype:
    """Element type of weights and KV cache: what is asked for, or what suits the device."""
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    return jnp.dtype(jnp.float32 if platform_of(mesh) == "cpu" else jnp.bfloat16)


def resolve_cache_dtype(config: EngineConfig, dtype: jnp.dtype) -> jnp.dtype:
    """Element type of the KV cache, beside weights of `dtype`."""
    return dtype if config.kv_cache_dtype == "auto" else jnp.dtype(jnp.float8_e4m3fn)


def platform_of(mesh: Mesh) -> str:
    """Of its devices, which are all alike: "cpu" or "gpu"."""
    return mesh.devices.flat[0].platform
