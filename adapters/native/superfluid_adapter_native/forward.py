"""The forward pass of every architecture served: which parts a block has follows from its
tensors, how they act from its description."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from superfluid_adapter_native.config import LayerConfig, ModelConfig, RopeConfig
from superfluid_adapter_native.executor import Pass
from superfluid_adapter_native.kernels.engine import Kernels
from superfluid_adapter_native.kernels.tape import TAPE_ROWS, Tape
from superfluid_adapter_native.kernels.weights import Activations
from superfluid_adapter_native.rope import RopeTable
from superfluid_adapter_native.scheduler import LayerHandles
from superfluid_adapter_native.weights import EMBEDDING, LayerWeights, WeightStore

Array: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Block:
    """A layer at its turn: `place` is its own among those selected, in caches."""

    layer: LayerConfig
    weights: LayerWeights
    place: int
    cosines: Array
    sines: Array


@dataclass(frozen=True, slots=True)
class _Heads:
    """Of every row: (rows, heads, head_dim) each."""

    queries: Array
    keys: Array
    values: Array
    mixed: Array


@dataclass(frozen=True, slots=True)
class _Written:
    """A block for one number of rows, which stands while the tables it reads do."""

    tape: Tape
    heads: _Heads
    cosines: Array


class Forwarder:
    """Computes one layer of a pass; an executor calls it for each in order.

    A cache keeps the `selected` layers in their order. `context` is the longest sequence, by which
    LongRoPE chooses its factors; `head` names the matrix that gives logits."""

    def __init__(
        self,
        config: ModelConfig,
        store: WeightStore,
        kernels: Kernels,
        *,
        selected: tuple[int, ...],
        context: int,
        head: str,
    ) -> None:
        self._config = config
        self._store = store
        self._kernels = kernels
        self._places = {layer: place for place, layer in enumerate(selected)}
        self._head = head
        self._output_norm = store.vector("output_norm.weight")
        self._ropes = self._rope_tables(context)
        self._tapes: dict[tuple[int, int], _Written] = {}
        self._hidden = np.empty((TAPE_ROWS, config.width), np.float32)
        self._positions = np.empty(TAPE_ROWS, np.int64)

    def _rope_tables(self, context: int) -> dict[RopeConfig, RopeTable]:
        first = self._config.layers[0].rope
        long = context > first.original_context
        name = f"rope_factors_{'long' if long else 'short'}.weight"
        factors = self._store.optional_vector("rope_freqs.weight")
        if factors is None:
            factors = self._store.optional_vector(name)
        return {rope: RopeTable(rope, factors) for rope in {x.rope for x in self._config.layers}}

    def __call__(self, handles: LayerHandles, work: Pass) -> None:
        if handles.is_first:
            self._embed(work)
        layer = self._config.layers[handles.index]
        weights = self._store.layer(handles.index, handles.tensors)
        cosines, sines = self._ropes[layer.rope].upto(int(work.positions.max()) + 1)
        block = _Block(layer, weights, self._places[handles.index], cosines, sines)
        if len(work.tokens) > TAPE_ROWS or weights.experts:
            heads = self._heads(block, work)
            self._attend(block, work, heads)
            self._rest(block, work, heads)
        else:
            self._by_tape(block, work)
        if handles.is_last:
            self._finish(work)

    def _by_tape(self, block: _Block, work: Pass) -> None:
        """A block of few rows, whose products are so small that calling them would take long."""
        key = block.place, len(work.tokens)
        known = self._tapes.get(key)
        if known is not None and known.cosines is block.cosines:
            self._kernels.replay(known.tape, 0, block.weights.matrices)
            self._attend(block, work, known.heads)
            self._kernels.replay(known.tape, 1, block.weights.matrices)
            return
        tape = Tape()
        with self._kernels.recording(tape):
            heads = self._heads(block, work)
        self._attend(block, work, heads)
        with self._kernels.recording(tape):
            self._rest(block, work, heads)
        tape.close(block.weights.matrices)
        self._tapes[key] = _Written(tape, heads, block.cosines)

    def _embed(self, work: Pass) -> None:
        hidden = self._store.rows(EMBEDDING, work.tokens)
        if self._config.embedding_scale != 1.0:
            hidden *= np.float32(self._config.embedding_scale)
        rows = len(hidden)
        if rows > TAPE_ROWS:
            work.hidden = hidden
            return
        # What a tape reads and writes has one place.
        self._hidden[:rows], self._positions[:rows] = hidden, work.positions
        work.hidden, work.positions = self._hidden[:rows], self._positions[:rows]

    def _norm(self, x: Array, weight: Array) -> Array:
        return self._kernels.rms_norm(x, weight, self._config.epsilon)

    def _heads(self, block: _Block, work: Pass) -> _Heads:
        """Queries, keys and values of a block, and room for what attention makes of them."""
        vectors = block.weights.vectors
        normed = self._norm(work.hidden, vectors["attn_norm.weight"])
        queries, keys, values = self._projections(block, normed)
        if "attn_q_norm.weight" in vectors:
            queries = self._norm(queries, vectors["attn_q_norm.weight"])
            keys = self._norm(keys, vectors["attn_k_norm.weight"])
        tables, pairs = (block.cosines, block.sines), block.layer.rope.pairs
        for rotated in (queries, keys):
            self._kernels.rope(rotated, work.positions, *tables, pairs=pairs)
        return _Heads(queries, keys, values, self._kernels.new(queries.shape))

    def _attend(self, block: _Block, work: Pass, heads: _Heads) -> None:
        layer = block.layer
        for seat in work.seats:
            rows = slice(seat.first, seat.first + seat.count)
            seat.cache.append(block.place, heads.keys[rows], heads.values[rows])
            self._kernels.attention(
                heads.queries[rows],
                *seat.cache.raw(block.place),
                start=seat.start,
                scale=self._config.attention_scale,
                window=layer.window or None,
                cap=self._config.attention_cap or None,
                out=heads.mixed[rows],
            )

    def _rest(self, block: _Block, work: Pass, heads: _Heads) -> None:
        """What a block does with its attention."""
        mixed, norm = heads.mixed, block.weights.vectors.get("post_attention_norm.weight")
        self._add(work, self._linear(mixed.reshape(len(mixed), -1), block, "attn_output"), norm)
        self._feed_forward(block.weights, work)

    def _projections(self, block: _Block, x: Array) -> tuple[Array, Array, Array]:
        rows, config, matrices = len(x), self._config, block.weights.matrices
        shared = self._kernels.quantise(x)
        if "attn_qkv.weight" in matrices:
            joined = matrices["attn_qkv.weight"]
            cut = block.layer.heads * config.head_dim
            ends = [0, cut, cut + block.layer.kv_heads * config.head_dim, joined.shape[0]]
            cuts = [joined.rows(first, end) for first, end in pairwise(ends)]
            parts = [self._kernels.linear(shared, one) for one in cuts]
        else:
            parts = [self._linear(shared, block, f"attn_{part}") for part in "qkv"]
        queries, keys, values = (part.reshape(rows, -1, config.head_dim) for part in parts)
        return queries, keys, values

    def _linear(self, x: Array | Activations, block: _Block, name: str) -> Array:
        out = self._kernels.linear(x, block.weights.matrices[f"{name}.weight"])
        bias = block.weights.vectors.get(f"{name}.bias")
        if bias is not None:
            self._kernels.add(out, bias)
        return out

    def _add(self, work: Pass, change: Array, norm: Array | None) -> None:
        self._kernels.add(work.hidden, change if norm is None else self._norm(change, norm))

    def _feed_forward(self, weights: LayerWeights, work: Pass) -> None:
        x = self._norm(work.hidden, weights.vectors["ffn_norm.weight"])
        if weights.experts:
            out = self._mixture(weights, x)
        else:
            out = self._kernels.linear(self._gated(weights, x), weights.matrices["ffn_down.weight"])
        self._add(work, out, weights.vectors.get("post_ffw_norm.weight"))

    def _gated(self, weights: LayerWeights, x: Array) -> Array:
        shared = self._kernels.quantise(x)
        up, gate = weights.matrices["ffn_up.weight"], weights.matrices.get("ffn_gate.weight")
        if gate is None:
            half = up.shape[0] // 2
            gate, up = up.rows(0, half), up.rows(half, 2 * half)
        return self._activate(self._kernels.linear(shared, gate), self._kernels.linear(shared, up))

    def _activate(self, gate: Array, up: Array) -> Array:
        if self._config.architecture.activation == "silu":
            return self._kernels.silu_mul(gate, up, gate)
        return self._kernels.gelu_tanh_mul(gate, up, gate)

    def _mixture(self, weights: LayerWeights, x: Array) -> Array:
        """Each row through its best experts, their softmax weights made to sum to one."""
        scores = self._kernels.linear(x, weights.matrices["ffn_gate_inp.weight"])
        used = self._config.experts_used
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, :used]
        best = np.take_along_axis(scores, chosen, axis=1)
        shares = np.exp(best - best.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        # One slot per choice, summed in order of choice: a row's sum is the same in any company.
        slots = np.empty((used, *x.shape), np.float32)
        wanted: list[int] = sorted(set(chosen.ravel().tolist()))
        for expert in wanted:
            rows, ranks = np.nonzero(chosen == expert)
            slots[ranks, rows] = self._expert(weights, expert, x[rows])
        mixed: Array = slots[0] * shares[:, 0, None]
        for rank in range(1, used):
            mixed += slots[rank] * shares[:, rank, None]
        return mixed

    def _expert(self, weights: LayerWeights, expert: int, x: Array) -> Array:
        gate, up, down = (
            weights.experts[f"ffn_{part}_exps.weight"][expert] for part in ("gate", "up", "down")
        )
        shared = self._kernels.quantise(x)
        inner = self._activate(self._kernels.linear(shared, gate), self._kernels.linear(shared, up))
        return self._kernels.linear(inner, down)

    def _finish(self, work: Pass) -> None:
        """Final norm and head, for the wanted rows alone."""
        if not len(work.wanted):
            return
        x = self._norm(work.hidden[work.wanted], self._output_norm)
        if work.output is None:
            work.output = np.empty((len(x), self._config.vocabulary), np.float32)
        shared, first = self._kernels.quantise(x), 0
        for tile in self._store.tiles(self._head):
            end = first + tile.shape[0]
            self._kernels.linear(shared, tile, work.output[:, first:end])
            first = end
        if self._config.logit_cap:
            self._kernels.softcap(work.output, self._config.logit_cap)
