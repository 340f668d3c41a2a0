"""One model over all devices beside replicas over fewer each: what is set against what, in words and as a chart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxserve.bench.parallelism import comparisons, crossing
from jaxserve.bench.records import Load
from jaxserve.bench.results import Series, find_series
from jaxserve.cli.main import build_app
from tests.bench.made_up_runs import LOADS, series_of, write_run


def test_where_two_curves_cross() -> None:
    loads = np.array([1.0, 4.0, 16.0, 64.0])
    rising, flat = (loads, np.array([2.0, 3.0, 5.0, 9.0])), (loads, np.full(4, 4.0))
    assert crossing(rising, flat) == pytest.approx(8.0, rel=0.02)  # halfway between 4 and 16 on a logarithmic axis
    assert crossing(flat, rising) is None  # the second one is never the lower one for good
    assert crossing(rising, (loads, np.full(4, 1.0))) is None  # nor from some load on: it always is


def test_parallelism_is_compared_within_a_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from jaxserve.bench.charts_choices import parallelism

    for model, tpot_ms in (("a", 5.0), ("b", 50.0)):
        for degree in (1, 2):
            settings = {"tensor_parallel_size": degree}
            write_run(tmp_path, f"{model} TP{degree}", model=model, tpot_ms=tpot_ms / degree, num_devices=degree,
                      settings=settings)  # fmt: skip
    figure = parallelism(find_series(tmp_path))
    assert figure is not None
    tops = [max(axes.lines[1].get_ydata()) for axes in figure.axes]  # of data parallelism, from one device's figures
    assert len(tops) == 2 and tops[0] < 10 < 50 < tops[1]
    assert figure.axes[0].get_title().startswith("a TP2:") and figure.axes[1].get_title().startswith("b TP2:")


def test_loads_with_failed_requests_decide_nothing(tmp_path: Path) -> None:
    for degree in (1, 2):
        write_run(
            tmp_path, f"TP{degree}", tpot_ms=5.0 / degree, num_devices=degree, settings={"tensor_parallel_size": degree}
        )
    one, two = find_series(tmp_path)
    [whole] = comparisons([one, two])

    def failing(part: Series, failed: Sequence[int]) -> Series:
        points = [
            replace(point, summary=replace(point.summary, num_failed=int(number in failed)))
            for number, point in enumerate(part.points)
        ]
        return replace(part, points=points)

    [partly] = comparisons([one, failing(two, [len(LOADS) - 1])])
    assert str(partly) == str(replace(whole, wide=replace(two, points=two.points[:-1]))) != str(whole)
    assert comparisons([one, failing(two, range(len(LOADS)))]) == []


def write_eight(folder: Path, **wide: Any) -> None:
    """One model over eight devices; two replicas over four each; the same with speculation, from one replica's figures."""
    settings = {"tensor_parallel_size": 4, "data_parallel_size": 2}
    write_run(folder, "TP4 x DP2", tpot_ms=6.0, growth_ms=0.04, num_devices=8, settings=settings)
    write_run(folder, "TP4", tpot_ms=6.0, growth_ms=0.08, num_devices=4, settings={"tensor_parallel_size": 4})
    write_run(folder, "TP8", num_devices=8, settings={"tensor_parallel_size": 8}, **wide)
    speculating = {"speculative_config": "{}", "tensor_parallel_size": 4}
    write_run(folder, "TP4 speculation", tpot_ms=4.0, growth_ms=0.16, num_devices=4, settings=speculating)
    speculating = {"speculative_config": "{}", "tensor_parallel_size": 8}
    write_run(folder, "TP8 speculation", tpot_ms=3.0, growth_ms=0.11, num_devices=8, settings=speculating)


def test_replicas_over_several_devices_are_set_against_one_model_over_all(tmp_path: Path) -> None:
    """Replicas that were measured count before figures of one, and those that speculate are another matter."""
    write_eight(tmp_path, tpot_ms=4.0, growth_ms=0.08, noise=0.0)
    found = {comparison.wide.name: comparison for comparison in comparisons(find_series(tmp_path))}
    assert {name: (each.narrow.name, each.times) for name, each in found.items()} == {
        "TP8": ("TP4 x DP2", 1), "TP8 speculation": ("TP4 speculation", 2),
    }  # fmt: skip
    # 4 + 0.08 n and 6 + 0.04 n meet at 50 in flight and 8 ms, where n / TPOT is 6250 tokens a second.
    text = str(found["TP8"])
    assert text.startswith(
        "TP4 x DP2 (measured) gives more output tokens a second than TP8 at the same time per token from "
    )
    start, tokens = float(text.split(" from ")[1].split()[0]), text.split("each gives ")[1].split()[0].rstrip(",")
    assert start == pytest.approx(8.0, abs=0.1) and float(tokens.replace(",", "")) == pytest.approx(6250, rel=0.03)
    # 3 + 0.11 n and, with half of them on each replica, 4 + 0.08 n meet at 33 in flight and 6.7 ms.
    text = str(found["TP8 speculation"])
    assert text.startswith("2 x TP4 speculation (from 4 devices' figures) gives more")
    assert float(text.split(" from ")[1].split()[0]) == pytest.approx(6.7, abs=0.2)


