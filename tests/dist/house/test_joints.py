"""Where features meet: each model on each shape of a mesh, evaluated, writing text, and resumed.

`python tests/dist/house/joints_table.py` runs all cells; here every pair of values is in one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import axes_cells
import pytest
from axes_cells import covering
from distances import distance
from runs import run

pytest.importorskip("transformers")

from joints_table import (
    HAS_PEFT,
    MODELS,
    PRECISIONS,
    Cell,
    Trained,
    all_cells,
    compared,
    on_ranks,
    outcome,
)

CELLS = covering(list(all_cells()))


@pytest.fixture(scope="module")
def alone(ranks: Any) -> Any:
    """What a cell comes to in one process."""
    made: dict[Cell, Trained] = {}

    def found(cell: Cell) -> Trained:
        if cell not in made:
            made[cell] = on_ranks(ranks(1), cell)[0]
        return made[cell]

    return found


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: " ".join(map(str, cell)))
@pytest.mark.at_most(2)
def test_one_process_or_a_refusal(ranks: Any, alone: Any, cell: Cell) -> None:
    if MODELS[cell.model].needs_peft and not HAS_PEFT:
        pytest.skip("peft is not installed: pip install peft")
    found = outcome(ranks, cell, None if cell.why_not else alone(cell.alone))
    assert cell.why_not in found.refusal
    assert bool(cell.why_not) == bool(found.refusal), found.refusal
    assert found.is_within(cell.close), found


@pytest.mark.parametrize("model", [name for name in MODELS if MODELS[name].experts])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.thorough
def test_a_mistake_is_further_away(
    ranks: Any, alone: Any, monkeypatch: pytest.MonkeyPatch, model: str, precision: str
) -> None:
    """What the bounds are worth: they see a layer that is a tenth too large."""
    cell = Cell(model, "tp 2, dp 2", 1, precision, asks_all=precision != "fp32")
    right = alone(cell.alone)
    wrong = MODELS[model]._replace(args={**MODELS[model].args, "mistake": 0.1})
    monkeypatch.setitem(MODELS, model, wrong)
    found = on_ranks(ranks(1), cell.alone)[0]
    is_within = True
    try:
        is_within = compared(found, right, 10 * cell.close).is_within(cell.close)
    except AssertionError as error:  # of the text
        if "where one process writes" not in str(error):
            raise
        is_within = False
    assert not is_within


def test_layers_are_noted_once_however_often_a_model_is_tried(ranks: Any, tmp_path: Path) -> None:
    """Ranks run forwards before the first step, by which a model of transformers is hooked."""
    cell = Cell("mixtral", "tp 2, dp 2", 1, "fp32")
    keys = {
        **cell.keys,
        "loss": "house/joints_models.py:loss_of_layers",
        "eval": None,
        "hooks": {},
        "checkpoint": None,
    }
    many = ranks(4).run(run, keys, str(tmp_path / "many"), None, None, None, cell.dims)
    one = ranks(1).run(run, {**keys, "zero": 0, "parallel": {}}, str(tmp_path / "one"))
    apart = distance(many, one)
    assert apart.is_within(cell.close), apart


@pytest.mark.thorough
def test_experts_that_the_plan_wants_whole_have_whole_parameters(
    ranks: Any, alone: Any, tmp_path: Path
) -> None:
    cell = Cell("qwen3-moe", "tp 2, dp 2", 3, "fp32")
    parallel = {"tp": 2, "plan": {"*.experts": "whole"}}
    keys = {**cell.keys, "parallel": parallel}
    many = ranks(4).run(run, keys, str(tmp_path), None, None, None, cell.dims)
    apart = distance(many, alone(cell.alone).found)
    assert apart.is_within(cell.close), apart
    shapes = {name: order[0] for each in many for name, order in each["orders"].items()}
    assert shapes["model.layers.0.mlp.experts.down_proj"] == (4, 16, 16)


@pytest.mark.thorough
def test_losses_are_close_where_rounding_chooses_other_experts(ranks: Any, alone: Any) -> None:
    """Gradients are not: in cells with slices in halves, mixtures of the table ask all experts."""
    cell = Cell("mixtral", "tp 2, dp 2", 3, "bf16", asks_all=False)
    apart = distance(on_ranks(ranks(4), cell)[0].found, alone(cell.alone).found)
    assert apart.of_losses <= axes_cells.CLOSE["bf16"], apart
