"""Norms in half precision, whose statistics CUDA keeps in 32 bits and the CPU does not."""

from __future__ import annotations

from scripts import run


def test_norms_have_the_bits_of_the_cpu() -> None:
    said = run(
        """
        import torch
        from torch import nn
        torch.set_num_threads(1)  # sums over rows are divided among threads
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for norm in (nn.LayerNorm(16), nn.GroupNorm(2, 16), nn.RMSNorm(16)):
                generator = torch.Generator().manual_seed(1)
                source = torch.randn(8, 16, generator=generator).to(dtype)
                found = []
                for device in ("cpu", "cuda"):
                    norm.to(dtype).to(device)
                    x = source.detach().clone().to(device).requires_grad_()
                    norm(x).float().square().sum().backward()
                    found.append([x.grad.cpu(), *(each.grad.cpu() for each in norm.parameters())])
                    norm.zero_grad()
                print(all(map(torch.equal, *found)))
        """,
        devices=1,
        delay_us=50,
    )
    assert said.split() == ["True"] * 9
