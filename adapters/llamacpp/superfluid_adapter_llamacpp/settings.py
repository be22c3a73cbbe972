"""The adapter's options: declared, checked together, and turned into members of structs.

An option that was not given leaves the library's own default. One whose member a contract lacks is
refused by name, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from superfluid_adapter_llamacpp.contracts import Contract, Layout
from superfluid_compat.errors import BadOptionValue
from superfluid_workerd.adapter import Options
from superfluid_workerd.options import MOST_THREADS, Kind, Option, Scope, Value
from superfluid_workerd.values import Values

_LEAST_FLOAT: Final = 1.2e-38
ALL_LAYERS: Final = -2
AUTO_LAYERS: Final = -1
CACHE_TYPES: Final[Mapping[str, tuple[int, float]]] = {
    "f32": (0, 4.0),
    "f16": (1, 2.0),
    "bf16": (30, 2.0),
    "q8_0": (8, 1.0625),
    "q5_1": (7, 0.75),
    "q5_0": (6, 0.6875),
    "q4_1": (3, 0.625),
    "q4_0": (2, 0.5625),
    "iq4_nl": (20, 0.5625),
}
"""ggml's number of each type a KV cache may have, and its bytes per value; any other kills us."""
BLOCK_VALUES: Final = 32
_UNQUANTISED: Final = frozenset({"f32", "f16", "bf16"})

_SPLITS: Final = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
_LOADS: Final = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "dio": 4}
_LAZY: Final = {"off": 0, "auto": 1, "on": 2}
_FLASH: Final = {"auto": -1, "off": 0, "on": 1}
_SCALINGS: Final = {"none": 0, "linear": 1, "yarn": 2}
_MAPPED: Final = frozenset({"auto", "mmap", "mmap+mlock"})
_LOAD_FLAGS: Final[Mapping[str, tuple[int, int, int]]] = {
    "auto": (1, 0, 0),
    "none": (0, 0, 0),
    "mmap": (1, 0, 0),
    "mlock": (0, 1, 0),
    "mmap+mlock": (1, 1, 0),
    "dio": (0, 0, 1),
}
"""What a load mode is where it was three flags: use_mmap, use_mlock, use_direct_io."""

