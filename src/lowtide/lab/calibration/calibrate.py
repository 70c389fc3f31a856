"""`lowtide.calibrate`: measure this machine once, and keep what was found for the predictions to come."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import torch

from lowtide.errors import ConfigError, HardwareError
from lowtide.hardware import Hardware
from lowtide.hardware.calibration import (
    Calibration,
    MeasuredDevice,
    calibration_path,
    current_setting,
    find_calibration,
    save_calibration,
)
from lowtide.hardware.known import kind_of
from lowtide.hardware.machine import cache_folder, find_commit, lowtide_version
from lowtide.hardware.rates import DeviceRates, HostRates
from lowtide.lab.calibration import kernels, steps
from lowtide.lab.calibration.kernels import Sizes, Timer
from lowtide.units import GiB, format_bytes

_NEEDED_BYTES = 4 * GiB
_PLENTY_BYTES = 16 * GiB


def calibrate(*, again: bool = False, on_progress: Callable[[str], None] | None = None) -> Calibration:
    """Measure this machine, in under a minute, or give what was measured before.

    Measured are the device's matrix products, attention, memory and copies, updates on the device and the host, and how long the
    host's Python takes to launch operators and to manage a session. `prepare` then predicts with these rates, and so does
    `plan(..., hardware="this")`. Without a GPU only the host is measured.

    Args:
        again: Measure even where a calibration of this machine is kept.
        on_progress: Is told what is being measured.

    Raises:
        HardwareError: The device has too little free memory to be measured.
        ConfigError: The calibration cannot be kept.

    Example:
        >>> import lowtide
        >>> found = lowtide.calibrate()  # doctest: +SKIP
        >>> found.host.updates.exact  # doctest: +SKIP
        127000000000.0
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    kept = None if again else find_calibration(device)
    if kept is not None:
        return kept
    found = measure(device, kind_of(device), sizes_for(device), on_progress or (lambda text: None))
    path = calibration_path(found.setting.device)
    try:
        save_calibration(found, path)
    except OSError as error:
        raise ConfigError(
            f"the calibration cannot be kept in {cache_folder()}: {error}; name a folder that can be written in XDG_CACHE_HOME"
        ) from error
    return found


def sizes_for(device: torch.device) -> Sizes:
    """Sizes that the device's free memory holds.

    Raises:
        HardwareError: It holds none.
    """
    sizes = Sizes()
    if device.type != "cuda":
        return replace(sizes, model_dtype="float32", num_updated=1 << 25)
    free, total = torch.cuda.mem_get_info(device)
    if free < _NEEDED_BYTES:
        raise HardwareError(
            f"{torch.cuda.get_device_name(device)} has {format_bytes(free)} of its {format_bytes(total)} free, and measuring it "
            f"takes {format_bytes(_NEEDED_BYTES)}; end what else runs there"
        )
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        sizes = replace(sizes, dtypes=("float16", "float32"), model_dtype="float16")
    if free < _PLENTY_BYTES:
        sizes = replace(
            sizes, num_tokens=2048, lengths=(256, 512, 2048), large_batch=(1, 2048), num_updated=1 << 24,
            memory_bytes=128 << 20,
        )  # fmt: skip
    return sizes


def measure(device: torch.device, hardware: Hardware, sizes: Sizes, tell: Callable[[str], None]) -> Calibration:
    """Measure a device and its host; on the CPU only the host. The caller's random numbers are left as they are."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        return _measure(device, hardware, sizes, tell)


def _measure(device: torch.device, hardware: Hardware, sizes: Sizes, tell: Callable[[str], None]) -> Calibration:
    began_s = time.perf_counter()
    timer = Timer(device, sizes, tell)
    tell("tracing the steps to be timed")
    small = steps.read_step(sizes.small, sizes.small_batch, sizes.model_dtype, hardware)
    host = HostRates().launching(steps.measure_step(timer, small, "step of a small model") / len(small.ops))
    found, notes = None, []
    if device.type == "cuda":
        large = steps.read_step(sizes.large, sizes.large_batch, sizes.model_dtype, hardware)
        workspace_bytes = kernels.workspace_bytes(device)
        host = steps.measure_session(timer, small, host)
        rates, copies = measure_device(timer, large)
        found = MeasuredDevice(
            rates=rates, context_bytes=kernels.context_bytes(device), cublas_workspace_bytes=workspace_bytes
        )
        host = replace(host, pin_bytes_per_s=kernels.measure_pinning(timer))
        if found.context_bytes is None:
            notes.append(
                "other processes use the device, so its context was not measured; that of the data sheet stands"
            )
    else:
        copies = None
        notes.append(
            "no GPU: only the host was measured; what a session's Python takes is that of an H200's host, scaled by the launches"
        )
    host = measure_host(timer, host, copies)
    return Calibration(
        setting=current_setting(device),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        lowtide=f"{lowtide_version()} {find_commit()}",
        took_s=time.perf_counter() - began_s,
        device=found,
        host=host,
        measurements=tuple(timer.found),
        notes=tuple(notes),
    )


def measure_device(timer: Timer, large: steps.Step) -> tuple[DeviceRates, kernels.Copies]:
    """Kernels, copies and updates of the device; the copies go on to be run beside the host's updates."""
    sizes = timer.sizes
    memory = kernels.measure_memory(timer)
    products = {}
    for dtype in sizes.dtypes:
        products[dtype] = kernels.measure_products(timer, dtype)
        _release(timer)
    own = products[sizes.model_dtype]
    forward, backward = kernels.measure_attention(timer, sizes.model_dtype, own)
    _release(timer)
    device_updates = steps.measure_device_updates(timer)
    _release(timer)
    copies = kernels.Copies(timer)
    links = copies.measure()
    rates = DeviceRates(
        fp32=products["float32"],
        bf16=products.get("bfloat16"),
        fp16=products.get("float16"),
        attention=forward,
        attention_backward=backward,
        memory=memory,
        to_device_bytes_per_s=links.to_device,
        to_host_bytes_per_s=links.to_host,
        updates=device_updates,
    )
    step_s = steps.measure_step(timer, large, "step of a large model")
    _release(timer)
    rates = replace(
        rates,
        memory=steps.fit_memory(large, step_s, rates),
        updates=steps.measure_updates_in_session(timer, large, step_s, device_updates),
    )
    _release(timer)
    return rates, copies


def measure_host(timer: Timer, host: HostRates, copies: kernels.Copies | None) -> HostRates:
    """Memory and updates of the host, alone and beside copies."""
    alone, beside = steps.measure_host_updates(timer, copies)
    if beside is None:
        beside = alone.times(host.updates_beside_copies.exact / host.updates.exact)
    return replace(
        host, updates=alone, updates_beside_copies=beside, memory_bytes_per_s=steps.measure_host_memory(timer)
    )


def _release(timer: Timer) -> None:
    gc.collect()
    if timer.is_cuda:
        torch.cuda.empty_cache()
