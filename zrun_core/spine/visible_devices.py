"""The variables by which a process sees no GPU of its host. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

# As of a process that is to see none: ROCm takes an empty text for no variable.
NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


def are_hidden(environ: Mapping[str, str]) -> bool:
    """Return whether this environment asks for no GPU."""
    return any(environ.get(name) in ("", "-1") for name in (*NO_GPU, "ROCR_VISIBLE_DEVICES"))
