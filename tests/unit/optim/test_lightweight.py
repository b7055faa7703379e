"""Optimizers are torch's own, to the bit, and do not bring torch's compiler with them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from zrun_core.optim import lightweight


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam"])
def test_steps_are_torchs_own(name):
    start, grads = torch.randn(64), torch.randn(3, 64)
    ours, plain = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizer_class = getattr(torch.optim, name)
    light = lightweight.build(optimizer_class, [ours], {"lr": 0.1, "weight_decay": 0.01})
    usual = optimizer_class([plain], lr=0.1, weight_decay=0.01)
    for grad in grads:
        ours.grad, plain.grad = grad.clone(), grad.clone()
        lightweight.step(light)
        usual.step()
    assert torch.equal(ours, plain)


def test_a_users_optimizer_keeps_its_own_step():
    class Counting(torch.optim.SGD):
        calls = 0

        def step(self, closure=None):
            Counting.calls += 1
            return super().step(closure)

    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    lightweight.step(lightweight.build(Counting, [param], {"lr": 1.0}))
    assert Counting.calls == 1
    assert torch.equal(param, torch.zeros(2))


def test_torchs_compiler_is_not_imported():
    code = (
        "import sys, torch; from zrun_core.optim import lightweight;"
        "p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2);"
        "lightweight.step(lightweight.build(torch.optim.AdamW, [p], {'fused': True}));"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_bundled_model_on_meta_imports_neither_the_compiler_nor_sympy():
    code = (
        "import sys; from zrun_core.models.gpt import gpt;"
        "from zrun_core.user_code.on_meta import on_meta\n"
        "with on_meta(): gpt(flavour='llama', vocab_size=8, dim=16, depth=1, heads=2, seq_len=4)\n"
        "sys.exit(any(name in sys.modules for name in ('torch._dynamo', 'sympy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
