import os
import pty
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from jaxserve.cli.logs import configure_logging
configure_logging(int(sys.argv[1]), shown=("jaxserve.server",))
logging.getLogger("jaxserve.engine").info("engine info")
logging.getLogger("jaxserve.engine").warning("engine warning")
logging.getLogger("jaxserve.server.lifecycle").info("server info")
logging.getLogger("httpx").info("library info")
"""


@pytest.mark.parametrize(
    ("verbose", "expected"),
    [
        (0, ["engine warning", "server info"]),
        (1, ["engine info", "engine warning", "server info"]),
        (2, ["engine info", "engine warning", "server info", "library info"]),
    ],
)
def test_what_is_logged(verbose: int, expected: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(verbose)], capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    assert [line.split(": ", 1 if verbose else 2)[-1] for line in done.stderr.splitlines()] == expected


ACCESS_PROGRAM = """
import logging, sys
from jaxserve.cli.logs import configure_access_log, configure_logging
configure_logging(2)
configure_access_log(enabled=bool(int(sys.argv[1])))
logging.getLogger("jaxserve.access").info("GET /health 200")
"""


@pytest.mark.parametrize(("enabled", "expected"), [(1, "GET /health 200\n"), (0, "")])
def test_access_log_goes_to_stdout_as_it_is(enabled: int, expected: str) -> None:
    program = [sys.executable, "-c", ACCESS_PROGRAM, str(enabled)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (expected, "")


BAR_PROGRAM = """
import logging, sys
from jaxserve.cli.logs import configure_access_log, configure_logging
from jaxserve.progress_display import progress_on
configure_logging(0, shown=("jaxserve.server",), over_bars=True)
configure_access_log(enabled=True)
with progress_on().task("Loading", 30, "layers") as advance:
    advance(1)
    logging.getLogger("jaxserve.access").info("GET /health 503")
    logging.getLogger("jaxserve.server").info("listening")
"""


@pytest.mark.parametrize(("terminal", "start"), [("xterm", "\r\x1b[2K"), ("dumb", "")])
def test_a_line_takes_the_place_of_a_progress_bar(terminal: str, start: str) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": terminal}
    subprocess.run([sys.executable, "-c", BAR_PROGRAM], stdout=theirs, stderr=theirs, env=environment, timeout=60)
    os.close(theirs)
    shown = ""
    try:
        while part := os.read(ours, 65536):
            shown += part.decode()
    except OSError:  # nobody writes any more, on Linux
        pass
    os.close(ours)
    for line in ("GET /health 503", "jaxserve: INFO: listening"):
        assert f"{start}{line}\r\n" in shown, shown
