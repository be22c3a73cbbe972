"""Qwen 3 with experts: each token goes through the best few, their weights summing to one."""

from superfluid_adapter_native.architectures.description import (
    ATTENTION,
    EXPERTS,
    QK_NORMS,
    Architecture,
)

ARCHITECTURE = Architecture(
    name="qwen3moe", serves="Qwen 3 MoE", block=ATTENTION + QK_NORMS + EXPERTS
)
