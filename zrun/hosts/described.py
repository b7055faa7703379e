"""Machines that are not there, as `--simulate` names them: `8xH100-80G`, or a file."""

from __future__ import annotations

from pathlib import Path

from zrun.topology.scenario import Scenario
from zrun_core.errors import JobError

_MIB = 1 << 20
# Links of a GPU to the switches of its node.
_LINKS = {"NVLink2": 6, "NVLink3": 12, "NVLink4": 18, "NVLink5": 18}


def described(text: str) -> Scenario:
    """Return the machines that a text describes: a file of docs/topology.md, or a cluster.

    Args:
        text: a path, or such as 2x8xH100-80G, with the usual links of that GPU.

    Raises:
        JobError: it is neither.
    """
    from zrun_core.hardware.simulated import parse_simulate

    path = Path(text)
    if path.exists() or "/" in text or path.suffix:
        return Scenario.read(path)
    hardware = parse_simulate(text)
    if hardware.device.kind == "cpu":
        raise JobError(f"--simulate {text}: CPUs have no links to show; name GPUs, as 8xH100-80G")
    count = hardware.devices_per_node
    links = _LINKS.get(hardware.intra.name, 0)
    return Scenario(
        num_gpus=count,
        name=hardware.device.name,
        memory_mib=hardware.device.memory_bytes // _MIB,
        links={gpu: [None] * links for gpu in range(count)} if links and count > 1 else {},
        num_hosts=hardware.nodes,
        ram_mib=hardware.host_bytes // _MIB,
    )
