"""Files that are cut, damaged or lie: each is told on one line, leaves nothing behind, and costs no memory."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.manifest import TOKENIZER_FOLDER
from jaxserve.checkpoint.meta_source import consolidated_files
from jaxserve.checkpoint.open_model import open_model
from jaxserve.checkpoint.tokenizer_files import read_tokenizer
from jaxserve.checkpoint.tokenizer_read import read_hf_tokenizer
from jaxserve.progress import NoProgress
from jaxserve.text.tokenizer import load_tokenizer
from tests.checkpoint.files import edit_config, shard, write_gguf, write_index
from tests.tiny_model import TINY_CONFIG, random_weights, write_tiny_llama

Q0 = "model.layers.0.self_attn.q_proj.weight"
TOKENIZERS = Path(__file__).parents[1] / "goldens" / "tokenizers"
MOST_MEMORY = 50e6  # bytes, for files of some hundred thousand


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "source", num_hidden_layers=1)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    weights = random_weights({**TINY_CONFIG, "num_hidden_layers": 1}, seed=0)
    (tmp_path / "source").mkdir()
    return write_gguf(tmp_path / "source" / "model.gguf", weights, num_hidden_layers=1)


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


def told(act: Callable[[], object]) -> str | None:
    """The one line with which something is refused; None: it is taken. Any other error fails the test."""
    with little_memory():
        try:
            act()
        except CheckpointError as error:
            line = str(error)
            assert line.isprintable() and len(line) < 2100
            return line
    return None


def opened(source: Path) -> str | None:
    """All that is checked before anything is written."""

    def act() -> None:
        with open_model(source):
            pass

    return told(act)


def assert_refused(source: Path, named: str = "") -> None:
    parent = source.parent if source.is_dir() else source.parent.parent
    destination = parent / "converted"
    line = told(lambda: convert(source, destination, progress=NoProgress()))
    assert line is not None and named in line
    assert [path.name for path in parent.iterdir()] == ["source"]


def cuts(content: bytes, header: int, seed: int) -> list[bytes]:
    """A file cut at places of its header, and anywhere."""
    places = random.Random(seed)
    return [content[: places.randrange(header if number % 2 else len(content))] for number in range(30)]


def flips(content: bytes, first: int, end: int, number: int) -> Iterator[bytes]:
    """A file with one bit turned over somewhere between two places, again and again."""
    places = random.Random(7)
    for _ in range(number):
        damaged = bytearray(content)
        damaged[places.randrange(first, end)] ^= 1 << places.randrange(8)
        yield bytes(damaged)


def test_safetensors_cut_anywhere(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for cut in cuts(content, 8 + int.from_bytes(content[:8], "little"), seed=1):
        path.write_bytes(cut)
        assert_refused(folder, "model.safetensors is damaged")


def test_safetensors_with_a_damaged_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    lines = []
    for damaged in flips(content, 0, end, 100):
        path.write_bytes(damaged)
        lines.append(opened(folder))
    assert lines.count(None) < 6  # in what nobody reads: spaces, and metadata


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x08" + bytes(7) + b"\xff" * 8], ids=["empty", "size", "text"])
def test_safetensors_that_change_once_the_library_has_checked_them(
    folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, check = folder / "model.safetensors", safetensors.safe_open

    @contextmanager
    def check_and_change(*arguments: Any, **options: Any) -> Iterator[None]:
        with check(*arguments, **options):
            yield
        path.write_bytes(content)

    monkeypatch.setattr(safetensors, "safe_open", check_and_change)
    assert_refused(folder, "model.safetensors")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "I64"}, {"dtype": "F8_E8M0"}, {"dtype": "XX"}, {"dtype": None}, {"shape": []}, {"shape": [2**62, 4]},
        {"shape": [-1, 64]}, {"shape": [64, 64, 1]}, {"shape": "64"}, {"data_offsets": [0, 4]},
        {"data_offsets": [2**63, 2**64 - 1]}, {"data_offsets": [0, 2**40]}, {"data_offsets": None},
    ],
    ids=str,
)  # fmt: skip
def test_safetensors_that_lie_about_a_tensor(folder: Path, entry: dict[str, Any]) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[Q0] |= entry
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    assert_refused(folder)


@pytest.mark.parametrize(
    "name", ["/dev/zero", "a/../../b", "~/x", "a\0b", "x" * 300, "x\ny", "config.json", "missing.safetensors"], ids=repr
)
def test_index_with_other_names(folder: Path, name: str) -> None:
    write_index(folder, {**shard(folder), Q0: name})
    assert_refused(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_plain_file_is_not_opened(folder: Path, name: str, kind: str) -> None:
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)  # reading from it would wait for ever
    else:
        (folder / name).mkdir()
    assert_refused(folder, f"refuses {name}: it is no plain file")


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
     "chat_template.jinja", "hf_quant_config.json"],
)  # fmt: skip
def test_a_link_to_what_was_never_fetched(folder: Path, name: str) -> None:
    """As in a cache of the Hub where fetching stopped half-way; without the file the model would be another one."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../../blobs/missing")
    assert_refused(folder, f"{name} is missing")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"])
