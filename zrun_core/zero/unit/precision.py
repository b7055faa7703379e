"""Number formats, and dynamic loss scaling.

fp16 has a smallest normal number of 6e-5: gradients vanish below it. The loss is multiplied by a
scale before backward and the gradients are divided by it after reduction; the scale halves when a
step overflows (which is skipped) and doubles after a window of good ones (Micikevicius et al. 2018,
"Mixed Precision Training", section 3.2).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from zrun_core.spine.sections.precision import LossScaleConfig, PrecisionConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_SCALE = 2.0**127  # doubled once more it would be infinite, and stay so


@dataclass(frozen=True)
class Precision:
    """The formats of one run.

    Attributes:
        compute: parameters as the model sees them, activations.
        reduce: gradients, from accumulation to the update.
    """

    compute: torch.dtype
    reduce: torch.dtype
    loss_scale: LossScaleConfig

    @classmethod
    def of(cls, config: PrecisionConfig) -> Precision:
        """Return the formats that the job's section `precision` names."""
        compute = _DTYPES[config.compute]
        reduce = torch.float32 if config.reduce == "fp32" else compute
        return cls(compute, reduce, config.loss_scale)

    def slowness(self, device: torch.device) -> str | None:
        """Say that a processor takes long for products in the compute format, if it does."""
        supports = {
            torch.bfloat16: "_is_mkldnn_bf16_supported",
            torch.float16: "_is_mkldnn_fp16_supported",
        }
        if device.type != "cpu" or self.compute not in supports:
            return None
        if getattr(torch.ops.mkldnn, supports[self.compute])():
            return None
        name = _NAMES[self.compute]
        return (
            f"precision: this processor has no instructions for {name}, so torch computes "
            "products some 30 times slower than in fp32: write precision: fp32"
        )

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context of forward passes: matrix products in `compute`, losses in fp32.

        Parameters are in `compute` already, so nothing is cast twice; autocast keeps the rest of a
        user's model (norms, softmax, fp32 inputs and buffers) in the formats that torch considers
        safe.
        """
        if self.compute == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute, cache_enabled=False)


class LossScaler:
    """The scale of the loss. It is the same on every rank, as all see the same overflows.

    The state lives in tensors on the device and follows each step; the host reads nothing.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.enabled = precision.compute == torch.float16
        self._config = precision.loss_scale
        first = self._config.init if self.enabled else 1.0
        self.scale = torch.tensor(first, dtype=torch.float32, device=device)
        # Steps since the scale last changed, and overflows in a row.
        self._good = torch.zeros((), dtype=torch.int64, device=device)
        self._bad = torch.zeros((), dtype=torch.int64, device=device)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss`, scaled against underflow where it has to be."""
        return loss * self.scale if self.enabled else loss

    def update(self, overflow: torch.Tensor) -> None:
        """Follow one step, without the host reading anything: booleans on the device are factors.

        Args:
            overflow: 0-d bool, equal on all ranks.
        """
        if not self.enabled:
            return
        config = self._config
        bad = (self._bad + 1) * overflow
        good = (self._good + 1) * ~overflow
        shrinks = bad >= config.hysteresis
        grows = good >= config.window  # never both
        factor = 1.0 + 1.0 * grows - 0.5 * shrinks  # 2, 0.5 or 1
        self.scale = (self.scale * factor).clamp(config.min, _LARGEST_SCALE)
        self._bad = bad * ~shrinks
        self._good = good * ~grows

    @property
    def least_scale(self) -> float | None:
        """The scale never falls below this; None if losses are not scaled."""
        return self._config.min if self.enabled else None

    def state_dict(self) -> dict[str, float]:
        return {"scale": float(self.scale), "good": int(self._good), "bad": int(self._bad)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale.fill_(state["scale"])
        self._good.fill_(int(state["good"]))
        self._bad.fill_(int(state["bad"]))
