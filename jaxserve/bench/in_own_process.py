"""Engines that are measured while this process keeps away from the device: one after the other has it to itself."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import jax

from jaxserve.bench.engine_run import start_engine, start_hosted_engine
from jaxserve.bench.model_run import Measured, ModelRun, measure
from jaxserve.config import EngineConfig
from jaxserve.engine.engine_process import ProcessSetup
from jaxserve.engine.remote_engine import RemoteEngine


def measure_in_own_process(run: ModelRun, config: EngineConfig, setup: ProcessSetup) -> Measured:
    """Builds an engine in a process that ends when it was measured there, so that what comes next finds all memory free.

    Raises:
        Exception: whatever building or measuring raised.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=setup.configure_logging) as process:
        return process.submit(_measure, run, config, setup).result()


def start_remote_engine(model: str, config: EngineConfig, setup: ProcessSetup) -> RemoteEngine:
    """An engine in a process of its own, as `jaxserve serve` has it.

    Raises:
        Exception: whatever building it raised.
    """
    jax.config.update("jax_platforms", "cpu")  # in this process
    return RemoteEngine(partial(start_hosted_engine, model, config), setup)


def _measure(run: ModelRun, config: EngineConfig, setup: ProcessSetup) -> Measured:
    engine = start_engine(run.model, config, setup.make_progress())
    try:
        return measure(engine, run)
    finally:
        engine.shutdown()
