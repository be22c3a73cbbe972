"""The messages of the link.

Daemon and worker each send `Hello` first. The daemon then sends one `Load`; the worker reports
`Stage`s and ends with `Ready` or `LoadFailed`. From then on streams run side by side, each named
by a number that the daemon chose: `Generate` is answered by `Prompted`, then by entries in `Turn`
frames, one frame for each turn of the runtime, until an entry carries `finish`, or by
`StreamFailed`. Nothing here names a thing that is local to one machine, save the path in `Load`.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from superfluid_compat import numbers
from superfluid_workerd.link.answers import Facts, Refusal

Channel: TypeAlias = Literal["text", "reasoning", "tool_call"]
Finish: TypeAlias = Literal["stop", "length", "tool_calls", "cancelled"]
Class: TypeAlias = Literal["interactive", "completion", "agent", "background"]
CLASSES: Final[dict[str, Class]] = {name: name for name in get_args(Class)}


class _Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    pass


class _Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class Messages(_Frame, frozen=True):
    """A chat, rendered in the worker by the model's template. Content follows OpenAI's shape."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    template_arguments: dict[str, Any] = {}


class Text(_Frame, frozen=True):
    """A prompt as text. Special tokens named in it stay text; `add_special` adds the BOS token."""

    text: str
    add_special: bool = True


class Tokens(_Frame, frozen=True):
    """A prompt as token ids, taken as it is."""

    tokens: list[int]


Prompt: TypeAlias = Messages | Text | Tokens


class Sampling(_Record, frozen=True):
    """How a token is drawn. Defaults change nothing: they draw from the model's distribution.

    `temperature` 0 is greedy; `top_k` 0 is off; penalties look back over `penalty_window` tokens;
    `logprobs` asks for that many alternatives beside each token's own, None for no logprobs.
    Draw number i of a stream depends on `seed` and i alone.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int | None = None


class Choices(_Record, frozen=True):
    """One of `count` choices that are asked for together and accepted all or none.

    They share `group`, a number of their own. `param` is the field that asks for so many.
    """

    group: int
    count: int
    param: str = "n"


class GenerationRequest(_Record, frozen=True):
    """One generation, whichever API it came from.

    `max_tokens` None means up to the context's end. `deadline_s` counts from arrival.
    """

    prompt: Prompt
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    service_class: Class = "agent"
    deadline_s: float | None = None
    choices: Choices | None = None


class Replay(_Record, frozen=True):
    """Where an interrupted stream stood: its prompt's ids, what it committed, what went out.

    `sent` counts characters already delivered per channel; the worker sends none of them again.
    """

    prompt: list[int]
    committed: list[int]
    sent: dict[str, int] = {}


class Hello(_Frame, frozen=True):
    """First frame both ways. Unequal `link` numbers are refused by number."""

    link: int = numbers.LINK
    kit: int = numbers.KIT
    version: str = ""
    adapter: str = ""
    pid: int = 0


class Load(_Frame, frozen=True):
    """Open this model, known to clients as `name`, with the adapter's own `options`, checked.

    `scratch` is a private folder, `shared` the adapter's own, read only.
    """

    model: str
    name: str
    scratch: str
    shared: str
    context: int = 0
    lanes: int = 1
    threads: int = 0
    memory_budget: int | None = None
    options: dict[str, Any] = {}


class Generate(_Frame, frozen=True):
    """Start stream `stream`, or with `replay` continue it."""

    stream: int
    request: GenerationRequest
    replay: Replay | None = None


class Cancel(_Frame, frozen=True):
    """End stream `stream`, or the `Embed` of that number, within one turn; unknown numbers are
    ignored."""

    stream: int


class Tokenize(_Frame, frozen=True):
    """Answered by `Tokenized`. A chat is rendered first. `special` reads special tokens in text."""

    request: int
    prompt: Prompt
    special: bool = False


class Detokenize(_Frame, frozen=True):
    """Answered by `Detokenized`."""

    request: int
    tokens: list[int]


class Embed(_Frame, frozen=True):
    """A vector for each input is wanted, of `dimensions` floats. Answered by `Embedded`."""

    request: int
    inputs: list[Text | Tokens]
    dimensions: int | None = None


class Ping(_Frame, frozen=True):
    """Answered by the turn loop itself, between or inside turns, never by another thread."""

    number: int


class Shutdown(_Frame, frozen=True):
    """Close the runtime and exit 0. Streams still running are cancelled."""


ToWorker: TypeAlias = (
    Hello | Load | Generate | Cancel | Tokenize | Detokenize | Embed | Ping | Shutdown
)


class Stage(_Frame, frozen=True):
    """Progress of the load: `done` of `total` (any unit; 0 of 0 when not counted)."""

    stage: Literal["probed", "mapped", "warmed"]
    done: int = 0
    total: int = 0
    note: str = ""


class LoadRecord(_Record, frozen=True):
    """Asked versus got, by name, for everything that could fall short."""

    asked: dict[str, Any]
    got: dict[str, Any]


class Description(_Record, frozen=True):
    """What was loaded. `context` is the longest stream in tokens, `plan` the memory plan in bytes.

    `template` says where the chat template came from: `model`, `fallback:FAMILY`, or `none`.
    """

    facts: Facts
    adapter: str
    context: int
    lanes: int
    vocabulary: int
    template: str
    record: LoadRecord
    plan: dict[str, int] = {}
    capabilities: dict[str, Any] = {}


class Ready(_Frame, frozen=True):
    description: Description


class LoadFailed(_Frame, frozen=True):
    error: Refusal


class Logprob(_Record, frozen=True):
    """Log probability of one token; `text` is its bytes."""

    token: int
    text: bytes
    logprob: float


class TokenLogprob(_Record, frozen=True):
    """The drawn token's log probability and the likeliest alternatives, best first."""

    chosen: Logprob
    top: list[Logprob] = []


