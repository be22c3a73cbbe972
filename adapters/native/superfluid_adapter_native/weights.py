"""A model's weights as the kernels take them: small ones and resident layers kept, others bound
to the memory of the layer that is computing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
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
from superfluid_compat.errors import ModelDamaged

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


def read_names(source: ModelSource, layer: int) -> tuple[str, ...]:
    """Those of a block's that a pass reads from end to end; experts are not."""
    return tuple(
        name
        for name in streamed_names(source, layer)
        if len(source.tensors[name].shape) == 2 and not EXPERT_APART.search(name)
    )


def expert_bytes(source: ModelSource, layer: int) -> int:
    """Bytes of one expert's matrices in a block, the largest of each kind."""
    largest: dict[str, int] = {}
    for name in set(streamed_names(source, layer)) - set(read_names(source, layer)):
        tensor = source.tensors[name]
        count = tensor.shape[0] if len(tensor.shape) == 3 else 1
        kind = EXPERT_APART.sub(r"\1", name)
        largest[kind] = max(largest.get(kind, 0), tensor.bytes // count)
    return sum(largest.values())


class WeightStore:
    """Binds tensors to kernels. `resident` layers are bound once and for good.

    `hold` and `hold_matrix` make one thing resident, so that the caller can report progress in
    between; `layer` gives any layer while its handles are held. `prefetch` is called with the name
    of a tile that is about to be wanted.
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
        tensor = self._source.tensors.get(name)
        if tensor is None:
            raise ModelDamaged(f"{self._source.path.name} has no tensor {name}")
        values = decode(tensor.type, self._manager.read(name), tensor.shape[0]).copy()
        if name.endswith("_norm.weight"):
            with np.errstate(invalid="ignore"):
                values += np.float32(self._source.norm_shift)
        return values

    def optional_vector(self, name: str) -> Vector | None:
        known = name in self._source.tensors or name in self._source.vectors
        return self.vector(name) if known else None

    def hold(self, layer: int) -> None:
        """Make `layer` resident."""
        handles = self._manager.keep(streamed_names(self._source, layer))
        self._held[layer] = self._bind(layer, handles, keep=True)

    def hold_matrix(self, name: str) -> None:
        """Make the embedding or the head resident."""
        self._held_matrices[name] = self._weight(self._manager.keep((name,))[name], keep=True)

    def layer(self, index: int, handles: Mapping[str, TensorHandle]) -> LayerWeights:
        """The layer's weights; `handles` are those of a streamed layer, without its experts."""
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
        after another, each held while it is at work and no longer."""
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

    def _weight(self, handle: TensorHandle, *, keep: bool) -> Weight:
        tensor = handle.tensor
        rows, columns = tensor.shape
        return self._kernels.weight(tensor.type, handle.view, (rows, columns), resident=keep)

    def _bind(self, layer: int, handles: Mapping[str, TensorHandle], *, keep: bool) -> LayerWeights:
        start = f"blk.{layer}."
        matrices: dict[str, Weight] = {}
        experts: dict[str, Experts] = {}
        apart: dict[str, dict[int, str]] = {}
        for name in streamed_names(self._source, layer):
            short = name[len(start) :]
            expert = EXPERT_APART.fullmatch(short)
            if expert is not None:
                apart.setdefault(f"ffn_{expert[1]}_exps.weight", {})[int(expert[2])] = name
            elif len(self._source.tensors[name].shape) == 3:
                experts[short] = _experts(partial(self._slice, name, handles.get(name)), keep)
            else:
                matrices[short] = self._weight(handles[name], keep=keep)
        for short, names in apart.items():
            experts[short] = _experts(partial(self._one_of, names, handles), keep)
        return LayerWeights(self._layer_vectors(layer), matrices, experts)

    def _slice(self, name: str, handle: TensorHandle | None, expert: int) -> Weight:
        """One expert of a tensor that holds all, read alone where that is not in memory."""
        tensor = self._source.tensors[name]
        count, rows, columns = tensor.shape
        size = tensor.bytes // count
        if handle is None:
            raw = self._manager.read(name, expert * size, size)
        else:
            raw = handle.view[expert * size : (expert + 1) * size]
        return self._kernels.weight(tensor.type, raw, (rows, columns), resident=handle is not None)

    def _one_of(
        self, names: Mapping[int, str], handles: Mapping[str, TensorHandle], expert: int
    ) -> Weight:
        name = names[expert]
        handle = handles.get(name)
        if handle is not None:
            return self._weight(handle, keep=True)
        tensor = self._source.tensors[name]
        rows, columns = tensor.shape
        raw = self._manager.read(name)
        return self._kernels.weight(tensor.type, raw, (rows, columns), resident=False)

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


def _experts(bind: Callable[[int], Weight], keep: bool) -> Experts:
    return Experts(bind, {} if keep else None)
