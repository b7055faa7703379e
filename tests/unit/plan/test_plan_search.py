"""The search finds what estimating everything finds, and says what it may not be asked."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from traced_gpt import GPT, planner_of

from zrun.estimate.patch import job_changes
from zrun.estimate.why import sentence
from zrun_core.errors import JobError
from zrun_core.hardware.hardware import Hardware
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.memory.buffers import ON_DEVICE, Placement, Tier
from zrun_core.memory.placement import place, share_of
from zrun_core.plan.answer.bounds import Bounds
from zrun_core.plan.answer.choice import Choice, row_of
from zrun_core.plan.answer.least_share import with_least_share
from zrun_core.plan.answer.outcome import Estimate
from zrun_core.plan.answer.planner import Planner
from zrun_core.plan.answer.search import SearchResult, SearchSpace, SearchState, _Search, search
from zrun_core.plan.answer.search_space import candidates, offload_chains
from zrun_core.plan.question.candidate import Candidate, changes, features
from zrun_core.plan.timing.timing import StepTime
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.spine.spec import BatchPlan

HOST, DISK = Tier.HOST, Tier.DISK
ONE = ParallelDims(1)
SMALL = GPT(8, 1024, 16, seq=1024, vocab=50304)
MIDDLE = GPT(8, 4096, 32)
BIG = GPT(24, 4096, 32)  # 5.2 billion: 16 bytes each are more than a device has


def everything(planner: Planner, constraints: SearchSpace) -> list[Estimate]:
    found = []
    for candidate in candidates(planner, constraints):
        try:
            found.append(planner.estimate(candidate))
        except JobError:
            continue
    return found


def names(found: tuple[Estimate, ...]) -> list[str]:
    return [str(each.candidate) for each in found]


@pytest.mark.parametrize(
    ("shape", "hardware", "batch"), [(MIDDLE, "2x4xA100-40G@100G", 16), (SMALL, "4xV100-16G", 32)]
)
@pytest.mark.at_most(1)
def test_the_best_are_those_of_trying_everything(shape: GPT, hardware: str, batch: int) -> None:
    planner = planner_of(shape, parse_simulate(hardware), divides=True)
    limits = SearchSpace(
        batch,
        stages=(0, 1, 3),
        checkpoints=("none", "full"),
        offloads=False,
        virtual=2,
        most_micro=2,
        tp=(1, 2),
    )
    all_of_them = everything(planner, limits)
    rows = Choice(planner.hardware).rows(each for each in all_of_them if each.fits)
    found = search(planner, limits, "best")
    assert [row_of(each) for each in found.best] == [row_of(each) for each in rows[:10]]
    assert found.best[0].candidate == rows[0].candidate
    assert all(each.fits for each in found.best)
    assert found.tried + found.pruned >= len(all_of_them) > found.tried, "bounds ruled some out"
    for point in found.pareto:
        better = [
            e
            for e in all_of_them
            if e.fits
            and e.time.seconds * 1.01 < point.time.seconds
            and e.headroom > point.headroom + 0.01 * point.capacity
        ]
        assert not better
    most_room = max(each.headroom for each in all_of_them if each.fits)
    assert found.pareto[-1].headroom >= most_room - 0.01 * found.pareto[-1].capacity


@pytest.mark.thorough
def test_it_is_the_same_every_time() -> None:
    results: list[SearchResult] = []
    for _ in range(2):
        planner = planner_of(MIDDLE, parse_simulate("4xV100-16G"))
        results.append(search(planner, SearchSpace(16, virtual=1, most_micro=1), "best"))
    for one, other in itertools.pairwise(results):
        assert (one.best, one.pareto, one.rejected, one.tried) == (
            other.best,
            other.pareto,
            other.rejected,
            other.tried,
        )


def test_no_bound_is_above_what_it_bounds() -> None:
    planner = planner_of(SMALL, parse_simulate("2x2xA100-80G"), divides=True)
    searching = _Search(planner, SearchSpace(8, virtual=2, most_micro=2))
    for bound in searching.bounded():
        found = planner.estimate(bound.candidate)
        assert bound.seconds <= found.time.seconds * (1 + 1e-9), bound.candidate
        assert bound.num_bytes <= found.device_used, bound.candidate


@pytest.mark.thorough
def test_states_elsewhere_are_bounded_without_another_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    lower_bounds = Bounds._lower_bounds

    def counted(self: Bounds, candidate: Candidate) -> Any:
        nonlocal looks
        looks += 1
        return lower_bounds(self, candidate)

    monkeypatch.setattr(Bounds, "_lower_bounds", counted)
    planner = planner_of(BIG, parse_simulate("2xA100-40G"))
    limits = SearchSpace(8, virtual=1, most_micro=2, checkpoints=("none", "full"))
    found = search(planner, limits, "best")
    all_of_them = list(candidates(planner, limits))
    assert looks == len(all_of_them)
    assert found.tried + found.pruned > looks, "states elsewhere were considered"
    bounds = Bounds(planner, [chain[0] for chain in offload_chains(planner, limits)])
    for number, candidate in enumerate(all_of_them):
        bounds.bound(number, candidate)
        for way in bounds.placements:
            if planner.why_not_placed(replace(candidate, placement=way)):
                continue
            other = bounds.at(number, candidate, way)
            assert other.candidate == replace(candidate, placement=way)
            used = planner.estimate(other.candidate)
            assert other.num_bytes <= used.device_used
            assert other.seconds <= used.time.seconds * (1 + 1e-9)


def fit(hardware: Hardware, base: Candidate, batch: int, **limits: object) -> SearchResult:
    planner = planner_of(BIG, hardware)
    return search(planner, SearchSpace(batch, base=base, **limits), "fit")  # type: ignore[arg-type]


@pytest.mark.thorough
def test_the_cheapest_change_is_one_key() -> None:
    base = Candidate(0, ParallelDims(8), 1, 4, "full", "bf16")
    found = fit(parse_simulate("8xA100-80G"), base, 32)
    best = found.best[0].candidate
    assert best.stage > 0
    assert changes(base, best) == 1
    alike = [each for each in found.best if changes(base, each.candidate) == 1]
    assert found.best[: len(alike)] == tuple(alike)
    assert [e.time.seconds for e in alike] == sorted(e.time.seconds for e in alike), (
        "the least slowdown first"
    )
    assert found.rejected
    assert not any(each.fits for each in found.rejected)


def test_states_leave_the_device_where_nothing_else_fits() -> None:
    base = Candidate(0, ParallelDims(1), 1, 4, "none", "bf16")
    found = fit(parse_simulate("1xA100-80G"), base, 4)
    assert found.best[0].candidate.offloads
    assert changes(base, found.best[0].candidate) == 1
    only = fit(parse_simulate("1xA100-80G"), base, 4, offloads=False)
    assert not only.best
    missing = [-each.headroom for each in only.rejected]
    assert missing == sorted(missing)
    assert missing[0] > 0
    assert len({row_of(each) for each in only.rejected}) == len(missing), "no two look the same"


def test_homes_that_are_alike_in_all_do_not_confuse_a_search() -> None:
    fast = replace(parse_simulate("2xA100-40G"), disk_read=1e18, disk_write=1e18)
    planner = planner_of(BIG, fast)
    limits = SearchSpace(8, virtual=1, most_micro=1, checkpoints=("full",), tp=(1,), pp=(1,))
    best = search(planner, limits, "best").best
    assert len({row_of(each) for each in best}) == len(best) > 1, "they are one row"


# What comes first


@pytest.fixture(scope="module")
def plain() -> Estimate:
    """A data-parallel job of one second on 8 A100."""
    planner = planner_of(SMALL, parse_simulate("8xA100-80G"))
    return estimated(planner.estimate(Candidate(1, ParallelDims(8), 1, 4)), 1.0)


def estimated(like: Estimate, seconds: float, free: float = 0.5, **keys: Any) -> Estimate:
    """Return an estimate of other seconds, free memory and keys of the candidate."""
    memory = parse_simulate("8xA100-80G").device.memory_bytes
    return replace(
        like,
        candidate=replace(like.candidate, **keys),
        time=replace(like.time, seconds=seconds, doubt=1.0),
        capacity=like.device_used + round(free * memory),
    )


def test_what_leaves_too_little_is_not_first(plain: Estimate) -> None:
    tight = estimated(plain, 0.5, 0.03, micro=4)
    roomy = estimated(plain, 0.7, 0.08, micro=2)
    hardware = parse_simulate("8xA100-80G")
    choice = Choice(hardware)
    assert choice.rows([tight, roomy]) == [roomy, tight]
    assert Choice(hardware, headroom=0.02).rows([tight, roomy]) == [tight, roomy]
    lead = choice.lead([tight])
    assert lead is not None, "where nothing leaves more, it is"
    assert not choice.may_lead(tight.candidate, 0.1, tight.headroom, choice.lead([roomy]))
    assert choice.may_lead(roomy.candidate, 0.9, roomy.headroom, lead)
    assert Choice(hardware, base=plain).lead([tight]) is None


def test_the_simpler_of_those_that_are_nearly_as_fast_is_first(plain: Estimate) -> None:
    moved = {"placement": Placement(optimizer=Tier.HOST), "micro": 4}
    parts = {"dims": ParallelDims(4, tp=2), "sequence_parallel": True}
    clever = estimated(plain, 0.50, **moved)
    divided = estimated(plain, 0.51, **parts)
    simple = estimated(plain, 0.519, micro=2)
    slower = estimated(plain, 0.53, micro=1)
    assert [features(each.candidate) for each in (clever, divided, simple)] == [2, 1, 0]
    choice = Choice(parse_simulate("8xA100-80G"))
    everything_found = [slower, clever, simple, divided]
    assert choice.rows(everything_found) == [simple, clever, divided, slower]
    lead = choice.lead([clever])
    assert choice.may_lead(simple.candidate, 0.519, simple.headroom, lead)
    assert not choice.may_lead(simple.candidate, 0.521, simple.headroom, lead)
    again = replace(simple, candidate=replace(simple.candidate, stage=2))
    assert choice.rows([again, simple]) == [simple], "one row of each time and memory"


@pytest.mark.parametrize(
    ("spread", "keys", "seconds", "is_faster"),
    [
        (0.25, {"micro": 2}, 0.96, False),
        (0.25, {"micro": 2}, 0.94, True),
        (0.25, {"dims": ParallelDims(4, tp=2)}, 0.89, False),
        (0.25, {"dims": ParallelDims(4, tp=2)}, 0.87, True),
        (0.50, {"micro": 2}, 0.91, False),
        (0.50, {"dims": ParallelDims(1, tp=8)}, 0.76, False),
        (0.50, {"dims": ParallelDims(1, tp=8)}, 0.74, True),
    ],
)
def test_a_proposal_is_faster_than_the_job_for_sure(
    plain: Estimate, spread: float, keys: dict[str, Any], seconds: float, is_faster: bool
) -> None:
    """The main job's tp 2 on two cores: 0.67 s for 0.74 s predicted, 0.47 for 0.34 measured."""
    choice = Choice(replace(parse_simulate("8xA100-80G"), spread=spread), base=plain)
    other = estimated(plain, seconds, **keys)
    lead = choice.lead([plain, other])
    assert (lead is not None) == is_faster
    assert choice.rows([plain, other])[0] is (other if is_faster else plain)
    assert choice.may_lead(other.candidate, seconds, other.headroom, None) == is_faster
    lacking = replace(choice, base=replace(plain, fits=False))
    assert lacking.lead([other]) is not None, "what does not run is not faster"


