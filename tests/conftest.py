"""What every test runs under: eight fake CPU devices, strict JAX, compiled programs kept from run to run."""

import os

# Before jax is imported, by whatever a test module imports first. Devices that wait for one another on a machine that is
# busy with something else wait for longer than the 40 s after which XLA ends the process.
_XLA_FLAGS = {"xla_force_host_platform_device_count": 8, "xla_cpu_collective_call_terminate_timeout_seconds": 600}
for _name, _value in _XLA_FLAGS.items():
    if _name not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_name}={_value}".strip()
# Nearly all that the tests do is to compile: without these optimizations a program takes a third of the time, and runs
# slower than it could for as long as a test has it. The long tests run what users run. (The second is one of XLA's extra
# options, which may be unknown to a version; a flag may not.)
_FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
# The CPU unless asked otherwise: `JAX_PLATFORMS=cuda,cpu scripts/test tests/gpu` runs on a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Several workers share a card, and none may take most of its memory at its start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

from jaxserve.progress import NoProgress

DEFAULT_MODEL = "smollm2-135m-instruct"

hypothesis.settings.register_profile("jaxserve", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("jaxserve")


def pytest_configure(config: pytest.Config) -> None:
    # XLA reads its flags when the first device is asked for.
    if config.option.markexpr == "not long" and os.environ["JAX_PLATFORMS"] == "cpu":
        os.environ["XLA_FLAGS"] += f" {_FAST_COMPILE}"
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # Compiled programs stay from run to run (`pytest --cache-clear` empties it); in the environment as well, for the
    # processes that tests start.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("jax-compilation")))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update(
        "jax_persistent_cache_min_compile_time_secs", float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
    )


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker that dies ends the run: pytest-xdist 3.8 may wait for ever for the one that takes its place."""
    if error:
        node.config.pluginmanager.getplugin("dsession").shouldstop = f"a test ended its process: {error}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if Path(__file__).parent / "gpu" in item.path.parents]
    if gpu_tests and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason="needs a GPU: JAX_PLATFORMS=cuda,cpu scripts/test tests/gpu")
        for item in gpu_tests:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model's converted folder, fetched into the model cache when it is not there."""
    from jaxserve.checkpoint.source import resolve_model  # here: most tests need none of its libraries

    return resolve_model(DEFAULT_MODEL, NoProgress())


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a random Llama: 2 layers, hidden size 64, byte-level vocabulary, chat template."""
    from tests.tiny_model import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")
