"""`jaxserve inspect`: of checkpoints, of what is fetched, and of architectures that get random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxserve.checkpoint import source
from jaxserve.cli.main import build_app


def inspect(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["inspect", *arguments])
    return result.exit_code, result.output


def line_of(output: str, start: str) -> str:
    return next(line.strip() for line in output.splitlines() if line.strip().startswith(start))


def test_an_architecture_over_eight_devices() -> None:
    """Llama-3-70B in float8, whose bytes are these, by hand."""
    code, output = inspect("llama-3-70b", "--quantization", "fp8", "--tensor-parallel-size", "8")
    assert code == 0, output
    tables = 2 * 128_256 * 8192  # embedding and head
    # Of a layer: qkv (64 query heads, 8 of keys and 8 of values), o, gate and up, down.
    products = 80 * 128 * 8192 + 64 * 128 * 8192 + 2 * 28_672 * 8192 + 28_672 * 8192
    scales = 80 * 128 + 8192 + 2 * 28_672 + 8192
    assert line_of(output, "bfloat16: ") == f"bfloat16: {2 * tables:,} (4.2 GB)"
    assert line_of(output, "float8_e4m3fn: ") == f"float8_e4m3fn: {80 * products:,} (68.5 GB)"
    assert line_of(output, "float32: ") == f"float32: {4 * (80 * (scales + 2 * 8192) + 8192):,} (32.1 MB)"
    # Scales of o and of down, whose inputs are what is cut, and norms are on all devices.
    whole = 80 * 4 * 8192 + 8192
    cut = 2 * tables + 80 * (products + 4 * (80 * 128 + 2 * 28_672))
    assert "--tensor-parallel-size 8, bfloat16, weights fp8" in output
    assert line_of(output, "weights: ") == f"weights: {cut // 8 + 4 * whole:,} (9.1 GB)"
    assert line_of(output, "KV cache: ") == f"KV cache: {2 * 80 * 1 * 128 * 2:,} a token, 335.5 MB for 8192 tokens"


def test_an_architecture_of_a_file_and_what_is_wrong_with_one(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4,
             "num_kv_heads": 2, "head_dim": 8, "max_position_embeddings": 128}  # fmt: skip
    path.write_text(json.dumps(sizes))
    code, output = inspect(str(path), "--dtype", "float32")
    assert code == 0 and "random weights" in output and "num_kv_heads = 2" in output
    assert "layer_*/wqkv  [32, 2, 4, 8] float32  (2 times)" in output
    path.write_text('{"vocab_size": 64}')
    code, output = inspect(str(path))
    assert code == 1 and "tiny.json does not describe a model" in output
    path.write_text(json.dumps(sizes | {"rope_theta": "1e4"}))
    code, output = inspect(str(path))
    assert code == 1 and "tiny.json does not describe a model: rope_theta='1e4' must be a number" in output


def test_a_checkpoint_tells_what_it_holds_and_what_an_engine_would(tiny_model_dir: Path) -> None:
    code, plain = inspect(str(tiny_model_dir))
    assert code == 0 and "huggingface" in plain and "--tensor-parallel-size 1, bfloat16 (" in plain
    code, quantized = inspect(str(tiny_model_dir), "--quantization", "int8")
    assert code == 0 and "--tensor-parallel-size 1, bfloat16, weights int8" in quantized
    assert line_of(quantized, "all ") == line_of(plain, "all ")  # of the files
    held = [int(line_of(each, "weights: ").split()[1].replace(",", "")) for each in (plain, quantized)]
    assert 0.5 < held[1] / held[0] < 0.9


def test_the_dtype_is_told_with_where_serve_takes_it(tiny_model_dir: Path) -> None:
    code, of_a_gpu = inspect(str(tiny_model_dir))
    assert code == 0
    assert line_of(of_a_gpu, "memory of").endswith("bfloat16 (serve's on a GPU; on a CPU it takes --dtype float32)")
    code, of_a_cpu = inspect(str(tiny_model_dir), "--dtype", "float32")
    assert code == 0
    assert line_of(of_a_cpu, "memory of").endswith("float32 (serve's on a CPU; on a GPU it takes --dtype bfloat16)")


@pytest.mark.parametrize("model", [source.DEFAULT_MODEL, "hf:some/model"])
def test_what_serve_would_fetch_is_fetched(model: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(name: str, progress: object) -> Path:
        asked.append(name)
        return tiny_model_dir

    monkeypatch.setattr(source, "resolve_model", fetch)
    code, output = inspect(model)
    assert code == 0 and asked == [model] and "hidden_size = 64" in output


def test_what_there_is_not_is_told_with_what_there_is() -> None:
    code, output = inspect("no-such-model")
    assert code == 1
    assert "unknown model 'no-such-model'" in output and "llama-3-70b" in output and source.DEFAULT_MODEL in output


def test_a_folder_counts_before_an_architecture_of_that_name(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for `jaxserve serve`, which knows no architectures."""
    (tmp_path / "llama-3-8b").symlink_to(tiny_model_dir)
    monkeypatch.chdir(tmp_path)
    code, output = inspect("llama-3-8b")
    assert code == 0 and "random weights" not in output and "hidden_size = 64" in output