OPTIONS: Final = (
    Option("lib", Kind.PATH, "a libllama of your own, a file or its folder; nothing else is "
           "searched", scope=Scope.RUNTIME),
    Option("n-gpu-layers", Kind.INTEGER, "layers to place on GPUs; auto is as many as fit",
           "auto", minimum=0, maximum=1 << 16, keywords=("auto", "all"), unit="layers"),
    Option("main-gpu", Kind.INTEGER, "index of the GPU that serves alone, or first", minimum=0,
           maximum=255),
    Option("split-mode", Kind.CHOICE, "how a model is spread over GPUs", choices=tuple(_SPLITS)),
    Option("tensor-split", Kind.STRING, "share of the model for each GPU, such as 3,1"),
    Option("load-mode", Kind.CHOICE, "how weights come into memory", choices=tuple(_LOADS)),
    Option("lazy-mode", Kind.CHOICE, "whether mapped weights are read when first used",
           choices=tuple(_LAZY)),
    Option("repack", Kind.BOOLEAN, "rearrange weights for the processor while loading"),
    Option("threads", Kind.INTEGER, "threads to decode with; the common --threads by default",
           minimum=1, maximum=MOST_THREADS, unit="threads"),
    Option("threads-batch", Kind.INTEGER, "threads to read prompts with; as many as threads by "
           "default", minimum=1, maximum=MOST_THREADS, unit="threads"),
    Option("batch-size", Kind.INTEGER, "most tokens of one step", 2048, minimum=1,
           maximum=1 << 16, unit="tokens"),
    Option("ubatch-size", Kind.INTEGER, "tokens computed together; a cancel is heard between",
           512, minimum=1, maximum=1 << 16, unit="tokens"),
    Option("flash-attn", Kind.CHOICE, "fused attention", "auto", choices=tuple(_FLASH)),
    Option("cache-type-k", Kind.CHOICE, "how keys are kept", "f16", choices=tuple(CACHE_TYPES)),
    Option("cache-type-v", Kind.CHOICE, "how values are kept", "f16", choices=tuple(CACHE_TYPES)),
    Option("kv-offload", Kind.BOOLEAN, "keep keys and values on the GPU", default=True),
    Option("op-offload", Kind.BOOLEAN, "let the GPU compute on weights in host memory",
           default=True),
    Option("swa-full", Kind.BOOLEAN, "keep every position of sliding-window layers: more memory, "
           "and any length can be gone back to", default=False),
    Option("rope-scaling", Kind.CHOICE, "how positions past the trained ones are scaled",
           choices=tuple(_SCALINGS)),
    Option("rope-scale", Kind.NUMBER, "by how much RoPE stretches the context", minimum=1e-3,
           maximum=1e6),
    Option("rope-freq-base", Kind.NUMBER, "RoPE's base; 0 is the model's", minimum=0,
           maximum=1e12),
    Option("rope-freq-scale", Kind.NUMBER, "RoPE's frequency factor; 0 is the model's", minimum=0,
           maximum=1e6),
    Option("yarn-orig-ctx", Kind.INTEGER, "context that YaRN starts from; 0 is the model's",
           minimum=0, maximum=1 << 24, unit="tokens"),
    Option("yarn-ext-factor", Kind.NUMBER, "YaRN's extrapolation mix; negative is the model's",
           minimum=-1, maximum=1),
    Option("yarn-attn-factor", Kind.NUMBER, "YaRN's attention factor, which llama.cpp chooses "
           "itself unless yarn-ext-factor is 0; negative is the model's", minimum=-1, maximum=1e6),
    Option("yarn-beta-fast", Kind.NUMBER, "YaRN's high correction dimension; negative is the "
           "model's", minimum=-1, maximum=1e6),
    Option("yarn-beta-slow", Kind.NUMBER, "YaRN's low correction dimension; negative is the "
           "model's", minimum=-1, maximum=1e6),
)  # fmt: skip

_MODEL: Final[Mapping[str, tuple[str, Callable[[Any], float]]]] = {
    "main-gpu": ("main_gpu", int),
    "split-mode": ("split_mode", _SPLITS.__getitem__),
    "lazy-mode": ("lazy_mode", _LAZY.__getitem__),
    "repack": ("use_extra_bufts", int),
}
_CONTEXT: Final[Mapping[str, tuple[str, Callable[[Any], float]]]] = {
    "flash-attn": ("flash_attn_type", _FLASH.__getitem__),
    "cache-type-k": ("type_k", lambda name: CACHE_TYPES[name][0]),
    "cache-type-v": ("type_v", lambda name: CACHE_TYPES[name][0]),
    "kv-offload": ("offload_kqv", int),
    "op-offload": ("op_offload", int),
    "swa-full": ("swa_full", int),
    "rope-scaling": ("rope_scaling_type", _SCALINGS.__getitem__),
    "rope-scale": ("rope_freq_scale", lambda scale: 1.0 / scale),
    "rope-freq-base": ("rope_freq_base", float),
    "rope-freq-scale": ("rope_freq_scale", float),
    "yarn-orig-ctx": ("yarn_orig_ctx", int),
    "yarn-ext-factor": ("yarn_ext_factor", float),
    "yarn-attn-factor": ("yarn_attn_factor", float),
    "yarn-beta-fast": ("yarn_beta_fast", float),
    "yarn-beta-slow": ("yarn_beta_slow", float),
}
"""Option to member, and how its value is written there."""

