"""Devices, the links between them, and the hosts that carry them, for which a plan is made.

    parse_simulate("512x8xA100-40G")                512 nodes of 8; 4xH100 is one node of 4
    parse_simulate("64x8xH100-80G@4xHDR,ram=1TB")   other adapters, other memory
    from_rates(rates, ranks=2)                      a host as `zrun doctor --bench` measured it

The first two are in `simulated.py`, the third in `measured.py`; what a device and a link do by
their names is in `catalogue.py`. Standard library only.

All rates are per second: bytes, or floating-point operations of dense products (a multiply-add is
two). Peaks are the vendors' data sheets. What a device reaches of them follows curves with few
constants, the same for all models: those of the A100 reproduce the step times of Korthikanti et
al. 2022; the others have the same form, and what is published of square products, copies and
collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

GB = 1e9
GIB = 1 << 30
MIB = 1 << 20
# How far a step's time may be off to either side: from data sheets, measured, and on cores, where
# few rates stand for kernels that differ much.
PRESET_SPREAD = 0.25
MEASURED_SPREAD = 0.10
CORES_SPREAD = 0.50


@dataclass(frozen=True)
class Link:
    """A way for bytes, as one device sees it.

    Attributes:
        bandwidth: bytes per second in one direction that large messages reach.
        latency: seconds of one message.
    """

    name: str
    bandwidth: float
    latency: float

    def shared(self, adapters: int, devices: int) -> Link:
        """Return one device's part of so many of these."""
        return replace(self, bandwidth=self.bandwidth * adapters / devices)


@dataclass(frozen=True)
class Device:
    """A device of one rank: a GPU, or a rank's part of the cores of a host.

    Attributes:
        memory_bytes: that processes can have, as the driver says.
        peak: FLOP/s by compute format.
        bandwidth: of its memory, reads and writes together.
        gemm: share of the peak that large matrix products reach.
        gemm_area, gemm_depth: elements of the result, and length of the sum, at which a product
            reaches half of that.
        attention: share of the peak that fused attention reaches.
        attention_rates: FLOP/s of it by compute format, where they were measured.
        streaming: share of the bandwidth that elementwise operations reach.
        cache_bytes: tensors up to this size stay near the cores, at `cache_speedup` times the
            bandwidth.
        narrow: bytes per second of elementwise operations in 16 bits, as a share of those in 32.
        launch_s: seconds that an operation takes however small it is.
        inner_s: of a core: seconds of an operator that a kernel calls, and not Python; None: as
            `launch_s`.
        host_s: of a GPU: seconds that its host takes for an operation before the GPU has it. A CPU
            has no host beside it: that is in `launch_s`.
        context_bytes: of the driver, outside of any allocator; on a CPU of Python and torch, which
            each process has.
        workspace_bytes: of the library of matrix products, in the allocator.
        communicator_bytes: of one group of ranks, outside of the allocator.
        pair_bytes: of one end of a communicator for messages between two ranks, which go one way.
        contention: share of a transfer's time that it takes from computation beside it; 1:
            nothing overlaps.
        optimizer: elements that a fused Adam in fp32 updates per second; None: as the memory
            allows.
    """

    name: str
    kind: str  # "cuda" or "cpu"
    memory_bytes: int
    peak: Mapping[str, float]
    bandwidth: float
    gemm: float = 0.80
    gemm_area: float = 1e6
    gemm_depth: float = 256.0
    attention: float = 0.50
    attention_rates: Mapping[str, float] = field(default_factory=dict)
    streaming: float = 0.85
    cache_bytes: int = 0
    cache_speedup: float = 1.0
    narrow: float = 1.0
    launch_s: float = 4e-6
    inner_s: float | None = None
    host_s: float = 15e-6
    context_bytes: int = 0
    workspace_bytes: int = 0
    communicator_bytes: int = 0
    pair_bytes: int = 0
    contention: float = 0.12
    optimizer: float | None = None

    def attention_flops(self, precision: str) -> float:
        """Return the FLOP/s that fused attention reaches in a compute format."""
        return self.attention_rates.get(precision, self.attention * self.flops(precision))

    def flops(self, precision: str) -> float:
        """Return the peak FLOP/s in a compute format; one that the device lacks runs in fp32."""
        return self.peak.get(precision, self.peak["fp32"])


@dataclass(frozen=True)
class Hardware:
    """Nodes that are alike.

    Attributes:
        name: as it was asked for.
        intra, inter: between devices of a node, and of two nodes, each as one device's part.
        wait_s: seconds that ranks which need a result at once wait beyond the message itself.
        uneven: share of what ranks compute between such messages by which they differ.
        host: between a device and the memory of its host, as one device's part.
        host_bytes, host_bandwidth, cores: of a node.
        offload_bytes: of a node's memory that states may take; None: what is free.
        disk_read, disk_write: bytes per second of a node's disks together; 0: there are none.
        disk_bytes: of a node's disks that states may take.
        usual_disk: nobody has measured the disks: their rates are usual ones.
        measured: the rates come from this machine and not from data sheets.
        spread: how far the time of a step may be from what is said, as a share of it.
        price: of one device for an hour, in any currency; None: not given.
        shares_memory: devices are cores of the host, and hold what they hold in its memory.
    """

    name: str
    device: Device
    nodes: int
    devices_per_node: int
    intra: Link
    inter: Link
    host: Link
    host_bytes: int
    host_bandwidth: float
    cores: int
    offload_bytes: int | None = None
    disk_read: float = 0.0
    disk_write: float = 0.0
    disk_bytes: int = 0
    usual_disk: bool = False
    measured: bool = False
    spread: float = PRESET_SPREAD
    price: float | None = None
    shares_memory: bool = False
    wait_s: float = 0.0
    uneven: float = 0.0

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node
