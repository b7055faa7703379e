"""The training of a job with layers divided by torch's own tensor parallelism: DTensors.

Embeddings, norms and the head are whole on each rank, as torch's tutorial has them.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any, NamedTuple

import numpy as np
import pipeline_zoo
import pretrained
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import default_collate
from toys import world

Arrays = dict[str, NDArray[Any]]  # whole ones, by name of a parameter
LLAMA = {
    "*.self_attn.[qkv]_proj": ColwiseParallel,
    "*.self_attn.o_proj": RowwiseParallel,
    "*.mlp.gate_proj": ColwiseParallel,
    "*.mlp.up_proj": ColwiseParallel,
    "*.mlp.down_proj": RowwiseParallel,
}
BERT = {
    "*.attention.self.*": ColwiseParallel,
    "*.attention.output.dense": RowwiseParallel,
    "*.intermediate.dense": ColwiseParallel,
    "*.layer.*.output.dense": RowwiseParallel,
}
# By model of tensor_table.py, how its linears are divided: the first pattern that fits.
STYLES = {
    "transformers llama": LLAMA,
    "transformers mistral": LLAMA,
    "transformers bert": BERT,
}


class Trained(NamedTuple):
    """What a training comes to.

    Attributes:
        losses: by step.
        gradients: of the first step.
        params: after the last one.
    """

    losses: dict[int, float]
    gradients: Arrays
    params: Arrays


def by_dtensors(keys: dict[str, Any], model: str) -> Trained:
    """Train a model of transformers on all ranks, which are a tensor group.

    Args:
        keys: of a job of tensor_table.py, whose samples come in their order.
        model: a name of `STYLES`.
    """
    torch.manual_seed(keys["seed"])
    module = pipeline_zoo.transformer(**keys["model"]["args"])
    mesh = init_device_mesh("cpu", (world()[1],))
    plan = {}
    for name, inner in module.named_modules():
        styles = [style for pattern, style in STYLES[model].items() if fnmatch(name, pattern)]
        if isinstance(inner, torch.nn.Linear) and styles:
            plan[name] = styles[0]()
    parallelize_module(module, mesh, plan)
    rates = {"lr": keys["optim"]["lr"], **keys["optim"]["args"]}
    optimizer = torch.optim.SGD(module.parameters(), foreach=False, **rates)
    data = pretrained.Texts()
    batch, micro = keys["batch"]["global"], keys["batch"]["micro"]
    losses, gradients = {}, {}
    for step in range(keys["steps"]):
        losses[step + 1] = 0.0
        for first in range(step * batch, (step + 1) * batch, micro):
            samples = [data[number % len(data)] for number in range(first, first + micro)]
            loss = module(**default_collate(samples)).loss * micro / batch
            loss.backward()
            losses[step + 1] += loss.item()
        if step == 0:
            gradients = {name: _whole(param.grad) for name, param in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    params = {name: _whole(param) for name, param in module.named_parameters()}
    return Trained(losses, gradients, params)


def _whole(tensor: torch.Tensor | None) -> NDArray[Any]:
    assert tensor is not None
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return np.array(whole.detach())