def test_a_search_that_changes_nothing_says_so() -> None:
    hardware = parse_simulate("2xA100-80G")
    planner = planner_of(SMALL, hardware)
    limits = SearchSpace(8, virtual=1, offloads=False)
    best = search(planner, limits, "best").best[0].candidate
    found = search(planner, replace(limits, base=best), "best")
    assert found.keeps_base
    assert found.best[0].candidate == best
    slow = replace(best, micro=1, accumulation=8 // best.dims.dp, checkpoint="full")
    found = search(planner, replace(limits, base=slow), "best")
    assert not found.keeps_base
    assert found.best[0].time.seconds < 0.95 * planner.estimate(slow).time.seconds


@pytest.mark.parametrize("goal", ["best", "fit"])
@pytest.mark.thorough
def test_who_interrupts_a_search_gets_what_it_has_found(goal: Any) -> None:
    planner = planner_of(BIG, parse_simulate("8xA100-80G"))
    base = Candidate(0, ParallelDims(8), 1, 4, "full", "bf16")
    states: list[SearchState] = []

    def interrupt(state: SearchState) -> None:
        states.append(state)
        if state.best is not None:
            raise KeyboardInterrupt

    limits = SearchSpace(32, base=base, virtual=1)
    found = search(planner, limits, goal, interrupt)
    assert found.is_interrupted
    assert found.best[0].candidate == states[-1].best.candidate  # type: ignore[union-attr]
    assert states[-1].considered >= states[-1].tried > 0

    def at_once(state: SearchState) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(planner, limits, goal, at_once)


def test_zero_3_over_more_ranks_than_were_compared_is_not_preferred() -> None:
    """Narayanan et al. 2021, table 2: 1.6, 2.4 and 4.5 times as long on 384, 768 and 1,536."""
    planner = planner_of(GPT(8, 12288, 96), parse_simulate("192x8xA100-80G"))

    def time(ranks: int, stage: int = 3) -> StepTime:
        found = planner.estimate(Candidate(stage, ParallelDims(ranks), 1, 1, "full"))
        assert any("ZeRO-3 over" in note for note in found.notes) == (found.time.doubt > 1)
        return found.time

    doubts = [time(ranks).doubt for ranks in (128, 384, 768, 1536)]
    assert doubts == pytest.approx([1.0, 1.64, 2.6, 4.52])
    assert time(1536, stage=1).doubt == 1.0
    wide, usual = time(1536), time(128)
    assert wide.high / wide.seconds == pytest.approx(4.52 * usual.high / usual.seconds)
    assert wide.cautious == pytest.approx(4.52 * wide.seconds)


def test_a_job_that_fits_needs_no_change() -> None:
    base = Candidate(3, ParallelDims(8), 1, 1, "full", "bf16")
    found = fit(parse_simulate("8xA100-80G"), base, 8, virtual=1, most_micro=1)
    assert names(found.best)[0] == str(base)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"global_batch": 0}, "trains nothing"),
        ({"global_batch": 8, "tp": ()}, "leave nothing to choose tp from"),
    ],
)
def test_contradictions_are_said(limits: dict[str, object], said: str) -> None:
    with pytest.raises(JobError, match=said):
        SearchSpace(**limits)  # type: ignore[arg-type]


