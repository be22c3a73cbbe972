"""What the runtime says of a model by its header."""

from __future__ import annotations

from typing import Final

from superfluid_adapter_llamacpp.gguf import Header, tensor_types
from superfluid_workerd.adapter import Facts

TEMPLATE_KEY: Final = "tokenizer.chat_template"
_POOLING_NONE: Final = 0
_EMBEDDERS: Final = frozenset({
    "bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3",
    "modern-bert", "eurobert", "gemma-embedding",
})  # fmt: skip
"""Architectures whose models give embeddings and never text."""


def facts_of(header: Header) -> Facts:
    """The header as `Adapter.facts` gives it."""
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
    return header.counts.get("tokenizer.ggml.tokens", 0) or header.number("vocab_size")


def embeds(header: Header) -> bool:
    """Whether the model was made for embeddings: it pools, or it is an encoder."""
    pooling = header.number("pooling_type", _POOLING_NONE)
    return header.architecture in _EMBEDDERS or pooling != _POOLING_NONE
