"""Operators that write to tensors of another shape, and graphs, which there are none of."""

from __future__ import annotations

import json

from scripts import run


def test_outputs_of_another_shape_are_resized() -> None:
    found = run(
        """
        import json, torch, warnings
        warnings.simplefilter("ignore")
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, 96, generator=generator)
        y = torch.randn(5, 96, generator=generator)

        def topk(x, y, out):
            torch.topk(x, 7, dim=1, out=out)

        def sort(x, y, out):
            torch.sort(x, dim=0, descending=True, out=out)

        def cat(x, y, out):
            torch.cat([x, y, x], out=out[0])

        def add(x, y, out):
            torch.add(x, y[0], out=out[0])

        def sums(x, y, out):
            torch.sum(x, dim=1, out=out[0])

        def both(x, y, out):
            torch.max(x, dim=1, out=out)

        found = {}
        for call in (topk, sort, cat, add, sums, both):
            for shape in ((0,), (3,), (2, 2), (80, 200)):
                results = []
                for device in ("cpu", "cuda"):
                    out = (
                        torch.full(shape, 3.0, device=device),
                        torch.full(shape, 3, dtype=torch.int64, device=device),
                    )
                    call(x.to(device), y.to(device), out)
                    for _ in range(3):  # and what was there before comes back, and is poisoned
                        torch.ones(96, 96, device=device)
                    results.append([(*each.stride(), each.cpu()) for each in out])
                same = all(
                    mine[:-1] == theirs[:-1] and torch.equal(mine[-1], theirs[-1])
                    for mine, theirs in zip(*results)
                )
                found[f"{call.__name__} {shape}"] = same
        print(json.dumps(found))
        """,
        devices=1,
        delay_us=100,
    )
    outcomes = json.loads(found)
    assert len(outcomes) == 24
    assert [name for name, is_same in outcomes.items() if not is_same] == []


def test_an_output_that_is_a_view_grows_in_its_storage() -> None:
    said = run(
        """
        import torch
        whole = torch.zeros(10, device="cuda")
        part = whole[2:4]
        torch.arange(3.0, 8.0, out=part)
        print(whole.tolist(), part.tolist(), part.data_ptr() - whole.data_ptr())
        part = whole[8:10]
        torch.cat([torch.ones(3, device="cuda"), torch.ones(2, device="cuda")], out=part)
        print(part.tolist(), whole.tolist(), whole.untyped_storage().nbytes())
        """,
        devices=1,
        delay_us=100,
        more={"PYTHONWARNINGS": "ignore"},
    )
    assert said.splitlines() == [
        "[0.0, 0.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.0, 0.0, 0.0] [3.0, 4.0, 5.0, 6.0, 7.0] 8",
        "[1.0, 1.0, 1.0, 1.0, 1.0] [0.0, 0.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.0, 1.0, 1.0] 52",
    ]


def test_graphs_are_refused() -> None:
    said = run(
        """
        import torch
        from torch.cuda.graphs import make_graphed_callables
        calls = [
            torch.cuda.CUDAGraph,
            lambda: torch.cuda.graph(None),
            lambda: make_graphed_callables(torch.relu, (torch.ones(1, device="cuda"),)),
        ]
        for call in calls:
            try:
                call()
            except NotImplementedError as error:
                print(error)
        """,
        devices=1,
    )
    assert said.splitlines() == ["the simulated GPU has no graphs"] * 3
