"""A decode layer between attention and the next attention in plain XLA: the reference, the CPU path, the fall-back."""

from jaxtyping import Array, Float

from jaxserve.kernels.decode_matmul_xla import decode_matmul_swiglu_xla, decode_matmul_xla
from jaxserve.kernels.rms_norm_xla import rms_norm


def decode_layer_xla(
    attended: Float[Array, "rows attended"],
    residual: Float[Array, "rows hidden"],
    wo: Float[Array, "attended hidden"],
    mlp_norm: Float[Array, " hidden"],
    w_gate_up: Float[Array, "hidden 2 ffn"],
    w_down: Float[Array, "ffn hidden"],
    next_norm: Float[Array, " hidden"] | None,
    next_wqkv: Float[Array, "hidden qkv"] | None,
    *,
    eps: float,
) -> tuple[Float[Array, "rows hidden"], Float[Array, "rows qkv"] | None]:
    """Computes what `decode_layer` documents, from validated arguments."""
    x = decode_matmul_xla(attended, wo, residual, residual.dtype)
    activated = decode_matmul_swiglu_xla(rms_norm(x, mlp_norm, eps), w_gate_up)
    x = decode_matmul_xla(activated, w_down, x, x.dtype)
    if next_norm is None or next_wqkv is None:
        return x, None
    return x, decode_matmul_xla(rms_norm(x, next_norm, eps), next_wqkv, None, x.dtype)
