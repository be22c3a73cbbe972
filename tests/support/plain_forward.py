"""A forward pass written out in float64 NumPy, apart from the product: an oracle for tiny models.

No caches, no batches: the whole sequence at once, one expression per line of the papers.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from support.tiny_models import TinyModel, model_metadata, model_tensors

Array: TypeAlias = NDArray[np.float64]


def plain_logits(spec: TinyModel, tokens: list[int]) -> Array:
    """Logits after each of `tokens`, shape (tokens, vocabulary)."""
    return _Plain(spec).run(tokens)


class _Plain:
    def __init__(self, spec: TinyModel) -> None:
        self.spec = spec
        self.keys = model_metadata(spec)
        self.tensors = {one.name: _floats(one) for one in model_tensors(spec)}

    def key(self, name: str, default: Any = None) -> Any:
        return self.keys.get(f"{self.spec.architecture}.{name}", default)

    def run(self, tokens: list[int]) -> Array:
        x = self.tensors["token_embd.weight"][tokens]
        if self.spec.gemma:
            x = x * math.sqrt(self.spec.width)
        for layer in range(self.spec.layers):
            x = self.block(layer, x)
        x = self.norm(x, self.tensors["output_norm.weight"])
        logits: Array = x @ self.tensors.get("output.weight", self.tensors["token_embd.weight"]).T
        return _cap(logits, self.key("final_logit_softcapping", 0.0))

    def norm(self, x: Array, weight: Array) -> Array:
        mean = (x**2).mean(axis=-1, keepdims=True)
        normal: Array = x / np.sqrt(mean + self.key("attention.layer_norm_rms_epsilon"))
        return normal * weight

    def block(self, layer: int, x: Array) -> Array:
        start = f"blk.{layer}."
        w = {n[len(start) :]: t for n, t in self.tensors.items() if n.startswith(start)}
        change = self.attention(layer, w, self.norm(x, w["attn_norm.weight"]))
        if "post_attention_norm.weight" in w:
            change = self.norm(change, w["post_attention_norm.weight"])
        x = x + change
        change = self.feed_forward(w, self.norm(x, w["ffn_norm.weight"]))
        if "post_ffw_norm.weight" in w:
            change = self.norm(change, w["post_ffw_norm.weight"])
        return x + change

    def local(self, layer: int) -> bool:
        if self.spec.architecture in ("llama", "phi3"):
            return bool(self.key("attention.sliding_window", 0) > 0)
        every = {"gemma3": 6, "gemma2": 2}.get(self.spec.architecture, 0)
        return every > 0 and layer % every != every - 1

    def attention(self, layer: int, w: dict[str, Array], x: Array) -> Array:
        spec, n = self.spec, len(x)
        sizes = [spec.heads * spec.head_dim, *[spec.kv_heads * spec.head_dim] * 2]
        if "attn_qkv.weight" in w:
            q, k, v = np.split(x @ w["attn_qkv.weight"].T, np.cumsum(sizes)[:2], axis=1)
        else:
            q, k, v = (
                x @ w[f"attn_{p}.weight"].T + w.get(f"attn_{p}.bias", np.zeros(1)) for p in "qkv"
            )
        q, k, v = (part.reshape(n, -1, spec.head_dim) for part in (q, k, v))
        if "attn_q_norm.weight" in w:
            q, k = self.norm(q, w["attn_q_norm.weight"]), self.norm(k, w["attn_k_norm.weight"])
        q, k = self.rotate(layer, q), self.rotate(layer, k)
        seen = np.tril(np.ones((n, n), bool))
        if self.local(layer):
            seen &= ~np.tril(np.ones((n, n), bool), -self.key("attention.sliding_window"))
        mixed = np.empty_like(q)
        for head in range(spec.heads):
            group = head * spec.kv_heads // spec.heads
            scores = q[:, head] @ k[:, group].T / math.sqrt(spec.head_dim)
            scores = _cap(scores, self.key("attn_logit_softcapping", 0.0))
            mixed[:, head] = _softmax(np.where(seen, scores, -np.inf)) @ v[:, group]
        out: Array = mixed.reshape(n, -1) @ w["attn_output.weight"].T
        return out

    def rotate(self, layer: int, x: Array) -> Array:
        dims = self.key("rope.dimension_count")
        half = dims // 2
        angles = np.arange(len(x))[:, None] * self.frequencies(layer, half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        size = self.magnitude(layer)
        cos, sin = cos * size, sin * size
        out = x.copy()
        if self.spec.architecture == "llama":
            a, b = x[..., 0:dims:2], x[..., 1:dims:2]
            out[..., 0:dims:2], out[..., 1:dims:2] = a * cos - b * sin, a * sin + b * cos
        else:
            a, b = x[..., :half], x[..., half:dims]
            out[..., :half], out[..., half:dims] = a * cos - b * sin, a * sin + b * cos
        return out

    def frequencies(self, layer: int, half: int) -> Array:
        local = self.spec.architecture == "gemma3" and self.local(layer)
        base = 10_000.0 if local else self.key("rope.freq_base")
        plain = np.array([base ** (-i / half) for i in range(half)])
        scaling = self.key("rope.scaling.type", "none")
        factor = self.key("rope.scaling.factor", 1.0)
        factors = self.tensors.get("rope_freqs.weight", self.tensors.get(self.long_or_short()))
        if factors is not None:
            plain /= factors
        if local or scaling == "none":
            return plain
        if scaling == "linear":
            plain /= factor
            return plain
        trained = self.key("rope.scaling.original_context_length")

        def pair_turning(times: float) -> float:
            return half * math.log(trained / (2 * math.pi * times)) / math.log(base)

        low = max(math.floor(pair_turning(32.0)), 0)
        high = min(math.ceil(pair_turning(1.0)), 2 * half - 1)
        slow = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0.0, 1.0)
        mixed: Array = plain / factor * slow + plain * (1 - slow)
        return mixed

    def long_or_short(self) -> str:
        trained = self.key("rope.scaling.original_context_length", self.spec.context)
        kind = "long" if self.spec.context > trained else "short"
        return f"rope_factors_{kind}.weight"

    def magnitude(self, layer: int) -> float:
        attention: float = self.key("rope.scaling.attn_factor", 1.0)
        if self.key("rope.scaling.type") == "yarn":
            attention *= 1 + 0.1 * math.log(self.key("rope.scaling.factor"))
        return attention

    def feed_forward(self, w: dict[str, Array], x: Array) -> Array:
        if "ffn_gate_inp.weight" in w:
            return np.stack([self.experts(w, row) for row in x])
        up = x @ w["ffn_up.weight"].T
        if "ffn_gate.weight" in w:
            gate = x @ w["ffn_gate.weight"].T
        else:
            gate, up = np.split(up, 2, axis=1)
        out: Array = (self.activate(gate) * up) @ w["ffn_down.weight"].T
        return out

    def experts(self, w: dict[str, Array], x: Array) -> Array:
        shares = _softmax(w["ffn_gate_inp.weight"] @ x)
        best = np.argsort(shares)[::-1][: self.spec.experts_used]
        total = np.zeros_like(x)
        for expert in best:
            gate, up = w["ffn_gate_exps.weight"][expert] @ x, w["ffn_up_exps.weight"][expert] @ x
            out = w["ffn_down_exps.weight"][expert] @ (self.activate(gate) * up)
            total += out * shares[expert] / shares[best].sum()
        return total

    def activate(self, x: Array) -> Array:
        if self.spec.gemma:
            x = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        else:
            x = x / (1 + np.exp(-x))
        return x


def _floats(one: Any) -> Array:
    raw = np.frombuffer(one.raw, np.uint8)
    if one.type.name == "F32":
        return raw.view(np.float32).reshape(one.shape).astype(np.float64)
    rows = raw.reshape(-1, one.type.row_bytes(one.shape[-1]))
    values = dequantize(rows, GGMLQuantizationType(one.type.ggml))
    return values.reshape(one.shape).astype(np.float64)


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: Array = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def _cap(x: Array, cap: float) -> Array:
    return cap * np.tanh(x / cap) if cap else x
