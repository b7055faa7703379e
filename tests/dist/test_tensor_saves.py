"""Checkpoints of layers divided over ranks: those of one rank, whatever the axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import losses, run
from safetensors.torch import load_file
from test_pipelines import gpt
from test_tensor_parallel import small, values

from zrun_core.checkpoint.export import export
from zrun_core.checkpoint.folder import read_step
from zrun_core.checkpoint.manifest_fields import VALUE
from zrun_core.models.gpt import gpt as make_gpt

SHAPES: dict[str, dict[str, int]] = {
    "dp 4": {"dp": 4},
    "tp 2, dp 2": {"tp": 2, "dp": 2},
    "pp 2, dp 2": {"pp": 2, "dp": 2},
    "tp 2, pp 2": {"tp": 2, "pp": 2},
    "tp 2, pp 2, dp 2": {"tp": 2, "pp": 2, "dp": 2},
}
CASES = [(shape, stage) for shape in SHAPES for stage in (1, 3)]
MODEL = gpt(tied=True, flavour="gpt2", vocab_size=13, seq_len=6)  # of which tp 2 pads the rows


def trained(
    ranks: Any, folder: Path, case: tuple[str, int], source: Path | None = None, steps: int = 1
) -> list[dict[str, Any]]:
    """Run the job on the ranks of a shape, at a stage of ZeRO."""
    shape, stage = case
    dims = {"dp": 1, **SHAPES[shape]}
    keys = small(
        model=MODEL,
        steps=steps,
        zero=stage,
        batch={"global": 8, "micro": 1},
        optim={"lr": 1e-3, "eps": 1e-3},
        lr={"schedule": "constant"},
        checkpoint={"every": 1},
        parallel={axis: size for axis, size in dims.items() if axis != "dp"},
    )
    size = dims["dp"] * dims.get("tp", 1) * dims.get("pp", 1)
    resume = None if source is None else {"folder": f"{source}/checkpoints"}
    found: list[dict[str, Any]] = ranks(size).run(run, keys, str(folder), resume, None, None, dims)
    for each in found:
        assert not each["error"], each["error"]
    return found


def begun(found: list[dict[str, Any]]) -> dict[Any, np.ndarray]:
    return values([{**each, **each["begun"]} for each in found])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_another_shape_goes_on_with_the_same_tensors(
    ranks, tmp_path: Path, case: tuple[str, int]
) -> None:
    """A step of one shape holds the same bits in another one, and leads to the same loss."""
    folder = tmp_path / "was"
    before = values(trained(ranks, folder, case))
    expected = None
    place = CASES.index(case)
    for other in (case, CASES[(place + 3) % len(CASES)]):  # other axes, at the other stage
        rest = trained(ranks, tmp_path / str(other), other, folder, steps=2)
        held = begun(rest)
        assert held.keys() == before.keys()
        for key, value in before.items():
            np.testing.assert_array_equal(held[key], value, err_msg=f"{key} in {other}")
        loss = losses(rest[0])[2]
        expected = loss if expected is None else expected
        assert loss == pytest.approx(expected, rel=1e-6), other


def test_exports_are_of_the_plain_model(ranks, tmp_path: Path) -> None:
    """Its weights are those of the checkpoint, whole and without padding."""
    case = ("tp 2, pp 2, dp 2", 3)
    found = trained(ranks, tmp_path, case)
    step = tmp_path / "checkpoints" / "step-00000001"
    out = tmp_path / "model.safetensors"
    export(step, read_step(step), out)
    model = make_gpt(**MODEL["args"])
    model.load_state_dict(load_file(out), strict=False)
    held = values(found)
    for name, param in model.named_parameters():
        np.testing.assert_array_equal(param.detach().numpy(), held[name, VALUE], err_msg=name)