POSITIONS: Final = tuple(name for name in _CONTEXT if name.startswith(("rope-", "yarn-")))
"""Options that change what a key in the cache means."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked options, and what of them goes into which struct."""

    values: Mapping[str, Value | None]

    @classmethod
    def of(cls, options: Options) -> Settings:
        """From options that were checked one by one. Raises `BadOptionValue` where they do not
        go together."""
        defaults = {option.name: option.default for option in OPTIONS}
        settings = cls({**defaults, **options})
        for check in _CHECKS:
            check(settings)
        return settings

    def text(self, name: str) -> str | None:
        return Values(self.values).text(name, None)

    def number(self, name: str) -> int:
        """A whole number, 0 where none was given."""
        return Values(self.values).integer(name, 0)

    def flag(self, name: str) -> bool:
        return Values(self.values).flag(name, False)

    @property
    def gpu_layers(self) -> int:
        """As llama.cpp counts: -1 chooses, -2 is all."""
        value = self.values["n-gpu-layers"]
        if isinstance(value, int):
            return value
        return ALL_LAYERS if value == "all" else AUTO_LAYERS

    @property
    def tensor_split(self) -> tuple[float, ...]:
        """Shares by GPU, none when not given."""
        text = self.text("tensor-split")
        return tuple(float(part) for part in text.split(",")) if text else ()

    def real(self, name: str, default: float = 0.0) -> float:
        """A number, `default` where none was given."""
        return float(Values(self.values).number(name, default))

    def positions(self) -> tuple[tuple[str, Value], ...]:
        """The options given that change what a key means."""
        given = ((name, self.values[name]) for name in POSITIONS)
        return tuple((name, value) for name, value in given if value is not None)

    def model_members(self, contract: Contract) -> dict[str, float]:
        """Members of `llama_model_params`. Raises `BadOptionValue` for those it lacks."""
        members = self._members(_MODEL, contract, contract.model)
        mode = self.text("load-mode")
        if mode is not None:
            members |= load_members(mode, contract.model)
        return {**members, "n_gpu_layers": self.gpu_layers}

    def context_members(self, contract: Contract) -> dict[str, float]:
        """Members of `llama_context_params`, likewise."""
        return self._members(_CONTEXT, contract, contract.context)

    def _members(
        self,
        table: Mapping[str, tuple[str, Callable[[Any], float]]],
        contract: Contract,
        layout: Layout,
    ) -> dict[str, float]:
        members: dict[str, float] = {}
        for name, (member, write) in table.items():
            value = self.values[name]
            if value is None:
                continue
            if member not in layout.fields:
                raise BadOptionValue(
                    f"option llamacpp-{name} needs {member}, which libraries of contract "
                    f"{contract.number} do not have",
                    fix=f"leave --llamacpp-{name} out, or use a newer llama.cpp",
                    param=name,
                )
            members[member] = write(value)
        return members


def load_members(mode: str, layout: Layout) -> dict[str, float]:
    """A load mode as the layout says it."""
    if "load_mode" not in layout.fields:
        names = ("use_mmap", "use_mlock", "use_direct_io")
        return dict(zip(names, _LOAD_FLAGS[mode], strict=True))
    if mode == "auto" and -1 not in layout.fields["load_mode"].defaults:
        return {}
    return {"load_mode": _LOADS[mode]}


def _refuse(name: str, found: str, fix: str) -> None:
    raise BadOptionValue(f"option llamacpp-{name}: {found}", fix=fix, param=name)


def _check_shares(settings: Settings) -> None:
    try:
        shares = settings.tensor_split
    except ValueError:
        shares = (-1.0,)
    if any(not 0 <= share < 1e9 for share in shares) or (shares and not any(shares)):
        _refuse(
            "tensor-split",
            f"{settings.text('tensor-split')!r} was given, shares such as 3,1 were wanted",
            "give a number for each GPU, separated by commas",
        )


def _check_batches(settings: Settings) -> None:
    batch, ubatch = settings.number("batch-size"), settings.number("ubatch-size")
    default = next(option.default for option in OPTIONS if option.name == "ubatch-size")
    if ubatch > batch and ubatch != default:
        _refuse(
            "ubatch-size",
            f"{ubatch} tokens were wanted together, a step has {batch} at most",
            f"give --llamacpp-ubatch-size {batch} or a larger --llamacpp-batch-size",
        )


def _check_attention(settings: Settings) -> None:
    if settings.text("flash-attn") != "off":
        return
    if settings.text("cache-type-v") not in _UNQUANTISED:
        _refuse(
            "cache-type-v",
            f"{settings.text('cache-type-v')} needs flash attention, which is off",
            "give --llamacpp-flash-attn auto, or a cache type of f32, f16 or bf16",
        )
    if settings.text("split-mode") == "tensor":
        _refuse(
            "split-mode",
            "tensor needs flash attention, which is off",
            "give --llamacpp-flash-attn auto, or another split mode",
        )


