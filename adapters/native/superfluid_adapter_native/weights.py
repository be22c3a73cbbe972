"""A model's weights as the kernels take them: small ones and resident layers kept, others bound
to the maps of the layer that is computing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from superfluid_adapter_native.formats.source import ModelSource
from superfluid_adapter_native.kernels.engine import Kernels
from superfluid_adapter_native.kernels.weights import Weight
from superfluid_adapter_native.memory import MemoryManager, TensorHandle
from superfluid_adapter_native.quants.decode import decode

Vector: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Experts:
    """The matrices of one kind for all experts, one bound only when it is chosen."""

    bind: Callable[[int], Weight]
    kept: dict[int, Weight] | None

    def __getitem__(self, expert: int) -> Weight:
        found = None if self.kept is None else self.kept.get(expert)
        if found is None:
            found = self.bind(expert)
            if self.kept is not None:
                self.kept[expert] = found
        return found


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block's tensors by their names within it."""

    vectors: Mapping[str, Vector]
    matrices: Mapping[str, Weight]
    experts: Mapping[str, Experts] = field(default_factory=dict)


def streamed_names(source: ModelSource, layer: int) -> tuple[str, ...]:
    """A block's tensors that pass through memory: everything but its vectors."""
    start = f"blk.{layer}."
    return tuple(
        name
        for name, tensor in source.tensors.items()
        if name.startswith(start) and len(tensor.shape) > 1
    )


EMBEDDING: Final = "token_embd.weight"
EXPERT_APART: Final = re.compile(r"ffn_(gate|up|down)\.(\d+)\.weight$")
"""One expert's matrix where experts are not joined in one tensor."""


def head_name(source: ModelSource) -> str:
    """The matrix that gives logits: its own, or the embedding."""
    return "output.weight" if "output.weight" in source.tensors else EMBEDDING


