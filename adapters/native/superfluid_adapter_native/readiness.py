"""Whether the kernels work on this machine, and having them compiled before a model is there."""

from __future__ import annotations

import importlib.metadata
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np

from superfluid_adapter_native.kernels.engine import Kernels
from superfluid_adapter_native.kernels.warm import warm as warm_kernels
from superfluid_adapter_native.quants.types import BY_NAME
from superfluid_adapter_native.settings import Settings, threads_for
from superfluid_workerd.adapter import Device, Facts, Options, Probe, Progress

_VERSION: Final = importlib.metadata.version("superfluid")
_TOLERANCE: Final = 1e-4


def probe(options: Options, shared: Path) -> Probe:
    """Compile a product, run it on every core and compare it with NumPy's."""
    threads = threads_for(0)
    try:
        with closing(Kernels(threads=threads, exact=True, cache=shared, writable=True)) as kernels:
            worst = _worst_error(kernels)
    except Exception as error:  # noqa: BLE001  # whatever fails here is the probe's finding
        return Probe(
            version=_VERSION,
            problem=f"kernels do not run here: {type(error).__name__}: {str(error)[:200]}",
            rule="kernels-run",
            fix="reinstall numba and llvmlite for this Python",
        )
    if not worst <= _TOLERANCE:
        return Probe(
            version=_VERSION,
            problem=f"a kernel's product is off by {worst:.2g}, at most {_TOLERANCE:g} was wanted",
            rule="kernels-agree",
            fix="report this with the processor's name",
        )
    device = Device(name=f"cpu, {threads} threads, {kernels.features.name}")
    return Probe(version=_VERSION, devices=(device,))


def _worst_error(kernels: Kernels) -> float:
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((512, 256), np.float32)
    x = rng.standard_normal((5, 256), np.float32)
    raw = matrix.view(np.uint8).reshape(-1)
    weight = kernels.weight(BY_NAME["F32"], raw, (512, 256), resident=True)
    return float(np.abs(kernels.linear(x, weight) - x @ matrix.T).max())


def warm(facts: Facts, options: Options, shared: Path, progress: Progress) -> None:
    """Fill `shared` with every kernel that a model of these facts takes under these options."""
    settings = Settings.of(options)
    warm_kernels(
        [BY_NAME[name] for name in sorted(facts.types) if name in BY_NAME],
        exact=settings.exact,
        caches=(settings.kv_type,),
        folder=shared,
        progress=progress,
    )
