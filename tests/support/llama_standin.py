"""Small shared libraries that look like libllama: every symbol, and what a test wants wrong.

path = build(folder / "libllama.so", contract=contracts()[7], context={"n_ctx": 513})
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

from superfluid_adapter_llamacpp.contracts import Contract, Layout
from superfluid_adapter_llamacpp.symbols import BACKEND, REQUIRED

_SPECIAL = {
    "ggml_backend_dev_count": "unsigned long ggml_backend_dev_count(void) { return DEVICES; }",
    "ggml_backend_dev_get": 'void *ggml_backend_dev_get(unsigned long i) { return "device"; }',
    "ggml_backend_dev_name": 'const char *ggml_backend_dev_name(void *d) { return "stand-in"; }',
    "ggml_backend_dev_description":
        'const char *ggml_backend_dev_description(void *d) { return "a stand-in"; }',
}  # fmt: skip


def build(
    path: Path,
    *,
    contract: Contract,
    context: Mapping[str, float] | None = None,
    model: Mapping[str, float] | None = None,
    context_size: int | None = None,
    without: Collection[str] = (),
    devices: int = 1,
    at_load: str = "",
) -> Path:
    """Compile one with the defaults of `contract`, changed as told; its models never load.

    `context_size` is that of the context's struct, `at_load` C statements that run in `dlopen`.
    """
    wanted = [name for name in (*REQUIRED, *BACKEND) if name not in without]
    headers = ("signal.h", "stdio.h", "unistd.h", "sys/wait.h")
    source = [f"#define DEVICES {devices}", *(f"#include <{name}>" for name in headers)]
    source += [
        _getter("llama_model_default_params", contract.model, model or {}, contract.model.size),
        _getter("llama_context_default_params", contract.context, context or {},
                context_size or contract.context.size),
    ]  # fmt: skip
    getters = {"llama_model_default_params", "llama_context_default_params"}
    for name in wanted:
        if name not in getters:
            source.append(_SPECIAL.get(name, f"void *{name}(void) {{ return 0; }}"))
    if at_load:
        source.append(f"__attribute__((constructor)) static void begin(void) {{ {at_load} }}")
    text = "\n".join(source) + "\n"
    command = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=text.encode(), check=True)
    return path


def _getter(name: str, layout: Layout, changed: Mapping[str, float], size: int) -> str:
    raw = bytearray(size)
    for field in layout.fields.values():
        if field.bytes.stop <= size:
            field.write(raw, changed.get(field.name, field.defaults[0]))
    numbers = ",".join(map(str, raw))
    return (
        f"struct {name}_s {{ unsigned char bytes[{size}]; }};\n"
        f"struct {name}_s {name}(void) {{ struct {name}_s it = {{{{{numbers}}}}}; return it; }}"
    )
