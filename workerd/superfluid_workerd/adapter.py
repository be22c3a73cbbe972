"""The whole surface that an adapter implements: what a runtime *is* and what a loaded model *does*.

A package becomes an adapter by an entry point of the group `superfluid.adapters` whose value is a
function without arguments that returns an `Adapter`. Importing the package, building the adapter
and everything it answers up to `check` must load no engine and no weights; `docs/adapters.md`
walks through one. All that an adapter needs is imported from here, but for the errors, which are
in `superfluid_compat.errors`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from superfluid_compat.errors import Unsupported
from superfluid_compat.verdicts import Line, Requirement, State
from superfluid_workerd.link.answers import (
    GGUF,
    SAFETENSORS,
    AdapterInfo,
    Archive,
    Artifact,
    Device,
    Facts,
    Format,
    InstallPlan,
    Probe,
    Rights,
    Version,
    Wheel,
)
from superfluid_workerd.link.frames import LoadRecord
from superfluid_workerd.options import Kind, Option, Scope, Value
from superfluid_workerd.values import Values

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Logits: TypeAlias = NDArray[np.float32]

SequenceId: TypeAlias = int
Options: TypeAlias = Mapping[str, Value | None]
"""An adapter's own options by name, checked, each present (None where nothing was given)."""

Progress: TypeAlias = Callable[[int, int], None]
"""`progress(done, total)`, in any unit: the load moves."""

Tick: TypeAlias = Callable[[], None]
"""Called within a long step, per layer or micro-batch. It may raise to abandon the step; the
runtime lets that pass. Its sequences are then truncated to the lengths they had, or freed where
that is refused."""


class Adapter(abc.ABC):
    """What a runtime is. Everything but `check`, `vet`, `tokenizer` and `open` answers from
    data."""

    installed: Path | None = None
    """The install that this worker runs with, set before the first call; None for a runtime that
    ships with its adapter, for one of the user's own, and where the question needs none."""

    shared: Path | None = None
    """The folder that `check` filled, set likewise where `vet` or `tokenizer` is asked."""

    @abc.abstractmethod
    def info(self) -> AdapterInfo:
        """Id, kit number, formats and rights."""

    def options(self) -> Sequence[Option]:
        """The options only this runtime takes. `context`, `lanes`, `threads` and
        `memory-budget` are common to all and come in the `OpenRequest`."""
        return ()

    def compat(self) -> dict[str, Any]:
        """This build's half of the runtime's contract, as plain JSON for `compat.json`."""
        return {}

    def versions(self) -> Sequence[Version]:
        """Versions this adapter installs on its own, newest first; none when it ships with us."""
        return ()

    def plan(self, version: str, backend: str) -> InstallPlan:
        """How to install one of `versions`. Raises `Unsupported` when there is none."""
        raise Unsupported(f"{self.info().id} ships with superfluid and is not installed on its own")

    def install(self, plan: InstallPlan, staged: Path) -> None:  # noqa: B027  # optional
        """Finish what the daemon fetched, verified and laid into `staged`. No network."""

    @abc.abstractmethod
    def check(self, options: Options, shared: Path) -> Probe:
        """Try the runtime on this machine without a model; may take long and fill `shared`.

        A runtime that does not work is a `Probe` with its problem, not an exception."""

    @abc.abstractmethod
    def facts(self, model: Path) -> Facts:
        """What the model's header says. Reads no weights.

        Raises `ModelDamaged`, `UnsupportedArchitecture`, `UnsupportedType`."""

    def vet(self, model: Path, options: Options) -> None:  # noqa: B027  # optional
        """Refuse a model of good facts that the engine itself would not open, as far as it tells
        without weights.

        Raises a `ModelError`, `BadOptionValue`."""

    def prepare(  # noqa: B027  # optional
        self, facts: Facts, options: Options, shared: Path, progress: Progress
    ) -> None:
        """Fill `shared` for a model known by its facts alone, in a worker that holds none.

        `shared` belongs to this adapter's workers together: written here and in `check`, only
        read by a worker that holds a model. A second call for like facts does nothing, fast."""

    def memory(self, request: OpenRequest) -> Mapping[str, int]:
        """The memory plan `open` would load by, in bytes by part, from the header alone; nothing
        when it cannot tell. Raises what `open` raises."""
        return {}

    @abc.abstractmethod
    def tokenizer(self, model: Path, options: Options) -> Tokenizer:
        """The model's tokenizer, from its vocabulary alone."""

    @abc.abstractmethod
    def open(self, request: OpenRequest) -> LoadedModel:
        """Load the model within what the request grants, or raise a `ModelError`.

        Falling short of what was asked (fewer lanes, less context) is a refusal unless the value
        asked for was 0 or None, which leave the choice to the adapter."""


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What to open and within what. 0 (context, threads) and None (budget) mean: choose.

    `scratch` is a folder of the worker's own, `shared` the one that `prepare` filled, to be read
    only. `memory_budget` bounds the plan, in bytes.
    """

    model: Path
    scratch: Path
    shared: Path
    context: int = 0
    lanes: int = 1
    threads: int = 0
    memory_budget: int | None = None
    options: Options = field(default_factory=dict)
    progress: Progress = lambda done, total: None

    def record(
        self,
        *,
        context: int,
        threads: int | None = None,
        memory_budget: int | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> LoadRecord:
        """The load's record. Asked is this request with every option that was given; got is the
        context, the lanes, the threads and the bytes planned where the adapter knows them, and
        whatever is its `own`."""
        given = {name: _plain(it) for name, it in self.options.items() if it is not None}
        asked = {
            "context": self.context,
            "lanes": self.lanes,
            "threads": self.threads,
            "memory-budget": self.memory_budget,
            **given,
        }
        known = {"threads": threads, "memory-budget": memory_budget}
        got: dict[str, Any] = {"context": context, "lanes": self.lanes}
        got |= {name: value for name, value in known.items() if value is not None}
        return LoadRecord(asked=asked, got=got | dict(own or {}))


def _plain(value: Value) -> object:
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that serves: its runtime, its tokenizer, its template, and the load's record.

    `template` is the model's own Jinja source or None; `family` names the fallback to take then
    (`superfluid_workerd.codec.families`). `plan` is the memory plan in bytes by part.
    """

    runtime: Runtime
    tokenizer: Tokenizer
    facts: Facts
    record: LoadRecord
    template: str | None = None
    family: str = ""
    plan: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Embedding:
    """What a loaded runtime makes of a text for search.

    `width` is the length of a vector, `tokens` that of the longest input. `batch_tokens` bounds
    the tokens of one call of `Runtime.embed`, all rows together, and is `tokens` or more.
    `pooling` names how a text's tokens become one vector: `mean`, `cls`, `last`.
    """

    width: int
    tokens: int
    batch_tokens: int
    pooling: str = ""


