"""A model's facts, from its header alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

from superfluid_adapter_native.formats.source import ModelSource
from superfluid_compat.errors import ModelDamaged
from superfluid_workerd.link.answers import Facts

_DETAIL: Final = {
    "width": "embedding_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "ff": "feed_forward_length",
    "window": "attention.sliding_window",
    "experts": "expert_count",
}
"""What else to tell, by the architecture's key; only where it is one number for all layers."""


def facts_of(source: ModelSource) -> Facts:
    """What `source` says of itself. Raises `ModelDamaged` where a key has the wrong type."""
    name = source.metadata.get("general.name")
    keys = {
        short: source.metadata.get(f"{source.architecture}.{key}") for short, key in _DETAIL.items()
    }
    detail = {short: found for short, found in keys.items() if type(found) is int}
    return Facts(
        format=source.format,
        architecture=source.architecture,
        name=name if isinstance(name, str) else "",
        parameters=sum(math.prod(tensor.shape) for tensor in source.tensors.values()),
        bytes=source.total_bytes,
        context=_number(source, "context_length"),
        vocabulary=_vocabulary(source),
        layers=_number(source, "block_count"),
        types=dict(Counter(tensor.type.name for tensor in source.tensors.values())),
        template=isinstance(source.metadata.get("tokenizer.chat_template"), str),
        detail={**detail, "files": len(source.files)},
    )


def _number(source: ModelSource, name: str) -> int:
    key = f"{source.architecture}.{name}"
    found = source.metadata.get(key, 0)
    if type(found) is not int or found < 0:
        raise ModelDamaged(f"{source.path}: {key} is {found!r:.60}, a whole number was wanted")
    return found


def _vocabulary(source: ModelSource) -> int:
    """By the embedding, as folders pad it; vocabulary-only files have none."""
    embedding = source.tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.shape[0]
    tokens = source.metadata.get("tokenizer.ggml.tokens", ())
    return len(tokens) if isinstance(tokens, Sequence) else 0
