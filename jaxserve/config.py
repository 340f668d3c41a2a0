"""Frozen, validated configuration: what the model is, how the engine runs it, how the server exposes it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jaxserve.json_fields import from_json
from jaxserve.quantization_config import Quantization, QuantizationConfig
from jaxserve.server_config import EngineProcess as EngineProcess
from jaxserve.server_config import ServerConfig as ServerConfig
from jaxserve.server_config import ToolCallFormat as ToolCallFormat
from jaxserve.speculative_config import SpeculativeConfig

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "gpu"]
LoadFormat = Literal["auto", "dummy"]
Mode = Literal["local", "interactive", "server"]
SchedulingPolicy = Literal["fcfs", "priority", "sjf"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]
RopeScalingKind = Literal["linear", "llama3", "yarn", "dynamic", "longrope"]

_LARGEST_SIZE = 2**31 - 1  # positions and sizes are 32-bit integers on the device


def _check_size(name: str, size: float) -> None:
    if not 1 <= size <= _LARGEST_SIZE:
        raise ValueError(f"{name}={size} must be at least 1, and at most {_LARGEST_SIZE}")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary embeddings are stretched to contexts longer than those that a model was pretrained with.

    Attributes:
        kind: as Hugging Face's `rope_type` names it: "linear"; "llama3" (https://arxiv.org/abs/2407.21783); "yarn"
            (https://arxiv.org/abs/2309.00071); "longrope" (https://arxiv.org/abs/2402.13753); "dynamic", whose base grows
            with the context.
        factor: by how much the longest wavelengths are stretched (not longrope).
        low_frequency_factor, high_frequency_factor: bounds of the band that is interpolated (llama3).
        original_max_position_embeddings: context length that the model was pretrained with (not linear).
        attention_factor: what cosines and sines are multiplied with (yarn, longrope).
        fast_turns, slow_turns: pairs that turn so often within the original context are left, and stretched (yarn).
        whole_pairs: the bounds that these turns give are rounded outwards to whole pairs (yarn).
        short_factors, long_factors: by how much each pair's wavelength is stretched where the longest sequence fits the
            original context, and where it does not (longrope).
    """

    kind: RopeScalingKind
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    whole_pairs: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeScalingKind):
            raise ValueError(
                f"rope scaling kind {self.kind!r} is not supported: use {', '.join(get_args(RopeScalingKind))}"
            )
        for name in ("factor", "attention_factor", "fast_turns", "slow_turns"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"rope scaling {name}={getattr(self, name)} must be positive and finite")
        _check_size("rope scaling original_max_position_embeddings", self.original_max_position_embeddings)
        if self.kind == "llama3" and not 0 < self.low_frequency_factor < self.high_frequency_factor < math.inf:
            raise ValueError(
                f"rope scaling low_frequency_factor={self.low_frequency_factor} must be positive and below "
                f"high_frequency_factor={self.high_frequency_factor}"
            )
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if (self.kind == "longrope") != bool(factors) or not all(0 < factor < math.inf for factor in factors):
                raise ValueError(f"rope scaling {name}={factors} must be positive numbers with longrope, and only then")

    @property
    def depends_on_length(self) -> bool:
        """Whether it is another for other lengths of the longest sequence."""
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a Llama-family decoder. Sizes are counts of elements, names are the field's.

    Raises:
        ValueError: if sizes are not positive, heads do not divide, or a token id is none of the model's.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # bias of the q, k and v projections
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim of q and k before rope (Qwen3)
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # every id that ends an answer: union of config, generation config, tokenizer
    bos_token_id: int | None = None
    quantization: QuantizationConfig | None = None  # of the layers' weights
    kv_cache_scales: bool = False  # the checkpoint brings scales for keys and values in a float8 cache

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "max_position_embeddings",
        ):  # fmt: skip
            _check_size(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs")
        for name in ("rms_norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be positive and finite")
        if self.rope_scaling is not None:
            for factors in (self.rope_scaling.short_factors, self.rope_scaling.long_factors):
                if factors and len(factors) != self.head_dim // 2:
                    raise ValueError(
                        f"longrope has {len(factors)} factors, must have one for each of {self.head_dim // 2} pairs"
                    )
        if self.sliding_window is not None:
            _check_size("sliding_window", self.sliding_window)
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"{token_id} of eos_token_ids ends an answer, but the model knows {self.vocab_size} tokens, from 0 on"
                )
        # It may be beyond them: an added token, which the model does not know and nobody puts first.
        if self.bos_token_id is not None and self.bos_token_id < 0:
            raise ValueError(f"bos_token_id={self.bos_token_id} must be a token id")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> ModelConfig:
        """Inverse of `to_json`; unknown keys are an error, since a dropped key may change the model.

        Raises:
            ValueError: as `jaxserve.json_fields.from_json`.
        """
        return from_json(ModelConfig, data)


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs a model. Flag names of `jaxserve serve` are these with dashes.

    Attributes:
        max_model_len: longest sequence (prompt + output) in tokens; None: what the model was trained for, or less if the
            KV cache cannot hold it.
        max_num_seqs: sequences that run at once (slots of the decode state); None: what suits the device.
        max_num_batched_tokens: tokens that one step computes at most (decode rows + prefill chunks); None: what suits the
            device.
        mode: sizes that are left open: "local": 4 sequences over one context of up to 8192 tokens; "interactive": 1 sequence
            of the longest context; "server": as many sequences as suit the device, and all the KV pages that fit.
        page_size: tokens a KV page holds.
        num_pages: KV pages; None: planned from the memory that is free.
        gpu_memory_utilization: share of the device's memory that weights, work space and KV pages may take; no more than
            JAX has taken, which is 75% where it was used before and the environment says nothing else.
        dtype: of weights and KV cache; "auto": float32 on CPU, bfloat16 elsewhere.
        seed: of requests that bring no seed of their own, and of dummy weights; None: drawn at random.
        tensor_parallel_size: devices that share the model.
        disable_custom_all_reduce: have NCCL make all sums over devices, and no kernel of our own those of small steps.
        nnodes: hosts that share the model, each with a process of its own and as many of the devices.
        node_rank: which of them this one is; 0 schedules and serves, the others follow.
        master_addr, master_port: where host 0 is found by the others.
        data_parallel_size: engines with the same model, each with as many devices of its own; sizes are of one engine.
        max_num_queued_requests: requests that may wait; one more is refused.
        max_num_queued_tokens: prompt tokens that may wait to be computed; a request that brings more is refused, unless
            none wait. None: any number.
        scheduling_policy: "fcfs": first come, first served, in a burst the shorter prompt; "priority": smaller `priority` of
            a request first; "sjf": shortest prompt first. The last two let nobody starve: waiting outweighs both.
        max_tpot_ms: how long a step may take at most while somebody decodes, which bounds how much of a prompt rides along;
            None: twice what it takes without any prompt; infinity: as long as it takes.
        enable_prefix_caching: prompts that begin alike share what is computed of them, as long as memory keeps it.
        kv_offload_gib: GiB of host memory for KV pages that were evicted from the prefix cache, to come back when a prompt
            matches them; of each engine. 0: none.
        load_format: "auto": weights from the checkpoint; "dummy": seeded random weights of a named architecture, for
            benchmarks.
        quantization: what the weights of a checkpoint that is not quantized are made into as it is loaded ("int4": in groups
            of 128); None: they stay as they are.
        kv_cache_dtype: element type of the KV cache; "auto": the weights' `dtype`; "fp8" and "fp8_e4m3": float8_e4m3fn.
        static_batching: each batch is held until all of it is done, before others are let in; for comparison only.
        speculative_config: how tokens are drafted for the model to verify several at a time; None: they are not.
    """

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    mode: Mode = "server"
    page_size: int = 16
    num_pages: int | None = None
    gpu_memory_utilization: float = 0.9
    dtype: DType = "auto"
    seed: int | None = None
    device: Device = "auto"
    tensor_parallel_size: int = 1
    disable_custom_all_reduce: bool = False
    data_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    max_num_queued_requests: int = 1024
    max_num_queued_tokens: int | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_tpot_ms: float | None = None
    enable_prefix_caching: bool = True
    kv_offload_gib: float = 0.0
    load_format: LoadFormat = "auto"
    quantization: Quantization | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    static_batching: bool = False
    speculative_config: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs", "max_num_batched_tokens", "page_size", "tensor_parallel_size", "data_parallel_size",
            "nnodes", "max_model_len", "num_pages", "max_num_queued_tokens",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if (
            self.max_num_batched_tokens is not None
            and self.max_num_seqs is not None
            and self.max_num_batched_tokens < self.max_num_seqs
        ):
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must not be below "
                f"max_num_seqs={self.max_num_seqs}: every running sequence gets a token in every step"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization} must lie in (0, 1]")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype={self.dtype!r} must be one of auto, float32, bfloat16, float16")
        if self.device not in ("auto", "cpu", "gpu"):
            raise ValueError(f"device={self.device!r} must be one of auto, cpu, gpu")
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format={self.load_format!r} must be auto or dummy")
        if self.quantization is not None:
            QuantizationConfig.named(self.quantization)  # raises if there is none of that name
        if self.speculative_config is not None:
            self._check_speculation(self.speculative_config)
        if self.kv_cache_dtype not in get_args(KVCacheDType):
            raise ValueError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} must be one of {', '.join(get_args(KVCacheDType))}"
            )
        if self.mode not in ("local", "interactive", "server"):
            raise ValueError(f"mode={self.mode!r} must be local, interactive or server")
        if self.scheduling_policy not in ("fcfs", "priority", "sjf"):
            raise ValueError(f"scheduling_policy={self.scheduling_policy!r} must be fcfs, priority or sjf")
        if self.max_tpot_ms is not None and not self.max_tpot_ms > 0.0:
            raise ValueError(f"max_tpot_ms={self.max_tpot_ms} must be positive")
        self._check_hosts()
        if not 0.0 <= self.kv_offload_gib < math.inf:
            raise ValueError(f"kv_offload_gib={self.kv_offload_gib} must be 0 or a number of GiB")
        if self.kv_offload_gib and not self.enable_prefix_caching:
            raise ValueError(
                f"kv_offload_gib={self.kv_offload_gib} keeps pages of the prefix cache, and enable_prefix_caching is False"
            )
        if self.max_num_queued_requests < 0:
            raise ValueError(f"max_num_queued_requests={self.max_num_queued_requests} must not be negative")

    def _check_speculation(self, speculative: SpeculativeConfig) -> None:
        if speculative.num_speculative_tokens >= self.page_size:
            raise ValueError(
                f"num_speculative_tokens={speculative.num_speculative_tokens} must be below page_size={self.page_size}: "
                "draft fewer tokens, or raise --page-size"
            )
        if speculative.quantization is not None:
            try:
                QuantizationConfig.named(speculative.quantization)
            except ValueError as error:
                raise ValueError(f"of the draft model, {error}") from None
        synthetic = speculative.synthetic_acceptance
        if synthetic is not None and self.load_format != "dummy":
            raise ValueError(
                f"speculative_synthetic_acceptance={synthetic} makes up what the model says: it goes with "
                f"load_format='dummy' alone, not {self.load_format!r}"
            )

    def _check_hosts(self) -> None:
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"node_rank={self.node_rank} must be one of the nnodes={self.nnodes} hosts, counted from 0"
            )
        if not 1 <= self.master_port <= 65535:
            raise ValueError(f"master_port={self.master_port} must lie in 1..65535")
        if self.nnodes == 1:
            return
        if self.tensor_parallel_size % self.nnodes:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} does not divide over nnodes={self.nnodes}"
            )
        if self.data_parallel_size > 1:
            raise ValueError(
                f"data_parallel_size={self.data_parallel_size} with nnodes={self.nnodes}: the hosts share one engine; for "
                "replicas over several hosts start a server on each, or use jaxserve.deploy.ray"
            )