def _check_lazy(settings: Settings) -> None:
    mode = settings.text("load-mode") or "auto"
    if settings.text("lazy-mode") == "on" and mode not in _MAPPED:
        _refuse(
            "lazy-mode",
            f"on needs mapped weights, load-mode is {mode}",
            "give --llamacpp-load-mode mmap",
        )


def _check_scales(settings: Settings) -> None:
    if settings.values["rope-scale"] is not None and settings.values["rope-freq-scale"] is not None:
        _refuse(
            "rope-scale",
            "rope-freq-scale says the same in another way, one of them was wanted",
            "leave one of the two out",
        )


def _check_unscaled(settings: Settings) -> None:
    for name in ("rope-scale", "rope-freq-scale"):
        if settings.text("rope-scaling") == "none" and settings.values[name]:
            _refuse(
                name,
                f"{settings.values[name]:g} scales nothing where rope-scaling is none",
                "leave one of the two out, or give --llamacpp-rope-scaling linear or yarn",
            )


def _check_attention_factor(settings: Settings) -> None:
    extends = settings.values["yarn-ext-factor"]
    mixes = settings.text("rope-scaling") == "yarn"
    if isinstance(extends, (int, float)) and extends >= 0:
        mixes = extends > 0
    if mixes and settings.values["yarn-attn-factor"] is not None:
        _refuse(
            "yarn-attn-factor",
            "llama.cpp chooses it itself where yarn-ext-factor is not 0",
            "leave it out, or give --llamacpp-yarn-ext-factor 0",
        )


def _check_floats(settings: Settings) -> None:
    """A number that llama.cpp's 32 bits round to 0 would mean that none was given."""
    for name, value in settings.positions():
        if isinstance(value, float) and 0 < abs(value) < _LEAST_FLOAT:
            _refuse(
                name,
                f"{value:g} was given, llama.cpp tells no number below {_LEAST_FLOAT:g} from 0",
                f"leave --llamacpp-{name} out, or give a larger number",
            )


_CHECKS: Final = (
    _check_floats,
    _check_shares,
    _check_batches,
    _check_attention,
    _check_lazy,
    _check_scales,
    _check_unscaled,
    _check_attention_factor,
)


def check_head(settings: Settings, key_width: int, value_width: int) -> None:
    """Refuse cache types whose blocks do not fit heads of these widths."""
    for name, width in (("cache-type-k", key_width), ("cache-type-v", value_width)):
        kind = settings.text(name)
        if kind not in _UNQUANTISED and width % BLOCK_VALUES:
            _refuse(
                name,
                f"{kind} needs heads in multiples of {BLOCK_VALUES}, the model has {width}",
                f"give --llamacpp-{name} f16",
            )


def check_devices(settings: Settings, gpus: int) -> None:
    """Refuse what asks for GPUs that are not here: llama.cpp would serve without a word."""
    found = f"the library finds {gpus} GPUs here"
    layers = settings.values["n-gpu-layers"]
    if not gpus and layers not in ("auto", 0):
        _refuse("n-gpu-layers", f"{layers} was asked for, {found}",
                "leave --llamacpp-n-gpu-layers out, or install a build for your GPU")  # fmt: skip
    if not gpus and settings.text("split-mode") == "tensor":
        _refuse("split-mode", f"tensor was asked for, {found}",
                "leave --llamacpp-split-mode out, or install a build for your GPU")  # fmt: skip
    main = Values(settings.values).integer("main-gpu", None)
    if main is not None and main >= gpus:
        _refuse("main-gpu", f"{main} was asked for, {found}",
                f"give 0 to {gpus - 1}" if gpus else "leave --llamacpp-main-gpu out")  # fmt: skip
    if len(settings.tensor_split) > max(gpus, 1):
        _refuse("tensor-split", f"{len(settings.tensor_split)} shares were given, {found}",
                "give one share for each GPU")  # fmt: skip