def test_one_that_is_always_better_and_two_that_have_nothing_in_common(tmp_path: Path) -> None:
    write_eight(tmp_path / "a", tpot_ms=4.0, growth_ms=0.06, noise=0.0)
    plain = next(each for each in comparisons(find_series(tmp_path / "a")) if each.wide.name == "TP8")
    assert str(plain) == (
        "TP8 gives more output tokens a second than TP4 x DP2 (measured) at the same time per token, whichever it is of the "
        "6.0 to 7.8 ms that both have."
    )
    write_eight(tmp_path / "b", tpot_ms=1.0, growth_ms=0.01, noise=0.0)
    plain = next(each for each in comparisons(find_series(tmp_path / "b")) if each.wide.name == "TP8")
    assert str(plain) == (
        "TP8 is faster than TP4 x DP2 (measured) at every load that was measured: "
        "1.0 to 1.6 ms per token, and 6.0 to 8.5 ms."
    )


def test_two_that_have_one_time_in_common_are_compared_at_it(tmp_path: Path) -> None:
    """One of them was measured at a single load, whose time lies within the other's."""
    write_run(tmp_path, "TP1", tpot_ms=5.0, growth_ms=0.1, noise=0.0, settings={"tensor_parallel_size": 1})
    settings = {"tensor_parallel_size": 2}
    write_run(tmp_path, "TP2", tpot_ms=7.0, noise=0.0, num_devices=2, loads=LOADS[:1], settings=settings)
    [found] = comparisons(find_series(tmp_path))
    # 5 + 0.1 n is 7 ms at 20 in flight, twice: 40 / 7 ms, where TP2 has one.
    text = str(found)
    assert text.startswith("2 x TP1 (from one device's figures) gives more output tokens a second than TP2 at 7.")
    assert "ms per token, the only time that both have: " in text and "every load" not in text


def without_tpot(series: Series, *, loads: Sequence[Load]) -> Series:
    """As where no request of these loads got a second token."""
    points = [
        replace(point, summary=replace(point.summary, tpot_ms=dict.fromkeys(point.summary.tpot_ms, 0.0)))
        if point.summary.load in loads
        else point
        for point in series.points
    ]
    return replace(series, points=points)


def test_loads_without_a_time_per_token_are_not_compared(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from jaxserve.bench.charts_choices import parallelism

    one = series_of(tmp_path, "TP1", tpot_ms=5.0, settings={"tensor_parallel_size": 1})
    two = series_of(tmp_path, "TP2", tpot_ms=3.0, num_devices=2, settings={"tensor_parallel_size": 2})
    part = without_tpot(two, loads=LOADS[:1])
    [found] = comparisons([without_tpot(one, loads=LOADS[:1]), part])
    [clean] = comparisons([replace(each, points=each.points[1:]) for each in (one, two)])
    assert str(found) == str(clean)
    figure = parallelism([one, part])
    assert figure is not None and min(figure.axes[0].lines[0].get_ydata()) > 3
    assert comparisons([one, without_tpot(two, loads=LOADS)]) == []
    assert comparisons([without_tpot(one, loads=LOADS), two]) == []
    assert parallelism([one, without_tpot(two, loads=LOADS)]) is None


def test_models_whose_runs_are_called_alike_get_a_panel_each(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from jaxserve.bench.charts_choices import parallelism

    series = [
        series_of(tmp_path / model, f"TP{degree}", model=model, tpot_ms=5.0 / degree, num_devices=degree,
                  settings={"tensor_parallel_size": degree})
        for model in ("a", "b")
        for degree in (1, 2)
    ]  # fmt: skip
    figure = parallelism(series)
    assert figure is not None
    assert [axes.get_title().splitlines()[0] for axes in figure.axes] == ["a, TP2:", "b, TP2:"]


def test_the_report_says_what_replicas_give_and_draws_a_panel_for_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from jaxserve.bench.charts_choices import parallelism

    monkeypatch.setattr("jaxserve.bench.report.draw_charts", lambda series, folder: [])  # each takes a second
    write_eight(tmp_path, tpot_ms=4.0, growth_ms=0.08)
    done = CliRunner().invoke(build_app(), ["bench", "report", str(tmp_path)])
    said = json.loads((tmp_path / "summary.json").read_text())["parallelism"]
    assert done.exit_code == 0 and len(said) == 2 and all(sentence in done.output for sentence in said)
    assert said[0].replace("'", "&#x27;") in (tmp_path / "report.html").read_text()
    figure = parallelism(find_series(tmp_path))
    assert figure is not None
    titles = [axes.get_title() for axes in figure.axes]
    assert [title.split(" (")[0] for title in titles] == [
        "TP8:\nTensor or data parallelism on 8 devices", "TP8 speculation:\nTensor or data parallelism on 8 devices",
    ]  # fmt: skip
    labels = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert labels[0] == ["tensor parallel on 8", "data parallel on 8, 4 each (measured)"]
    assert labels[1] == ["tensor parallel on 8", "data parallel on 8, 4 each (from 4 devices' figures)"]
