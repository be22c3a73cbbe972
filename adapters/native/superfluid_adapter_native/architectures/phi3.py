"""Phi 3 and 3.5: fused projections; long contexts by the factors the file brings (LongRoPE)."""

from superfluid_adapter_native.architectures.description import (
    FUSED_ATTENTION,
    FUSED_GATED,
    Architecture,
)

ARCHITECTURE = Architecture(
    name="phi3",
    serves="Phi 3, Phi 3.5, Phi 4 mini",
    block=FUSED_ATTENTION + FUSED_GATED,
    window_every=1,
)
