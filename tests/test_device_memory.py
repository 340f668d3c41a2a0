"""How much of a GPU's memory is taken and planned with."""

from __future__ import annotations

import os

import pytest

from jaxserve.device_memory import claim_device_memory, usable_device_bytes, usable_in_words

CARD = 80_000_000_000
VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # as JAX takes it: nothing is said; and so it is put back afterwards


def test_a_share_that_was_claimed_is_what_is_planned_with_but_for_gaps() -> None:
    claim_device_memory(0.9)
    assert float(os.environ["XLA_CLIENT_MEM_FRACTION"]) == 0.9
    assert usable_device_bytes(int(0.9 * CARD), 0.9) == pytest.approx(0.9 * 0.97 * CARD)
    assert usable_device_bytes(int(0.9 * CARD), 0.5) == pytest.approx(0.5 * CARD)


def test_devices_that_share_a_model_leave_what_jax_leaves() -> None:
    claim_device_memory(0.9, num_devices=2)
    assert usable_device_bytes(int(0.75 * CARD), 0.9) == pytest.approx(0.75 * 0.97 * CARD)


@pytest.mark.parametrize("variable", VARIABLES)
def test_what_the_environment_says_is_left_alone(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "0.4")
    claim_device_memory(0.9)
    assert [os.environ[each] for each in VARIABLES if os.environ[each]] == ["0.4"]  # JAX refuses to be told twice
    assert usable_device_bytes(int(0.4 * CARD), 0.9) == pytest.approx(0.4 * 0.97 * CARD)


def test_where_jax_was_used_before_its_own_share_is_the_limit() -> None:
    assert usable_device_bytes(int(0.75 * CARD), 0.9) == pytest.approx(0.75 * 0.97 * CARD)
    assert usable_device_bytes(int(0.75 * CARD), 0.6) == pytest.approx(0.6 * CARD)


def test_what_bounds_the_memory_is_told() -> None:
    assert usable_in_words(0.6) == "--gpu-memory-utilization 0.6 of the device's"
    assert usable_in_words(0.9) == (
        "the 0.75 of the device's that JAX has taken, of --gpu-memory-utilization 0.9: XLA_CLIENT_MEM_FRACTION sets it"
    )
    claim_device_memory(0.9)
    assert usable_in_words(0.9) == "--gpu-memory-utilization 0.9 of the device's"
