"""What crosses between an engine in a process of its own and the process that takes requests.

Commands go one way, one pickled object each. The other way, what a step brought is one message: tuples through `marshal`,
which for a step of 64 rows takes 30 µs to write and 36 to read where `pickle` takes 80 and 72.
"""

from __future__ import annotations

import marshal
import pickle
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.constraint import Constraint, TokenConstraint
from jaxserve.engine.client import EngineClient, EngineStats
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.replicas import ReplicatedEngine
from jaxserve.engine.request import RequestOutput, TokenLogprobs
from jaxserve.progress import Progress
from jaxserve.sampling_params import SamplingParams

_PICKLE_PROTOCOL = 5
CallName = Literal["flush_prefix_cache", "pin_prompt", "compile_constraint", "drop_constraint"]


@dataclass(frozen=True)
class HostedEngine:
    """What runs in the engine's process.

    Attributes:
        compile_constraint: makes constraints out of what `ConstraintSource`s hold; None: there are none.
        close: has whatever compiles constraints begin no more of them; called when the engine was shut down.
        drop_constraint: takes one call of `compile_constraint` back, so that nothing is compiled that nobody waits for.
    """

    engine: EngineClient | ReplicatedEngine
    compile_constraint: Callable[[Any], Future[Constraint]] | None = None
    close: Callable[[], None] = lambda: None
    drop_constraint: Callable[[Any], None] = lambda source: None


StartEngine = Callable[[Progress], HostedEngine]  # run in the engine's process, so it must be possible to pickle it


@dataclass(frozen=True)
class ConstraintSource:
    """Stands for a constraint in the process that cannot have it compiled.

    Attributes:
        source: what it is compiled from; can be pickled.
    """

    source: Any

    def start(self) -> TokenConstraint:
        raise TypeError("this constraint is compiled in the engine's process alone")


@dataclass(frozen=True)
class Submit:
    """Queue a request.

    Attributes:
        prompt_bytes: its `token_bytes`.
    """

    request_id: str
    prompt_bytes: bytes
    sampling: SamplingParams
    cache_salt: str | None
    priority: int


@dataclass(frozen=True)
class Abort:
    request_id: str
    index: int | None


@dataclass(frozen=True)
class Call:
    """Ask for something that is answered by a `Reply` of the same number."""

    number: int
    name: CallName
    argument: Any = None


@dataclass(frozen=True)
class Shutdown:
    pass


Command = Submit | Abort | Call | Shutdown


@dataclass(frozen=True)
class Snapshot:
    """The engine's numbers at a moment."""

    stats: EngineStats
    is_ready: bool


@dataclass(frozen=True)
class Ready:
    """The engine runs.

    Attributes:
        limits: of each of `num_engines`.
    """

    config: EngineConfig
    model_config: ModelConfig
    device_kind: str
    max_model_len: int
    limits: SchedulerLimits
    num_engines: int
    snapshot: Snapshot


@dataclass(frozen=True)
class Failed:
    """The engine could not be started, or has failed for good."""

    error: BaseException


@dataclass(frozen=True)
class Reply:
    number: int
    value: Any = None
    error: BaseException | None = None


Event = Ready | Failed | Reply | Snapshot


def pickled(message: Command | Event) -> bytes:
    return pickle.dumps(message, _PICKLE_PROTOCOL)


def encode_event(event: Event) -> bytes:
    return marshal.dumps(((), pickled(event)))


def encode_outputs(outputs: Sequence[RequestOutput], snapshot: Snapshot | None) -> bytes:
    """What steps brought, and the numbers after them."""
    rows = [_row(output) for output in outputs]
    return marshal.dumps((rows, b"" if snapshot is None else pickled(snapshot)))


def _row(output: RequestOutput) -> tuple[Any, ...]:
    """A plain tuple, and plain ones in it."""
    if output.logprobs is not None or output.prompt_logprobs is not None:
        output = output._replace(logprobs=_plain(output.logprobs), prompt_logprobs=_plain(output.prompt_logprobs))
    return tuple(output)


def decode(message: bytes) -> tuple[list[RequestOutput], Event | None]:
    """Inverse of both."""
    rows, event = marshal.loads(message)
    return [_output(row) for row in rows], pickle.loads(event) if event else None


def _output(row: tuple[Any, ...]) -> RequestOutput:
    output = RequestOutput._make(row)
    if output.logprobs is not None or output.prompt_logprobs is not None:
        output = output._replace(logprobs=_places(output.logprobs), prompt_logprobs=_places(output.prompt_logprobs))
    return output


def _plain(places: Sequence[TokenLogprobs | None] | None) -> Any:
    if places is None:
        return None
    return tuple(place and (place.token_id, place.logprob, place.top) for place in places)


def _places(plain: Any) -> Any:
    """Inverse of `_plain`."""
    return None if plain is None else tuple(place and TokenLogprobs(*place) for place in plain)


def portable(error: BaseException) -> BaseException:
    """The error itself where it can cross to another process, and else one that says the same.

    Where it was raised is told in a note, since tracebacks cannot cross.
    """
    error.add_note("in the engine's process:\n" + "".join(traceback.format_tb(error.__traceback__)))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does not bear: other arguments than its own, a part that is not data
        copy = None
    if type(copy) is type(error) and str(copy) == str(error):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