@dataclass(frozen=True, slots=True)
class RuntimeDescription:
    """What a loaded runtime can do.

    `context` is the longest sequence in tokens. `sequences` is how many may exist at once, at
    least the lanes that were asked for. `step_tokens` bounds the tokens of one step, all feeds
    together. `truncate` is `any` when every length works and `zero` when only 0 is sure to.
    `row_invariant` says that a token's logits do not depend on what else is in the step nor on
    how its prompt was cut. `tokens` is how many tokens all sequences hold together, 0 when each
    has room for a whole context. `swap_bytes` is not 0 where a step takes longer for every token
    that sequences beside it hold: that many bytes of them may then be kept exported, and those that
    rest will be. `retry` says that a step that raised `Fault` may be given again
    once its sequences are truncated. `embedding` is None where `embed` raises `Unsupported`.
    `generates` False says that there is nothing but `embed`: no sequence is then asked for, and
    `sequences` and `step_tokens` may be 0.
    """

    context: int
    sequences: int
    vocabulary: int
    step_tokens: int
    truncate: Literal["any", "zero"] = "any"
    copy: bool = False
    export: bool = False
    row_invariant: bool = False
    tokens: int = 0
    swap_bytes: int = 0
    retry: bool = False
    generates: bool = True
    embedding: Embedding | None = None
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens that go into one sequence in one step.

    `start` is the position of the first of `tokens` and equals the sequence's length. `logits`
    says which rows are wanted back: none, the last token's, or every token's.
    """

    sequence: SequenceId
    tokens: Sequence[int]
    start: int
    logits: Literal["none", "last", "all"] = "last"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes now held: weights in memory, sequence state, and what a caller could release."""

    weights: int = 0
    sequences: int = 0
    releasable: int = 0


