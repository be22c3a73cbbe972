"""The seed runtime, `flatrun`, in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Final

VERSION: Final = "0.1.1"
_TIMEOUT_S: Final = 600.0


def install(folder: Path) -> Path:
    """Its program, installed into `folder` unless it is there. Raises `CalledProcessError`."""
    program = folder / "bin" / "flatrun"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"flatrun=={VERSION}"], check=True)
    return program


def streaming_rate(program: Path, model: Path, cap: int, tokens: int) -> float:
    """Tokens a second while streaming within `cap` bytes: what `tokens` more than one take, so that
    its start is not counted; with few tokens the two starts' difference would be most of it.

    It runs the whole prompt again for each token, so the prompt is kept short."""
    short, long = (_seconds(program, model, cap, count) for count in (1, 1 + tokens))
    return tokens / (long - short)


def _seconds(program: Path, model: Path, cap: int, tokens: int) -> float:
    command = [
        str(program), "run", "--model", str(model), "--prompt", "a b", "--max-new", str(tokens),
        "--no-sample", "--no-chat-template", "--dequant-cache", "off",
        "--cache-mb", str(cap >> 20),
    ]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    elapsed_s = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"flatrun: {done.stderr.strip().splitlines()[-1:]}")
    if f"token {tokens}:" not in done.stdout:
        raise RuntimeError(f"flatrun stopped short of {tokens} tokens")
    return elapsed_s
