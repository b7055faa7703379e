"""Ghosts: modules of other stages."""

from __future__ import annotations

import torch
from torch import nn

from zrun_core.stages.ghosts import Ghosts


def test_a_fake_is_of_its_parameter_and_of_none_in_its_place() -> None:
    """Parameters are replaced when layers are divided: a new one may lie where an old one was."""
    ghosts = Ghosts(torch.device("cpu"))
    for shape in [(3,), (2, 2)] * 4:
        param = nn.Parameter(torch.empty(shape))
        assert ghosts.fake_like(param, torch.float32).shape == shape
        assert ghosts.fake_like(param, torch.float32) is ghosts.fake_like(param, torch.float32)
        del param
