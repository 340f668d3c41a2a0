"""A manifest that somebody edited: each wrong value is told on one line, by the name of its field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.manifest import MANIFEST_FILE, read_manifest
from jaxserve.checkpoint.quantize import quantization_step
from jaxserve.checkpoint.store import load_checkpoint
from jaxserve.cli.main import build_app
from jaxserve.progress import NoProgress
from tests.tiny_model import write_tiny_llama

SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
OTHER_VALUES = ["text", 5, 1.5, True, None, [], {}]
OPTIONAL = ("rope_scaling", "sliding_window", "bos_token_id", "quantization")
ALIKE = ("files", "versions", "arrays", "source_files")  # one entry of each stands for all


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("manifest")
    source = write_tiny_llama(root / "source", num_hidden_layers=1, rope_scaling=SCALING)
    return convert(source, root / "converted", step=quantization_step("int8"), progress=NoProgress())


@pytest.fixture
def folder(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "converted"))


def edited(folder: Path, place: tuple[str | int, ...], value: Any) -> None:
    path = folder / MANIFEST_FILE
    data = json.loads(path.read_text())
    holder = data
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    path.write_text(json.dumps(data))


def run(command: str, folder: Path) -> tuple[int, str]:
    arguments = [str(folder)] if command == "inspect" else [str(folder), str(folder.parent / "exported")]
    result = CliRunner().invoke(build_app(), [command, *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("model_config", "num_layers"), "1", "model_config.num_layers='1' must be a whole number"),
        (("model_config", "max_position_embeddings"), 1.5, "max_position_embeddings=1.5 must be a whole number"),
        (("model_config", "tie_word_embeddings"), "false", "tie_word_embeddings='false' must be true or false"),
        (("model_config", "eos_token_ids"), "258", "model_config.eos_token_ids='258' must be a list"),
        (("model_config", "eos_token_ids", 0), "a", "model_config.eos_token_ids[0]='a' must be a whole number"),
        (("model_config", "bos_token_id"), [1], "model_config.bos_token_id=[1] must be a whole number or null"),
        (("model_config", "rope_scaling", "factor"), "8", "rope_scaling.factor='8' must be a number"),
        (("model_config", "rope_scaling", "spin"), 1, "model_config.rope_scaling.spin is not known"),
        (("model_config", "quantization"), ["int8"], "quantization=['int8'] must be an object or null"),
        (("model_config",), [], "model_config=[] must be an object"),
        (("versions",), ["jax"], "versions=['jax'] must be an object"),
        (("source_files", "model.safetensors"), 5, "source_files['model.safetensors']=5 must be a text"),
        (("arrays", "embedding/embedding", "shape"), 64, "arrays['embedding/embedding'].shape=64 must be a list"),
        (("arrays", "embedding/embedding", "dtype"), "float33", "arrays['embedding/embedding']: dtype='float33'"),
        (("model_config", "eos_token_ids", 0), 259, "259 of eos_token_ids ends an answer, but the model knows 259 tokens"),
        (("model_config", "eos_token_ids", 0), -1, "-1 of eos_token_ids ends an answer, but the model knows 259 tokens"),
        (("model_config", "bos_token_id"), -1, "bos_token_id=-1 must be a token id"),
        (("model_config", "sliding_window"), 2**31, "sliding_window=2147483648 must be at least 1, and at most"),
        (("model_config", "rope_scaling", "original_max_position_embeddings"), 2**31, "original_max_position_embeddings=2"),
        (("model_config", "quantization", "dense_layers"), [1], "leaves 1 as it is, but there are 1 layers"),
        (("model_config", "quantization", "dense_weights"), ["wq"], "leaves 'wq' as it is, but there are 1 layers"),
        (("model_config", "quantization", "dense_parts"), [[-1, "wo"]], "leaves -1 as it is, but there are 1 layers"),
        (("dtype",), "float33", "dtype='float33' must be one of auto, float32"),
        (("files", "tokenizer/tokenizer.json"), "12", "files['tokenizer/tokenizer.json']='12' must be a whole"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)  # fmt: skip
@pytest.mark.parametrize("command", ["inspect", "export"])
def test_the_field_and_the_remedy_are_told(
    command: str, place: tuple[str | int, ...], value: Any, told: str, folder: Path
) -> None:
    edited(folder, place, value)
    code, output = run(command, folder)
    assert code == 1
    (line,) = output.splitlines()
    assert told in line and MANIFEST_FILE in line and "convert the model again" in line
    assert not (folder.parent / "exported").exists()


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("model_config", "quantization", "format"), "fp8", "has dtype int8, its config says float8_e4m3fn"),
        (("arrays", "layer_000/wo/values", "dtype"), "float32", "has dtype float32, its config says int8"),
        (("arrays", "layer_000/wo/scales", "dtype"), "float16", "has dtype float16, its config says float32"),
        (("arrays", "embedding/embedding", "dtype"), "int8", "has dtype int8, its config says a float"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_numbers_of_one_kind_are_not_read_as_those_of_another(
    place: tuple[str, ...], value: str, told: str, folder: Path
) -> None:
    """They have the same shape, and would be a model of nonsense."""
    edited(folder, place, value)
    code, output = run("inspect", folder)
    assert code == 1
    (line,) = output.splitlines()
    assert told in line and "convert the model again" in line
    with pytest.raises(CheckpointError, match=told):
        load_checkpoint(folder, "float32", NoProgress())


def test_no_value_of_another_type_is_taken(converted: Path, tmp_path: Path) -> None:
    text = (converted / MANIFEST_FILE).read_text()
    for place in places(json.loads(text)):
        for value in OTHER_VALUES:
            data = json.loads(text)
            holder = data
            for key in place[:-1]:
                holder = holder[key]
            was = holder[place[-1]]
            may_be_null = value is None and place[-1] in OPTIONAL
            if may_be_null or type(was) is type(value) or (isinstance(was, float) and type(value) is int):
                continue
            holder[place[-1]] = value
            (tmp_path / MANIFEST_FILE).write_text(json.dumps(data))
            with pytest.raises(CheckpointError, match="convert the model again"):
                read_manifest(tmp_path)


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of all values in others, but for those that are null."""
    if above and above[-1] in ALIKE:
        value = dict(list(value.items())[:1])
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [above] * bool(above and value is not None) + [
        place for key, part in parts for place in places(part, (*above, key))
    ]


def test_what_a_manifest_says_does_not_reach_the_terminal_as_it_is(folder: Path) -> None:
    for field in ("name", "architecture", "source"):
        edited(folder, (field,), "a\n\x1b[31m")
    code, output = run("inspect", folder)
    assert code == 0
    assert output.splitlines()[0] == r"a\n\x1b[31m: a\n\x1b[31m, converted, made from a\n\x1b[31m"


def test_sizes_that_no_arrays_have_are_told_with_the_file(folder: Path) -> None:
    edited(folder, ("model_config", "quantization"), {"format": "int4", "group_size": 128})
    edited(folder, ("model_config", "intermediate_size"), 3)
    code, output = run("inspect", folder)
    assert code != 0
    told = " ".join(output.split())
    assert (
        "jaxserve.json is damaged (3 inputs cannot be cut into int4 groups" in told
        and "convert the model again" in told
    )
