"""Qwen 2 and 2.5: llama with biases on queries, keys and values."""

from superfluid_adapter_native.architectures.description import ATTENTION, GATED, Architecture

ARCHITECTURE = Architecture(name="qwen2", serves="Qwen 2, Qwen 2.5", block=ATTENTION + GATED)
