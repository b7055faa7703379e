"""The variables by which a process sees no GPU of its host. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

# First entries of such a variable that ask for no GPU: Slurm writes the last one.
HIDING = frozenset({"", "-1", "none", "void", "NoDevFiles"})
# As of a process that is to see none: ROCm takes an empty text for no variable.
NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


def are_hidden(environ: Mapping[str, str]) -> bool:
    """Return whether this environment asks for no GPU."""
    names = (*NO_GPU, "ROCR_VISIBLE_DEVICES")
    lists = [environ[name].split(",") for name in names if name in environ]
    return any(entries[0].strip() in HIDING for entries in lists)