def test_a_batch_that_does_not_divide_is_said() -> None:
    planner = planner_of(BIG, parse_simulate("8xA100-80G"))
    with pytest.raises(JobError, match="no configuration has 7 samples per step on 8xA100-80G"):
        search(planner, SearchSpace(7, tp=(1,), pp=(1,)), "best")
    with pytest.raises(JobError, match="one of something"):
        search(planner, SearchSpace(8), "fit")


# Estimates


def test_an_estimate_adds_up() -> None:
    planner = planner_of(SMALL, parse_simulate("2x8xA100-80G"), divides=True)
    found = planner.estimate(
        Candidate(1, ParallelDims(4, tp=2, pp=2), 1, 8, "full", sequence_parallel=True)
    )
    assert [rank.role for rank in found.ranks] == ["first", "last"]
    for rank in found.ranks:
        states = sum(buffer.num_bytes for buffer in rank.buffers)
        assert rank.allocated == rank.peak.num_bytes == states + rank.peak.dynamic
        assert rank.reserved >= rank.allocated
        assert rank.device_used > rank.reserved
    assert found.headroom == found.capacity - max(rank.device_used for rank in found.ranks)
    assert found.source == "traced"
    share = SMALL.num_params / 4
    assert found.paper == {"params": 2 * share, "grads": 2 * share, "optim": 12 * share / 4}
    middle = planner.estimate(Candidate(1, ParallelDims(4, pp=4), 1, 8))
    assert [rank.role for rank in middle.ranks] == ["first", "middle", "last"]


