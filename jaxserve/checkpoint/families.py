"""The model families that are known: what their tensors are called, and what their configs leave unsaid.

A new family of the Llama shape is one more entry here.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.checkpoint.errors import CheckpointError


@dataclass(frozen=True)
class TensorNames:
    """What one file format calls the tensors of a Llama-shaped model.

    Attributes:
        layer: prefix of a layer's tensors, with `{layer}` for its number.
        ignored: ends of names that carry nothing (buffers that are computed anyway).
    """

    embedding: str
    final_norm: str
    lm_head: str
    layer: str
    attention_norm: str
    q: str
    k: str
    v: str
    o: str
    q_norm: str
    k_norm: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    ignored: tuple[str, ...]

    def in_layer(self, layer: int, module: str, part: str = "weight") -> str:
        """A layer's tensor, such as `in_layer(0, "q", "bias")`."""
        return f"{self.layer.format(layer=layer)}{getattr(self, module)}.{part}"


HUGGING_FACE = TensorNames(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    lm_head="lm_head.weight",
    layer="model.layers.{layer}.",
    attention_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.o_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    ignored=("rotary_emb.inv_freq",),
)

GGUF = TensorNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    lm_head="output.weight",
    layer="blk.{layer}.",
    attention_norm="attn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    o="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    ignored=("rope_freqs.weight",),
)


@dataclass(frozen=True)
class Family:
    """One family, and what its Hugging Face config means where a key is absent.

    Attributes:
        architecture: as `architectures` in Hugging Face's config names it.
        gguf_architecture: as `general.architecture` in a GGUF names it.
        gguf_permuted: GGUF holds q and k rows in another rotary order than Hugging Face (neighbours are pairs).
        qkv_bias: True: always has biases on q, k and v and never on o; None: as `attention_bias` says, for all four.
        qk_norm: has norms over q and k.
        has_mlp_bias: knows the key `mlp_bias`.
        sliding_window: "none"; "always": where `sliding_window` is a size; "opt-in": where `use_sliding_window` is set.
    """

    architecture: str
    gguf_architecture: str
    gguf_permuted: bool = False
    qkv_bias: bool | None = None
    qk_norm: bool = False
    has_mlp_bias: bool = False
    sliding_window: str = "none"
    default_sliding_window: int | None = None
    default_max_position_embeddings: int = 2048
    default_rms_norm_eps: float = 1e-6
    default_rope_theta: float = 10000.0
    default_tie_word_embeddings: bool = False


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
)
FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3)


def family_of_architecture(architecture: str, where: str) -> Family:
    """The family that a Hugging Face config names. Raises CheckpointError for one that is not known."""
    for family in FAMILIES:
        if family.architecture == architecture:
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise CheckpointError(f"{where}: architecture {architecture!r} is not supported; supported are {known}")


def family_of_gguf(architecture: str, where: str) -> Family:
    """The family that a GGUF names (Mistral's are "llama" there). Raises CheckpointError for one that is not known."""
    for family in FAMILIES:
        if family.gguf_architecture == architecture:
            return family
    known = ", ".join(dict.fromkeys(family.gguf_architecture for family in FAMILIES))
    raise CheckpointError(f"{where}: GGUF architecture {architecture!r} is not supported; supported are {known}")
