"""Figures of a run."""

import pytest

from jaxserve.bench.records import Load, RequestRecord, RunResult, Summary, format_table, summarize
from jaxserve.cli.bench import show


def record(ttft: float, tpot: float, tokens: int = 11, **fields: object) -> RequestRecord:
    return RequestRecord(10, tokens, 100.0, 100.0 + ttft, 100.0 + ttft + tpot * (tokens - 1), **fields)  # type: ignore[arg-type]


def run(*records: RequestRecord, duration: float = 2.0, tokens: float = 100.0) -> RunResult:
    return RunResult(list(records), duration, tokens)


def test_times_of_a_request() -> None:
    one = record(0.5, 0.02)
    assert one.ttft == pytest.approx(0.5)
    assert one.tpot == pytest.approx(0.02)


def test_tokens_that_came_with_the_first_one_took_no_time_of_their_own() -> None:
    one = RequestRecord(10, 11, 0.0, 1.0, 2.0, first_count=6)
    assert one.tpot == pytest.approx(0.2)
    assert RequestRecord(10, 1, 0.0, 1.0, 1.0).tpot is None
    assert RequestRecord(10, 4, 0.0, 1.0, 1.0, first_count=4).tpot is None


def test_a_summary_has_means_and_percentiles_in_milliseconds() -> None:
    records = [record(0.1 * number, 0.01 * number) for number in range(1, 11)]
    summary = summarize(Load("concurrency", 4), [run(*records)])
    assert summary.tpot_ms["mean"] == pytest.approx(55)
    assert summary.tpot_ms["p50"] == pytest.approx(55)
    assert summary.tpot_ms["p90"] == pytest.approx(91)
    assert summary.ttft_ms["mean"] == pytest.approx(550)
    assert summary.output_tokens_per_second == 50
    assert summary.mean_running == 4


def test_figures_of_several_rounds_are_their_medians() -> None:
    runs = [run(record(0.1, tpot), tokens=tokens) for tpot, tokens in ((0.01, 100), (0.02, 300), (0.9, 500))]
    summary = summarize(Load("concurrency", 1), runs)
    assert summary.tpot_ms["mean"] == pytest.approx(20)
    assert summary.output_tokens_per_second == 150
    assert summary.num_requests == 3


def test_times_between_tokens_are_told_over_all_requests_and_of_the_one_that_had_it_worst() -> None:
    calm, disturbed = [5.0] * 999, [5.0] * 50 + [80.0] * 50
    summary = summarize(
        Load("concurrency", 2), [run(record(0.1, 0.01, gaps_ms=calm), record(0.1, 0.01, gaps_ms=disturbed))]
    )
    assert summary.itl_ms is not None
    assert summary.itl_ms["p50"] == pytest.approx(5) and summary.itl_ms["p99"] == pytest.approx(80)
    assert summary.itl_ms["mean"] == pytest.approx((1049 * 5 + 50 * 80) / 1099)
    assert summary.itl_ms["worst"] == pytest.approx(80)
    assert "ITL p99" in format_table([summary]) and " 80.00" in format_table([summary])


def test_records_without_times_between_tokens_say_nothing_of_them() -> None:
    old = record(0.1, 0.01).to_json()
    del old["gaps_ms"]
    assert summarize(Load("concurrency", 1), [run(RequestRecord.from_json(old))]).itl_ms is None


def test_failed_requests_are_counted_and_say_nothing_about_times() -> None:
    summary = summarize(Load("concurrency", 1), [run(record(0.1, 0.01), record(9.0, 9.0, error="status 500"))])
    assert (summary.num_requests, summary.num_failed) == (1, 1)
    assert summary.tpot_ms["mean"] == pytest.approx(10)
    assert "at 1: 1 of 2 requests failed: status 500" in format_table([summary])
    assert summary.first_failure == "status 500" and Summary.from_json(summary.to_json()) == summary


def test_what_a_load_gave_is_told_with_its_failures_as_soon_as_it_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep shows no more of its runs than this line."""
    page = "status 503: <html>\n" + "busy " * 100
    show(summarize(Load("concurrency", 8), [run(record(0.1, 0.01), record(9.0, 9.0, error=page))]))
    line = capsys.readouterr().err
    assert line.startswith("  8: TPOT 10.00 ms; 1 of 2 requests failed: status 503: <html> busy busy")
    assert line.count("\n") == 1 and len(line) < 250
    show(summarize(Load("concurrency", 8), [run(record(0.1, 0.01))]))
    assert capsys.readouterr().err == "  8: TPOT 10.00 ms\n"


def test_nothing_but_failures_is_an_error_with_the_reason() -> None:
    with pytest.raises(RuntimeError, match=r"no request was answered at 2/s: status 429"):
        summarize(Load("rate", 2), [run(record(0.1, 0.1, error="status 429: too many"))])


def test_under_a_rate_the_requests_that_run_are_counted_by_littles_law() -> None:
    # Two answers of one second each within two seconds.
    records = [RequestRecord(1, 11, 0.0, 0.0, 1.0), RequestRecord(1, 11, 1.0, 1.0, 2.0)]
    assert summarize(Load("rate", 1), [run(*records)]).mean_running == pytest.approx(1.0)


def test_the_table_shows_floor_and_share_of_the_bandwidth() -> None:
    summary = Summary(
        Load("concurrency", 8), 24, 0, 1000.0, dict.fromkeys(("mean", "p50", "p90", "p99"), 6.0),
        dict.fromkeys(("mean", "p50", "p90", "p99"), 20.0), 8.0, floor_ms=4.5, host_gap=0.012,
    )  # fmt: skip
    head, row = format_table([summary]).splitlines()
    assert row.split()[:2] == ["8", "24"] and head.split()[:2] == ["load", "requests"]
    assert "4.50  75%" in row and row.endswith("1.2%")
    assert Summary.from_json(summary.to_json()) == summary


@pytest.mark.parametrize("value", [0, -1])
def test_a_load_of_nothing_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Load("rate", value)
