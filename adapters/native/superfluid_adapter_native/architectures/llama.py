"""Llama 1 to 3 and what is built like it. RoPE factors of Llama 3 come in `rope_freqs.weight`.

A sliding window that the file states (Mistral's first version) holds for every layer, as in
`modeling_mistral.py` of `transformers`; llama.cpp passes over it.
"""

from superfluid_adapter_native.architectures.description import ATTENTION, GATED, Architecture

ARCHITECTURE = Architecture(
    name="llama",
    serves="Llama 1 to 3, Mistral, SmolLM, TinyLlama",
    block=ATTENTION + GATED,
    window_every=1,
)
