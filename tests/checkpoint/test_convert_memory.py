"""What conversion holds in memory, and what restoring reads of the disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.assemble import expected_shapes
from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.hf_config import model_config_from_hf
from jaxserve.checkpoint.tensor_names import HUGGING_FACE
from jaxserve.progress import NoProgress
from tests.checkpoint.files import python
from tests.tiny_model import TINY_CONFIG


def write_large(folder: Path, **sizes: int) -> tuple[Path, int, int]:
    """A checkpoint in bfloat16. Returns the folder, the bytes of all of it, and of a layer."""
    heads = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    folder.mkdir()
    config = {**TINY_CONFIG, **heads, **sizes, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    model = model_config_from_hf(config, eos_token_ids=(), bos_token_id=None, where="config.json")
    tensors = {
        name: np.full(shape, 0.5, ml_dtypes.bfloat16) for name, shape in expected_shapes(HUGGING_FACE, model).items()
    }
    save_file(tensors, folder / "model.safetensors")
    layer = sum(value.nbytes for name, value in tensors.items() if name.startswith("model.layers.0."))
    return folder, sum(value.nbytes for value in tensors.values()), layer


# What getrusage tells is no less than what the process that started this one had: the kernel is asked, and set back before.
PEAKS = """
import sys
from pathlib import Path
from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.quantize import quantization_step
from jaxserve.progress import NoProgress

step = quantization_step(sys.argv[1] or None)
for source in sys.argv[2:]:
    Path("/proc/self/clear_refs").write_text("5")
    convert(source, source + "-converted", progress=NoProgress(), step=step)
    print(next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").open() if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="asks Linux for the peak of a process")
@pytest.mark.parametrize("quantization", [pytest.param("", id="dense"), pytest.param("int4", marks=pytest.mark.long)])
def test_memory_is_of_the_largest_piece_alone(tmp_path: Path, quantization: str) -> None:
    """What two models take differs by little more than their largest pieces do, whatever else the process holds."""
    small, _, small_layer = write_large(
        tmp_path / "small", intermediate_size=4096, num_hidden_layers=1, vocab_size=8192
    )
    large, _, large_layer = write_large(
        tmp_path / "large", intermediate_size=32768, num_hidden_layers=1, vocab_size=32768
    )
    done = python(PEAKS, quantization, str(small), str(large))
    assert done.returncode == 0, done.stderr
    of_small, of_large = map(int, done.stdout.split())
    assert of_large - of_small < 1.8 * (large_layer - small_layer)


READ = """
import os, sys
from pathlib import Path
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax
from jaxserve.checkpoint.manifest import read_manifest
from jaxserve.checkpoint.orbax_weights import restore_weights
from jaxserve.config import QuantizationConfig
from jaxserve.models.params import param_specs
from jaxserve.models.quantize_params import LayerQuantizer
from jaxserve.sharding.mesh import make_mesh
from jaxserve.sharding.placement import named_shardings

def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])

folder = Path(sys.argv[1])
config = read_manifest(folder).model_config
def restore(size, dtype="float32", quantizer=None):
    shardings = named_shardings(param_specs(config), make_mesh(jax.devices(), size))
    before = bytes_read()
    jax.block_until_ready(restore_weights(
        folder / "weights", config, jax.numpy.dtype(dtype), shardings, quantizer=quantizer))
    return bytes_read() - before

restore(4)
print(restore(1), restore(4), restore(4, "bfloat16", LayerQuantizer(QuantizationConfig("int8"))))
"""


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts what a process reads, as Linux tells it")
def test_each_device_reads_only_its_bytes(tmp_path: Path) -> None:
    sizes = {"intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 4096}
    folder, total, _ = write_large(tmp_path / "source", **sizes)
    convert(folder, tmp_path / "converted", progress=NoProgress())
    done = python(READ, str(tmp_path / "converted"))
    assert done.returncode == 0, done.stderr
    for read in map(int, done.stdout.split()):
        assert total <= read < 1.1 * total
