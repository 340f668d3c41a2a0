"""The model families that are known: what their tensors are called, and what their configs leave unsaid.

A new family of the Llama shape is one more entry here, with names from `tensor_names.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tensor_names import (
    GGUF,
    GGUF_FUSED,
    HUGGING_FACE,
    HUGGING_FACE_FUSED,
    TensorNames,
)
from jaxserve.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """One family, and what its Hugging Face config means where a key is absent.

    Attributes:
        architecture: as `architectures` in Hugging Face's config names it.
        gguf_architecture: as `general.architecture` in a GGUF names it.
        names, gguf_names: of the tensors in Hugging Face's files and in GGUF's.
        gguf_permuted: GGUF holds q and k rows in another rotary order than Hugging Face (neighbours are pairs).
        qkv_bias: True: always has biases on q, k and v and never on o; None: as `attention_bias` says, for all four.
        qk_norm: has norms over q and k.
        has_mlp_bias: knows the key `mlp_bias`.
        rope_kinds: scalings of rotary embeddings that the family's configs call by other names.
        sliding_window: "none"; "always": where `sliding_window` is a size; "opt-in": where `use_sliding_window` is set.
    """

    architecture: str
    gguf_architecture: str
    names: TensorNames = HUGGING_FACE
    gguf_names: TensorNames = GGUF
    gguf_permuted: bool = False
    qkv_bias: bool | None = None
    qk_norm: bool = False
    has_mlp_bias: bool = False
    rope_kinds: Mapping[str, str] = field(default_factory=dict)
    sliding_window: str = "none"
    default_sliding_window: int | None = None
    default_max_position_embeddings: int = 2048
    default_original_max_position_embeddings: int | None = None  # None: must be said
    default_rms_norm_eps: float = 1e-6
    default_rope_theta: float = 10000.0
    default_tie_word_embeddings: bool = False
    default_head_dim: int | None = None  # None: hidden_size / num_heads


LLAMA = Family("LlamaForCausalLM", "llama", gguf_permuted=True, has_mlp_bias=True)
MISTRAL = Family(
    "MistralForCausalLM",
    "llama",
    gguf_permuted=True,
    qkv_bias=False,
    sliding_window="always",
    default_sliding_window=4096,
    default_max_position_embeddings=131072,
)
QWEN2 = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    qkv_bias=True,
    sliding_window="opt-in",
    default_sliding_window=4096,
    default_max_position_embeddings=32768,
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    qk_norm=True,
    sliding_window="opt-in",
    default_sliding_window=4096,
    default_max_position_embeddings=32768,
    default_head_dim=128,
)
PHI3 = Family(
    "Phi3ForCausalLM",
    "phi3",
    names=HUGGING_FACE_FUSED,
    gguf_names=GGUF_FUSED,
    qkv_bias=False,
    rope_kinds={"su": "longrope", "yarn": "longrope"},
    sliding_window="always",
    default_max_position_embeddings=4096,
    default_original_max_position_embeddings=4096,
    default_rms_norm_eps=1e-5,
)
FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3)

# Families that look alike and are not: better told than found out from nonsense.
_UNLIKE = {
    "gemma": "its norms, the scale of its embeddings and its activation are not Llama's",
    "mixtral": "it is a mixture of experts",
    "phi": "its layers are not Llama's; Phi-3 is supported",
}


def family_of_architecture(architecture: str, where: str) -> Family:
    """The family that a Hugging Face config names. Raises CheckpointError for one that is not known."""
    for family in FAMILIES:
        if family.architecture == architecture:
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise CheckpointError(
        f"{where}: architecture {architecture!r} is not supported{_reason(architecture)}; supported are {known}"
    )


def family_of_gguf(architecture: str, where: str) -> Family:
    """The family that a GGUF names (Mistral's are "llama" there). Raises CheckpointError for one that is not known."""
    for family in FAMILIES:
        if family.gguf_architecture == architecture:
            return family
    known = ", ".join(dict.fromkeys(family.gguf_architecture for family in FAMILIES))
    raise CheckpointError(
        f"{where}: GGUF architecture {architecture!r} is not supported{_reason(architecture)}; supported are {known}"
    )


def family_of_model(config: ModelConfig) -> Family:
    """The plainest family that has such models, for where nothing names one, such as Mistral's as GGUF."""
    if config.qk_norm:
        return QWEN3
    if config.attention_bias and not config.attention_output_bias:
        return QWEN2
    return LLAMA if config.sliding_window is None else MISTRAL


def _reason(architecture: str) -> str:
    reasons = [reason for name, reason in _UNLIKE.items() if architecture.lower().startswith(name)]
    return f" ({reasons[0]})" if reasons else ""
