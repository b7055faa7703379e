"""Layers around a module's forward: their order, their names in stacks, and no trace when off."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from zrun_core.activations.checkpoint import apply_checkpointing
from zrun_core.activations.kept import DeviceKeeper
from zrun_core.activations.offloaded_inputs import OffloadedInputs
from zrun_core.plan.trace.divided_model import divide_alone
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.spine.sections.parallel import ParallelConfig
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.spine.sections.zero import ZeroConfig
from zrun_core.stages.node_calls import (
    DrawingWalk,
    Node,
    install_nodes,
    installed_nodes,
    walking,
)
from zrun_core.stages.weight_grads import WeightGrads
from zrun_core.tensor_parallel.regions import _divide_while_called, _send_results, count_once
from zrun_core.train.parallelize import transform
from zrun_core.user_code.forward_layers import (
    Layer,
    calls_without_layers,
    layers_of,
    wrap_forward,
    wrapped_forward,
)
from zrun_core.zero.wrap.auto_wrap import repeated_blocks

CORE = Path(inspect.getfile(Layer)).parents[1]
FULL = ActivationsConfig(checkpoint="full")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        out: torch.Tensor = x + scale * self.down(torch.relu(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def around(module: nn.Module, layer: Layer) -> Callable[..., Any]:
    """A layer that does nothing but call what is inside."""
    inner = module.forward if layer.place == "forward" else type(module)._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=layer.frame or "call")
    return call


def frames_of(call: Callable[[], object]) -> list[str]:
    """The functions of Python that a call runs, in order, by the names that stacks have for them;
    but for those inside of torch other than a module's call.
    """
    found: list[str] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        is_ours = file.startswith(str(CORE)) or file == __file__
        if event == "call" and (is_ours or frame.f_code.co_name == "_call_impl"):
            found.append(frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


# The mechanism


def test_layers_are_put_on_from_the_inside_to_the_outside() -> None:
    block = Block()
    for layer in (Layer.DRAWS_INSIDE, Layer.RECOMPUTED, Layer.INPUT_ELSEWHERE):
        wrap_forward(block, layer, around(block, layer))
    expected = (Layer.INPUT_ELSEWHERE, Layer.RECOMPUTED, Layer.DRAWS_INSIDE)
    assert layers_of(block) == expected
    assert frames_of(lambda: block.forward(torch.ones(1, 4)))[:4] == [
        "<lambda>",
        "input_elsewhere",
        "recomputed",
        "draws_inside",
    ]


@pytest.mark.parametrize("outer", list(Layer))
@pytest.mark.parametrize("inner", list(Layer))
@pytest.mark.at_most(40)
def test_the_order_is_that_of_the_list(outer: Layer, inner: Layer) -> None:
    block = Block()
    wrap_forward(block, inner, around(block, inner))
    own = vars(block)[inner.place]
    if outer.place != inner.place or outer.number < inner.number:
        wrap_forward(block, outer, around(block, outer))
        assert layers_of(block) == tuple(sorted((outer, inner), key=list(Layer).index))
        return
    with pytest.raises(AssertionError) as refused:
        wrap_forward(block, outer, around(block, outer))
    assert outer.name in str(refused.value)
    assert inner.name in str(refused.value)
    assert layers_of(block) == (inner,)
    assert vars(block)[inner.place] is own


def test_a_layer_comes_off_only_when_it_is_the_outermost() -> None:
    block = Block()
    off = wrap_forward(block, Layer.ROW, around(block, Layer.ROW))
    with wrapped_forward(block, Layer.RECOMPUTED, around(block, Layer.RECOMPUTED)):
        with pytest.raises(AssertionError, match=r"ROW is to come off this Block, and RECOMPUTED"):
            off()
        assert layers_of(block) == (Layer.RECOMPUTED, Layer.ROW)
    off()
    with pytest.raises(AssertionError, match="ROW is to come off this Block, which has not got it"):
        off()


def test_the_code_of_a_layer_has_its_name() -> None:
    block = Block()
    with pytest.raises(AssertionError, match="of ROW is to be named rows_summed, and is column"):
        wrap_forward(block, Layer.ROW, around(block, Layer.COLUMN))
    partial = functools.partial(around(block, Layer.ROW))
    wrap_forward(block, Layer.ROW, partial)
    outside = torch.compiler.disable(around(block, Layer.DRAWS_INSIDE))
    wrap_forward(block, Layer.DRAWS_INSIDE, outside)

    @functools.wraps(outside)  # with what torch has noted on it
    def known_to_run(*args: Any, **kwargs: Any) -> Any:
        return outside(*args, **kwargs)

    wrap_forward(block, Layer.READS, known_to_run)
    assert layers_of(block) == (Layer.READS, Layer.DRAWS_INSIDE, Layer.ROW)


def test_no_trace_is_left() -> None:
    block = Block()
    before = dict(vars(block))
    for layer in (Layer.NODE, Layer.READS):
        with wrapped_forward(block, layer, around(block, layer)):
            assert vars(block).keys() - before.keys() == {layer.place, "_zrun_layers"}
    assert vars(block) == before
    assert block.forward.__func__ is Block.forward


def test_a_forward_of_the_users_own_comes_back() -> None:
    model = Model()
    block = model.blocks[0]
    own = functools.partial(Block.forward, block, scale=2.0)
    block.forward = own  # type: ignore[method-assign]
    x = torch.ones(1, 4, requires_grad=True)
    expected = block(x)
    with apply_checkpointing(model, FULL):
        with wrapped_forward(block, Layer.COMPILED, around(block, Layer.COMPILED)):
            assert layers_of(block) == (Layer.COMPILED, Layer.RECOMPUTED)
        assert layers_of(block) == (Layer.RECOMPUTED,)
        assert torch.equal(block(x), expected)
    assert vars(block)["forward"] is own
    assert layers_of(block) == ()
    assert "forward" not in vars(model.blocks[1])


def test_layers_before_hooks_are_set_aside_and_those_of_forward_stay() -> None:
    model = Model()
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda *_: None)
    wrap_forward(block, Layer.NODE, around(block, Layer.NODE))
    node = vars(block)["_call_impl"]
    with calls_without_layers(list(model.modules())):
        assert "_call_impl" not in vars(block)
        off = wrap_forward(block, Layer.RECOMPUTED, around(block, Layer.RECOMPUTED))
        wrap_forward(block, Layer.NODE, around(block, Layer.NODE))
        assert vars(block)["_call_impl"] is not node
    assert vars(block)["_call_impl"] is node
    assert layers_of(block) == (Layer.NODE, Layer.RECOMPUTED)
    off()
    assert layers_of(block) == (Layer.NODE,)
    assert layers_of(model.blocks[1]) == ()


# As ranks put them on


def test_blocks_with_layers_are_copied() -> None:
    model = Model()
    apply_checkpointing(model, FULL)
    install_nodes(model, repeated_blocks(model))
    twin = copy.deepcopy(model)
    assert [layers_of(each) for each in twin.modules()] == [
        layers_of(each) for each in model.modules()
    ]
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    x = torch.ones(1, 4, requires_grad=True)
    y = twin.blocks[0](x)
    assert torch.equal(y, x)  # by its own parameters, which are zeros
    y.sum().backward()
    assert model.blocks[0].up.weight.grad is None
    assert twin.blocks[0].down.bias.grad is not None
    node = vars(twin.blocks[0])["_call_impl"].__self__
    assert isinstance(node, Node)
    assert node.module is twin.blocks[0]


def test_a_model_with_nodes_is_pickled() -> None:
    model = Model()
    install_nodes(model, repeated_blocks(model))
    twin = pickle.loads(pickle.dumps(model))
    assert layers_of(twin.blocks[1]) == (Layer.NODE,)
    x = torch.ones(1, 4)
    assert torch.equal(twin(x), model(x))
    assert vars(twin.blocks[1])["_call_impl"].__self__.module is twin.blocks[1]


@pytest.mark.parametrize("moves", [False, True])
def test_stacks_have_a_frame_for_each_layer(moves: bool) -> None:
    model = Model()
    inputs = OffloadedInputs(DeviceKeeper()) if moves else None
    apply_checkpointing(model, FULL, inputs)
    install_nodes(model, repeated_blocks(model))
    block = model.blocks[0]
    with torch.no_grad():
        found = frames_of(lambda: block(torch.ones(1, 4)))
    hook = ["refuse_cache", "<genexpr>", "_is_cache", "<genexpr>"]
    until = found.index("forward")
    names = [name for name in found[1:until] if name not in hook]
    moved = ["_input_elsewhere", "recomputed"] if moves else ["recomputed"]
    assert names == ["call_of_node", "run", "_call_impl", *moved]


def test_signatures_are_those_of_the_users_forward() -> None:
    model = Model()
    wanted = inspect.signature(model.blocks[0].forward)
    _divide_while_called(model.blocks[0], [], 2)
    _send_results(model.blocks[0], lambda x: x)
    assert inspect.signature(model.blocks[0].forward) == wanted
    x = torch.ones(1, 4)
    assert torch.equal(model.blocks[0](x, scale=0.0), x)


def test_several_parameters_of_a_module_count_once() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.full((2,), 3.0))
            self.second = nn.Parameter(torch.full((2,), 5.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.first + 10 * self.second

    model = nn.ModuleDict({"experts": Experts()})
    count_once(model, ["experts.first", "experts.second", "experts.gone"], 2)
    experts = model["experts"]
    assert layers_of(experts) == (Layer.ONCE,)
    y = experts(torch.zeros(2))
    assert y.tolist() == [26.5, 26.5]
    y.sum().backward()
    assert experts.second.grad.tolist() == [5.0, 5.0]
    assert experts._parameters.keys() == {"first", "second"}


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("moves", [False, True])
def test_where_compiling_and_recomputation_lie(compiles: bool, moves: bool) -> None:
    model = Model()
    inputs = OffloadedInputs(DeviceKeeper()) if moves else None
    zero = ZeroConfig.model_validate({"stage": 3, "tile": {"bytes": 64, "modules": [".*up"]}})
    transform(model, zero, PrecisionConfig(), FULL, compile=compiles, inputs=inputs)
    expected = {
        (False, False): (Layer.RECOMPUTED,),
        (False, True): (Layer.INPUT_ELSEWHERE,),
        (True, False): (Layer.COMPILED, Layer.RECOMPUTED_IN_GRAPH),
        (True, True): (Layer.INPUT_ELSEWHERE, Layer.COMPILED),
    }
    for block in model.blocks:
        assert layers_of(block) == expected[compiles, moves]
        assert layers_of(block.up) == ((Layer.OUTSIDE_GRAPHS,) if compiles else ())
        assert layers_of(block.down) == ()


def test_slices_of_a_model_of_torchs_attention() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    divide_alone(model, ParallelConfig(tp=2), "cpu", for_real=True)
    layer = model.layers[0]
    assert layers_of(layer.self_attn) == (Layer.ATTENTION,)
    assert layers_of(layer.linear1) == (Layer.COLUMN,)
    assert layers_of(layer.linear2) == (Layer.ROW,)
    names = frames_of(lambda: layer(torch.ones(1, 3, 16)))
    assert {"_own_heads", "_column", "rows_summed"} <= set(names)


def test_late_gradients_are_of_linears_without_layers() -> None:
    model = Model()
    named = model.blocks[1].up
    wrap_forward(named, Layer.READS, around(named, Layer.READS))
    WeightGrads(model.blocks)
    assert layers_of(model.blocks[0].up) == (Layer.LATE_WEIGHT_GRADS,)
    assert layers_of(named) == (Layer.READS,)
    names = frames_of(lambda: model.blocks[0].up(torch.ones(1, 4)))
    assert names[1:4] == ["_call_impl", "_late_weight_grads", "_product"]


def test_nodes_for_a_while_leave_those_that_were_there() -> None:
    model = Model()
    blocks = repeated_blocks(model)
    first = install_nodes(model, blocks)
    with installed_nodes(model, blocks), walking(DrawingWalk(None)):  # type: ignore[arg-type]
        assert vars(model.blocks[0])["_call_impl"].__self__ is not first[0]
    assert vars(model.blocks[0])["_call_impl"].__self__ is first[0]
    with pytest.raises(AssertionError, match="NODE is on this Block already"):
        install_nodes(model, blocks)


def test_the_page_has_every_layer_in_order() -> None:
    page = (CORE.parent / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = page.partition("| frame | the module |\n|---|---|\n")[2].partition("\n\n")[0]
    frames = [f"`{each.frame}`" if each.frame else f"of torch (`{each.label}`)" for each in Layer]
    expected = [f"| {f} | {each.about} |" for f, each in zip(frames, Layer, strict=True)]
    assert rows.splitlines() == expected


# Nobody goes around it

_ELSEWHERE = {
    "user_code/forward_layers.py": "the mechanism",
    "stages/ghosts.py": "modules inside of a ghost, for one call: see the note of the mechanism",
}


def _is_put_on(node: ast.AST) -> bool:
    """Whether code puts something in place of a module's forward, or of its call."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    names = ("forward", "_call_impl", "__call__")
    for target in targets:
        if isinstance(target, ast.Attribute) and target.attr in names:
            owner = target.value
            return not (isinstance(owner, ast.Name) and owner.id == "self")
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            return target.slice.value in names and "vars(" in ast.unparse(target.value)
    if isinstance(node, ast.Constant):
        return node.value == "_call_impl"
    return False


def test_no_one_else_puts_anything_around_a_forward() -> None:
    found = {
        str(path.relative_to(CORE))
        for path in CORE.rglob("*.py")
        if any(map(_is_put_on, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found == set(_ELSEWHERE)