class Delta(_Record, frozen=True):
    """What one stream gained in one turn.

    `tokens` are the ids committed, `text` what is decided to go out (never part of a character
    nor of a possible stop string); `finish` ends the stream, `stopped_by` is the stop string.
    """

    stream: int
    tokens: list[int] = []
    text: str = ""
    channel: Channel = "text"
    logprobs: list[TokenLogprob] = []
    finish: Finish | None = None
    stopped_by: str | None = None


class Prompted(_Frame, frozen=True):
    """The stream's prompt as token ids, before its first turn; `cached` of them cost nothing.

    `cached` is None while the stream waits for a lane; `Prompted` comes again when it has one.
    """

    stream: int
    tokens: list[int]
    cached: int | None = None


class TurnStats(_Record, frozen=True):
    """Counters since the load, and gauges of now, for metrics and tests. Times in seconds.

    `seats` sums the streams seated and `ready` those that could have been, turn by turn; the
    `window` fields are the same of the last turns alone. `queued_s` sums the waits of the
    `admitted` for a lane, `lingered_s` the waits of turns for company. `shared_tokens` came from
    the prefix cache instead of a prefill; `refed_tokens` were fed a second time, after a park or a
    failed step. `stored` sequences of ended streams hold `stored_tokens`; `swapped_bytes` is their
    state, and `parked_bytes` that of preempted streams, outside of the runtime. `embed_calls` took
    `embedded_inputs` of `embedded_tokens`; `embeds_waiting` requests still have some to be
    embedded.
    """

    turns: int = 0
    failed_turns: int = 0
    seats: int = 0
    ready: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    busy_s: float = 0.0
    lanes: int = 0
    free_lanes: int = 0
    waiting: int = 0
    window_turns: int = 0
    window_seats: int = 0
    window_ready: int = 0
    admitted: int = 0
    queued_s: float = 0.0
    lingered_s: float = 0.0
    shared_tokens: int = 0
    refed_tokens: int = 0
    preempted: int = 0
    parked: int = 0
    parked_bytes: int = 0
    stored: int = 0
    stored_tokens: int = 0
    swapped_bytes: int = 0
    embed_calls: int = 0
    embedded_inputs: int = 0
    embedded_tokens: int = 0
    embeds_waiting: int = 0


class Turn(_Frame, frozen=True):
    """All that one turn committed, for every lane seated in it.

    `prefilled` is how many tokens of those streams are computed that were seated and have more to
    go before their next token.
    """

    deltas: list[Delta]
    stats: TurnStats
    prefilled: dict[int, int] = {}


class StreamFailed(_Frame, frozen=True):
    stream: int
    error: Refusal


class Tokenized(_Frame, frozen=True):
    """`pieces` are the tokens' bytes, in order."""

    request: int
    tokens: list[int]
    pieces: list[bytes]


class Detokenized(_Frame, frozen=True):
    request: int
    text: str


class Embedded(_Frame, frozen=True):
    """The inputs' vectors in order, each of `width` little-endian float32 and Euclidean length 1;
    `tokens` counts those of each input."""

    request: int
    width: int
    vectors: bytes
    tokens: list[int]


class RequestFailed(_Frame, frozen=True):
    """The answer to a `Tokenize`, `Detokenize` or `Embed` that cannot be answered."""

    request: int
    error: Refusal


class Pong(_Frame, frozen=True):
    """Proof that the turn loop moves: `ticks` grows within a long turn too."""

    number: int
    ticks: int
    stats: TurnStats


ToDaemon: TypeAlias = (
    Hello
    | Stage
    | Ready
    | LoadFailed
    | Prompted
    | Turn
    | StreamFailed
    | Tokenized
    | Detokenized
    | Embedded
    | RequestFailed
    | Pong
)
