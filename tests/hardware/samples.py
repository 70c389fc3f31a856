"""Calibrations made by hand."""

from __future__ import annotations

from lowtide.hardware.calibration import Calibration, MeasuredDevice, Measurement, Setting
from lowtide.hardware.rates import AttentionRate, DeviceRates, HostRates, KernelRate, UpdateRates

SETTING = Setting(
    device="NVIDIA L4", device_memory_bytes=23 << 30, driver="580.1", torch="2.11.0", processor="8 x Chip"
)
UPDATES = UpdateRates(exact=1e9, fp32=2e9, eight_bit=3e9, torch_fused=4e9, torch=5e9)
RATES = DeviceRates(
    fp32=KernelRate(per_s=1e13, start_s=1e-6),
    bf16=KernelRate(per_s=6e13, start_s=5e-6),
    fp16=None,
    attention=AttentionRate(share=0.5, bytes_per_s=1e12),
    attention_backward=AttentionRate(share=0.25, bytes_per_s=1e11),
    memory=KernelRate(per_s=2e11, start_s=3e-6),
    to_device_bytes_per_s=2e10,
    to_host_bytes_per_s=1e10,
    updates=UPDATES,
)
HOST = HostRates(launch_s=3e-5, updates=UPDATES, updates_beside_copies=UPDATES.times(0.5), memory_bytes_per_s=4e10)


def calibration(setting: Setting = SETTING, *, has_gpu: bool = True) -> Calibration:
    device = MeasuredDevice(rates=RATES, context_bytes=400 << 20, cublas_workspace_bytes=9 << 20)
    return Calibration(
        setting=setting,
        measured_at="2026-11-18T20:00:00+00:00",
        lowtide="0.1.0 0123abc",
        took_s=12.5,
        device=device if has_gpu else None,
        host=HOST,
        measurements=(Measurement(name="product", work=2e9, unit="FLOP", times_s=(0.3, 0.1, 0.2)),),
        notes=("a note",),
    )