def test_a_file_of_holes_is_not_read(folder: Path, name: str) -> None:
    if name == "tokenizer.model":
        (folder / "tokenizer.json").unlink()
        (folder / name).write_bytes(b"QQ== 0\n")  # as tiktoken's begin
    with (folder / name).open("ab") as file:
        file.truncate(2**40)
    assert_refused(folder, f"{name} has {2**40} bytes, and at most")


def test_gguf_cut_anywhere(gguf_file: Path) -> None:
    content = gguf_file.read_bytes()
    for cut in cuts(content, content.index(b"token_embd.weight"), seed=2):
        gguf_file.write_bytes(cut)
        assert_refused(gguf_file, "fetch the file again")


def test_gguf_with_a_damaged_header(gguf_file: Path) -> None:
    content = gguf_file.read_bytes()
    for damaged in flips(content, 0, content.index(b"token_embd.weight") + 800, 70):
        gguf_file.write_bytes(damaged)
        opened(gguf_file)  # names of tokens and of keys that nobody reads may be any


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.freq_base", float("nan")),
        ("llama.rope.freq_base", float("inf")),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.context_length", 2**32 - 1),
        ("tokenizer.ggml.bos_token_id", "x"),
        ("tokenizer.ggml.eos_token_id", 1.5),
        ("tokenizer.ggml.eot_token_id", "x"),
        ("tokenizer.ggml.eot_token_id", 2**31),
        ("tokenizer.ggml.tokens", [1, 2, 3]),
        ("tokenizer.ggml.tokens", "abc"),
        ("tokenizer.ggml.token_type", "x"),
        ("tokenizer.ggml.merges", [1]),
        ("tokenizer.ggml.pre", [2, 2]),
        ("tokenizer.ggml.add_bos_token", 5),
        ("tokenizer.chat_template", 5),
    ],
)
def test_gguf_values_of_another_kind(tmp_path: Path, key: str, value: Any) -> None:
    weights = random_weights({**TINY_CONFIG, "num_hidden_layers": 1}, seed=0)
    (tmp_path / "source").mkdir()
    path = write_gguf(tmp_path / "source" / "m.gguf", weights, num_hidden_layers=1, metadata={key: value})
    assert_refused(path, str(path))


@pytest.mark.parametrize("name", ["token_embd.weight", "output.weight", "rope_freqs.weight", "blk.0.attn_q.weight"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 0), (64, 64, 1)], ids=str)
def test_gguf_tensors_of_another_shape(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    weights = random_weights({**TINY_CONFIG, "num_hidden_layers": 1}, seed=0)
    weights.pop({"token_embd.weight": "model.embed_tokens.weight", "blk.0.attn_q.weight": Q0}.get(name, ""), None)
    weights[name] = np.zeros(shape, np.float32)
    (tmp_path / "source").mkdir()
    assert_refused(write_gguf(tmp_path / "source" / "m.gguf", weights, num_hidden_layers=1), repr(name))


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": float("nan")}, {"rms_norm_eps": 10**400}, {"rope_theta": float("inf")},
        {"max_position_embeddings": 10**400}, {"tie_word_embeddings": "false"}, {"attention_bias": 1},
        {"mlp_bias": "no"}, {"eos_token_id": True}, {"eos_token_id": 259}, {"eos_token_id": [258, 10**400]},
        {"rope_scaling": {"factor": 8.0}}, {"rope_scaling": []},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10**400}},
        {"sliding_window": 2**31, "architectures": ["MistralForCausalLM"]},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192}},
    ],
    ids=lambda changes: str(changes)[:60],
)  # fmt: skip
def test_configs_that_cannot_be_meant(folder: Path, changes: dict[str, Any]) -> None:
    edit_config(folder, **changes)
    assert_refused(folder)


@pytest.mark.parametrize("token_id", ["x", [1], -1, 1.5, True], ids=repr)
def test_a_first_token_that_is_no_id_where_no_tokenizer_says_another(folder: Path, token_id: Any) -> None:
    (folder / "tokenizer.json").unlink()
    edit_config(folder, bos_token_id=token_id)
    assert_refused(folder, f"config.json: bos_token_id={token_id!r} must be a token id")


