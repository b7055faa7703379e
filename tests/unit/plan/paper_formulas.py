"""Formulas as their papers print them: an oracle for what zrun plans.

States take K = 12 bytes per parameter with Adam in mixed precision, 4 of the master copy and 4 of
each moment, on top of 2 of the parameters and 2 of their gradients (Rajbhandari et al. 2020,
"ZeRO", section 3.1). Units are bytes, elements, seconds and operations; "params" are numbers of
parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from formulas import TransformerShape

PARAM_BYTES = GRAD_BYTES = 2  # half precision
ADAM_BYTES = LAMB_BYTES = (
    12  # K: fp32 master, momentum, variance; LAMB keeps what Adam does, and norms of layers
)
CPU_ADAM_BYTES = (
    30  # read: master, moments, gradient (14 of 16); written: master, moments, parameter
)


# Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"


def model_states(params: float, stage: int, dp: int, optimizer_bytes: int = ADAM_BYTES) -> float:
    """Bytes on one device: figure 1 and table 1.

    Stages 1 to 3 are the paper's Pos, Pos+g and Pos+g+p.
    """
    sizes = (
        optimizer_bytes,
        GRAD_BYTES,
        PARAM_BYTES,
    )  # in the order in which the stages divide them
    return sum(params * size / (dp if stage > order else 1) for order, size in enumerate(sizes))


def largest_model(device_bytes: float, stage: int, dp: int, mp: int = 1) -> float:
    """Parameters whose states fit on devices of `device_bytes`, with nothing else: table 2."""
    return device_bytes * mp / model_states(1, stage, dp)


@dataclass(frozen=True)
class StepTraffic:
    """Elements that one rank sends and receives per step, each counted once: section 7."""

    gathered: float
    reduced: float

    @property
    def total(self) -> float:
        return self.gathered + self.reduced


def traffic(params: float, stage: int, micro_batches: int = 1) -> StepTraffic:
    """What a step moves. The paper's 2P, 2P and 3P are those of one micro-batch.

    Stage 3 gathers parameters in each forward and each backward pass, stages 2 and 3 reduce after
    each micro-batch.
    """
    reductions = micro_batches if stage >= 2 else 1
    gathers = 2 * micro_batches if stage == 3 else 1  # at stage 0 the second half of an all-reduce
    return StepTraffic(gathers * params, reductions * params)


def on_the_wire(elements: float, ranks: int) -> float:
    """What a ring really moves of it: each rank has 1/ranks already."""
    return elements * (ranks - 1) / ranks


def block_activations(batch: int, seq: int, hidden: int, layers: int) -> int:
    """Bytes of activations by section 3.2: 12 * hidden elements of 2 bytes per token and layer."""
    return 2 * 12 * batch * seq * hidden * layers


def checkpoints(batch: int, seq: int, hidden: int, layers: int, mp: int = 1) -> float:
    """Bytes of one input per layer in half precision, divided over `mp` ranks: Pa, section 6.1."""
    return 2 * batch * seq * hidden * layers / mp


def partition_traffic(batch: int, seq: int, hidden: int) -> tuple[int, int]:
    """Elements per layer of model parallelism with recomputation, and what Pa adds: section 8."""
    return 12 * batch * seq * hidden, batch * seq * hidden


def fused_buffer(params: float) -> float:
    """Bytes of one fp32 buffer of all gradients, as fused reductions use it: section 3.2."""
    return 4 * params


# Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training"


@dataclass(frozen=True)
class Offload:
    """Bytes of states on the device and on the host, and what a step moves between them."""

    device: float
    host: float
    moved: float


def offload(params: float, *, grads: bool, optimizer: bool) -> Offload:
    """One GPU with gradients, or the optimizer, or both on the host: table 1 and section 3.

    The update runs where the optimizer is: gradients come down to it and parameters go up.
    """
    host = params * (GRAD_BYTES * grads + ADAM_BYTES * optimizer)
    moved = params * (
        GRAD_BYTES * (grads or optimizer) + (PARAM_BYTES if optimizer else GRAD_BYTES * grads)
    )
    return Offload(model_states(params, 0, 1) - host, host, moved)


def cpu_adam_seconds(params: float, bandwidth: float) -> float:
    """Time of an update that is bound by the host's memory of `bandwidth` bytes per second."""
    return CPU_ADAM_BYTES * params / bandwidth


# Rajbhandari et al. 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
# Learning"


@dataclass(frozen=True)
class Infinity:
    """Section 3: a transformer's memory. `interval` is the number of layers between checkpoints."""

    layers: int
    hidden: int
    heads: int
    seq: int = 1024
    interval: int = 1

    @property
    def params(self) -> int:
        return 12 * self.layers * self.hidden**2

    @property
    def states(self) -> int:
        """Bytes, 20 per parameter: with gradients in fp32 too."""
        return 20 * self.params

    @property
    def working_states(self) -> int:
        """MSWM: bytes of parameter and gradient of the largest linear layer, hidden x 4 hidden."""
        return (PARAM_BYTES + GRAD_BYTES) * 4 * self.hidden**2

    def working_activations(self, batch: int) -> int:
        """AWM: bytes of what lies between two checkpoints.

        The paper's formula counts elements of two bytes.
        """
        return 2 * batch * self.seq * self.interval * (16 * self.hidden + 2 * self.heads * self.seq)

    def activations(self, batch: int) -> float:
        """Bytes of all activations."""
        return self.working_activations(batch) / self.interval * self.layers

    def checkpoints(self, batch: int) -> float:
        """Bytes of the inputs that are kept."""
        return checkpoints(batch, self.seq, self.hidden, self.layers) / self.interval

    def intensity_of_params(self, batch: int) -> float:
        """Operations per byte of parameters and gradients that is moved: equation 9."""
        return self.seq * batch

    def intensity_of_optimizer(self, batch: int) -> float:
        """The same of optimizer states: equation 10."""
        return self.seq * batch / 4

    def intensity_of_checkpoints(self) -> float:
        """The same of checkpoints: equation 11."""
        return 24 * self.hidden * self.interval


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Share of `peak` where bytes arrive at `bandwidth` and nothing overlaps: equation 6."""
    return intensity * bandwidth / (intensity * bandwidth + peak)


# Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"


def first_stage_activations(
    shape: TransformerShape, micro: float, *, pp: int = 1, virtual: int = 1, **options: Any
) -> float:
    """Bytes on the first pipeline stage, which has `pp` micro-batches in flight: section 4.2.3.

    So it holds as much as all layers do for one; a little more where stages have several parts.
    """
    more = (pp - 1) / (pp * virtual) if virtual > 1 else 0.0
    return shape.layers * shape.block_activations(micro, **options) * (1 + more)


# Pipelines


def pipeline_efficiency(stages: int, micro_batches: int, virtual: int = 1) -> float:
    """1 less the bubble's share (Huang et al. 2019; `virtual`: Narayanan et al. 2021, 2.2.2)."""
    return micro_batches / (micro_batches + (stages - 1) / virtual)


def days(tokens: float, params: float, devices: int, flops: float) -> float:
    """Training time with recomputation, at `flops` per device (Narayanan et al. 2021, eq. 4)."""
    return 8 * tokens * params / (devices * flops) / 86400
