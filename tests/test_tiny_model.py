"""The tiny checkpoint that other tests lean on is what it says it is."""

from pathlib import Path

import jax
from safetensors.numpy import load_file
from tokenizers import Tokenizer


def test_tokens_are_bytes_and_specials(tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    text = "a é \n🌶"
    assert tokenizer.encode(text, add_special_tokens=False).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("<|im_start|>x<|im_end|>").ids == [257, ord("x"), 258]


def test_weights_have_hugging_face_shapes(tiny_model_dir: Path) -> None:
    weights = load_file(tiny_model_dir / "model.safetensors")
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (32, 64)
    assert weights["model.layers.1.mlp.down_proj.weight"].shape == (64, 128)
    assert "lm_head.weight" not in weights


def test_jax_runs_strict_on_eight_cpu_devices() -> None:
    assert jax.device_count("cpu") == 8
    assert jax.config.jax_numpy_dtype_promotion == "strict"  # pyright: ignore[reportAttributeAccessIssue]
    assert jax.config.jax_numpy_rank_promotion == "raise"  # pyright: ignore[reportAttributeAccessIssue]
