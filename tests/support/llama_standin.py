"""Small shared libraries that look like libllama: every symbol, and what a test wants wrong.

    path = build(folder / "libllama.so", contract=contracts()[7], context={"n_ctx": 513})

With `sings` it does all that the canary asks, by the parameters that it was given, and wrong in the
one respect that the variable STANDIN_FAULT names: a word of `FAULTS`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from superfluid_adapter_llamacpp.contracts import Contract, Kind, Layout
from superfluid_adapter_llamacpp.symbols import BACKEND, REQUIRED
from superfluid_adapter_llamacpp.tiny import WIDTH

FAULT: Final = "STANDIN_FAULT"
_HEADERS: Final = ("signal.h", "stdio.h", "stdlib.h", "string.h", "unistd.h", "sys/wait.h")

_SPECIAL: Final = {
    "llama_log_set":
        "void llama_log_set(void (*log)(int, const char *, void *), void *data) { heard = log; }",
    "llama_backend_init": "void llama_backend_init(void) { speak(); }",
    "ggml_backend_load_all_from_path":
        "void ggml_backend_load_all_from_path(const char *folder) {"
        " if (DEVICES) abort(); speak(); loaded = !strcmp(folder, FOLDER); }",
    "ggml_backend_dev_count": "unsigned long ggml_backend_dev_count(void) { return DEVICES; }",
    "ggml_backend_dev_get": 'void *ggml_backend_dev_get(unsigned long i) { return "device"; }',
    "ggml_backend_dev_name": 'const char *ggml_backend_dev_name(void *d) { return "stand-in"; }',
    "ggml_backend_dev_description":
        'const char *ggml_backend_dev_description(void *d) { return "a stand-in"; }',
}  # fmt: skip

_BEGIN: Final = """
static void (*heard)(int, const char *, void *);
static int loaded;
static void speak(void) {
  if (heard) heard(2, "words", 0); else fprintf(stderr, "words that nobody took\\n");
}
"""

_SINGS: Final[Mapping[str, str]] = {
    "llama_model_load_from_file": """void *llama_model_load_from_file(const char *path, params p) {
  speak();
  if (fault("load") || access(path, R_OK) || n_gpu_layers(p) != 0) return 0;
  if (!fault("no progress"))
    ((int (*)(float, void *))progress_callback(p))(
      1.0f, fault("other progress") ? "" : progress_callback_user_data(p));
  return "model"; }""",
    "llama_init_from_model": """void *llama_init_from_model(void *model, params p) {
  given = p; return fault("context") || flash_attn_type(p) != 0 ? 0 : "context"; }""",
    "llama_n_ctx_seq": """unsigned llama_n_ctx_seq(void *c) {
  return n_ctx(given) / (kv_unified(given) ? 1 : n_seq_max(given)) + fault("llama_n_ctx_seq"); }""",
    "llama_decode": """int llama_decode(void *c, struct batch b) {
  if (dirty) return -1;
  int stop = !fault("no abort") && ((int (*)(void *))abort_callback(given))(
    fault("other abort") ? "" : abort_callback_data(given));
  if (stop & 255) { dirty = 1; return fault("abort") ? 1 : 2; }
  held = b.n_tokens; return fault("decode"); }""",
    "llama_memory_clear": "void llama_memory_clear(void *m, int data) { dirty = 0; }",
    "llama_get_embeddings_seq": """void *llama_get_embeddings_seq(void *c, int seq) {
  return fault("embeddings") || seq != 1 || !embeddings(given) ? 0 : "pooled"; }""",
    "llama_state_seq_get_size": """unsigned long llama_state_seq_get_size(void *c, int seq) {
  int wide = (type_k(given) ? 2 : 4) + (type_v(given) ? 2 : 4);
  return seq == 1 ? held * wide * WIDTH - fault("state") : 0; }""",
    **{
        f"llama_{name}": f"int llama_{name}(void *c) {{"
        f' return {name}(given) + fault("llama_{name}"); }}'
        for name in (
            "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch",
            "pooling_type",
        )
    },
}  # fmt: skip

FAULTS: Final[Mapping[str, str]] = {
    "load": "a model does not load",
    "no progress": "progress is told to somebody else",
    "other progress": "progress is told to somebody else",
    "context": "no context opens",
    "llama_n_ctx": "n_ctx is 769, wanted 768",
    "llama_n_batch": "n_batch is 97, wanted 96",
    "llama_n_ubatch": "n_ubatch is 49, wanted 48",
    "llama_n_seq_max": "n_seq_max is 4, wanted 3",
    "llama_n_threads": "n_threads is 2, wanted 1",
    "llama_n_threads_batch": "n_threads_batch is 3, wanted 2",
    "llama_pooling_type": "pooling_type is 4, wanted 3",
    "llama_n_ctx_seq": "n_ctx_seq of a unified cache is 769, wanted 768",
    "no abort": "the answer of a decode that is aborted is 0, wanted 2",
    "abort": "the answer of a decode that is aborted is 1, wanted 2",
    "other abort": "somebody else is asked whether to abort",
    "decode": "the answer of a decode is 1, wanted 0",
    "embeddings": "no embedding is pooled",
    "state": "a state of F32 keys and values has 1279 bytes",
}
"""What a library that sings may do wrong, and what the canary says to it."""

_TYPES: Final[Mapping[Kind, str]] = {
    "i32": "int", "u32": "unsigned", "f32": "float", "u64": "unsigned long", "ptr": "void *",
    "bool": "unsigned char",
}  # fmt: skip


def build(
    path: Path,
    *,
    contract: Contract,
    context: Mapping[str, float] | None = None,
    model: Mapping[str, float] | None = None,
    context_size: int | None = None,
    holes: Collection[str] = (),
    without: Collection[str] = (),
    devices: int | str = 1,
    at_load: str = "",
    sings: bool = False,
    instead: Mapping[str, str] | None = None,
) -> Path:
    """Compile one with the defaults of `contract`, changed as told.

    `context_size` is that of the context's struct; members of it in `holes` are left as they were;
    `devices` is their number in C, where `loaded` is 1 after backends came from its own folder;
    `at_load` are C statements that run in `dlopen`; `instead` bodies of functions by name. Unless
    it `sings`, its models never load.
    """
    bodies = {**_SPECIAL, **(_singing(contract) if sings else {}), **(instead or {})}
    size = context_size or contract.context.size
    bodies |= {
        "llama_model_default_params":
            _getter("llama_model", contract.model, model or {}, contract.model.size, ()),
        "llama_context_default_params":
            _getter("llama_context", contract.context, context or {}, size, holes),
    }  # fmt: skip
    source = [f"#define DEVICES {devices}", f'#define FOLDER "{path.parent.resolve()}"']
    source += [*(f"#include <{name}>" for name in _HEADERS), _BEGIN, bodies.pop("", "")]
    for name in (*REQUIRED, *BACKEND):
        if name not in without:
            source.append(bodies.get(name, f"void *{name}(void) {{ return 0; }}"))
    if at_load:
        source.append(f"__attribute__((constructor)) static void begin(void) {{ {at_load} }}")
    text = "\n".join(source) + "\n"
    command = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=text.encode(), check=True)
    return path


def _singing(contract: Contract) -> dict[str, str]:
    """Functions that go by the parameters given; under no name, what comes before them."""
    fields = [*contract.model.fields.values(), *contract.context.fields.values()]
    readers = (
        f"static {_TYPES[one.kind]} {one.name}(params p) "
        f"{{ return *({_TYPES[one.kind]} *)(p.bytes + {one.offset}); }}"
        for one in fields
    )
    begin = [
        f"#define WIDTH {WIDTH}",
        "typedef struct { unsigned char bytes[512]; } params;",
        "struct batch { int n_tokens; void *arrays[6]; };",
        "static params given;",
        "static int dirty, held;",
        "static int fault(const char *name) "
        f'{{ const char *it = getenv("{FAULT}"); return it && !strcmp(it, name); }}',
        *readers,
    ]
    return {"": "\n".join(begin), **_SINGS}


def _getter(
    struct: str, layout: Layout, changed: Mapping[str, float], size: int, holes: Collection[str]
) -> str:
    """A getter of defaults, which writes them where the first argument says, as the System V ABI
    for x86-64 has it for structs; with holes, as a compiler writes one that has padding there:
    told by a buffer that was filled, so that whoever reads the values sees them whole."""
    raw = bytearray(size)
    for field in layout.fields.values():
        if field.bytes.stop <= size:
            field.write(raw, changed.get(field.name, field.defaults[0]))
    numbers = ",".join(map(str, raw))
    name = f"{struct}_default_params"
    value = (
        f"struct {struct}_s {{ unsigned char bytes[{size}]; }};\n"
        f"static const struct {struct}_s {struct}_it = {{{{{numbers}}}}};\n"
    )
    if not holes:
        return f"{value}struct {struct}_s {name}(void) {{ return {struct}_it; }}"
    skipped = " || ".join(f"at == {byte}" for one in holes for byte in layout.fields[one].bytes)
    return (
        f"{value}void *{name}(unsigned char *out) {{ int filled = 1;\n"
        f"for (int at = {size}; at < {size} + 16; at++) filled &= out[at] == out[{size}];\n"
        f"filled &= out[{size}] == 0xAA || out[{size}] == 0x55;\n"
        f"for (int at = 0; at < {size}; at++) if (!(filled && ({skipped})))"
        f" out[at] = {struct}_it.bytes[at];\nreturn out; }}"
    )
