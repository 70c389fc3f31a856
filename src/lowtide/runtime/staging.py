"""How much of the host is for gradients that wait there for their updates.

Note [Gradients that wait]
In backward, gradients may come faster than the host updates: 8 billion parameters have 16 GB of them in bf16, which come
within 0.6 s, and the host gets through 8 GB/s. What finds no room holds up the backward. Where the host updates all, 2 GiB
are enough: it is busy from the first gradient to the last in any case. Where the device updates a part, which comes last,
the host could catch up meanwhile, and in the next forward; but if the backward had to go at its pace before, not much is
left to do then, and it idles. So more room is of use there, as much as all of the host's gradients, and no more than the
device's part beside the 2 GiB: a host that is slower than the backward does not catch up with more while that part is made.
It comes out of what the plan leaves of the host, see `SHARE_OF_REST`.
"""

from __future__ import annotations

from lowtide.errors import PlanError
from lowtide.units import format_bytes

ENOUGH_BYTES = 1 << 31
"""Where the host updates all."""
SHARE_OF_REST = 0.25
"""Of what the plan leaves of the host: what may be taken for more than is needed."""


def staging_for(wanted: int | None, *, least: int, on_host: int, on_device: int, waits: bool) -> tuple[int, int]:
    """Bytes that a plan takes in any case, and as many as it could make use of.

    Args:
        wanted: What the plan says; None leaves it to us.
        least: What the largest gradient needs to go on its way.
        on_host: Bytes of gradients that go to the host for updates there.
        on_device: Bytes of what the device updates.
        waits: Whether gradients wait there for updates that take their time, which more room would hide.

    Raises:
        PlanError: The plan has less than the least.

    Example:
        >>> needed, useful = staging_for(None, least=100, on_host=6 << 30, on_device=1 << 30, waits=True)
        >>> needed >> 30, useful >> 30
        (2, 3)
    """
    if not least:
        return 0, 0
    if wanted is not None and wanted < least:
        raise PlanError(
            f"staging_memory is {format_bytes(wanted)} ({wanted:,} bytes), and gradients on their way to the host need at least "
            f"{format_bytes(least)} ({least:,} bytes); give that much, or smaller chunks",
            needed_bytes=least,
        )
    if wanted is not None or not waits:
        taken = _rounded(least if wanted is None else wanted)
        return taken, taken
    needed, useful = min(ENOUGH_BYTES, on_host), min(ENOUGH_BYTES + on_device, on_host)
    return _rounded(max(least, needed)), _rounded(max(least, useful))


def granted(needed: int, *, useful: int, rest_bytes: int) -> int:
    """What is taken where the plan, with what it needs, leaves so many bytes of the host.

    Example:
        >>> granted(1024, useful=9216, rest_bytes=8192)
        3072
    """
    return min(useful, needed + max(0, int(SHARE_OF_REST * rest_bytes)) // 512 * 512)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512 + 4096
