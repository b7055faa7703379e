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


def test_norms_may_keep_parameters_in_32_bits() -> None:
    said = run(
        """
        import torch
        from torch import nn
        torch.set_num_threads(1)
        for norm in (nn.LayerNorm(16), nn.BatchNorm1d(16)):
            source = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
            found = []
            for device in ("cpu", "cuda"):
                norm.to(device)
                x = source.detach().clone().to(device).requires_grad_()
                norm(x).float().square().sum().backward()
                found.append([x.grad.cpu(), *(each.grad.cpu() for each in norm.parameters())])
                norm.zero_grad()
            print(all(map(torch.equal, *found)))
        """,
        devices=1,
        delay_us=50,
    )
    assert said.split() == ["True"] * 2


def test_batch_norms_have_the_bits_of_the_cpu_and_evaluate() -> None:
    """Evaluation has no statistics of the batch to keep."""
    said = run(
        """
        import torch
        from torch import nn
        torch.set_num_threads(1)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            generator = torch.Generator().manual_seed(1)
            source = torch.randn(8, 16, generator=generator).to(dtype)
            for is_training in (True, False):
                found = []
                for device in ("cpu", "cuda"):
                    norm = nn.BatchNorm1d(16).to(dtype).to(device).train(is_training)
                    x = source.detach().clone().to(device).requires_grad_()
                    y = norm(x)
                    y.float().square().sum().backward()
                    of_norm = [*norm.buffers(), *(each.grad for each in norm.parameters())]
                    found.append([each.detach().cpu() for each in (y, x.grad, *of_norm)])
                print(all(map(torch.equal, *found)))
        """,
        devices=1,
        delay_us=50,
    )
    assert said.split() == ["True"] * 6
