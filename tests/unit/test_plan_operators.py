"""What single operators take: tables, what lies between their rows, and what a plan makes of them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from zrun.agent.bench import layouts
from zrun.estimate.machine import hardware_of
from zrun.hosts.cluster import Cluster, HostFacts
from zrun.preflight.calibration import Calibration
from zrun_core.hardware.hardware import GIB, Device, Rates, from_rates
from zrun_core.hardware.operators import Operators
from zrun_core.plan.measure import microbench
from zrun_core.plan.measure.measure import _mean, _numel, _updates
from zrun_core.plan.measure.rehearsal import job_of
from zrun_core.plan.timing.cost_model import _columns, _ways, trace_seconds
from zrun_core.plan.trace.profile import Affine, Op, Trace, TracePhase

SIDES = (10.0, 100.0, 1000.0)


def grid(factor: float = 1.0) -> tuple[tuple[float, ...], ...]:
    """A rate that is linear in the logarithms of all sides."""
    return tuple((m, n, k, factor * m * n**2 * k**3) for m in SIDES for n in SIDES for k in SIDES)


TABLES = Operators(
    streams={
        "add float32": ((100.0, 1e-6), (1000.0, 1e-5), (10000.0, 1e-4)),
        "add bfloat16": ((100.0, 2e-6),),
        "copy float32": ((100.0, 5e-6), (200.0, 6e-6)),
    },
    flops={"convolution float32": ((9.0, 1e9), (900.0, 3e9))},
    products={
        "output float32": grid(),
        "input float32": grid(2.0),
        "weight float32": grid(4.0),
        "batch float32": grid(8.0),
    },
)


def test_seconds_follow_bytes_between_rows_and_the_last_rate_beyond() -> None:
    found = TABLES.stream_seconds("add", "float32", np.array([1.0, 100.0, 550.0, 1000.0, 20000.0]))
    assert found == pytest.approx([1e-6, 1e-6, 5.5e-6, 1e-5, 2e-4])
    assert TABLES.stream_seconds("add_", "bfloat16", np.array([200.0])) == pytest.approx([4e-6]), (
        "in place is the same"
    )
    assert TABLES.stream_seconds("copy", "int64", np.array([150.0])) == pytest.approx([5.5e-6]), (
        "another format's rows"
    )
    assert TABLES.stream_seconds("conjure", "float32", np.array([550.0])) == pytest.approx(
        [5.5e-6]
    ), "as a usual one"


def test_rates_follow_the_logarithms_of_sizes() -> None:
    m, n, k = (np.array([side]) for side in (30.0, 200.0, 77.0))
    assert TABLES.product_rate("output", "float32", m, n, k) == pytest.approx(m * n**2 * k**3)
    edge = TABLES.product_rate("output", "float32", np.array([1.0]), n, np.array([1e6]))
    assert edge == pytest.approx(10 * n**2 * 1e9), "beyond the grid it stays as at its edge"
    assert TABLES.product_rate("output", "bfloat16", m, n, k) is None
    assert TABLES.flop_rate("convolution", "float32", np.array([1.0, 90.0, 1e5])) == pytest.approx(
        [1e9, 2e9, 3e9]
    )
    assert TABLES.flop_rate("convolution_backward", "float32", np.array([90.0])) is None


def op(
    name: str,
    family: str,
    phase: TracePhase,
    moved: Affine,
    shape: tuple[int, ...] = (),
    flops: float = 0.0,
) -> Op:
    return Op(name, family, Affine(0.0, flops), moved, phase, "", -1, "float32", shape)  # type: ignore[arg-type]


def layer(tokens: int, out: int, inside: int) -> list[Op]:
    """A linear layer on `tokens` per sample, traced for one sample: its output, and the gradients of both factors."""
    flops = 2.0 * tokens * out * inside
    x, y, w = (4.0 * size for size in (tokens * inside, tokens * out, out * inside))
    moved = Affine(w, x + y)
    return [
        op("addmm", "gemm", TracePhase.FORWARD, moved, (tokens, out, inside), flops),
        op("mm", "gemm", TracePhase.BACKWARD, moved, (tokens, inside, out), flops),
        op("mm", "gemm", TracePhase.BACKWARD, moved, (out, inside, tokens), flops),
    ]


def test_products_are_told_apart_by_what_the_batch_leaves_alone() -> None:
    heads = op(
        "bmm", "gemm", TracePhase.FORWARD, Affine(0.0, 4.0 * 4 * 300), (10, 10, 10), 2.0 * 4 * 1000
    )
    columns = _columns(Trace("none", (), (*layer(32, 100, 100), *layer(500, 20, 40), heads)), 0)
    assert _ways(columns).tolist() == [0, 1, 2, 0, 1, 2, 3]


def test_a_plan_takes_what_was_measured() -> None:
    ops = (
        *layer(32, 100, 100),
        op("add", "elementwise", TracePhase.FORWARD, Affine(0.0, 500.0)),
        op("convolution", "conv", TracePhase.FORWARD, Affine(0.0, 8.0), (9, 10, 1, 1), 4e6),
    )
    device = Device("cores", "cpu", GIB, {"fp32": 1e9}, 1e9, launch_s=1e-7, operators=TABLES)
    seconds = trace_seconds(_columns(Trace("none", (), ops), 0), 2, device, "fp32")
    flops = 2 * 2.0 * 32 * 100 * 100
    expected = [
        flops / (64 * 100**2 * 100**3),
        flops / (2 * 64 * 100**2 * 100**3),
        flops / (4 * 100 * 100**2 * 64**3),
        1e-5,
        8e6 / 2e9,
    ]
    assert seconds == pytest.approx([each + 1e-7 for each in expected])


def test_what_a_computer_says_of_its_operators_is_what_a_trace_says() -> None:
    seen = [microbench._only(make(1 << 10, torch.bfloat16)) for make in microbench._STREAMS]
    names = {each.name.rstrip("_") for each in seen}
    assert len(seen) == len(microbench._STREAMS)
    assert {
        "add",
        "native_layer_norm_backward",
        "index_put",
        "nll_loss_backward",
        "bernoulli",
        "_to_copy",
    } <= names
    (add,) = [each for each in seen if each.name == "add"]
    assert (add.bytes_moved, add.dtype) == (3 * 2 * 1024, "bfloat16")
    attention = [
        microbench._only(action) for action in microbench._attention(16, True, torch.float32)
    ]
    assert [each.name.endswith("[causal]") for each in attention] == [True, True]
    kernels = [
        microbench._only(action).shape for action in microbench._convolution(4, torch.float32)
    ]
    assert kernels == [(4, 4, 3, 3)] * 2
    microbench._pools.clear()


def test_actions_take_turns() -> None:
    calls: list[int] = []
    found = microbench.in_turns([lambda: calls.append(0), lambda: calls.append(1)], 3)
    assert sorted(calls) == [0] * 4 + [1] * 4
    assert calls[:4] != [0, 0, 0, 0]
    assert all(seconds > 0 for seconds in found)


def test_ranks_that_measured_together_are_one() -> None:
    both = _mean([{"a": 1.0, "rows": [[1.0, 2.0]]}, {"a": 3.0, "rows": [[1.0, 6.0]]}])
    assert both == {"a": 2.0, "rows": [[1.0, 4.0]]}
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)
    )
    assert _numel(64, 3) == sum(param.numel() for param in model.parameters())
    more = _numel(1024, 4) - _numel(8, 4)
    steps = {"update_empty": 1.0, "update_fp32": 2.0, "update_bf16": 3.0}
    assert _updates(steps) == {"fp32": more, "bf16": more / 2}
    assert job_of(8, 4, 2, "bf16").batch.global_ == 2


def test_all_cores_are_measured_as_ranks_share_them() -> None:
    assert layouts(1) == [(1, 1)]
    assert layouts(2) == [(1, 2), (2, 1)]
    assert layouts(12) == [(1, 12), (2, 6), (4, 3), (8, 1)]


def stored(tmp_path: Path) -> dict[str, str]:
    """An environment in which two layouts of a host were measured."""

    def cores(ranks: int, update: float) -> dict[str, object]:
        return {
            "ranks": ranks,
            "threads": 4 // ranks,
            "flops": {"fp32": 1e11, "bf16": 2e11},
            "copy_bytes_per_s": 1e10,
            "exchange_bytes_per_s": 5e9,
            "exchange_s": 1e-4,
            "extra": {"step_s": 0.002, "param_s": 1e-5},
            "update": {"fp32": update},
            "operators": asdict(TABLES),
        }

    host = {
        "cpu": {"fp32_flops": 9e10, "bf16_flops": 9e10},
        "copy_bytes_per_s": 8e9,
        "disk": {"folder": "/"},
        "cores": [cores(1, 1e9), cores(4, 4e8)],
    }
    path = Calibration.default_path({"XDG_CACHE_HOME": str(tmp_path)})
    path.parent.mkdir()
    path.write_text(json.dumps({"made": "now", "zrun": "0", "hosts": {"here": host}}))
    return {"XDG_CACHE_HOME": str(tmp_path)}


def test_a_plan_of_this_machine_has_the_rates_that_doctor_stored(tmp_path: Path) -> None:
    environ = stored(tmp_path)
    here = HostFacts(hostname="here", cores=4, memory_bytes=8 * GIB)
    found = hardware_of(Cluster((here,)), "cpu", 3, environ)
    assert found.measured
    assert found.device.operators == TABLES
    assert (found.device.update, found.device.step_s, found.device.param_s) == (
        {"fp32": 4e8},
        0.002,
        1e-5,
    )
    assert (found.intra.bandwidth, found.intra.latency) == (5e9, 1e-4)
    alone = hardware_of(Cluster((here,)), "cpu", 1, environ).device
    assert alone.update == {"fp32": 1e9}
    assert alone.flops("bf16") == 2e11


def test_rates_without_tables_are_a_roofline_as_before() -> None:
    device = from_rates(Rates({"fp32": 1e11}, 1e10), ranks=1, host_bytes=GIB, cores=1).device
    assert device.operators is None
    columns = _columns(Trace("none", (), tuple(layer(32, 100, 100))), 0)
    slower = replace(device, peak={"fp32": 1e9})
    assert (
        trace_seconds(columns, 4, slower, "fp32") > trace_seconds(columns, 4, device, "fp32")
    ).all()
