"""Torch's compiler is imported by processes that need it, and by no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # functions are left out of graphs where it is there

from zrun_core.spine.config import JobConfig
from zrun_core.spine.spec import LaunchPlan, RankPlace, RunSpec, resolve_batch
from zrun_core.train import worker
from zrun_core.user_code.on_meta import on_meta
from zrun_core.zero.passes.graph_breaks import check_without_compiler, outside_graphs

_HAS_IT = "; import sys; sys.exit('torch._dynamo' in sys.modules)"
_BUILDS = (
    "from torch import nn; from zrun_core.models.gpt import gpt; "
    "from zrun_core.user_code.on_meta import on_meta\n"
    "with on_meta():\n"
    "    gpt('gpt2', vocab_size=50, dim=32, depth=2, heads=4, seq_len=16)\n"
    "    gpt('llama', vocab_size=50, dim=32, depth=2, heads=4, seq_len=16)\n"
    "    layer = nn.Linear(3, 3)\n"
    "    nn.init.normal_(layer.weight)\n"
    "    nn.init.trunc_normal_(layer.weight)\n"
    "    nn.init.kaiming_normal_(layer.weight)\n"
    "    layer.weight.data.normal_(0, 0.02)\n"
    "assert layer.weight.is_meta"
)


_ATTENDS = """
import sys
import torch
from zrun_core.zero.passes.graph_breaks import check_without_compiler
check_without_compiler()
check_without_compiler()  # once is enough
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
padding = torch.zeros(2, 3).masked_fill(torch.eye(2, 3) > 0, float("-inf"))
layer(torch.randn(2, 3, 8), src_key_padding_mask=padding).sum().backward()
assert "sympy" not in sys.modules
for broken in (lambda: torch._check(False, lambda: "not so"), lambda: torch._check_value(False)):
    try:
        broken()
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__, error)
"""


@pytest.mark.thorough
def test_checks_that_hold_import_no_part_of_the_compiler_and_others_still_fail() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ATTENDS], check=True, capture_output=True, text=True
    )
    runtime, value = done.stdout.splitlines()
    assert runtime == "RuntimeError not so"
    assert value.startswith("ValueError")


def test_a_compiler_that_is_there_keeps_its_checks() -> None:
    before = torch._check_with
    check_without_compiler()
    assert torch._check_with is before


@pytest.mark.parametrize("code", ["import zrun_core.train.worker", _BUILDS])
@pytest.mark.thorough
def test_torchs_compiler_is_not_imported(code: str) -> None:
    code += _HAS_IT if code is not _BUILDS else _HAS_IT.replace("; ", "\n", 1)
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_marked_function_is_left_out_of_graphs() -> None:
    """It runs as it is written, also where what calls it is compiled."""
    sizes: list[int] = []
    graphs: list[int] = []

    @outside_graphs
    def note(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return x + 1

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(lambda x: note(x * 2) * 3, backend=count)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 9.0))
    assert sizes == [2, 2, 2]
    assert len(graphs) == 2, "before it and after it"


def test_on_meta_what_torch_refuses_is_refused() -> None:
    with on_meta():
        weight = torch.nn.Parameter(torch.empty(3))
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            weight.normal_()
        with torch.no_grad():
            assert weight.normal_() is weight
        assert torch.empty(2, device="cpu").normal_().isfinite().all()


@pytest.mark.parametrize(
    ("keys", "is_needed"),
    [
        ({}, False),
        ({"compile": True}, True),
        ({"parallel": {"tp": 2}}, True),
        ({"parallel": {"pp": 2}}, True),
        ({"activations": {"checkpoint": "full"}}, True),
    ],
)
def test_what_all_ranks_need_is_imported_before_they_are_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], is_needed: bool
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(worker, "load_compiler", lambda: loaded.append("compiler"))
    given = {"name": "x", "model": "a:b", "data": "a:b", "steps": 1, "batch": 2}
    job = JobConfig.model_validate(given | keys)
    plan = LaunchPlan(ranks=[RankPlace(rank=0, host="h", local_rank=0, device="cpu")])
    batch = resolve_batch(job, 1)
    spec = RunSpec(job=job, plan=plan, batch=batch, job_dir="/", run_dir="/", run_id="x")
    path = tmp_path / "spec.json"
    spec.write(path)
    worker.import_for(str(path))
    assert loaded == (["compiler"] if is_needed else [])
    worker.import_for(str(tmp_path / "gone.json"))  # `main` says so
