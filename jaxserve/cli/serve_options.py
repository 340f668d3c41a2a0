"""Arguments of `jaxserve serve` that no other command has. Names follow `vllm serve` where it has one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from jaxserve.config import EngineProcess, ToolCallFormat

# Environment variables. Typer's own reading of them takes none that is blank for none, and flags in place of them.
API_KEYS = "JAXSERVE_API_KEY"
ADMIN_API_KEYS = "JAXSERVE_ADMIN_API_KEY"

Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0: all.")]
Port = Annotated[int, typer.Option("--port", metavar="PORT", help="Port to listen on; 0: any free one.")]
UnixSocket = Annotated[
    str | None, typer.Option(metavar="PATH", help="Unix socket to listen on, in place of address and port.")
]
CertFile = Annotated[str | None, typer.Option(metavar="FILE", help="PEM file with the certificate: serves HTTPS.")]
KeyFile = Annotated[str | None, typer.Option(metavar="FILE", help="PEM file with the certificate's private key.")]
RootPath = Annotated[str, typer.Option(metavar="PATH", help="What a proxy in front puts before every path.")]
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-origins", metavar="ORIGIN",
        help="Web origin whose pages may call the server; may be given several times, '*': any. Unset: none.",
    ),
]  # fmt: skip
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(metavar="COUNT", help="Answers that are generated at once; unset: what suits the device."),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(metavar="TOKENS", help="Tokens that one step computes at most; unset: what suits the device."),
]
MaxNumQueuedRequests = Annotated[
    int,
    typer.Option(
        "--max-num-queued-requests", "--max-num-queued-reqs", metavar="COUNT",
        help="Requests that may wait; one more is refused.",
    ),
]  # fmt: skip
MaxNumQueuedTokens = Annotated[
    int | None,
    typer.Option(metavar="TOKENS", help="Prompt tokens that may wait; a request with more is refused. Unset: any."),
]
TensorParallelSize = Annotated[int, typer.Option(metavar="COUNT", help="Devices that the model is cut across.")]
DataParallelSize = Annotated[
    int, typer.Option(metavar="COUNT", help="Engines with the same model, each with as many devices of its own.")
]
NumNodes = Annotated[int, typer.Option(metavar="COUNT", help="Hosts that share the model, with a process on each.")]
NodeRank = Annotated[
    int, typer.Option(metavar="NUMBER", help="Which of the hosts this is; 0 serves, the others follow it.")
]
MasterAddr = Annotated[str, typer.Option(metavar="ADDRESS", help="Address of host 0, for the others.")]
MasterPort = Annotated[
    int, typer.Option("--master-port", metavar="PORT", help="Port at which the hosts come together.")
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help=f"Key that clients must send; may be given several times, and {API_KEYS} adds to them. None: all may come in.",
    ),
]
ApiKeyFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File with further keys, one on each line; # starts a comment line.")
]
ModeName = Annotated[
    Literal["local", "interactive", "server"],
    typer.Option(help="Sizes left open: 4 sequences and a small cache; 1 and the longest context; all that fits."),
]
AdminApiKey = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="Key that also opens what is for administrators (/flush_cache); may be given several times, and "
        f"{ADMIN_API_KEYS} adds to them.",
    ),
]
PinnedPrompt = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Text of a system prompt that is computed at start and kept."),
]
ServedModelName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Name that clients ask for; unset: MODEL as given.")
]
Seed = Annotated[
    int | None, typer.Option(metavar="NUMBER", help="Of requests that bring none; unset: drawn at random.")
]
AllowSpecialTokens = Annotated[
    bool,
    typer.Option(
        "--allow-special-tokens-in-content",
        help="Let what messages say make control tokens, as Hugging Face does. A user can then speak as the system.",
    ),
]
ToolCallParser = Annotated[
    ToolCallFormat | None,
    typer.Option(help="How the model writes calls of tools; unset: as its chat template tells."),
]
MaxBodyBytes = Annotated[int, typer.Option(metavar="BYTES", help="Longest request body; a longer one is refused.")]
ShutdownTimeout = Annotated[
    float, typer.Option(metavar="SECONDS", help="What running answers get to end in after SIGTERM.")
]
StalledClientTimeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="After this, a client that neither sends nor takes anything is cut off."),
]
TimeoutKeepAlive = Annotated[
    float, typer.Option(metavar="SECONDS", help="What a connection is kept for after an answer, for the next request.")
]
MaxConnections = Annotated[
    int | None,
    typer.Option(metavar="COUNT", help="Clients' connections; one more is refused. Unset: as open files allow."),
]
EngineProcessName = Annotated[
    EngineProcess,
    typer.Option("--engine-process", help="Run the engine in a process of its own; auto: on anything but a CPU."),
]
RestartEngine = Annotated[
    bool, typer.Option("--restart-engine", help="Build a failed engine anew, in place of ending the process.")
]
OtlpTracesEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Where OpenTelemetry spans go, as OTLP over HTTP; needs the extra otel. Unset: none are made.",
    ),
]
AccessLogForm = Annotated[
    Literal["json", "text", "none"], typer.Option(help="A line on stdout for each answer, with its request's id.")
]
LogRequests = Annotated[
    bool, typer.Option("--log-requests", help="Log what each request asks for, without a word of what it says.")
]
LogRequestsContent = Annotated[
    bool, typer.Option("--log-requests-content", help="With --log-requests: log all of each request, prompts included.")
]


def all_api_keys(flags: list[str] | None, variable: str, file: Path | None = None) -> tuple[str, ...]:
    """The keys of all sources: flags, an environment variable (with spaces between them), and a file.

    Raises:
        ValueError: the variable is set, or there is the file, and holds none: the server might be open to everyone; or
            the file cannot be read.
    """
    value = os.environ.get(variable)
    if value is not None and not value.split():
        raise ValueError(f"{variable} is set and holds no key: unset it, or put keys in it, with spaces between them")
    return (*(flags or ()), *(value or "").split(), *(read_api_keys(file) if file else ()))


def read_text(file: Path, flag: str) -> str:
    """A file's text, without the mark that some editors put before UTF-8: it would be a part of a prompt or a key.

    Args:
        flag: that named it.

    Raises:
        ValueError: it cannot be read, or is no UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{flag} {file} is no UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8"
        ) from error
    except OSError as error:
        raise ValueError(f"{flag} {file} cannot be read ({error.strerror}): give a text file") from error


def read_api_keys(file: Path) -> tuple[str, ...]:
    """The keys in a file: a line each, without white space around it; empty lines and those that start with # are none.

    Raises:
        ValueError: there is none in it, which would leave the server open to everyone; or it is no UTF-8 or cannot be read.
    """
    lines = [line.strip() for line in read_text(file, "--api-key-file").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"the API key file {file} holds no key: write one on each line")
    return keys
