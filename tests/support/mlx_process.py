"""One process of MLX for tests: `python -m support.mlx_process COMMAND ...`, its answer as JSON.

write FOLDER NAME                      a tiny model's folder
export FOLDER PAYLOAD                  a sequence's state after 41 tokens, and rows that follow
import FOLDER PAYLOAD [foreign]        the rows that follow, from another process's state
sealed FOLDER                          a kernel that is needed when no compiler can start any more
force FOLDER TOKENS ROWS FIRST         logits of positions FIRST and on of a text, to an npy file
logits ROOT TOKENS OUT                 by mlx-lm's own model alone: each folder's logits of a text,
                                       at once and token by token, to npy files in OUT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from superfluid_adapter_mlx import adapter
from superfluid_adapter_mlx.engine import mx
from superfluid_adapter_mlx.model import Model
from superfluid_compat.errors import Fault, Unsupported
from superfluid_workerd.adapter import Feed, OpenRequest, Runtime
from superfluid_workerd.registry import checked_options
from superfluid_workerd.sandbox import linux, seccomp

TOKENS = [1 + (7 * place) % 399 for place in range(41)]
NEXT = (5, 6, 7)


def opened(folder: Path, context: int, **options: Any) -> Runtime:
    request = OpenRequest(
        model=folder,
        scratch=folder,
        shared=folder,
        context=context,
        lanes=2,
        options=checked_options(adapter(), {"compile": False, **options}),
    )
    return adapter().open(request).runtime


def fed(runtime: Runtime, sequence: int, tokens: Sequence[int]) -> Any:
    feed = Feed(sequence, tokens, runtime.seq_length(sequence))
    (row,) = runtime.step([feed], lambda: None)
    return row


def following(runtime: Runtime, sequence: int) -> list[float]:
    """What three single steps give, bit for bit comparable."""
    return [float(each) for token in NEXT for each in fed(runtime, sequence, [token])[0]]


def write(root: Path, *names: str) -> None:
    from support.mlx_models import write_folder

    for name in names:
        write_folder(root / name, name)


def export(root: Path, label: str) -> dict[str, list[float]]:
    answers = {}
    for folder in models(root):
        runtime = opened(folder, 64)
        sequence = runtime.seq_create()
        fed(runtime, sequence, TOKENS)
        (root / f"{folder.name}-{label}").write_bytes(runtime.seq_export(sequence))
        answers[folder.name] = following(runtime, sequence)
    return answers


def bring(root: Path, label: str) -> dict[str, dict[str, Any]]:
    return {
        folder.name: {
            "as it is": brought(folder, root / f"{folder.name}-{label}", foreign=False),
            "allowed": brought(folder, root / f"{folder.name}-{label}", foreign=True),
        }
        for folder in models(root)
    }


def models(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir())


def brought(folder: Path, payload: Path, *, foreign: bool) -> list[float] | str:
    """What follows, or why the state was refused."""
    runtime = opened(folder, 64, **{"foreign-state": foreign})
    try:
        sequence = runtime.seq_import(payload.read_bytes())
    except Unsupported as error:
        return error.message
    assert runtime.seq_length(sequence) == len(TOKENS)
    return following(runtime, sequence)


def force(folder: Path, tokens: str, rows: str, first: str) -> None:
    """The text in one sequence, and beside it one by one in two copies that decode together."""
    ids, before = json.loads(Path(tokens).read_text()), int(first)
    runtime = opened(folder, 2 * len(ids))
    alone = runtime.seq_create()
    runtime.step([Feed(alone, ids[:before], 0, "none")], lambda: None)
    pair = [runtime.seq_copy(alone, before) for _ in range(2)]
    (every,) = runtime.step([Feed(alone, ids[before:], before, "all")], lambda: None)
    together = [
        runtime.step([Feed(sequence, [token], place) for sequence in pair], lambda: None)
        for place, token in enumerate(ids[before:], before)
    ]
    sides = [
        np.concatenate([row for step in together if (row := step[side]) is not None])
        for side in range(2)
    ]
    assert every is not None
    np.save(rows, np.stack([every, *sides]))


def logits(root: Path, tokens: str, out: str) -> None:
    from superfluid_adapter_mlx.engine import cache_module, mx, utils

    ids = json.loads(Path(tokens).read_text())
    for folder in models(root):
        model, _ = utils.load_model(folder)
        cache = cache_module.make_prompt_cache(model)
        at_once = model(mx.array([ids]), cache=cache_module.make_prompt_cache(model))[0]
        stepwise = mx.concatenate([model(mx.array([[one]]), cache=cache)[0] for one in ids])
        np.save(Path(out, f"{folder.name}.npy"), np.stack([np.array(at_once), np.array(stepwise)]))


def sealed(folder: Path) -> dict[str, Any]:
    """What a step answers that needs a new kernel once the process may start no other, and what it
    answers when it is given again; beside it the answer without kernels."""
    runtime: Any = opened(folder, 64, compile=True)
    mx.enable_compile()
    # As a load does: from here on MLX takes it that there is a compiler.
    mx.eval(mx.compile(lambda row: mx.cos(row) * 2 + row)(mx.ones((2, 2))))
    model = runtime._model
    bent = mx.compile(lambda row: mx.sin(row) * 2 - row / 3)
    runtime._model = Model(lambda ids, cache: bent(model.module(ids, cache=cache)), 400, 400)
    runtime._model.module.make_cache = model.fresh
    if sys.platform == "linux":
        linux._no_new_privileges()
        seccomp.install()
    sequence, fault = runtime.seq_create(), ""
    try:
        row = fed(runtime, sequence, TOKENS)
    except Fault as error:
        fault = error.message
        runtime.seq_truncate(sequence, 0)
        row = fed(runtime, sequence, TOKENS)
    plain = model.module(mx.array([TOKENS]))[0, -1:].astype(mx.float32)
    wanted = np.array(mx.sin(plain) * 2 - plain / 3)
    return {"fault": fault, "apart": float(np.abs(row - wanted).max())}


COMMANDS: Mapping[str, Callable[..., Any]] = {
    "write": write,
    "export": export,
    "import": bring,
    "force": force,
    "sealed": sealed,
    "logits": logits,
}


def main() -> None:
    command, folder, *rest = sys.argv[1:]
    print(json.dumps(COMMANDS[command](Path(folder), *rest)))


if __name__ == "__main__":
    main()
