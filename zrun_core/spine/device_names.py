"""Names of devices, as jobs and scripts write them: those there are, and what to say of others."""

from __future__ import annotations

CPU_AND_GPU = ("auto", "cpu", "cuda")

_ROCM = {"rocm", "hip", "amd"}
# Of torch's kinds of devices.
_OTHERS = {
    "xpu": "Intel's GPUs",
    "hpu": "Gaudi",
    "npu": "Ascend",
    "mps": "Apple's GPUs",
    "mtia": "MTIA",
    "xla": "TPUs",
    "tpu": "TPUs",
    "privateuseone": "a device of an extension",
}


def what_lacks(kind: str) -> str | None:
    """Say why there is no training on devices of one of torch's kinds; None: it is not known."""
    if kind not in _OTHERS:
        return None
    return (
        f"zrun trains on CPUs and on the GPUs of CUDA and ROCm, not on {kind} ({_OTHERS[kind]}): "
        "it does not find such devices and their links, cannot pin the host's memory for them "
        "where it lies, and has never run on one"
    )


def why_refused(name: object) -> str | None:
    """Say why nobody can ask for the devices called `name`, and what to write; None: not known."""
    if not isinstance(name, str):
        return None
    kind = name.lower().partition(":")[0]
    if kind in _ROCM:
        return f"torch calls the GPUs of ROCm cuda: write cuda in place of {name}"
    lacks = what_lacks(kind)
    return None if lacks is None else f"{lacks}; write cpu"
