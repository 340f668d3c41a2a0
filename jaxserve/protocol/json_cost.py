"""What parsing JSON would cost, told from its bytes: a parser works in one go, and all else in the process waits for it."""

from __future__ import annotations

from jaxserve.protocol.errors import BadRequestError

MAX_VALUES = 1_200_000  # of a body: the longest list of token ids, and some room
MAX_STRINGS = 300_000  # of its values and names, strings: each costs as much as several numbers
MAX_CONTAINERS = 100_000  # of its values, lists and objects, which cost more still


def check_cost(body: bytes) -> None:
    """Refuses a body that holds too many values, whether or not it is JSON.

    Raises:
        BadRequestError: it does.
    """
    if _num_values(body) <= MAX_VALUES and _num_containers(body) <= MAX_CONTAINERS and body.count(b'"') < MAX_STRINGS:
        return  # the signs in its texts counted, which only makes it more
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")  # what quotes are left begin or end a string
    num_strings = bare.count(b'"') // 2
    if num_strings <= MAX_STRINGS:
        bare = b"".join(bare.split(b'"')[::2])  # what is outside of strings
        if _num_values(bare) <= MAX_VALUES and _num_containers(bare) <= MAX_CONTAINERS:
            return
    raise BadRequestError(
        f"the body holds more than {MAX_VALUES} values, {MAX_STRINGS} strings or {MAX_CONTAINERS} lists and objects",
        code="too_many_values",
    )


def _num_values(body: bytes) -> int:
    return body.count(b",") + 1


def _num_containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")
