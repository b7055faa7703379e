"""The states of a model as papers count them: 2, 2 and 12 bytes per parameter."""

from __future__ import annotations

from zrun_core.plan.question.candidate import Candidate

# Bytes per parameter of Adam in mixed precision, K = 12: fp32 master and two moments (Rajbhandari
# et al. 2020, "ZeRO", section 3.1).
_PARAM_BYTES = _GRAD_BYTES = 2
_ADAM_BYTES = 12


def paper_bytes(num_params: int, candidate: Candidate) -> dict[str, float]:
    """Return the bytes of a rank's parameters, gradients and states in Adam, by kind.

    Args:
        num_params: of the whole model.
    """
    dims = candidate.dims
    params = num_params / dims.model_ranks
    ranks = dims.shard_size
    return {
        "params": _PARAM_BYTES * params / (ranks if candidate.stage >= 3 else 1),
        "grads": _GRAD_BYTES * params / (ranks if candidate.stage >= 2 else 1),
        "optim": _ADAM_BYTES * params / (ranks if candidate.stage >= 1 else 1),
    }
