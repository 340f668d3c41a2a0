"""What an earlier start left on disk must serve a later one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

QUESTIONS = "one\n/set temperature=1;seed=3;top_k=20\ntwo\n/set top_k=0;top_p=1\nthree\n"  # greedy, filtered, random


def chat(model: Path, home: Path, jax_cache: Path | None, *, as_tests_run: bool = False) -> str:
    """The answers of a chat in a process of its own, whose caches lie in the given folders."""
    dropped = {"JAX_COMPILATION_CACHE_DIR"} if as_tests_run else {"JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS"}
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    if jax_cache is not None:
        env["JAX_COMPILATION_CACHE_DIR"] = str(jax_cache)
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve", "chat", str(model), "--temperature", "0", "--max-tokens", "8"],
        env={**env, "JAXSERVE_HOME": str(home)},
        input=QUESTIONS.encode(),
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.parametrize("as_tests_run", [True, pytest.param(False, marks=pytest.mark.long)])
def test_programs_from_disk_give_the_same_answers(as_tests_run: bool, tiny_model_dir: Path, tmp_path: Path) -> None:
    first = chat(tiny_model_dir, tmp_path, None, as_tests_run=as_tests_run)
    assert list((tmp_path / "compiled").glob("*.executable"))
    assert chat(tiny_model_dir, tmp_path, None, as_tests_run=as_tests_run) == first


@pytest.mark.long
def test_programs_out_of_jaxs_own_cache_are_not_kept_twice(tiny_model_dir: Path, tmp_path: Path) -> None:
    """XLA's CPU programs from jax's cache fail when they are serialized again and loaded once more."""
    answers = [chat(tiny_model_dir, tmp_path / home, tmp_path / "jax") for home in ("a", "b", "b")]
    assert len(set(answers)) == 1