def read_whole(source: ModelSource, names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` that a pass reads from end to end; experts are not."""
    return tuple(
        name
        for name in names
        if len(source.tensors[name].shape) == 2 and not EXPERT_APART.search(name)
    )


class WeightStore:
    """Binds tensors to kernels. `resident` layers are bound once and for good.

    `hold` and `hold_matrix` make one thing resident, so that the caller can report progress in
    between; `layer` gives any layer while its handles are held. `prefetch` is called with the name
    of a tile that is about to be mapped.
    """

    def __init__(self, source: ModelSource, manager: MemoryManager, kernels: Kernels) -> None:
        self._source = source
        self._manager = manager
        self._kernels = kernels
        self._vectors: dict[int, dict[str, Vector]] = {}
        self._held: dict[int, LayerWeights] = {}
        self._held_matrices: dict[str, Weight] = {}
        self._split: dict[str, tuple[str, ...]] = {}
        self.prefetch: Callable[[str], None] = lambda name: None

    def vector(self, name: str) -> Vector:
        """A small tensor, decoded, shifted where the format wants it."""
        settings = self._source.vectors.get(name)
        if settings is not None:
            return np.array(settings, np.float32)
        handle = self._manager.acquire(name)
        try:
            tensor = handle.tensor
            values = decode(tensor.type, handle.view, tensor.shape[0]).copy()
        finally:
            self._manager.release(name)
        if name.endswith("_norm.weight"):
            with np.errstate(invalid="ignore"):
                values += np.float32(self._source.norm_shift)
        return values

    def optional_vector(self, name: str) -> Vector | None:
        known = name in self._source.tensors or name in self._source.vectors
        return self.vector(name) if known else None

    def hold(self, layer: int) -> None:
        """Make `layer` resident."""
        handles = {name: self._keep(name) for name in streamed_names(self._source, layer)}
        self._held[layer] = self._bind(layer, handles, keep=True)

    def hold_matrix(self, name: str) -> None:
        """Make the embedding or the head resident."""
        self._held_matrices[name] = self._weight(self._keep(name), keep=True)

    def layer(self, index: int, handles: Mapping[str, TensorHandle]) -> LayerWeights:
        """The layer's weights; `handles` are those of a streamed layer."""
        return self._held.get(index) or self._bind(index, handles, keep=False)

    def rows(self, name: str, ids: NDArray[np.int64]) -> Vector:
        """Rows of the embedding as floats, (len(ids), columns). Of one that is not resident no
        more is read than these."""
        held = self._held_matrices.get(name)
        if held is not None:
            return self._kernels.gather(held, ids)
        wanted, places = np.unique(ids, return_inverse=True)
        tensor = self._source.tensors[name]
        raw = self._manager.read_rows(name, wanted).reshape(-1)
        shape = (len(wanted), tensor.shape[1])
        weight = self._kernels.weight(tensor.type, raw, shape, resident=False)
        return self._kernels.gather(weight, places)

    def split(self, name: str, part_bytes: int) -> tuple[str, ...]:
        """Have `tiles` give this matrix, which is not resident, in parts; their names."""
        self._split[name] = self._manager.split(name, part_bytes)
        return self._split[name]

    def tiles(self, name: str) -> Iterator[Weight]:
        """The head from its first row to its last: whole where it is resident, else one tile
        after another, each mapped while it is at work and no longer."""
        held = self._held_matrices.get(name)
        if held is not None:
            yield held
            return
        for part in self._split[name]:
            self.prefetch(part)
            handle = self._manager.acquire(part)
            try:
                yield self._weight(handle, keep=False)
            finally:
                self._manager.release(part)

    def _keep(self, name: str) -> TensorHandle:
        handle = self._manager.acquire(name)
        self._manager.fetch(handle)
        return handle

    def _weight(self, handle: TensorHandle, *, keep: bool) -> Weight:
        tensor = handle.tensor
        rows, columns = tensor.shape
        return self._kernels.weight(tensor.type, handle.view, (rows, columns), resident=keep)

    def _bind(self, layer: int, handles: Mapping[str, TensorHandle], *, keep: bool) -> LayerWeights:
        start = len(f"blk.{layer}.")
        matrices: dict[str, Weight] = {}
        joined: dict[str, TensorHandle] = {}
        apart: dict[str, dict[int, TensorHandle]] = {}
        for name, handle in handles.items():
            short = name[start:]
            expert = EXPERT_APART.fullmatch(short)
            if expert is not None:
                apart.setdefault(f"ffn_{expert[1]}_exps.weight", {})[int(expert[2])] = handle
            elif len(handle.tensor.shape) == 3:
                joined[short] = handle
            else:
                matrices[short] = self._weight(handle, keep=keep)
        bound = {name: partial(self._slice, one, keep) for name, one in joined.items()}
        bound |= {name: partial(self._one_of, some, keep) for name, some in apart.items()}
        experts = {name: Experts(bind, {} if keep else None) for name, bind in bound.items()}
        return LayerWeights(self._layer_vectors(layer), matrices, experts)

    def _slice(self, handle: TensorHandle, keep: bool, expert: int) -> Weight:
        count, rows, columns = handle.tensor.shape
        size = handle.tensor.bytes // count
        span = slice(expert * size, (expert + 1) * size)
        if not keep:
            self._manager.fetch(handle, span)
        raw = handle.view[span]
        return self._kernels.weight(handle.tensor.type, raw, (rows, columns), resident=keep)

    def _one_of(self, handles: Mapping[int, TensorHandle], keep: bool, expert: int) -> Weight:
        if not keep:
            self._manager.fetch(handles[expert])
        return self._weight(handles[expert], keep=keep)

    def _layer_vectors(self, layer: int) -> dict[str, Vector]:
        found = self._vectors.get(layer)
        if found is None:
            start = f"blk.{layer}."
            found = self._vectors[layer] = {
                name[len(start) :]: self.vector(name)
                for name, tensor in self._source.tensors.items()
                if name.startswith(start) and len(tensor.shape) == 1
            }
        return found
