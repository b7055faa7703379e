"""Hosts as they were found, as the hardware of a plan: `hardware_of(cluster, "cpu", 2)`; and back.

Needs no torch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

from zrun.preflight.calibration import Calibration, HostRates, MatmulRates, StreamRates
from zrun_core.spine import memory_limits
from zrun_core.spine.direct_io import file_system
from zrun_core.tiers.probe import IN_MEMORY, DiskFacts

if TYPE_CHECKING:
    from zrun.hosts.cluster import Cluster, HostFacts
    from zrun_core.hardware.hardware import Hardware
    from zrun_core.hardware.measured import Rates

# What one core of a server does where nobody has measured: FLOP/s of large products, bytes/s
# copied.
_CORE_FLOPS = {"fp32": 75e9, "bf16": 150e9}
_CORE_COPY = 4e9
_MOST_COPY = 40e9
_DISK_RATE = 1e9  # bytes per second that a disk reads, or writes, where nobody has measured


def hardware_of(
    cluster: Cluster,
    device: str,
    per_host: int,
    environ: Mapping[str, str] = os.environ,
    memory: int | None = None,
    folder: Path | None = None,
) -> Hardware:
    """Return hosts as the hardware of a plan; the weakest of them counts.

    Rates are those that `zrun doctor --bench` has stored; else data sheets of GPUs; else those of
    this host's cores, which are measured now if nobody has asked before; else a usual core's.

    Args:
        device: "cuda" or "cpu".
        per_host: number of ranks on each host.
        environ: names the file of rates.
        memory: `limits.memory` of the job, in bytes; None: what the hosts have.
        folder: on the disk for states of hosts that were not asked for theirs; None: of the run
            directories.

    Raises:
        JobError: the file of rates is damaged.
    """
    least = min(cluster.hosts, key=lambda host: (host.memory_bytes, host.cores))
    host_bytes = min(_host_memory(host, memory) for host in cluster.hosts)
    nodes = len(cluster.hosts)
    rates = _rates(cluster, environ)
    name = str(cluster) if nodes == 1 else f"{nodes} hosts"
    if device == "cpu":
        plain = _plain(*rates) if rates is not None else _quickly(cluster, environ)
        found = _of_cpus(plain, least.cores, host_bytes, per_host, nodes, name)
    else:
        found = _of_gpus(rates, least, host_bytes, per_host, nodes, name)
    seen = [host.disk for host in cluster.hosts if host.disk is not None]
    free = min(map(_free_of, seen)) if seen else _free_disk((folder or Path("runs")).absolute())
    return _with_disks(found, free, is_measured=rates is not None)


def hosts_of(hardware: Hardware) -> Cluster:
    """Return hosts that are not there, as ranks are placed on them: the reverse of `hardware_of`.

    Nothing is known of their cores and of the links between their GPUs.
    """
    from zrun.hosts.cluster import Cluster, Gpu, HostFacts

    device = hardware.device
    count = hardware.devices_per_node
    host = HostFacts("host", hardware.cores, hardware.host_bytes, slots=count)
    if device.kind != "cpu":
        gpus = [
            Gpu(f"{device.name}-{index}", device.name, device.memory_bytes, index)
            for index in range(count)
        ]
        host = replace(host, gpus=tuple(gpus), slots=None)
    if hardware.nodes == 1:
        return Cluster((host,))
    return Cluster(
        tuple(host.called(f"host{index}", host.slots) for index in range(hardware.nodes))
    )


def _with_disks(hardware: Hardware, free: int, *, is_measured: bool) -> Hardware:
    """Return hardware with the disks of its hosts.

    States may take `free` bytes of each disk. With `is_measured`, the rates in `hardware` are those
    of its disks.
    """
    if not free:
        return replace(hardware, disk_read=0.0, disk_write=0.0, disk_bytes=0)
    if is_measured and hardware.disk_read and hardware.disk_write:
        return replace(hardware, disk_bytes=free)
    return replace(
        hardware,
        disk_read=_DISK_RATE,
        disk_write=_DISK_RATE,
        disk_bytes=free,
        usual_disk=True,
    )


def _free_of(disk: DiskFacts) -> int:
    """Return the bytes that are free on a disk, cut to three digits."""
    if disk.is_memory:
        return 0
    part: int = 10 ** max(0, len(str(disk.free_bytes)) - 3)
    return disk.free_bytes // part * part


def _free_disk(folder: Path) -> int:
    """Return the bytes that are free on the disk of a folder of this host; 0 if it is memory.

    The folder need not exist yet.

    They are counted in hundredths of the disk: the same question has the same answer a moment
    later.
    """
    while not folder.is_dir():
        folder = folder.parent
    if file_system(folder) in IN_MEMORY:
        return 0
    usage = shutil.disk_usage(folder)
    part = max(1, usage.total // 100)
    return usage.free // part * part or usage.free


def capacity_of(cluster: Cluster, device: str, per_host: int, memory: int | None) -> int | None:
    """Return the bytes that a rank may have where its model lives; None: not known.

    Args: as of `hardware_of`.
    """
    if device == "cpu":
        least = min(_host_memory(host, memory) for host in cluster.hosts)
        return memory_limits.share_of_rank(least, per_host)
    sizes = [gpu.memory_bytes for host in cluster.hosts for gpu in host.gpus]
    return min(sizes, default=0) or None


def _host_memory(host: HostFacts, most: int | None) -> int:
    """Return the bytes of a host's memory that a job may have: of this host only those free now.

    Free memory is counted in hundredths of all of it: the same question has the same answer a
    moment later.
    """
    has = host.memory_bytes if most is None else min(host.memory_bytes, most)
    if host.hostname not in (gethostname(), "localhost"):
        return has
    free = memory_limits.host_available()
    part = max(1, host.memory_bytes // 100)
    return min(has, free // part * part or free)


def _rates(
    cluster: Cluster, environ: Mapping[str, str]
) -> tuple[Calibration, list[HostRates]] | None:
    """Return the stored rates of these hosts, if all of them were measured."""
    path = Calibration.default_path(environ)
    if not path.is_file():
        return None
    found = Calibration.read(path)
    names = [host.hostname for host in cluster.hosts]
    if any(name not in found.hosts for name in names):
        return None
    return found, [found.hosts[name] for name in names]


def _quickly(cluster: Cluster, environ: Mapping[str, str]) -> Rates | None:
    """Return the rates of this host's cores, if it is the only host."""
    from zrun.estimate.quick_rates import quick_rates

    if [host.hostname for host in cluster.hosts] not in ([gethostname()], ["localhost"]):
        return None
    found = quick_rates(environ)
    return None if found is None else _slowest([found])


