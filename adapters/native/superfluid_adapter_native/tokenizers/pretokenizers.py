"""How text is cut into words before byte-level BPE, by the names that GGUF files use.

The patterns are those that the models' publishers ship in `tokenizer.json`; where llama.cpp
knows several that are applied one after the other, so are these: each cuts what the former left
into matches and gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BREAKS: Final = r"\s*[\r\n]+"
_SPACES: Final = r"\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OPEN: Final = r"[^\r\n\p{L}\p{N}]?"

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT: Final = r"\p{N}"
_LLAMA3: Final = "|".join((_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _SIGNS, _BREAKS, _SPACES))
_QWEN2: Final = "|".join((_CONTRACTIONS, _WORD, _DIGIT, _SIGNS, _BREAKS, _SPACES))
_QWEN35: Final = "|".join(
    (
        _CONTRACTIONS,
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        _DIGIT,
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        _BREAKS,
        _SPACES,
    )
)
_SIGNS_WITH_SLASHES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN: Final = "|".join(
    (
        f"{_OPEN}{_UPPER}*{_LOWER}+",
        f"{_OPEN}{_UPPER}+{_LOWER}*",
        _DIGIT,
        _SIGNS_WITH_SLASHES,
        _BREAKS,
        _SPACES,
    )
)


def _cased(digits: str) -> str:
    return "|".join(
        (
            f"{_OPEN}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?",
            f"{_OPEN}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?",
            digits,
            _SIGNS_WITH_SLASHES,
            _BREAKS,
            _SPACES,
        )
    )


_GPT4O: Final = _cased(r"\p{N}{1,3}")
_FALCON_SIGNS: Final = r"[\p{P}\$\+<=>\^~\|`]+"
_DEEPSEEK_LETTERS: Final = (
    "[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-"
    "\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-"
    "\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18"
    "-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2"
    "-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-"
    "\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-"
    "\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-"
    "\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-"
    "\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]"
)
"""Cased letters, range by range as DeepSeek's `tokenizer.json` lists them."""
_DEEPSEEK_SIGNS: Final = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_CJK: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3: Final = "|".join(
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        _BREAKS,
        _SPACES,
    )
)
_BLOOM: Final = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_JAIS2_SPACES: Final = "|".join(
    [rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)]
    + [r"\s{1,2}(?!\S)", r"\s{1}"]
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns in the order of their use, and what the family expects around BPE.

    `whole_words` takes a word that is a piece as that piece, whatever the merges say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_FAMILIES: Final = {
    PreTokenizer((_FALCON_SIGNS.replace("`", ""), _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): (
        "default",
    ),
    PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True): (
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
    ),
    PreTokenizer((_LLAMA3,)): ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"),
    PreTokenizer((_GPT2,)): (
        "gpt-2",
        "phi-2",
        "jina-es",
        "jina-de",
        "jina-v2-es",
        "jina-v2-de",
        "jina-v1-en",
        "jina-v2-code",
        "roberta-bpe",
        "gigachat",
        "a.x-4.0",
        "mellum",
        "modern-bert",
        "mpt",
        "olmo",
        "jais",
        "exaone4",
        "trillion",
        "granite-docling",
    ),
    PreTokenizer((_DIGIT, _GPT2)): (
        "starcoder",
        "refact",
        "command-r",
        "smollm",
        "codeshell",
        "exaone",
        "minerva-7b",
    ),
    PreTokenizer((_QWEN2,)): (
        "qwen2",
        "deepseek-r1-qwen",
        "kormo",
        "stablelm2",
        "hunyuan",
        "solar-open",
        "megrez",
        "grok-2",
    ),
    PreTokenizer((_QWEN35,)): ("qwen35",),
    PreTokenizer((_FALCON_SIGNS, _GPT2, "[0-9][0-9][0-9]")): ("falcon",),
    PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?{_DEEPSEEK_LETTERS}+",
            _DEEPSEEK_SIGNS,
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ): ("deepseek-llm",),
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGIT)): (
        "deepseek-coder",
    ),
    PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)): (
        "deepseek-v3",
        "hunyuan-dense",
        "joyai-llm",
    ),
    PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True): ("tekken",),
    PreTokenizer((_GPT4O,)): ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
    PreTokenizer((_BLOOM,)): ("bloom", "poro-chat", "gpt3-finnish"),
    PreTokenizer((_BLOOM, _DIGIT)): ("viking",),
    PreTokenizer(
        ("|".join((_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _SIGNS, _BREAKS, _JAIS2_SPACES)),)
    ): ("jais-2",),
    PreTokenizer(
        (
            "|".join(
                (
                    r"'(?i:[sdmt]|ll|ve|re)",
                    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
                    _DIGIT,
                    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
                    r"\s*[\r\n]",
                    _SPACES,
                )
            ),
        )
    ): ("bailingmoe", "bailingmoe2", "llada-moe"),
    PreTokenizer(
        ("|".join((_CONTRACTIONS, _WORD, _DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", _BREAKS, _SPACES)),)
    ): ("seed-coder",),
}

PRE_TOKENIZERS: Final = {name: family for family, names in _FAMILIES.items() for name in names}
"""Every known `tokenizer.ggml.pre`. A file without one means `default`, as in llama.cpp."""
