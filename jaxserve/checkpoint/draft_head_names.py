"""What published draft heads call their files and tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jaxserve.checkpoint.tensor_names import HUGGING_FACE


@dataclass(frozen=True)
class EagleNames:
    """Tensors of one family of EAGLE heads; None: it has none such.

    Attributes:
        optional_prefix: that all names may have.
        layer: prefixes that its layer may have; the modules in it are called as Hugging Face's.
        ignored: that carry nothing, or nothing that is not known: the inverse of `draft_ids`, and what the model has.
    """

    fc: str = "fc.weight"
    fc_bias: str | None = "fc.bias"
    embedding: str = "embed_tokens.weight"
    optional_prefix: str = "model."
    layer: tuple[str, ...] = ("layers.0.",)
    attention_norm: str | None = None
    embedding_norm: str | None = None
    final_norm: str | None = None
    lm_head: str | None = None
    input_norm: str | None = None
    input_norms: str | None = None  # one for each hidden state that it takes in, counted from 0
    draft_ids: str | None = None  # of each token of the head, how far the model's id is from its own
    ignored: tuple[str, ...] = HUGGING_FACE.ignored

    @property
    def modules(self) -> dict[str, str]:
        """Matrices of the layer, by the names that `jaxserve.checkpoint.tensor_names` has for them."""
        return {name: getattr(HUGGING_FACE, name) for name in ("q", "k", "v", "o", "gate", "up", "down")}

    @property
    def mlp_norm(self) -> str:
        return HUGGING_FACE.mlp_norm


EAGLE = EagleNames()
EAGLE3 = dataclasses.replace(
    EAGLE,
    fc_bias=None,
    layer=("midlayer.", "layers.0."),
    attention_norm="hidden_norm",
    embedding_norm="input_layernorm",
    final_norm="norm.weight",
    lm_head="lm_head.weight",
    input_norm="input_norm.weight",
    input_norms="fc_norm.{number}.weight",
    draft_ids="d2t",
    ignored=(*EAGLE.ignored, "t2d"),
)


@dataclass(frozen=True)
class MedusaNames:
    """Tensors of Medusa heads, `{head}` and `{block}` counted from 0."""

    safetensors_file: str = "medusa_lm_head.safetensors"
    torch_file: str = "medusa_lm_head.pt"
    block: str = "{head}.{block}.linear.weight"
    bias: str = "{head}.{block}.linear.bias"
    lm_head: str = "{head}.{block}.weight"  # the block after the last one


MEDUSA = MedusaNames()
