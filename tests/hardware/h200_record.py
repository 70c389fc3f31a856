"""The calibration of an H200 that the figures in the package come from, and the rates that follow from what it timed."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.hardware import SCHEMA
from benchmarks.records import RESULTS, newest
from lowtide.config import from_plain
from lowtide.hardware import find_hardware
from lowtide.hardware.calibration import Measurement
from lowtide.hardware.rates import DeviceRates, KernelRate
from lowtide.lab.calibration.kernels import Sizes, fit_attention, fit_rate

RECORD = "*_h200_c889712"
"""Later ones are of other machines of the kind, whose hosts and links differ by some percent."""


def measurements() -> dict[str, Measurement]:
    """What was timed, by name."""
    found = newest(RESULTS / "hardware", SCHEMA, RECORD).content["calibration"]
    assert isinstance(found, dict)
    timed = [from_plain(Measurement, plain) for plain in found["measurements"]]
    return {each.name: each for each in timed}


def measured_rates() -> DeviceRates:
    """The device's rates; memory as the record itself has fitted it to a step."""
    found = newest(RESULTS / "hardware", SCHEMA, RECORD).content["calibration"]
    assert isinstance(found, dict)
    memory = from_plain(KernelRate, found["device"]["rates"]["memory"])
    timed, sizes = measurements(), Sizes()
    product = fit_rate([each for name, each in timed.items() if name.startswith("product bfloat16")])
    num_bytes = sizes.num_tokens * sizes.hidden_size * 2
    attention = [timed[f"attention bfloat16 length {length}"] for length in sizes.lengths]
    backward = [timed[f"attention bfloat16 length {length} backward"] for length in sizes.lengths]
    sheet = find_hardware("h200").rates
    assert sheet is not None
    return replace(
        sheet,
        bf16=product,
        attention=fit_attention(attention, 4 * num_bytes, product),
        attention_backward=fit_attention(backward, 8 * num_bytes, product),
        memory=memory,
        to_device_bytes_per_s=timed["copy to device beside the other"].per_s,
        to_host_bytes_per_s=timed["copy to host beside the other"].per_s,
    )
