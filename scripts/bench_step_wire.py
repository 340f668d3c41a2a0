"""What it costs the first of several hosts to tell the others of a step.

    python scripts/bench_step_wire.py --sequences 64 --followers 1

The others are processes of this machine. Sending is what the engine's thread spends on it; a step is known when the last of
the others has made it of bytes again, which is half of the way there and back.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import time
from multiprocessing.connection import Connection, Listener

import numpy as np

from jaxserve.engine.cluster import connect, without_delay
from jaxserve.engine.request import Request
from jaxserve.engine.schedule import DecodeRow, PrefillChunk, ScheduledBatch
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.step_wire import StepDecoder, encode_step
from jaxserve.sampling_params import SamplingParams

KEY = b"of this benchmark alone"
ANSWER = b"known"
PAGE_SIZE = 16


def follower(port: int) -> None:
    """Makes steps of what comes, and answers each one that wants an answer."""
    connection = connect("127.0.0.1", port, KEY)
    decoder = StepDecoder()
    while message := connection.recv_bytes():
        decoder.decode_step(message[1:])
        if message[:1] == b"?":
            connection.send_bytes(ANSWER)


def sequence(tokens: int) -> Sequence:
    prompt = tuple(range(tokens))
    request = Request("request", prompt, SamplingParams(temperature=0.0), arrival_time=0.0)
    return Sequence(request, 0, 0, frozenset(), 100, token_ids=list(prompt))


def chunk(some: Sequence, slot: int, length: int) -> PrefillChunk:
    pages = tuple(range(len(some.token_ids) // PAGE_SIZE))
    return PrefillChunk(some, slot, 0, tuple(some.token_ids[:length]), pages, samples=True, output_index=0)


def measure(connections: list[Connection], batch: ScheduledBatch, steps: int) -> tuple[list[float], list[float], int]:
    """Seconds that sending takes, and until every other host knows the step; and the message's bytes."""
    sending, knowing = [], []
    message = b""
    for _ in range(steps):
        started = time.perf_counter()
        message = b"?" + encode_step(batch)
        for connection in connections:
            connection.send_bytes(message)
        sent = time.perf_counter()
        for connection in connections:
            connection.recv_bytes()
        knowing.append((sent - started) + (time.perf_counter() - sent) / 2)
        sending.append(sent - started)
        time.sleep(0.002)  # as if a step ran
    return sending, knowing, len(message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each sequence")
    parser.add_argument("--followers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
        others = [spawn.Process(target=follower, args=(listener.address[1],)) for _ in range(options.followers)]
        for other in others:
            other.start()
        connections = [without_delay(listener.accept()) for _ in others]
    sequences = [sequence(options.prompt) for _ in range(options.sequences)]
    admitted = ScheduledBatch((), tuple(chunk(some, slot, 1) for slot, some in enumerate(sequences)))
    measure(connections, admitted, 1)
    rows = tuple(DecodeRow(some, slot, slot if slot % PAGE_SIZE == 0 else -1, 3) for slot, some in enumerate(sequences))
    prefill = ScheduledBatch(rows, (chunk(sequences[0], options.sequences, options.prompt),))
    print(f"Python {platform.python_version()}, {options.followers} other host(s), {options.steps} steps")
    print("| step | bytes | sending, us: p5 | median | p99 | known after, us: p5 | median | p99 |")
    print("|---|---|---|---|---|---|---|---|")
    for name, batch in (
        (f"decode {options.sequences}", ScheduledBatch(rows, ())),
        (f"the same + a chunk of {options.prompt}", prefill),
    ):
        sending, knowing, size = measure(connections, batch, options.steps)
        cells = [f"{value * 1e6:.0f}" for times in (sending, knowing) for value in np.percentile(times, [5, 50, 99])]
        print(f"| {name} | {size} | {' | '.join(cells)} |")
    for connection in connections:
        connection.send_bytes(b"")
        connection.close()
    for other in others:
        other.join()


if __name__ == "__main__":
    main()
