"""Xids, the error numbers of NVIDIA's driver: what each means, and whether a job can go on.

Source: NVIDIA, "XID Errors" (docs.nvidia.com/deploy/xid-errors); the ones that a training job
meets. Every other number is named with the page that has it.
"""

from __future__ import annotations

from zrun.topology.boards import Fault

_PAGE = "https://docs.nvidia.com/deploy/xid-errors"
# The driver cleans up after a process that ended: a consequence, which would hide its cause.
_CONSEQUENCES = {45}

_RESET = (
    "leave this GPU out until it was reset (nvidia-smi --gpu-reset, with no process on it), and "
    "have it replaced if that comes again"
)
_REBOOT = (
    "leave this host out and reboot it; if it comes again, have the board, its slot and its power "
    "looked at"
)
_CODE = (
    "look for an index out of range or a bad address in the code: compute-sanitizer, or device: "
    "cpu, names the place; if only this GPU has it, suspect the board"
)
_LINK = (
    "look at nvidia-smi nvlink --errorcounters and at the fabric manager's log; the GPU, its "
    "bridge or the switch has to be reset or replaced"
)

# number: (what it means, what to do, whether a job on the GPU cannot go on)
_KNOWN: dict[int, tuple[str, str, bool]] = {
    13: ("a kernel raised an exception", _CODE, False),
    31: ("a kernel read or wrote an address that is not mapped", _CODE, False),
    32: ("a corrupted stream of commands reached the GPU", _REBOOT, False),
    38: ("the driver's firmware failed", _REBOOT, False),
    43: ("a kernel of the process went wrong and was stopped", _CODE, False),
    46: ("the GPU stopped processing", _RESET, True),
    48: ("an uncorrectable error of its memory (double-bit ECC)", _RESET, True),
    61: ("its internal controller broke off", _RESET, False),
    62: ("its internal controller halted", _RESET, True),
    63: (
        "a damaged row of its memory will be replaced",
        "reset the GPU when the job is over: nvidia-smi --gpu-reset",
        False,
    ),
    64: ("a damaged row of its memory could not be replaced", _RESET, False),
    69: ("a kernel's command was refused", _CODE, False),
    74: ("an error of an NVLink", _LINK, False),
    79: ("the GPU fell off the bus", _REBOOT, True),
    92: ("a high rate of corrected memory errors", _RESET, False),
    94: (
        "an uncorrectable error of its memory, which ends the process that met it",
        _RESET,
        True,
    ),
    95: ("an uncorrectable error of its memory, which was not contained", _RESET, True),
    109: ("a process did not leave the GPU in time", _RESET, False),
    119: ("its system processor (GSP) does not answer", _REBOOT, True),
    120: ("its system processor (GSP) failed", _REBOOT, True),
    121: ("an error of the link between CPU and GPU", _RESET, False),
    136: ("the link between its dies failed", _RESET, True),
    137: ("an access over NVLink that is not allowed", _LINK, False),
    140: ("uncorrectable errors of its memory", _RESET, True),
    143: ("the GPU could not be initialised", _REBOOT, True),
    154: (
        "the driver wants the GPU reset or the host rebooted",
        "see nvidia-smi -q -d RECOVERY for which of both",
        False,
    ),
}
_KNOWN |= dict.fromkeys(range(144, 151), ("an error of an NVLink", _LINK, False))


def fault_of(uuid: str, xid: int) -> Fault | None:
    """Return what an Xid of a GPU means; None for one that only follows from others."""
    if xid in _CONSEQUENCES:
        return None
    unknown = (f"see {_PAGE}", f"look the number up: {_PAGE}", False)
    what, advice, is_fatal = _KNOWN.get(xid, unknown)
    return Fault(uuid, xid, what, advice, is_fatal)


def memory_fault(uuid: str, count: int) -> Fault:
    """Return the fault of a GPU whose counter of uncorrectable errors grew by `count`."""
    errors = "an uncorrectable error"
    if count > 1:
        errors = f"{count} uncorrectable errors"
    # Contained ones end the process that was hit, by an Xid; others may have damaged nothing.
    return Fault(uuid, None, f"{errors} of its memory (ECC)", _RESET, False)


def lost_fault(uuid: str) -> Fault:
    """Return the fault of a GPU that has gone without a word."""
    what, advice, is_fatal = _KNOWN[79]
    return Fault(uuid, None, what, advice, is_fatal)