def test_earlier_stages_hold_more_micro_batches() -> None:
    planner = planner_of(BIG, parse_simulate("8xA100-80G"))
    asked = Candidate(0, ParallelDims(1, pp=4), 1, 16, "full")
    sizes = [planner.rank(asked, stage).peak.dynamic for stage in range(4)]
    blocks = [len(runs[0]) for runs in map(planner.split(asked).stage_blocks, range(4))]
    one_block = BIG.formula.block_activations(1, recompute="full")
    assert sizes[1] - sizes[2] == blocks[1] * one_block


def test_states_elsewhere_are_counted_where_they_are() -> None:
    planner = planner_of(BIG, parse_simulate("2xA100-80G"))
    here, there, disk = (
        planner.estimate(Candidate(2, ParallelDims(2), 1, 1, "full", placement=placement))
        for placement in (
            Placement(),
            Placement(grad=Tier.HOST, optimizer=Tier.HOST),
            Placement(optimizer=Tier.DISK),
        )
    )
    assert there.device_used < here.device_used
    rank = there.ranks[0]
    optimizer = sum(b.num_bytes for b in rank.buffers if b.kind.value == "optim")
    assert rank.pageable > optimizer >= 12 * BIG.num_params / 2
    assert rank.pinned >= 4 * BIG.num_params / 2
    held = {part: size for part, size in there.host_parts.items() if part != "build"}
    assert there.host_bytes == sum(held.values()) >= 2 * (rank.pinned + optimizer)
    assert disk.ranks[0].disk >= 12 * BIG.num_params / 2


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        (Candidate(2, ONE, 1, 1, placement=Placement(param=HOST)), "need zero.stage: 3"),
        (Candidate(2, ONE, 1, 1, placement=Placement(grad=HOST)), "need an optimizer there"),
        (Candidate(2, ONE, 1, 1, placement=Placement(activation=HOST)), "recomputed blocks"),
        (Candidate(2, ONE, 1, 1, placement=Placement(optimizer=DISK)), "lamb on a disk would"),
    ],
)
def test_states_do_not_live_where_a_run_refuses_them(candidate: Candidate, said: str) -> None:
    planner = planner_of(SMALL, parse_simulate("1xA100-80G"), optim="lamb")
    with pytest.raises(JobError, match=said):
        planner.estimate(candidate)
    space = SearchSpace(1, micro=(1,), virtual=1)
    for way in itertools.chain(*offload_chains(planner, space)):
        other = replace(candidate, placement=way)
        if not planner.why_not_placed(other):
            planner.estimate(other)


