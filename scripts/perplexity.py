"""Perplexity of a model on a fixed text with every way of quantization, as a table.

    python scripts/perplexity.py smollm2-135m-instruct --ways float32,fp8,int4

A way is a dtype ("float32"), a quantization of the weights in the widest dtype that was asked for ("fp8"), or either with
"+kv" for a KV cache in float8 ("float32+kv").
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # usable without installing the package

import jax

from jaxserve.bench.perplexity import perplexity
from jaxserve.checkpoint.source import DEFAULT_MODEL, resolve_model
from jaxserve.checkpoint.store import load_checkpoint
from jaxserve.config import EngineConfig
from jaxserve.engine.build import build_engine, make_engine_mesh, wanted_quantization
from jaxserve.progress import NoProgress
from jaxserve.text.tokenizer import load_tokenizer

TEXT = Path(__file__).resolve().parents[1] / "tests" / "data" / "alice.txt"
DTYPES = ("float32", "bfloat16")
WAYS = ("float32", "bfloat16", "fp8", "fp8-weight-only", "int8", "int4", "int4-32", "float32+kv", "fp8+kv")


def engine_config(way: str, dtype: str, window: int, device: str) -> EngineConfig:
    name, plus, cache = way.partition("+")
    if plus and cache != "kv":
        raise SystemExit(f"error: {way!r} must end in +kv, or have no plus")
    fixed: dict[str, Any] = {"max_model_len": window + 1, "max_num_seqs": 1, "max_num_batched_tokens": 256}
    return EngineConfig(
        **fixed,
        device=device,  # pyright: ignore[reportArgumentType] - it is checked
        dtype=name if name in DTYPES else dtype,  # pyright: ignore[reportArgumentType]
        quantization=None if name in DTYPES else name,  # pyright: ignore[reportArgumentType]
        kv_cache_dtype="fp8" if plus else "auto",
        enable_prefix_caching=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument(
        "--ways", default=",".join(WAYS), help="comma-separated; the first is what others are held against"
    )
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="beside quantized weights")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read in one go")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "gpu"))
    arguments = parser.parse_args()
    folder = resolve_model(arguments.model, NoProgress())
    first = None
    print(f"{arguments.model}, {arguments.text.name}, windows of {arguments.window}, jax {jax.__version__}", flush=True)
    print("| way | perplexity | against the first | seconds |\n| --- | --- | --- | --- |", flush=True)
    for way in arguments.ways.split(","):
        started = time.perf_counter()
        config = engine_config(way, arguments.dtype, arguments.window, arguments.device)
        quantization = partial(wanted_quantization, config=config)
        mesh = make_engine_mesh(config)
        checkpoint = load_checkpoint(folder, config.dtype, NoProgress(), mesh=mesh, quantization=quantization)
        tokenizer = load_tokenizer(checkpoint.tokenizer_dir)
        token_ids = tokenizer.encode(arguments.text.read_text(encoding="utf-8"))
        engine = build_engine(checkpoint.model_config, checkpoint.params, config, NoProgress())
        try:
            result = perplexity(engine, token_ids, arguments.window)
        finally:
            engine.shutdown()
        first = result.value if first is None else first
        seconds = time.perf_counter() - started
        print(f"| {way} | {result.value:.3f} | {result.value / first - 1:+.2%} | {seconds:.0f} |", flush=True)
    print(f"{result.num_tokens} tokens, {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
