"""Put the simulated GPU into this process: its library before torch, `torch.cuda` right after it.

torch asks once whether there is CUDA, so the library must be there first. Nothing here starts a
thread or a device: processes may fork after it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from simulated_gpu import build, settings


def preload() -> None:
    """Load the library. Before torch is imported."""
    if "torch" in sys.modules:
        raise ImportError(
            "the simulated GPU comes before torch: torch asks once whether it has one"
        )
    library = build.build()
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    folder = os.path.join(os.path.dirname(spec.origin), "lib")
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
        ctypes.CDLL(os.path.join(folder, name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def extension() -> Any:
    """The library as a module."""
    if build.MODULE in sys.modules:
        return sys.modules[build.MODULE]
    spec = importlib.util.spec_from_file_location(build.MODULE, build.library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[build.MODULE] = module
    return module


def when_torch_is_imported() -> None:
    """Have the first `import torch` of this process find simulated GPUs."""
    if "torch" in sys.modules:
        raise ImportError(
            "the simulated GPU comes before torch: torch asks once whether it has one"
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch as others do, and wraps its loader."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        del sys.modules[module.__name__]
        preload()
        sys.modules[module.__name__] = module
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        cuda = importlib.import_module("simulated_gpu.cuda")
        cuda.install(settings.read(os.environ.get(settings.VARIABLE, "")))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
