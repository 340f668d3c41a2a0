"""The command line as a person meets it."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.cli.errors import describe, reported_errors
from jaxserve.cli.main import build_app
from jaxserve.engine.request import QueueFullError


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "jaxserve", *arguments], capture_output=True, text=True, timeout=120)


def test_help_names_the_commands_without_importing_jax() -> None:
    program = "import sys; from jaxserve.cli.main import build_app; build_app(); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
    help_text = CliRunner().invoke(build_app(), ["--help"]).output
    assert all(name in help_text for name in ("chat", "serve", "pull", "convert", "version"))


@pytest.mark.parametrize("flag", ["version", "--version"])
def test_version(flag: str) -> None:
    done = run(flag)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["jaxserve", "jax", "jaxlib", "python"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--port", "70000"), "port=70000 must lie in 0..65535"),
        (
            ("serve", "--max-num-seqs", "8", "--max-num-batched-tokens", "4"),
            "max_num_batched_tokens=4 must not be",
        ),
        (("serve", "--gpu-memory-utilization", "1.5"), "gpu_memory_utilization=1.5 must lie in (0, 1]"),
        (("chat", "--temperature", "3"), "temperature=3.0 must lie in 0..2"),
        (("chat", "no-such-model"), "no-such-model"),
        (("pull", "no-such-model"), "no-such-model"),
    ],
)
def test_mistakes_are_one_line_on_stderr(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("jaxserve: error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_failed_conversion_ends_with_its_reason(tmp_path: Path) -> None:
    done = run("convert", str(tmp_path / "absent"), str(tmp_path / "converted"))
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"jaxserve: error: unknown model '{tmp_path / 'absent'}': give a known name (smollm2-135m-ins"
    )
    assert list(tmp_path.iterdir()) == []


def test_convert_prints_the_folder_it_made(tiny_model_dir: Path, tmp_path: Path) -> None:
    done = run("convert", str(tiny_model_dir), str(tmp_path / "converted"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'converted'}\n"
    assert run("pull", str(tmp_path / "converted")).stdout == done.stdout


def test_serve_ends_when_its_model_cannot_be_had() -> None:
    done = run("serve", "no-such-model", "--port", "0")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("jaxserve: error: unknown model 'no-such-model'")
    assert "Traceback" not in done.stderr


def test_verbose_shows_the_traceback_too() -> None:
    done = run("serve", "--port", "70000", "-v")
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("jaxserve: error: port=70000")


def test_a_wrong_type_is_a_usage_error() -> None:
    done = run("serve", "--port", "x")
    assert done.returncode == 2
    assert "'--port'" in done.stderr


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (CheckpointError("cannot read\n  the file"), "cannot read\\n the file"),  # a name may hold such a mark
        (QueueFullError("full"), "full"),
        (ValueError("port=-1 must …"), "port=-1 must …"),
        (RuntimeError("device 'gpu' was asked for"), "device 'gpu' was asked for"),
        (OSError(errno.ENOSPC, "No space left on device", "/model"), "No space left on device: /model"),
        (OSError(errno.EADDRINUSE, "address in use"), "address in use"),
        (MemoryError(), "MemoryError"),
        (KeyError("layer"), None),
        (NotImplementedError("soon"), None),
    ],
)
def test_errors_that_people_can_act_on_are_described(error: Exception, line: str | None) -> None:
    assert describe(error) == line


def test_bugs_keep_their_traceback() -> None:
    with pytest.raises(KeyError), reported_errors(0):
        raise KeyError("layer")
