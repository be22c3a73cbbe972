"""Gemma 2: norms before and after, soft caps, every other layer windowed."""

from superfluid_adapter_native.architectures.description import (
    ATTENTION,
    GATED,
    POST_NORMS,
    Architecture,
    Widths,
    by_head_dim,
)


def _scale(widths: Widths) -> float:
    # The 27B model alone scales by width per head instead of the head's own size.
    if widths.layers == 46:
        return float((widths.width / widths.heads) ** -0.5)
    return by_head_dim(widths)


ARCHITECTURE = Architecture(
    name="gemma2",
    serves="Gemma 2",
    block=ATTENTION + POST_NORMS + GATED,
    activation="gelu_tanh",
    embedding_scaled=True,
    window_every=2,
    window=4096,
    attention_scale=_scale,
    attention_cap=50.0,
    logit_cap=30.0,
)
