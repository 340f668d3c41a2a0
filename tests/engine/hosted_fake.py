"""An engine over a fake device, for a process of its own: files in a folder say what it does next."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jaxserve.config import EngineConfig
from jaxserve.constraint import Constraint, TokenConstraint
from jaxserve.engine.client import EngineClient
from jaxserve.engine.process_messages import HostedEngine
from jaxserve.engine.request import RequestError
from jaxserve.engine.scheduler import Scheduler
from jaxserve.progress import Progress
from tests.engine.client_harness import MODEL_CONFIG
from tests.engine.fake_device import FakeRunner
from tests.engine.scheduler_harness import make_limits
from tests.engine.test_constraints import WordRule

logger = logging.getLogger(__name__)


def start_fake(folder: Path, config: EngineConfig, progress: Progress) -> HostedEngine:
    """Fetches no step while `folder` has a file "closed", fails when it has "fault", and leaves "ended" at its end.

    "dropped" tells the last rule that nobody waits for any more.
    """
    with progress.task("starting", None, "engines"):
        limits = make_limits(seqs=2)

    def before_fetch(step: int) -> None:
        del step
        while (folder / "closed").exists():
            time.sleep(0.001)
        if (folder / "fault").exists():
            raise RuntimeError("the device is gone")

    engine = EngineClient(
        config=config,
        model_config=MODEL_CONFIG,
        scheduler=Scheduler(limits),
        runner=FakeRunner(limits, before_fetch),
        device_kind="fake",
    )
    engine.start()
    logger.info("started")

    def drop(source: object) -> None:
        (folder / "dropped").write_text(repr(source))

    return HostedEngine(engine, lambda source: compile_rule(source, folder), (folder / "ended").touch, drop)


@dataclass(frozen=True)
class HeldRule:
    """A rule that begins with a file "beginning", and goes on when there is no file "held" any more."""

    rule: WordRule
    folder: Path

    def start(self) -> TokenConstraint:
        (self.folder / "beginning").touch()
        while (self.folder / "held").exists():
            time.sleep(0.02)
        if (self.folder / "broken").exists():
            raise RuntimeError("a rule that cannot begin")
        return self.rule.start()


def compile_rule(source: tuple[tuple[int, ...], ...], folder: Path) -> Future[Constraint]:
    """A rule of words from their sets; of one that begins with an empty set a `HeldRule`, when no file is "compiling"."""
    rule: Future[Constraint] = Future()
    (folder / "frozen").write_text(str(gc.get_freeze_count()))
    if source and not source[0]:
        held = HeldRule(WordRule(source[1:], len(source) - 1, jumps=False), folder)

        def compile_held() -> None:
            (folder / "began").touch()
            while (folder / "compiling").exists():
                time.sleep(0.001)
            rule.set_result(held)

        ThreadPoolExecutor(1, thread_name_prefix="jaxserve-rules").submit(compile_held)
        return rule
    if source:
        rule.set_result(WordRule(source, len(source), jumps=False))
    else:
        rule.set_exception(RequestError("no words", parameter="words"))
    return rule


def refuse_to_start(progress: Progress) -> HostedEngine:
    del progress
    raise RequestError("no such model", parameter="model")


def die_at_start(progress: Progress) -> HostedEngine:
    del progress
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it goes on after its end")


def log_to_file(path: Path) -> None:
    logging.basicConfig(filename=path, level=logging.INFO)
