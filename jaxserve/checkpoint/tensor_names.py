"""What each file format calls the tensors of a Llama-shaped model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorNames:
    """What one file format calls the tensors of a Llama-shaped model.

    Attributes:
        layer: prefix of a layer's tensors, with `{layer}` for its number.
        ignored: ends of names that carry nothing (buffers that are computed anyway).
        qkv: q, k and v in one tensor, their rows in this order; None: each has its own.
        gate_up: gate and up in one tensor, likewise.
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
    qkv: str | None = None
    gate_up: str | None = None

    def in_layer(self, layer: int, module: str, part: str = "weight") -> str:
        """A layer's tensor, such as `in_layer(0, "q", "bias")`; `module` is a field's name or the format's own."""
        return f"{self.layer.format(layer=layer)}{getattr(self, module, module)}.{part}"

    def fused(self, modules: tuple[str, ...]) -> str | None:
        """The one module that holds these, where there is one."""
        return {"q": self.qkv, "gate": self.gate_up}.get(modules[0])

    def held_of(self, modules: tuple[str, ...]) -> tuple[str, ...]:
        """The modules that hold these in a file: the one that is fused of them, or they themselves."""
        fused = self.fused(modules)
        return modules if fused is None else (fused,)


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
    ignored=("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
)

# Phi-3: what others keep apart lies in one tensor, rows after rows.
HUGGING_FACE_FUSED = dataclasses.replace(HUGGING_FACE, qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
GGUF_FUSED = dataclasses.replace(GGUF, qkv="attn_qkv", gate_up="ffn_up")

META = TensorNames(
    embedding="tok_embeddings.weight",
    final_norm="norm.weight",
    lm_head="output.weight",
    layer="layers.{layer}.",
    attention_norm="attention_norm",
    q="attention.wq",
    k="attention.wk",
    v="attention.wv",
    o="attention.wo",
    q_norm="attention.q_norm",
    k_norm="attention.k_norm",
    mlp_norm="ffn_norm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    ignored=("rope.freqs",),
)
