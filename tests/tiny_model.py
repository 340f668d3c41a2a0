"""A tiny random Llama as Hugging Face saves one, so that tests of the whole path need no download and no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Vocabulary: one token for each byte (ids 0 to 255), then the special tokens.
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256 + len(SPECIAL_TOKENS),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 257,
    "eos_token_id": 258,
    "torch_dtype": "float32",
}


def write_tiny_llama(
    folder: Path, *, seed: int = 0, chat_template: str | None = CHAT_TEMPLATE, **overrides: Any
) -> Path:
    """Writes config.json, model.safetensors, tokenizer.json, tokenizer_config.json and returns the folder.

    Args:
        seed: of the random weights; the same seed and config give the same files.
        chat_template: None: a checkpoint without one.
        overrides: keys of config.json that differ from TINY_CONFIG.
    """
    folder.mkdir(parents=True)
    config = {**TINY_CONFIG, **overrides}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(random_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    return folder


def random_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """float32 arrays under the names that Hugging Face gives a Llama's."""
    rng = np.random.default_rng(seed)
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(hidden)).astype(np.float32)

    weights = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden), "model.norm.weight": norm()}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw(config["vocab_size"], hidden)
    shapes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.input_layernorm.weight"] = norm()
        weights[f"{prefix}.post_attention_layernorm.weight"] = norm()
        for name, shape in shapes.items():
            weights[f"{prefix}.{name}.weight"] = draw(*shape)
            has_bias = config["attention_bias"] if name.startswith("self_attn") else config["mlp_bias"]
            if has_bias:
                weights[f"{prefix}.{name}.bias"] = draw(shape[0])
    return weights


def byte_level_tokenizer() -> Tokenizer:
    """One token for each byte, in the order of the bytes, then the special tokens; no merges."""
    # GPT-2's way of writing bytes as printable characters, which the ByteLevel pre-tokenizer speaks.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
