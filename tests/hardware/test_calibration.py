"""Calibrations in files: whole, or refused with what is wrong; and what they change of the hardware."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.errors import BadRecordError, ConfigError
from lowtide.hardware import Source, find_hardware, hardware_of, known
from lowtide.hardware.calibration import (
    SCHEMA_VERSION,
    calibration_path,
    current_setting,
    find_calibration,
    load_calibration,
    save_calibration,
)
from tests.hardware.samples import HOST, RATES, SETTING, calibration

CPU = torch.device("cpu")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of this machine's calibration, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(known, "find_calibration", find_calibration)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return calibration_path(None)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "found.json"
    for has_gpu in (True, False):
        saved = calibration(has_gpu=has_gpu)
        save_calibration(saved, path)
        assert load_calibration(path, SETTING) == saved
    assert [each.name for each in path.parent.iterdir()] == ["found.json"]


def test_the_median_of_the_repeats_is_the_rate() -> None:
    (measured,) = calibration().measurements
    assert (measured.median_s, measured.per_s) == (0.2, 1e10)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"device": "NVIDIA T4"}, "the device was NVIDIA L4 and is NVIDIA T4"),
        ({"device_memory_bytes": 16 << 30}, "the device memory was 23.0 GiB and is 16.0 GiB"),
        ({"driver": None}, "the driver was 580.1 and is None"),
        ({"torch": "2.12.0"}, "the torch was 2.11.0 and is 2.12.0"),
        ({"processor": "4 x Chip"}, "the processor was 8 x Chip and is 4 x Chip"),
    ],
)
def test_another_machine_is_told_what_differs(tmp_path: Path, other: dict[str, Any], words: str) -> None:
    path = tmp_path / "found.json"
    save_calibration(calibration(), path)
    with pytest.raises(
        ConfigError, match=f"does not count here: {words}; measure it again with `lowtide hardware"
    ) as told:
        load_calibration(path, replace(SETTING, **other))
    assert told.value.key == "hardware"


def test_a_machine_that_was_not_measured_is_told_how_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was not measured yet: there is no .*/found.json; run `lowtide hardware`"):
        load_calibration(tmp_path / "found.json", SETTING)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], "is corrupt: .*not valid JSON"),
        (lambda text: text.replace('"launch_s": 3e-05', '"launch_s": "soon"'), "is corrupt: .*launch_s.*must be a number"),
        (lambda text: text.replace('"launch_s"', '"lunch_s"'), "is corrupt: unknown key 'host.lunch_s'"),
        (lambda text: text.replace('"launch_s": 3e-05', '"launch_s": -1.0'), "is corrupt: .*launch_s is -1.0"),
        (lambda text: text.replace('"per_s": 6e13', '"per_s": 0.0').replace('"per_s": 60000000000000.0', '"per_s": 0.0'),
         "is corrupt: .*per_s is 0.0"),
        (lambda text: text.replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 99'),
         f"schema version 99, and this Lowtide reads {SCHEMA_VERSION}"),
        (lambda text: "[]", "schema version None"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    path = tmp_path / "found.json"
    save_calibration(calibration(), path)
    text = path.read_text()
    path.write_text(change(text))
    assert path.read_text() != text
    with pytest.raises(BadRecordError, match=f"{words}.*; measure it again with `lowtide hardware --again`"):
        load_calibration(path, SETTING)


def test_this_is_the_machine_as_it_was_measured(kept: Path) -> None:
    mine = current_setting(CPU)
    assert (mine.device, mine.driver, mine.torch) == (None, None, torch.__version__)
    save_calibration(calibration(mine, has_gpu=False), kept)
    this = find_hardware("This")
    assert this == hardware_of(CPU)
    assert (this.name, this.host, this.host_source, this.measured) == ("cpu", HOST, Source.CALIBRATED, None)
    assert this.rates_from == "measured on this machine"


@pytest.mark.parametrize("what", ["missing", "stale", "corrupt"])
def test_what_does_not_count_is_refused_by_name_and_else_not_used(kept: Path, what: str) -> None:
    if what != "missing":
        save_calibration(calibration(replace(current_setting(CPU), processor="other"), has_gpu=False), kept)
    if what == "corrupt":
        kept.write_text("{")
    with pytest.raises(ValueError, match="lowtide hardware"):
        find_hardware("this")
    assert hardware_of(CPU) == find_hardware("cpu")
    assert hardware_of(CPU).rates_from == "not known"


def test_a_device_has_what_was_measured_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    card, found = find_hardware("l4"), calibration()
    measured = known.calibrated(card, found)
    assert (measured.rates, measured.host) == (RATES, HOST)
    assert (measured.context_bytes, measured.context_source) == (400 << 20, Source.CALIBRATED)
    assert measured.cublas_workspace_for("2.11.0") == 9 << 20
    assert (measured.memory_bytes, measured.bf16_flops) == (card.memory_bytes, card.bf16_flops)
    assert found.device is not None
    shared = replace(found, device=replace(found.device, context_bytes=None))
    assert known.calibrated(card, shared).context_bytes == card.context_bytes
    assert measured.note == "rates are those that this machine reached when it was measured: 2026-11-18T20:00:00+00:00"
    # A board that no table has: its step times are known once it was measured.
    assert known.calibrated(find_hardware("24GiB"), found).rates == RATES
    assert card.rates_from == "data sheet, times what an H200 and its host reach of theirs"
