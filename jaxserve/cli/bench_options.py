"""Arguments that the commands of `jaxserve bench` share."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def positive(value: float | None) -> float | None:
    """Of an option, which typer names in its message; its own `min=` lets 0 and "nan" through, and tells no value.

    Raises:
        typer.BadParameter: it is no positive, finite number.
    """
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value:g} must be a positive number")
    return value


def not_negative(value: float) -> float:
    """As `positive`, with 0 among what may be given."""
    if not 0 <= value < math.inf:
        raise typer.BadParameter(f"{value:g} must be 0 or a positive number")
    return value


def at_least_one(value: int | None) -> int | None:
    """As `positive`, for counts."""
    if value is not None and value < 1:
        raise typer.BadParameter(f"{value} must be at least 1")
    return value


MeasuredModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Architecture with random weights (llama-3-8b, llama-3-70b, llama-3.2-1b, a JSON file), a known name or a "
        "checkpoint's folder. Not with --endpoint.",
        show_default=False,
    ),
]
WorkloadName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="sharegpt-like, sharegpt:FILE, fixed:PROMPT/OUTPUT, shared-prefix:TOKENS, long-among-short:TOKENS, "
        "azure:FILE, json-schema.",
    ),
]
Concurrency = Annotated[
    str | None, typer.Option(metavar="LIST", help="Requests held in flight: a list such as 1,8,64.")
]
RequestRate = Annotated[
    str | None, typer.Option(metavar="LIST", help="Requests a second, at random times (Poisson): a list such as 1,2,4.")
]
TraceSpeed = Annotated[
    float | None,
    typer.Option(
        metavar="FACTOR",
        callback=positive,
        help="Send at the workload's own times, so much faster than they were recorded.",
    ),
]
NumRequests = Annotated[
    int | None,
    typer.Option(
        metavar="COUNT",
        callback=at_least_one,
        help="Measured at each load; unset: max(8, 3 x concurrency), or 30 s of a rate.",
    ),
]
Rounds = Annotated[
    int,
    typer.Option(metavar="COUNT", callback=at_least_one, help="Repetitions of each load; figures are their medians."),
]
Temperature = Annotated[float, typer.Option(callback=not_negative, help="0 is greedy.")]
Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", callback=positive, help="What one repetition of a load may take.")
]
Endpoint = Annotated[
    str | None, typer.Option(metavar="URL", help="OpenAI endpoint to measure, in place of an engine in this process.")
]
ApiKey = Annotated[
    str | None, typer.Option(metavar="KEY", envvar="OPENAI_API_KEY", help="Key that the endpoint wants.")
]
ServedModelName = Annotated[
    str | None, typer.Option(metavar="NAME", help="What the endpoint calls the model; unset: the first it lists.")
]
PromptForm = Annotated[Literal["token-ids", "text", "chat"], typer.Option(help="How prompts are sent to an endpoint.")]
VocabSize = Annotated[
    int,
    typer.Option(metavar="COUNT", callback=at_least_one, help="Token ids that an endpoint's prompts are drawn from."),
]
IgnoreEos = Annotated[bool, typer.Option(help="Ask an endpoint for answers of full length.")]
ExtraBody = Annotated[str | None, typer.Option(metavar="JSON", help="Further fields of each request to an endpoint.")]
EndpointDevices = Annotated[
    int,
    typer.Option(
        metavar="COUNT", callback=at_least_one, help="Devices that the endpoint runs on, for figures of each device."
    ),
]
ClientName = Annotated[Literal["own", "openai"], typer.Option(help="What reads the streams over HTTP.")]
ClientProcesses = Annotated[
    int,
    typer.Option(metavar="COUNT", callback=at_least_one, help="Processes that the streams over HTTP are spread over."),
]
StaticBatching = Annotated[
    bool, typer.Option("--static-batching", help="Hold each batch until all of it is done, for comparison.")
]
OutputFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Folder for records and figures; loads that are done there are kept. A name ending in .json: one file.",
    ),
]  # fmt: skip


def parse_numbers(text: str, flag: str) -> tuple[float, ...]:
    """The positive, finite numbers of a list such as "1,2.5,8".

    Raises:
        ValueError: it is no such list.
    """
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < value < math.inf for value in values):
        raise ValueError(f"{flag} {text!r} must be a list of positive numbers, such as 1,8,64")
    return values


def parse_counts(text: str, flag: str) -> tuple[int, ...]:
    """As `parse_numbers`, of whole numbers."""
    values = parse_numbers(text, flag)
    if any(value != int(value) for value in values):
        raise ValueError(f"{flag} {text!r} must be a list of whole numbers, such as 1,8,64")
    return tuple(int(value) for value in values)


def parse_json_object(text: str, flag: str) -> dict[str, Any]:
    """Raises:
    ValueError: the text is no JSON object.
    """
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{flag} {text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{flag} {text!r} must be a JSON object")
    return value
