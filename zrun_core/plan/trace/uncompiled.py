"""Fake tensors without detours through torch's compiler.

Torch marks its reference kernels, dispatch modes and checkpointing as not to be compiled, and each call of what is
marked passes through the compiler, which steps aside. Where nothing compiles, the functions themselves will do, in a
sixth less time. The mark is a detail of torch: where a release has another one, nothing changes.
"""

from __future__ import annotations

import sys
from types import CellType, FunctionType

_COMPILER = "torch._dynamo"
_MARK = "__dynamo_disable"  # where a marked function is looked up once the compiler has seen it
_MARKED = (
    *(
        "torch._refs",
        "torch._refs.nn.functional",
        "torch._refs.special",
        "torch._decomp.decompositions",
    ),
    *("torch._meta_registrations", "torch.utils.checkpoint", "torch._subclasses.fake_tensor"),
)


def pass_by_compiler() -> None:
    """From now on, in this process, unless something has imported the compiler already: it may be in use."""
    if _COMPILER in sys.modules:
        return
    modules = [sys.modules[name] for name in _MARKED if name in sys.modules]
    named = [value for module in modules for value in vars(module).values()]
    waiting = [
        vars(each).get("__torch_dispatch__") if isinstance(each, type) else each for each in named
    ]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        inside = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        waiting += inside
        if function.__code__.co_filename.endswith("_compile.py"):
            for each in inside:
                if isinstance(each, FunctionType):
                    vars(each).setdefault(_MARK, each)