def test_on_a_cpu_only_disks_are_elsewhere() -> None:
    planner = planner_of(SMALL, parse_simulate("2xCPU"))
    ways = [chain[-1] for chain in offload_chains(planner, SearchSpace(2))]
    assert {Placement(optimizer=DISK), Placement(DISK, DISK, DISK)} <= set(ways)
    assert not any(way.uses(HOST) for way in ways)
    without = replace(planner.hardware, disk_write=0.0)
    assert not offload_chains(planner_of(SMALL, without), SearchSpace(2))
    found = planner.estimate(Candidate(0, ONE, 1, 1, placement=Placement(optimizer=DISK)))
    here = planner.estimate(Candidate(0, ONE, 1, 1))
    rank = found.ranks[0]
    assert rank.disk >= 12 * SMALL.num_params > rank.device_used - here.ranks[0].device_used
    assert not any(buffer.tier is HOST for buffer in rank.buffers), "the host is the device"
    assert found.moved.keys() == {"disk"}
    small = planner_of(SMALL, replace(planner.hardware, disk_bytes=rank.disk - 1))
    assert not small.estimate(found.candidate).fits


def test_what_a_step_moves_is_in_the_estimate() -> None:
    planner = planner_of(SMALL, parse_simulate("1xA100-80G"))
    away = Placement(grad=HOST, optimizer=DISK)
    found = planner.estimate(Candidate(2, ONE, 1, 3, placement=away))
    params = SMALL.num_params
    assert found.moved == {
        "host": {
            "written": {"grads": pytest.approx(3 * 4 * params, rel=1e-3)},
            "read": {"params": pytest.approx(2 * params, rel=1e-3)},
        },
        "disk": {
            "written": {"optim": pytest.approx(12 * params, rel=1e-3)},
            "read": {"optim": pytest.approx(12 * params, rel=1e-3)},
        },
    }