def _of_cpus(
    rates: Rates | None,
    cores: int,
    host_bytes: int,
    ranks: int,
    nodes: int,
    name: str,
) -> Hardware:
    from zrun_core.hardware.measured import Rates, from_rates

    if rates is None:
        flops = {precision: rate * cores for precision, rate in _CORE_FLOPS.items()}
        guess = Rates(cpu_flops=flops, copy=min(_MOST_COPY, _CORE_COPY * cores))
        found = from_rates(
            guess, ranks=ranks, nodes=nodes, host_bytes=host_bytes, cores=cores, name=name
        )
        return replace(found, measured=False)
    return from_rates(
        rates, ranks=ranks, nodes=nodes, host_bytes=host_bytes, cores=cores, name=name
    )


def _of_gpus(
    rates: tuple[Calibration, list[HostRates]] | None,
    host: HostFacts,
    host_bytes: int,
    ranks: int,
    nodes: int,
    name: str,
) -> Hardware:
    from zrun_core.hardware.catalogue import like
    from zrun_core.hardware.measured import from_rates
    from zrun_core.hardware.simulated import parse_simulate

    gpu = min(host.gpus, key=lambda each: each.memory_bytes)
    if rates is not None and all(each.gpus for each in rates[1]):
        plain = replace(_plain(*rates), gpu_memory=gpu.memory_bytes)
        return from_rates(
            plain, ranks=ranks, nodes=nodes, host_bytes=host_bytes, cores=host.cores, name=name
        )
    preset = parse_simulate(f"{nodes}x{ranks}x{like(gpu.name).name}")
    memory = gpu.memory_bytes or preset.device.memory_bytes
    device = replace(preset.device, name=gpu.name, memory_bytes=memory)
    return replace(preset, name=name, device=device, host_bytes=host_bytes, cores=host.cores)


