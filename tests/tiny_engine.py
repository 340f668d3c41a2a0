"""Real engines over a random two-layer model, small enough to compile in seconds."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine import build
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.build import build_engine
from jaxserve.engine.client import EngineClient
from jaxserve.engine.replicas import ReplicatedEngine
from jaxserve.engine.request import RequestOutput
from jaxserve.models.params import LlamaParams, ParamSpec, param_specs
from jaxserve.progress import NoProgress
from jaxserve.sampling_params import SamplingMode, SamplingParams

VOCAB_SIZE = 64
EOS = 1
MODEL_CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8,
    max_position_embeddings=128, eos_token_ids=(EOS,),
)  # fmt: skip
# For tests that ask for one sequence at a time: the fewest programs, and those that know of no weights are the same.
ONE_SEQUENCE = EngineConfig(max_model_len=48, max_num_seqs=1, max_num_batched_tokens=8, page_size=4, num_pages=12)
TIMEOUT = 120.0  # seconds that a machine under load may need


def random_params(config: ModelConfig, dtype: str = "float32") -> LlamaParams:
    """Seeded weights, drawn by numpy: jax would compile a program for it."""
    rng = np.random.default_rng(0)

    def draw(spec: ParamSpec) -> np.ndarray:
        if spec.standard_deviation is None:
            return np.ones(spec.shape, np.float32)
        return (rng.standard_normal(spec.shape) * spec.standard_deviation).astype(jnp.dtype(dtype))

    return jax.tree.map(draw, param_specs(config), is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


@cache
def tiny_params(dtype: str = "float32") -> LlamaParams:
    """Of `MODEL_CONFIG`."""
    return random_params(MODEL_CONFIG, dtype)


@contextmanager
def few_programs(mode: SamplingMode | None, *, masked: bool = False) -> Iterator[None]:
    """Engines that are built meanwhile have one size of each kind of program, and one kind of sampling for all rows.

    Args:
        mode: that kind; None: all sizes and all kinds, as always.
        masked: with masks too, for rows that have a constraint.
    """
    if mode is None:
        yield
        return
    make_buckets = build.make_buckets

    def make_few(*arguments: Any, **options: Any) -> Buckets:
        buckets = make_buckets(*arguments, **options)
        return dataclasses.replace(
            buckets,
            decode_rows=buckets.decode_rows[-1:],
            prefill_tokens=buckets.prefill_tokens[-1:],
            sample_rows=buckets.sample_rows[-1:],
            sampling_modes=(mode,),
            masked_modes=(mode,) if masked else (),
        )

    with mock.patch.object(build, "make_buckets", make_few):
        yield


@contextmanager
def tiny_engine(
    config: EngineConfig,
    model_config: ModelConfig = MODEL_CONFIG,
    params: LlamaParams | None = None,
    *,
    mode: SamplingMode | None = None,
    masked: bool = False,
) -> Iterator[EngineClient]:
    """A running engine.

    Args:
        params: of `model_config`; None: those of `MODEL_CONFIG`.
        mode, masked: as in `few_programs`.
    """
    dtype = "float32" if config.dtype == "auto" else config.dtype
    with few_programs(mode, masked=masked):
        engine = build_engine(model_config, params or tiny_params(dtype), config, NoProgress())
    try:
        yield engine
    finally:
        engine.shutdown()


class Answer:
    """Outputs of one request as they come."""

    def __init__(
        self, engine: EngineClient | ReplicatedEngine, prompt: Sequence[int], sampling: SamplingParams
    ) -> None:
        self._outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self._unfinished = sampling.n
        self.choices: list[list[int]] = [[] for _ in range(sampling.n)]
        self.reasons: list[str] = [""] * sampling.n
        self.request_id = engine.submit_with_callback(prompt, sampling, self._outputs.put)

    def next(self) -> RequestOutput:
        """Takes in one more output."""
        output = self._outputs.get(timeout=TIMEOUT)
        self.choices[output.index] += output.token_ids
        if output.finish_reason is not None:
            self.reasons[output.index] = output.finish_reason
            self._unfinished -= 1
        return output

    def wait(self) -> list[list[int]]:
        """Tokens of each choice, when all have ended."""
        while self._unfinished:
            self.next()
        return self.choices


def ask(engine: EngineClient, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """What a request with one choice gives."""
    return Answer(engine, prompt, sampling).wait()[0]