def test_layer_by_layer_parameters_come_twice_per_step() -> None:
    planner = planner_of(SMALL, parse_simulate("1xA100-40G"))

    def read(layer_major: bool) -> int:
        placement = Placement(param=HOST)
        asked = Candidate(
            3, ONE, 1, 4, placement=placement, schedule="layer_major" if layer_major else "1f1b"
        )
        return planner.estimate(asked).moved["host"]["read"]["params"]

    in_turn = read(layer_major=False)
    assert in_turn == pytest.approx(4 * 2 * 2 * SMALL.num_params, rel=1e-3)
    assert in_turn / 8 < read(layer_major=True) < in_turn / 4, "the last slice once"


@pytest.mark.parametrize(
    ("hardware", "tier", "tiers"),
    [
        ("1xA100-80G", HOST, {"host"}),
        ("1xA100-80G", DISK, {"host", "disk"}),
        ("1xCPU", DISK, {"disk"}),
    ],
)
def test_inputs_of_blocks_are_planned_where_they_wait(
    hardware: str, tier: Tier, tiers: set[str]
) -> None:
    planner = planner_of(MIDDLE, parse_simulate(hardware))
    here = planner.estimate(Candidate(0, ONE, 2, 3, "full"))
    asked = replace(here.candidate, placement=Placement(activation=tier))
    away = planner.estimate(asked)
    each = 2 * 2 * 2048 * 4096  # bytes, samples, tokens, width
    slots = 2 * each if hardware == "1xCPU" else 0
    assert here.ranks[0].allocated - away.ranks[0].allocated == (8 - 1) * each - slots
    assert away.moved.keys() == tiers
    for directions in away.moved.values():
        assert directions == {
            "written": {"activations": 3 * 8 * each},
            "read": {"activations": 3 * 7 * each},
        }
    added = away.ranks[0].disk if tier is DISK else away.ranks[0].pinned
    assert added == 8 * each


@pytest.mark.parametrize("hardware", ["1xA100-40G", "1xCPU"])
def test_no_unit_leaves_that_need_not(hardware: str) -> None:
    fast = parse_simulate(hardware)
    way = Placement(DISK, DISK, DISK)
    asked = Candidate(3, ONE, 1, 1, "full", placement=way)
    planner = planner_of(MIDDLE, fast)
    room = planner.estimate(replace(asked, placement=Placement())).device_used
    least = planner.estimate(asked).device_used
    for part in (0.2, 0.5, 0.9):
        memory = round(least + part * (room - least))
        device = replace(fast.device, memory_bytes=memory)
        planner = planner_of(MIDDLE, replace(fast, device=device))
        found = with_least_share(planner, asked)
        assert planner.estimate(found).fits
        layouts = planner.layouts(found)
        count = len(place(layouts, found.placement))
        assert 0 < count < len(layouts)
        fewer = share_of(layouts, count - 1)
        less = replace(found, placement=replace(way, fraction=fewer))
        assert not planner.estimate(less).fits
    enough = replace(fast, device=replace(fast.device, memory_bytes=room))
    assert with_least_share(planner_of(MIDDLE, enough), asked).placement.fraction == 0


ALL_ON_DISK = Placement(Tier.DISK, Tier.DISK, Tier.DISK)


