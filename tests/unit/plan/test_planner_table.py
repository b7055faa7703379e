"""The planner's benchmark: which cases it has, what it asks of other estimators, and its tables.
Nothing is trained.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # as Python does for its scripts

import planner  # noqa: E402
import planner_peers  # noqa: E402
import planner_table  # noqa: E402

from zrun_core.spine.config import JobConfig  # noqa: E402
from zrun_core.user_code import user  # noqa: E402


def result(
    measured: int = 1000, predicted: int = 1000, world: int = 1, **peers: int | None
) -> dict[str, Any]:
    return {
        "case": f"gpt x{world}",
        "model": "gpt",
        "world": world,
        "peak": measured,
        "predicted": predicted,
        "peers": peers,
    }


@pytest.mark.parametrize("model", planner.MODELS)
def test_every_model_is_compared_at_every_stage_and_precision(model: str) -> None:
    own = [case for case in planner.cases() if case.model == model]
    assert len(set(own)) == len(own)
    both = [
        (precision, checkpoint) for precision in ("fp32", "bf16") for checkpoint in ("none", "full")
    ]
    assert {(case.precision, case.checkpoint) for case in own if case.world == 1} >= set(both)
    assert any(case.stage for case in own if case.world == 1)
    two = [case for case in own if case.world == 2]
    assert {case.stage for case in two} == {0, 1, 2, 3}
    assert {case.precision for case in two} == {"fp32", "bf16"}
    assert {case.checkpoint for case in two} == {"none", "full"}
    assert any(case.world == 4 for case in own)


@pytest.mark.parametrize(
    ("predicted", "world", "good"),
    [
        (990, 1, True),
        (989, 1, False),
        (1010, 1, True),
        (1011, 1, False),
        (1020, 2, True),
        (1021, 2, False),
        (989, 4, False),
    ],
)
def test_the_bound_is_narrower_below(predicted: int, world: int, good: bool) -> None:
    assert planner_table.is_good(result(predicted=predicted, world=world)) is good


def test_tables_have_the_peers_that_were_asked() -> None:
    results = [
        result(memtracker=500, formulas=None),
        result(predicted=1005, world=2, memtracker=None, formulas=2000),
    ]
    head, _, one, two = planner_table.peer_table(results).splitlines()
    assert "MemTracker" in head
    assert "DeepSpeed" not in head
    assert one.split()[-2:] == ["-", "-"]
    assert two.endswith("+100 %")
    head, _, row = planner_table.summary(results).splitlines()
    assert "+0.00 to +0.00 %" in row
    assert "+0.50 to +0.50 %" in row
    assert "-50 to -50 %" in row


def test_no_answer_is_no_error() -> None:
    assert planner_table.error(result(deepspeed=None), "deepspeed") is None
    assert planner_table.error(result(deepspeed=1500), "deepspeed") == pytest.approx(0.5)
    assert planner_table.spread([None, None]) == "-"


@pytest.mark.parametrize("model", ["gpt", "llama", "bert"])
def test_the_formulas_divide_all_16_bytes_by_the_ranks_of_stage_3(model: str) -> None:
    case = planner.Case(model)
    ref = JobConfig.model_validate(case.job()).model
    params = sum(param.numel() for param in user.build_model(ref, BENCHMARKS).parameters())
    whole, half = (
        planner_peers.formulas(case.question() | {"world": 2, "stage": stage}) for stage in (0, 3)
    )
    assert whole is not None
    assert half is not None
    assert whole - half == 8 * params


def test_there_is_no_formula_for_what_is_no_transformer() -> None:
    assert planner_peers.formulas(planner.Case("conv").question()) is None


def test_plain_training_is_asked_once_for_all_stages_and_ranks() -> None:
    assert planner_peers.is_plain(planner.Case("gpt", stage=3).question())
    assert planner_peers.is_plain(planner.Case("gpt", world=4).question())
    assert not planner_peers.is_plain(planner.Case("gpt", stage=1, world=2).question())
    assert planner._plain(planner.Case("gpt", stage=3)) == planner._plain(
        planner.Case("gpt", world=4)
    )


def test_missing_peers_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_peers, "ask_packages", lambda python, questions: {"deepspeed": [1]})
    assert planner.ask_peers([planner.Case("gpt")], "elsewhere") == {"deepspeed": [1]}
    assert capsys.readouterr().out.startswith("without accelerate: elsewhere has none")


def test_unknown_models_are_refused() -> None:
    with pytest.raises(SystemExit):
        planner.parse(["--only", "gpt,resnet"])


def test_results_of_parts_are_shown_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for world, file in enumerate(files, 1):
        file.write_text(json.dumps([result(world=world)]))
    monkeypatch.setattr(sys, "argv", ["planner.py", "--show", *map(str, files)])
    assert planner.main() == 0
    shown = capsys.readouterr().out
    assert "gpt x1" in shown
    assert "gpt x2" in shown
    assert "2 of 2 cases" in shown
