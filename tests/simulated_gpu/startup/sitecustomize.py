"""Python imports this module first wherever this folder is in PYTHONPATH.

Where SIMULATED_GPU is set, the first `import torch` finds simulated GPUs. Another `sitecustomize`
further down the path runs too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_next_one() -> None:
    paths = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is None or spec.loader is None:
        return
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "SIMULATED_GPU" in os.environ:
    sys.path.append(os.path.dirname(_HERE))
    from simulated_gpu import install

    install.when_torch_is_imported()
_run_the_next_one()