@pytest.mark.parametrize(("stage", "placement"), [(2, ON_DEVICE), (3, ALL_ON_DISK)])
def test_a_model_that_no_host_has_room_to_build_is_made_on_meta(
    stage: int, placement: Placement
) -> None:
    hardware = replace(
        parse_simulate("2xA100-80G"), host_bytes=2 * (1800 << 20) + 4 * BIG.num_params - 1
    )
    planner = planner_of(BIG, hardware)
    base = Candidate(stage, ParallelDims(2), 1, 1, "full", placement=placement)
    found = planner.estimate(base)
    assert found.headroom > 0
    assert not found.fits
    told = sentence(found, hardware, None)
    assert told.startswith("each host would hold ")
    assert " while the model is built, 1 B more than its " in told
    fits = (
        search(planner, SearchSpace(base.global_batch, base=base, tp=(1,)), "fit").best[0].candidate
    )
    assert fits == replace(base, init="meta")
    batch = BatchPlan(global_size=2, micro=1, accumulation=1, ranks=2)
    assert job_changes(planner.job, batch, fits, hardware)["init"] == "meta"


def test_a_jobs_own_keys_count() -> None:
    data = {"call": "zrun_core.data.text:text", "args": {"seq_len": SMALL.seq}, "workers": 3}
    hardware = parse_simulate("2xA100-80G")
    plain, bf16, sgd = (
        planner_of(SMALL, hardware, data=data, optim=optim).estimate(
            Candidate(0, ParallelDims(2), 1, 1)
        )
        for optim in ({}, {"moments": "bf16"}, {"name": "sgd"})
    )
    sizes = [
        sum(b.num_bytes for b in e.ranks[0].buffers if b.kind.value == "optim")
        for e in (plain, bf16, sgd)
    ]
    params = SMALL.num_params
    assert sizes == [pytest.approx(each * params, rel=1e-3) for each in (12, 8, 4)]
    assert plain.host_parts["loaders"] == 2 * 3 * (220 << 20)
    assert plain.host_parts["build"] == 4 * params
    assert plain.time.parts["update"] > bf16.time.parts["update"] > sgd.time.parts["update"]


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        (Candidate(0, ParallelDims(16), 1, 1), "16 ranks on 8 devices"),
        (
            Candidate(0, ParallelDims(1, tp=3), 1, 1),
            "16 heads, and 16 / tp 3 = 5.333 is not whole; write tp: 1, 2, 4, 8 or 16",
        ),
        (
            Candidate(0, ParallelDims(1, pp=4, virtual=4), 1, 4, schedule="interleaved"),
            "4 stages x 4 chunks = 16 > 8 blocks; write virtual: 2",
        ),
        (
            Candidate(0, ParallelDims(1, pp=4, virtual=2), 1, 4),
            "1f1b has one chunk on each stage: write schedule: interleaved",
        ),
        (
            Candidate(0, ParallelDims(1, pp=4), 1, 4, schedule="interleaved"),
            "interleaved has 2 chunks on each stage or more: write virtual: 2",
        ),
        (
            Candidate(0, ParallelDims(1, pp=4), 1, 4, split=("blocks.2", "blocks.4")),
            "4 stages have 3 borders, and it names 2",
        ),
    ],
)
def test_the_impossible_is_said(candidate: Candidate, said: str) -> None:
    planner = planner_of(SMALL, parse_simulate("8xA100-80G"), divides=True)
    with pytest.raises(JobError, match=said):
        planner.estimate(candidate)


def test_traffic_is_that_of_the_layouts() -> None:
    planner = planner_of(SMALL, parse_simulate("4xA100-80G"))
    sent = [planner.estimate(Candidate(stage, ParallelDims(4), 1, 3)).traffic for stage in range(4)]
    params, share = SMALL.num_params, 3 / 4
    close = {"rel": 2e-3}  # padding to pages
    assert sent[0] == {"all_reduce": pytest.approx(2 * 4 * params * share, **close)}
    for stage, (gathers, reductions) in {1: (1, 1), 2: (1, 3), 3: (6, 3)}.items():
        assert sent[stage]["all_gather"] == pytest.approx(gathers * 2 * params * share, **close)
        assert sent[stage]["reduce_scatter"] == pytest.approx(
            reductions * 4 * params * share, **close
        )
    hybrid = planner.estimate(Candidate(1, ParallelDims(4, shard=2), 1, 3)).traffic
    assert hybrid["all_reduce"] == pytest.approx(4 * params / 2, **close)
