"""Measures converting and restoring a checkpoint: makes a random one, converts it in one command, restores it.

    python scripts/bench_conversion.py /big/disk/folder                           # a random Llama 3 8B, 16 GB
    python scripts/bench_conversion.py /big/disk/folder --quantization none int4  # one conversion after the other
    python scripts/bench_conversion.py folder --model small                       # some MB, to try it out
    python scripts/bench_conversion.py folder --num-layers 1                      # its largest pieces, 2.5 GB
    python scripts/bench_conversion.py folder --tensor-parallel-size 2 --json out.json
    python scripts/bench_conversion.py folder --pieces-ahead 0 8 --rounds 3       # with and without reading ahead

It needs twice the model's size on the disk, and prints seconds, GB/s and peak memory of the conversion, the rate at which
the disk gives the converted files, and the rate at which they arrive on the devices, from the disk and from the page cache.
Of jaxserve's dependencies it needs jax, flax, orbax-checkpoint, safetensors, tokenizers and filelock.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # usable without installing the package

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import save_file

from jaxserve.checkpoint.assemble import expected_shapes
from jaxserve.checkpoint.families import LLAMA
from jaxserve.checkpoint.hf_config_write import hf_config_from_model
from jaxserve.checkpoint.manifest import WEIGHTS_FOLDER, read_manifest
from jaxserve.checkpoint.orbax_weights import PIECES_AHEAD, PIECES_AT_ONCE, read_piece, restore_weights
from jaxserve.checkpoint.pieces import layer_piece
from jaxserve.checkpoint.safetensors_source import SafetensorsSource
from jaxserve.checkpoint.tensor_names import HUGGING_FACE
from jaxserve.config import ModelConfig, Quantization
from jaxserve.models.params import param_specs
from jaxserve.models.presets import preset_config
from jaxserve.sharding.mesh import make_mesh
from jaxserve.sharding.placement import named_shardings

SMALL = ModelConfig(
    vocab_size=16384, hidden_size=1024, intermediate_size=4096, num_layers=6, num_heads=8, num_kv_heads=4, head_dim=128,
    max_position_embeddings=2048,
)  # fmt: skip
_RANDOM_VALUES = 1 << 25  # that are drawn; larger tensors repeat them, which no reader can use
_READERS = 8
_LOOKS_PER_SECOND = 20  # at the memory of a conversion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to work; the checkpoints made there are removed at the end")
    parser.add_argument("--model", default="llama-3-8b", help="a preset of jaxserve bench, or 'small'")
    parser.add_argument("--num-layers", type=int, help="that the model has; default: as the preset")
    parser.add_argument(
        "--quantization",
        nargs="+",
        choices=("none", *get_args(Quantization)),
        default=["none"],
        help="one run for each",
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pieces-at-once", type=int, default=PIECES_AT_ONCE, help="that a restore reads at a time")
    parser.add_argument(
        "--pieces-ahead",
        type=int,
        nargs="+",
        default=[PIECES_AHEAD],
        help="that are read into the page cache before; several numbers: each is measured, 0 reads none",
    )
    parser.add_argument("--rounds", type=int, default=1, help="of reading from the disk; the medians are printed")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    arguments = parser.parse_args()
    config = SMALL if arguments.model == "small" else preset_config(arguments.model)
    if arguments.num_layers is not None:
        config = dataclasses.replace(config, num_layers=arguments.num_layers)
    source, results = arguments.folder / "source", []
    try:
        made = make_source(source, config)
        for quantization in arguments.quantization:
            result = {"model": arguments.model, "quantization": quantization, "orbax": ocp.__version__, **made}
            result |= measured(source, arguments.folder / quantization, config, arguments)
            for name, value in result.items():
                print(f"{name:32s} {value:.3f}" if isinstance(value, float) else f"{name:32s} {value}", flush=True)
            print()
            results.append(result)
    finally:
        if not arguments.keep:
            shutil.rmtree(source, ignore_errors=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def measured(source: Path, converted: Path, config: ModelConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """One conversion, and restoring what came of it."""
    try:
        result = run_conversion(source, converted, converted.name)
        result["tensor_parallel_size"] = arguments.tensor_parallel_size
        result |= run_restore(converted, arguments)
        return result if converted.name != "none" else result | check(source, converted, config)
    finally:
        if not arguments.keep:
            shutil.rmtree(converted, ignore_errors=True)


def make_source(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """A Hugging Face folder with bfloat16 weights, a file a layer."""
    if folder.exists():
        print(f"{folder} is there already and is used as it is")
    else:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(hf_config_from_model(config, LLAMA, "bfloat16")))
        generator = np.random.default_rng(0)
        values = (0.02 * generator.standard_normal(_RANDOM_VALUES, np.float32)).astype(ml_dtypes.bfloat16)
        files: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in expected_shapes(HUGGING_FACE, config).items():
            file = f"layer-{name.split('.')[2]}" if name.startswith("model.layers.") else name.split(".")[-2]
            files.setdefault(f"model-{file}.safetensors", {})[name] = shape
        for file, shapes in files.items():
            save_file({name: draw(values, shape) for name, shape in shapes.items()}, folder / file)
        weight_map = {name: file for file, shapes in files.items() for name in shapes}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return {"source_gb": sum(path.stat().st_size for path in folder.iterdir()) / 1e9}


def draw(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, values.dtype)
    return np.resize(values, shape)


def run_conversion(source: Path, destination: Path, quantization: str) -> dict[str, Any]:
    """The conversion in a process of its own, as a user runs it."""
    command = [
        sys.executable, str(Path(__file__).with_name("convert_checkpoint.py")), str(source), str(destination),
    ]  # fmt: skip
    if quantization != "none":
        command += ["--quantization", quantization]
    forget(source)
    started, peak = time.perf_counter(), 0
    with subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}) as process:
        while process.poll() is None:
            peak = peak_memory(process.pid) or peak
            time.sleep(1 / _LOOKS_PER_SECOND)
    seconds = time.perf_counter() - started
    if process.returncode != 0:
        raise SystemExit(f"the conversion failed with exit code {process.returncode}")
    size = sum(path.stat().st_size for path in destination.rglob("*") if path.is_file())
    return {
        "converted_gb": size / 1e9,
        "convert_seconds": seconds,
        "convert_gb_per_second": size / 1e9 / seconds,
        "convert_peak_memory_gb": peak / 1e9,
    }


def peak_memory(process: int) -> int:
    """The most bytes that a process had so far; 0: it has ended.

    As the kernel counts them: getrusage, of a process that has ended, tells no less than what its parent had.
    """
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def run_restore(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The rate of the disk alone, and of restoring onto the devices, in turns: a disk that is shared changes its rate."""
    config = read_manifest(folder).model_config
    mesh = make_mesh(jax.devices(), arguments.tensor_parallel_size)
    shardings = named_shardings(param_specs(config), mesh)
    weights = folder / WEIGHTS_FOLDER
    size = sum(path.stat().st_size for path in weights.rglob("*") if path.is_file()) / 1e9
    jax.block_until_ready(jax.device_put(np.ones(8, np.float32), mesh.devices.flat[0]))  # starts the backend

    def restore(pieces_ahead: int) -> float:
        started = time.perf_counter()
        params = restore_weights(
            weights, config, np.dtype(ml_dtypes.bfloat16), shardings,
            pieces_at_once=arguments.pieces_at_once, pieces_ahead=pieces_ahead,
        )  # fmt: skip
        jax.block_until_ready(params)
        seconds = time.perf_counter() - started
        for leaf in jax.tree.leaves(params):
            leaf.delete()
        return seconds

    ways = {
        "disk": lambda: read_all(weights),
        **{f"restore_ahead_{ahead}": partial(restore, ahead) for ahead in arguments.pieces_ahead},
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way, run in ways.items():
            forget(weights)
            seconds[way].append(run())
    medians = {way: float(np.median(rounds)) for way, rounds in seconds.items()}
    medians["restore_cached"] = restore(arguments.pieces_ahead[0])
    return {
        "device": mesh.devices.flat[0].device_kind,
        **{f"{way}_seconds": taken for way, taken in medians.items()},
        **{f"{way}_gb_per_second": size / taken for way, taken in medians.items()},
    }


def forget(folder: Path) -> None:
    """Ask the system to drop the files of a folder from its page cache (it drops what is on the disk already)."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(folder: Path) -> float:
    """Seconds to read every file of a folder, several at once."""

    def read(path: Path) -> None:
        buffer = bytearray(1 << 24)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    started = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as threads:
        list(threads.map(read, (path for path in folder.rglob("*") if path.is_file())))
    return time.perf_counter() - started


def check(source: Path, converted: Path, config: ModelConfig) -> dict[str, Any]:
    """Whether one weight came through to the bit."""
    layer = config.num_layers - 1
    stored = read_piece(converted / WEIGHTS_FOLDER / layer_piece(layer))["w_down"].reshape(config.intermediate_size, -1)
    original = SafetensorsSource(source).read(HUGGING_FACE.in_layer(layer, "down"))
    same = bool(np.array_equal(stored[:1024].view(np.uint16), original[:, :1024].T.view(np.uint16)))
    return {"weights_are_equal": same}


if __name__ == "__main__":
    main()
