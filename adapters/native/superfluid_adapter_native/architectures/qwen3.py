"""Qwen 3, dense: norms of queries and keys, a head size of its own."""

from superfluid_adapter_native.architectures.description import (
    ATTENTION,
    GATED,
    QK_NORMS,
    Architecture,
)

ARCHITECTURE = Architecture(name="qwen3", serves="Qwen 3", block=ATTENTION + QK_NORMS + GATED)
