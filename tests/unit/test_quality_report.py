"""What is said of a measurement: words, table, JSON, picture."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.errors import ConfigError
from kvtier_engine.quality.report import (
    as_json,
    recommendation,
    result_table,
    save_plot,
    verdict,
)
from kvtier_engine.quality.results import Figures, Mode, Noise, Report, Result, Skipped

PNG = b"\x89PNG\r\n\x1a\n"


def result(
    codec: str, bits: float, kl: float, *, ppl_low: float = -0.1, db: float | None = 30.0
) -> Result:
    figures = Figures(
        positions=2048,
        kl_mean=kl,
        kl_p99=10 * kl,
        kl_max=100 * kl,
        top1_percent=99.5,
        reference_ppl=20.0,
        ppl=20.02,
        ppl_change_percent=ppl_low + 0.2,
        ppl_change_low=ppl_low,
        ppl_change_high=ppl_low + 0.4,
    )
    return Result(codec, bits, figures, Noise((db, db), (db, db)))


RAW = result("raw", 16.0, 0.0, db=None)
INT8 = result("int8", 8.25, 2e-5)
INT6 = result("int6", 6.25, 4e-4)
INT4 = result("int4", 4.25, 2e-3)
GROUPED = result("int4-g128", 4.1, 5e-2)


def report(*results: Result, skipped: tuple[Skipped, ...] = ()) -> Report:
    return Report("model", "text", Mode.STORAGE, 4, 1536, 512, results, skipped)


@pytest.mark.parametrize(
    ("kl", "words"),
    [
        (0.0, "exact"),
        (1e-12, "no measurable loss"),
        (1e-4, "no measurable loss"),
        (1.01e-4, "very small loss"),
        (1e-3, "very small loss"),
        (5e-3, "small loss"),
        (5.01e-3, "visible loss"),
        (1.0, "visible loss"),
    ],
)
def test_a_verdict_follows_the_mean_kl(kl: float, words: str) -> None:
    assert verdict(result("any", 8.0, kl)) == words


def test_perplexity_that_is_certainly_worse_overrules_a_small_kl() -> None:
    assert verdict(result("any", 8.0, 2e-3, ppl_low=0.5)) == "small loss"
    assert verdict(result("any", 8.0, 2e-3, ppl_low=0.51)) == "visible loss"


def last_line(*results: Result) -> str:
    return recommendation(report(*results)).splitlines()[-1]


def test_the_densest_codec_at_a_very_small_loss_is_advised() -> None:
    assert last_line(RAW, INT8) == "Take int8 (1.94 times as much KV per byte)."
    assert last_line(RAW, INT8, INT6, INT4, GROUPED) == (
        "Take int6 (2.56 times as much KV per byte); where room matters more than quality, "
        "int4 (3.76 times as much KV per byte)."
    )


def test_at_equal_size_the_better_one_is_advised() -> None:
    fp8 = result("fp8", 8.25, 9e-4)
    assert last_line(fp8, INT8).startswith("Take int8")
    assert last_line(INT8, fp8).startswith("Take int8")


def test_what_costs_too_much_is_not_advised() -> None:
    assert last_line(RAW, GROUPED) == "None of these saves anything at a small loss: store raw."
    assert last_line(RAW, INT4, GROUPED) == (
        "Take int4 (3.76 times as much KV per byte) if its loss is acceptable to you, else raw."
    )
    worse = result("int4", 4.25, 2e-3, ppl_low=0.6)
    assert last_line(RAW, worse) == "None of these saves anything at a small loss: store raw."


def test_every_codec_has_its_line() -> None:
    text = recommendation(report(RAW, INT8, skipped=(Skipped("int4", "needs a calibration"),)))
    assert text.splitlines()[:3] == [
        "raw: exact (KL 0.0e+00)",
        "int8: no measurable loss (KL 2.0e-05)",
        "int4: not measured: needs a calibration",
    ]


def test_json_has_the_promised_fields() -> None:
    found = json.loads(json.dumps(as_json(report(RAW, INT8)), allow_nan=False))
    assert found["mode"] == "storage"
    first = found["results"][0]
    assert {
        "codec",
        "bits_per_value",
        "kl_mean",
        "kl_p99",
        "top1_percent",
        "ppl_change_percent",
        "positions",
    } <= first.keys()
    assert first["snr_db"] == {"k": [None, None], "v": [None, None]}
    assert found["results"][1]["snr_db"]["k"] == [30.0, 30.0]


def test_the_table_fits_80_columns() -> None:
    output = io.StringIO()
    wide = result("int5k4v-centred", 4.75, 0.123456, ppl_low=-12.345)
    Console(file=output, width=80).print(result_table(report(RAW, wide)))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "int5k4v-centred  4.750 0.123456 1.234560" in output.getvalue()
    assert "-12.345 .. -11.945" in output.getvalue()


@pytest.mark.parametrize("results", [(RAW,), (RAW, INT8, GROUPED)])
def test_a_picture_is_drawn(tmp_path: Path, results: tuple[Result, ...]) -> None:
    path = tmp_path / "snr.png"
    save_plot(path, report(*results))
    assert path.read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", ["missing/snr.png", "snr.nonsense"])
def test_a_picture_that_cannot_be_written_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--plot"):
        save_plot(tmp_path / name, report(RAW, INT8))