def _plain(file: Calibration, hosts: list[HostRates]) -> Rates:
    """Return the slowest rates of all hosts and of the links between them."""
    links = [(link.bytes_per_s, link.round_trip_s) for link in file.links]
    return _slowest(hosts, links)


def _slowest(hosts: Sequence[HostRates], links: Sequence[tuple[float, float]] = ()) -> Rates:
    """Return the slowest rates of hosts.

    A link is its bytes per second, and the seconds of a round trip.
    """
    from zrun_core.hardware.measured import Rates

    first = hosts[0]
    gpus = [gpu for host in hosts for gpu in host.gpus]
    found: dict[str, Any] = {
        "cpu_flops": _flops([host.cpu for host in hosts]),
        "copy": min(host.copy_bytes_per_s for host in hosts),
        "disk_read": first.disk.read_bytes_per_s,
        "disk_write": first.disk.write_bytes_per_s,
    }
    sides = {host.cpu_side for host in hosts}
    if len(sides) == 1:
        (found["cpu_side"],) = sides
    streams = [host.streams for host in hosts if host.streams is not None]
    if len(streams) == len(hosts):
        found["cpu_streams"] = _bytes_per_s(streams)
    layers = [host.layers for host in hosts if host.layers is not None]
    if len(layers) == len(hosts):
        found["cpu_layers"] = _bytes_per_s(layers)
    attentions = [host.attention for host in hosts if host.attention is not None]
    if len(attentions) == len(hosts):
        found["cpu_attention"] = _flops(attentions)
    operators = [host.operator_s for host in hosts if host.operator_s is not None]
    if len(operators) == len(hosts):
        found["operator_s"] = max(operators)
    inner = [host.inner_s for host in hosts if host.inner_s is not None]
    if len(inner) == len(hosts):
        found["inner_s"] = max(inner)
    messages = [host.messages for host in hosts if host.messages is not None]
    if len(messages) == len(hosts):
        found["message_s"] = max(each.seconds for each in messages)
        found["message_bytes"] = min(each.bytes_per_s for each in messages)
    if gpus:
        found |= {
            "gpu_name": gpus[0].name,
            "gpu_flops": _flops(gpus),
            "gpu_copy": min(gpu.copy_bytes_per_s for gpu in gpus),
            "to_device": min(gpu.to_device_bytes_per_s for gpu in gpus),
            "from_device": min(gpu.from_device_bytes_per_s for gpu in gpus),
        }
    if links:
        found |= {
            "link": min(rate for rate, _ in links),
            "round_trip": max(trip for _, trip in links),
        }
    return Rates(**found)


def _bytes_per_s(rates: Sequence[StreamRates]) -> dict[str, float]:
    """Return the lowest rate of each format."""
    return {
        "fp32": min(each.fp32_bytes_per_s for each in rates),
        "bf16": min(each.bf16_bytes_per_s for each in rates),
    }


def _flops(rates: Sequence[MatmulRates]) -> dict[str, float]:
    """Return the lowest rate of each format that all have."""
    found = {}
    for name in ("fp32", "bf16", "fp16"):
        values = [getattr(each, f"{name}_flops") for each in rates]
        if all(value is not None for value in values):
            found[name] = min(values)
    return found
