"""What the runtime says of a model by its header."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from superfluid_adapter_llamacpp.gguf import FLOAT32, INTEGERS, STRING, Header, tensor_types
from superfluid_compat.errors import ModelDamaged, UnsupportedArchitecture
from superfluid_workerd.adapter import Facts

TEMPLATE_KEY: Final = "tokenizer.chat_template"
POOLINGS: Final = ("none", "mean", "cls", "last", "rank")
"""`llama_pooling_type` by number."""

MOST_LAYERS: Final = 512
"""LLAMA_MAX_LAYERS of llama.cpp's src/llama-hparams.h."""

_OTHERS: Final = {
    "clip": "an encoder of images or sound that goes with a model",
    "t5": "an encoder with a decoder",
    "wavtokenizer-dec": "a decoder of sound",
}
"""Architectures that llama.cpp knows and we serve nothing of."""

_EACH_LAYER: Final = ("attention.head_count", "attention.head_count_kv", "feed_forward_length",
                      "attention.sliding_window_pattern")  # fmt: skip
"""Keys that hold one value, or one for each layer."""

_LEAST: Final[Mapping[str, float]] = {
    "attention.layer_norm_epsilon": 0.0,
    "attention.layer_norm_rms_epsilon": 0.0,
    "attention.group_norm_epsilon": 0.0,
    "attention.max_alibi_bias": 0.0,
    "rope.freq_base": math.ulp(0.0),
    "rope.freq_base_swa": math.ulp(0.0),
    "rope.scale_linear": 0.0,
    "rope.scaling.factor": 0.0,
}
"""Numbers that llama.cpp aborts on, or answers nonsense by, where they are less than this."""

_TOKENS: Final = "tokenizer.ggml.tokens"
_MERGES: Final = "tokenizer.ggml.merges"
_EACH_TOKEN: Final[Mapping[str, str]] = {
    _TOKENS: "texts",
    "tokenizer.ggml.scores": "floats",
    "tokenizer.ggml.token_type": "integers",
}
"""Arrays with an entry for each token, and of what."""

_KINDS: Final[Mapping[str, Collection[int]]] = {
    "texts": {STRING}, "floats": {FLOAT32}, "integers": INTEGERS,
}  # fmt: skip
"""GGUF's numbers of the kinds of items that there may be."""

_STATED: Final = "pooling_type"
_EMBEDDERS: Final = frozenset({
    "bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3",
    "modern-bert", "eurobert", "gemma-embedding",
})  # fmt: skip
"""Architectures whose models give embeddings and never text."""


def check(header: Header) -> None:
    """Refuse by the header what llama.cpp serves nothing of. Raises `UnsupportedArchitecture`,
    `ModelDamaged`."""
    name = header.architecture
    if name in _OTHERS:
        raise UnsupportedArchitecture(
            f"{header.path} is {_OTHERS[name]} ({name}), a model for text or for embeddings was "
            "wanted"
        )
    if not any(key.startswith(f"{name}.") for key in header.metadata):
        raise UnsupportedArchitecture(
            f"{header.path} is of architecture {name[:40]!r} and says nothing else of itself"
        )
    layers = header.number("block_count")
    if not 0 < layers <= MOST_LAYERS:
        raise ModelDamaged(
            f"{header.path}: {name}.block_count is {layers}, wanted 1 to {MOST_LAYERS}"
        )
    if not header.number("embedding_length"):
        raise ModelDamaged(f"{header.path}: {name}.embedding_length is missing or 0")
    for key in _EACH_LAYER:
        _check_array(header, f"{name}.{key}", "integers", layers, f"{name}.block_count")
    _check_floats(header)
    check_vocabulary(header)
    if embeds(header):
        pooling(header)


def _check_floats(header: Header) -> None:
    """Refuse numbers that compute nothing: llama.cpp loads them and dies of the first token."""
    for key, value in _own_floats(header):
        least = _LEAST.get(key, -math.inf)
        if not (math.isfinite(value) and value >= least):
            wanted = {0.0: " that is not negative", -math.inf: ""}.get(least, " above 0")
            raise ModelDamaged(
                f"{header.path}: {header.architecture}.{key} is {value:g}, a finite number"
                f"{wanted} was wanted"
            )


def _own_floats(header: Header) -> Iterator[tuple[str, float]]:
    """The architecture's own keys that hold a float, or some, and each of these."""
    prefix = f"{header.architecture}."
    for key, value in header.metadata.items():
        if key.startswith(prefix):
            values = value if isinstance(value, list) else [value]
            yield from ((key.removeprefix(prefix), it) for it in values if isinstance(it, float))


def check_vocabulary(header: Header) -> None:
    """Refuse a vocabulary whose parts do not go together, which some builds die of. Raises
    `ModelDamaged`."""
    tokens = header.arrays.get(_TOKENS)
    if tokens is None:
        return
    for key, items in _EACH_TOKEN.items():
        _check_array(header, key, items, tokens.length, _TOKENS)
    _check_array(header, _MERGES, "texts")


def _check_array(
    header: Header, key: str, items: str, count: int | None = None, counted: str = ""
) -> None:
    """Where `key` is an array, it holds `items`, and as many as `counted` says."""
    found = header.arrays.get(key)
    if found is None:
        return
    if found.kind not in _KINDS[items]:
        raise ModelDamaged(f"{header.path}: {key} holds other things than {items}")
    if found.length != (found.length if count is None else count):
        raise ModelDamaged(
            f"{header.path}: {key} has {found.length} entries, by {counted} {count} were wanted"
        )


def facts_of(header: Header) -> Facts:
    """The header as `Adapter.facts` gives it. Raises as `check`."""
    check(header)
    return Facts(
        format="gguf",
        architecture=header.architecture,
        name=str(header.metadata.get("general.name", "")),
        parameters=sum(tensor.elements for tensor in header.tensors),
        bytes=header.size,
        context=header.number("context_length"),
        vocabulary=vocabulary(header),
        layers=header.number("block_count"),
        types=tensor_types(header.tensors),
        template=isinstance(header.metadata.get(TEMPLATE_KEY), str),
        detail={"embeds": embeds(header)},
    )


def vocabulary(header: Header) -> int:
    """Entries of the vocabulary."""
    tokens = header.arrays.get(_TOKENS)
    return tokens.length if tokens and tokens.length else header.number("vocab_size")


def embeds(header: Header) -> bool:
    """Whether the model was made for embeddings: it pools, or it is an encoder."""
    return header.architecture in _EMBEDDERS or header.number(_STATED) != POOLINGS.index("none")


def turns_positions(header: Header) -> bool:
    """Whether positions are rotations, which go on past the trained ones, and no learned table."""
    return all(tensor.name != "position_embd.weight" for tensor in header.tensors)


def pooling(header: Header) -> str:
    """How an embedding model makes one vector of a text's: as it states, or where it states
    nothing by the mean, as is usual.

    Raises `UnsupportedArchitecture` for a model that ranks, `ModelDamaged`."""
    stated = header.number(_STATED)
    if stated >= len(POOLINGS):
        raise ModelDamaged(f"{header.path}: {_STATED} is {stated}, wanted 0 to {len(POOLINGS) - 1}")
    if POOLINGS[stated] == "rank":
        raise UnsupportedArchitecture(
            f"{header.path} ranks texts, a model for text or for embeddings was wanted"
        )
    return POOLINGS[stated or POOLINGS.index("mean")]
