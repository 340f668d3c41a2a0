"""Make tests/goldens/quantized/ with compressed-tensors, the library that vendors write their quantized checkpoints with.

The tests that read them need none of it; this script does:

    pip install torch transformers accelerate compressed-tensors gguf safetensors
    python scripts/make_vendor_goldens.py

For every entry of `CHECKPOINTS` it writes `NAME/`, a tiny random checkpoint in bfloat16 that the library compressed, and
`NAME.npz` as `scripts/make_goldens.py` does: what transformers computes in float32 with the weights that the compressed
file stands for, numbers times scales, and activations that are not quantized.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from compressed_tensors.compressors import ModelCompressor  # pyright: ignore[reportMissingImports]
from compressed_tensors.compressors.pack_quantized.helpers import (  # pyright: ignore[reportMissingImports]
    unpack_from_int32,
)
from compressed_tensors.quantization import (  # pyright: ignore[reportMissingImports]
    QuantizationConfig,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams  # pyright: ignore[reportMissingImports]
from make_goldens import BASE, DECODE_STEPS, GOLDENS, MIN_GREEDY_MARGIN, greedy_margin, greedy_run, randomize
from safetensors.torch import load_file  # pyright: ignore[reportMissingImports]

FOLDER = GOLDENS / "quantized"
PROMPT_TOKENS = 16
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: its family, the scheme of its weights and activations, its format, and modules that are left."""

    weights: dict[str, Any]
    stored_as: str
    ignore: tuple[str, ...] = ("lm_head",)
    activations: dict[str, Any] | None = None
    family: str = "Llama"


def weights(kind: str, bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, "dynamic": False, **others}


PER_TOKEN = {"type": "int", "num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
FIRST_AND_LAST = ("lm_head", r"re:.*layers\.0\..*", r"re:.*layers\.2\..*")
CHECKPOINTS = {
    "fp8_weight_only": Checkpoint(
        weights("float", 8, "channel"), "float-quantized", ("lm_head", "model.layers.1.mlp.down_proj")
    ),
    "w8a8_int8": Checkpoint(weights("int", 8, "channel"), "int-quantized", activations=PER_TOKEN),
    "w8a16_int8": Checkpoint(weights("int", 8, "channel"), "pack-quantized", FIRST_AND_LAST),
    "w4a16_int4": Checkpoint(
        weights("int", 4, "group", group_size=32), "pack-quantized", ("lm_head", "model.layers.2.self_attn.o_proj")
    ),
    "w4a16_int4_phi3": Checkpoint(weights("int", 4, "group", group_size=16), "pack-quantized", family="Phi3"),
}


def quantizable(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}


def set_scales(module: Any) -> None:
    scheme, values = module.quantization_scheme.weights, module.weight.data.float()
    grouped = values.reshape(len(values), -1, scheme.group_size or values.shape[1])
    scales, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme)
    module.weight_scale.data.copy_(scales.to(module.weight_scale.dtype))


def weights_of_file(path: Path, modules: list[str], bits: int) -> dict[str, torch.Tensor]:
    """What the compressed file stands for, in float32, by the names of modules."""
    tensors, found = load_file(path), {}
    for name in modules:
        scales = tensors[f"{name}.weight_scale"].float()
        if f"{name}.weight_packed" in tensors:
            shape = torch.Size(tensors[f"{name}.weight_shape"].tolist())
            numbers = unpack_from_int32(tensors[f"{name}.weight_packed"], bits, shape)
        else:
            numbers = tensors[f"{name}.weight"]
        each = numbers.shape[1] // scales.shape[1]
        found[name] = numbers.float() * scales.repeat_interleave(each, dim=1)
    return found


def make(name: str, checkpoint: Checkpoint) -> None:
    """Save the checkpoint and its logits, with the first seed whose greedy tokens are beyond doubt."""
    config = getattr(transformers, f"{checkpoint.family}Config")(**BASE | SIZES, attn_implementation="sdpa")
    folder = FOLDER / name
    for seed in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        model = getattr(transformers, f"{checkpoint.family}ForCausalLM")(config).eval()
        randomize(model, 2.0, torch.bfloat16, seed)
        reference = getattr(transformers, f"{checkpoint.family}ForCausalLM")(config).eval()
        reference.load_state_dict(model.state_dict())
        model.to(torch.bfloat16)
        group = {"targets": ["Linear"], "weights": checkpoint.weights, "input_activations": checkpoint.activations}
        quantization = QuantizationConfig(
            config_groups={"group_0": group}, ignore=list(checkpoint.ignore), format=checkpoint.stored_as
        )
        apply_quantization_config(model, quantization)
        modules = quantizable(model)
        for module in modules.values():
            set_scales(module)
        compressor = ModelCompressor.from_pretrained_model(model, quantization_format=checkpoint.stored_as)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(folder)
        bits = checkpoint.weights["num_bits"]
        for module, values in weights_of_file(folder / "model.safetensors", list(modules), bits).items():
            reference.get_submodule(module).weight.data.copy_(values)
        generator = torch.Generator().manual_seed(seed)
        prompt_ids = torch.randint(3, config.vocab_size, (PROMPT_TOKENS,), generator=generator)
        prefill_logits, tokens, decode_logits = greedy_run(reference, prompt_ids, DECODE_STEPS)
        if greedy_margin(prefill_logits, decode_logits) >= MIN_GREEDY_MARGIN and len(set(tokens.tolist())) > 8:
            break
    else:
        raise RuntimeError(f"{name}: no seed below 1000 gives a greedy margin of {MIN_GREEDY_MARGIN}")
    np.savez_compressed(
        FOLDER / f"{name}.npz",
        prompt_ids=prompt_ids.numpy().astype(np.uint8),
        prefill_logits=prefill_logits.numpy(),
        tokens=tokens.numpy().astype(np.int32),
        decode_logits=decode_logits.numpy(),
    )
    print(f"{name}: seed {seed}, margin {greedy_margin(prefill_logits, decode_logits):.3f}")


def main() -> None:
    torch.set_num_threads(2)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, checkpoint in CHECKPOINTS.items():
        make(name, checkpoint)


if __name__ == "__main__":
    main()
