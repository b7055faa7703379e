"""What a rank held when memory ran out, in words, and beside what was expected."""

from __future__ import annotations

from zrun.estimate.forecast import Forecast
from zrun_core.sizes import format_size
from zrun_core.spine.held_memory import HeldMemory

# What a forecast tells apart, and the kinds of `Holder` in it.
_PARTS = {
    "parameters, gradients and optimizer states": ("params", "grads", "optim", "rings", "buffers"),
    "activations, temporaries and other tensors": ("activations", "tensors", "since"),
    "libraries and allocators": ("rest",),
}
_TOLERATED = 1.1  # of what was expected


def held_in_words(held: HeldMemory) -> list[str]:
    """Return what a rank held that was ended: where its code stood, and the holders."""
    where = f" at {held.place}" if held.place else ""
    first = f"rank {held.rank} held {format_size(held.num_bytes)}{where}. What holds most:"
    return [first, *held.lines()]


def beside_plan(held: HeldMemory | None, forecast: Forecast | None) -> list[str]:
    """Return what the estimate of a job expected, and what grew beyond that.

    Args:
        held: by a rank; None: nobody could tell.
        forecast: of the fullest rank; None: there is none.
    """
    if held is None or forecast is None or forecast.activation_bytes is None:
        return []
    sizes = (
        forecast.peak_bytes - forecast.activation_bytes,
        forecast.activation_bytes,
        forecast.device_bytes - forecast.peak_bytes,
    )
    expected = dict(zip(_PARTS, sizes, strict=True))
    found = {name: _sum(held, kinds) for name, kinds in _PARTS.items()}
    lines = [
        f"The estimate ({forecast.source}) expected {format_size(forecast.device_bytes)} in all, "
        f"{format_size(forecast.peak_bytes)} of it tensors:"
    ]
    lines += [
        f"  {format_size(size):>10}  {name} (this rank: {format_size(found[name])})"
        for name, size in expected.items()
    ]
    beyond = {name: found[name] - size for name, size in expected.items()}
    most = max(beyond, key=lambda name: beyond[name])
    if found[most] > _TOLERATED * expected[most]:
        lines.append(f"Beyond that: {format_size(beyond[most])} of {most}")
    return lines


def _sum(held: HeldMemory, kinds: tuple[str, ...]) -> int:
    return sum(held.by_kind.get(kind, 0) for kind in kinds)
