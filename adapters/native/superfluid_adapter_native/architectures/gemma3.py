"""Gemma 3, text: five windowed layers with a RoPE base of their own to one that sees all."""

from superfluid_adapter_native.architectures.description import (
    ATTENTION,
    GATED,
    POST_NORMS,
    QK_NORMS,
    Architecture,
    Widths,
    by_head_dim,
)


def _scale(widths: Widths) -> float:
    # The 27B model alone scales by width per head instead of the head's own size.
    if widths.layers == 62:
        return float((widths.width / widths.heads) ** -0.5)
    return by_head_dim(widths)


ARCHITECTURE = Architecture(
    name="gemma3",
    serves="Gemma 3 (text)",
    block=ATTENTION + QK_NORMS + POST_NORMS + GATED,
    activation="gelu_tanh",
    embedding_scaled=True,
    window_every=6,
    local_rope_base=10_000.0,
    attention_scale=_scale,
)