def test_llama3_scaling_with_nothing_scaled_may_say_the_models_length(folder: Path) -> None:
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert opened(folder) is None


def write_tokenizer_json(folder: Path, changes: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    changes(data)
    (folder / "tokenizer.json").write_text(json.dumps(data))


def add_token(folder: Path, token_id: int) -> None:
    switches = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {"id": token_id, "content": "<pad>", "special": True, **switches}
    write_tokenizer_json(folder, lambda data: data["added_tokens"].append(added))


@pytest.mark.parametrize("token_id", [259, 2**31, 2**32 - 1])
def test_a_tokenizer_of_another_model(folder: Path, token_id: int) -> None:
    write_tokenizer_json(folder, lambda data: data["model"]["vocab"].update(a=token_id))
    assert_refused(folder, f"the tokenizer has the id {token_id}, but the model knows 259 tokens")


@pytest.mark.parametrize("token_id", [300, 2**32 - 1])
def test_an_added_token_far_beyond_the_others(folder: Path, token_id: int) -> None:
    add_token(folder, token_id)
    assert_refused(folder, f"the tokenizer has the id {token_id}")


@pytest.mark.parametrize(
    "piece", [{"Sequence": {"id": "B", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}]
)
@pytest.mark.parametrize("nested", [True, False])
def test_a_template_that_no_text_fits(folder: Path, tmp_path: Path, piece: dict[str, Any], nested: bool) -> None:
    """The library takes it, and ends in a panic at every text."""
    single = [piece, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    processor = {"type": "Sequence", "processors": [template]} if nested else template
    converted = convert(folder, tmp_path / "earlier", progress=NoProgress())
    for place in (converted / TOKENIZER_FOLDER, folder):
        write_tokenizer_json(place, lambda data: data.update(post_processor=processor))
    with pytest.raises(CheckpointError, match=r"template in its post_processor"):
        load_tokenizer(converted / TOKENIZER_FOLDER)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not usable \(the template"):
        convert(folder, tmp_path / "converted", progress=NoProgress())


def test_an_added_token_that_the_model_does_not_know_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_token(folder, 259)
    assert opened(folder) is None
    assert "1 added tokens of the tokenizer, from id 259 on, are unknown to the model" in caplog.text


@pytest.mark.parametrize("name", ["sentencepiece_first", "tiktoken"])
def test_damaged_vocabularies(name: str, tmp_path: Path) -> None:
    for file in ("tokenizer.model", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((TOKENIZERS / name / file).read_bytes())
    path = tmp_path / "tokenizer.model"
    content = path.read_bytes()
    for damaged in (*cuts(content, len(content), seed=3), *flips(content, 0, len(content), 60)):
        path.write_bytes(damaged)
        told(lambda: read_hf_tokenizer(tmp_path))


@pytest.mark.parametrize(
    "listed", [True, "x", [1], {"a": {"content": "x"}}, {"1.5": {"content": "x"}}, {"999": {}}, {"999": 5}], ids=str
)
@pytest.mark.parametrize("name", ["sentencepiece_first", "tiktoken"])
def test_added_tokens_that_are_no_list_of_tokens(name: str, listed: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((TOKENIZERS / name / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    line = told(lambda: read_hf_tokenizer(tmp_path))
    assert line is not None and "added_tokens_decoder in tokenizer_config.json must list tokens by their ids" in line


@pytest.mark.parametrize("template", [5, [5], [{"name": "default"}], ["x"]], ids=str)
def test_chat_templates_that_are_no_texts(folder: Path, template: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert_refused(folder, "chat_template must be a text, or named texts")


@pytest.mark.parametrize("source", ["{% for message in messages %}{{ message", "{% break %}"])
def test_a_chat_template_that_is_not_valid_is_told_once_and_the_rest_converted(
    source: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "chat_template.jinja").write_text(source)
    convert(folder, folder.parent / "converted", progress=NoProgress())
    (told,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert told.startswith(f"{folder}: its chat template is not valid (")
    assert read_tokenizer(folder.parent / "converted" / TOKENIZER_FOLDER).settings.chat_template == source


def test_what_a_file_says_does_not_reach_the_terminal_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    metadata = {"split.count": "2\n\x1b[31m"}
    assert_refused(write_gguf(tmp_path / "source" / "m.gguf", {}, metadata=metadata), r"one part of 2\n\x1b[31m")


def test_the_number_of_a_meta_rank_costs_nothing(tmp_path: Path) -> None:
    for number in ("00", "99999999999"):
        (tmp_path / f"consolidated.{number}.pth").write_bytes(b"")
    line = told(lambda: consolidated_files(tmp_path))
    assert line is not None and "consolidated.01.pth is missing" in line