class Runtime(abc.ABC):
    """What a loaded model does. Synchronous, called by one thread only.

    Errors are the leaves of `StepError`. `UnknownSequence` may come from everything that takes a
    sequence, `Fatal` from everything. After any other error no sequence has grown, shrunk or
    vanished, except as `step` says.
    """

    @abc.abstractmethod
    def describe(self) -> RuntimeDescription:
        """Constant for the runtime's life."""

    @abc.abstractmethod
    def seq_create(self) -> SequenceId:
        """A new, empty sequence. Raises `Capacity`."""

    @abc.abstractmethod
    def seq_free(self, sequence: SequenceId) -> None:
        """Give the sequence and its memory back. Ids may be used again."""

    @abc.abstractmethod
    def seq_length(self, sequence: SequenceId) -> int:
        """Tokens the sequence holds."""

    @abc.abstractmethod
    def seq_truncate(self, sequence: SequenceId, length: int) -> None:
        """Keep the first `length` tokens. To 0 always works.

        Raises `OutOfBoundary` past the sequence's length, `Unsupported` where the state cannot go
        back exactly; the sequence is then unchanged."""

    def seq_copy(self, sequence: SequenceId, length: int) -> SequenceId:
        """A new sequence with the first `length` tokens' state. Raises as `seq_create` and
        `seq_truncate`."""
        raise Unsupported("this runtime does not copy sequences")

    def seq_export(self, sequence: SequenceId) -> bytes:
        """The sequence's state, for `seq_import` of a runtime of the same model and settings."""
        raise Unsupported("this runtime does not export sequences")

    def seq_import(self, payload: bytes) -> SequenceId:
        """A new sequence from `seq_export`. A payload of another model, setting or version, or a
        damaged one, raises `Unsupported` and leaves everything as it was."""
        raise Unsupported("this runtime does not import sequences")

    @abc.abstractmethod
    def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
        """One pass over the model for all feeds; one entry for each, in order.

        An entry is float32 of shape (rows, vocabulary), rows as `Feed.logits` asks, or None for
        `none`. It is the caller's until the runtime is called again, in whatever way: who keeps it
        longer copies it. Sequences in `feeds` are distinct. On return each sequence is longer by
        its tokens.

        Raises before computing, sequences unchanged: `OutOfBoundary` (empty or unknown tokens, a
        start that is not the length, past the context), `Capacity`. While computing: `Fault`, or
        whatever `tick` raised; the sequences of the feeds then hold at least what they held, and
        the caller truncates them, or frees them where that is refused."""

    @abc.abstractmethod
    def memory(self) -> MemoryUse:
        """What is held now."""

    def release(self) -> None:  # noqa: B027  # optional
        """Drop caches that can be made again."""

    def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
        """One vector for each row of tokens, in order and each for itself: float32 of shape (rows,
        width), of Euclidean length 1. It is the caller's, and no sequence changes.

        Rows are 1 to `Embedding.tokens` long, `batch_tokens` together, and as many as that allows;
        short ones are best computed together. Raises before computing `OutOfBoundary` (an empty or
        too long row, unknown tokens) and `Capacity`; while computing `Fault`, or whatever `tick`
        raised."""
        raise Unsupported("this runtime does not embed")

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back; nothing is called afterwards."""


class EmbeddingRuntime(Runtime):
    """A runtime whose model gives embeddings and never text: `describe` says so, `embed` does it,
    and there are no sequences."""

    def seq_create(self) -> SequenceId:
        raise Unsupported(_NO_TEXT)

    def seq_free(self, sequence: SequenceId) -> None:
        raise Unsupported(_NO_TEXT)

    def seq_length(self, sequence: SequenceId) -> int:
        raise Unsupported(_NO_TEXT)

    def seq_truncate(self, sequence: SequenceId, length: int) -> None:
        raise Unsupported(_NO_TEXT)

    def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
        raise Unsupported(_NO_TEXT)

    @abc.abstractmethod
    def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
        """As `Runtime.embed`."""


_NO_TEXT: Final = "this model gives embeddings and no text"


class Tokenizer(abc.ABC):
    """Text to token ids and back. Thread-safe, so that tokenizing need not wait for a turn."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Ids are 0 to size - 1."""

    @property
    @abc.abstractmethod
    def bos(self) -> int | None:
        """The id that opens a text, or None."""

    @property
    @abc.abstractmethod
    def eos(self) -> int | None:
        """The id that ends a text, or None."""

    @property
    @abc.abstractmethod
    def stops(self) -> frozenset[int]:
        """Every id that ends a generation: end of text, end of turn."""

    @property
    def longest(self) -> int | None:
        """Most bytes of a text that one id stands for; None where a text may shrink before it is
        cut, so that no number of bytes shows that it holds many ids."""
        return None

    @abc.abstractmethod
    def encode(self, text: str, *, add_special: bool = True, special: bool = False) -> list[int]:
        """Ids of `text`. `add_special` adds what the model expects around a text (BOS, EOS);
        `special` reads special tokens in the text as such, else they are ordinary text."""

    @abc.abstractmethod
    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that `token` adds to a text in its middle; special tokens add none unless
        `special`. Raises `OutOfBoundary` for an id outside the vocabulary."""

    @abc.abstractmethod
    def decode(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        """The bytes of a whole text, without the space that encoding puts at its start."""


__all__ = [
    "GGUF",
    "SAFETENSORS",
    "Adapter",
    "AdapterInfo",
    "Archive",
    "Artifact",
    "Device",
    "Embedding",
    "EmbeddingRuntime",
    "Facts",
    "Feed",
    "Format",
    "InstallPlan",
    "Kind",
    "Line",
    "LoadRecord",
    "LoadedModel",
    "MemoryUse",
    "OpenRequest",
    "Option",
    "Options",
    "Probe",
    "Progress",
    "Requirement",
    "Rights",
    "Runtime",
    "RuntimeDescription",
    "Scope",
    "SequenceId",
    "State",
    "Tick",
    "Tokenizer",
    "Value",
    "Values",
    "Version",
    "Wheel",
]
