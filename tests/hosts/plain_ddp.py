"""A plain DDP loop, as torchrun starts it on the hosts of `torchrun.py`.

A step every 20 ms, counted in a file.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[2])):
    time.sleep(0.02)
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(str(step))
dist.destroy_process_group()  # else its threads may end after what they work with
