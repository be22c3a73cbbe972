"""Logs: one structured line per record, to standard error and, where asked, to a file."""

from __future__ import annotations

import enum
import json
import logging
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Final

from superfluid.paths import open_private
from superfluid_compat.errors import BadConfig, one_line

ROOT: Final = "superfluid"
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_BARE: Final = re.compile(r"[^\s\"=]+")


class Level(enum.StrEnum):
    """What `--log-level` takes."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LineFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER message key=value …` on one line; keys come from `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        stamp = f"{seconds}.{int(record.msecs):03d}Z"
        fields = {k: v for k, v in vars(record).items() if k not in _STANDARD}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        pairs = "".join(f" {key}={_plain(value)}" for key, value in fields.items())
        head = f"{stamp} {record.levelname.lower()} {record.name}"
        return one_line(f"{head} {record.getMessage()}{pairs}")


def _plain(value: Any) -> str:
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def set_up(level: Level, file: Path | None = None) -> None:
    """Send `superfluid` and `uvicorn` records of `level` and above out, once each.

    Raises `BadConfig` for a file that cannot be written.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        handlers.append(_file_handler(file))
    # A full disk costs the record alone; by default logging writes a traceback for each.
    logging.raiseExceptions = False
    for handler in handlers:
        handler.setFormatter(LineFormatter())
    for name in (ROOT, "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = handlers
        logger.propagate = False
        logger.setLevel(level.upper())


def _file_handler(file: Path) -> logging.Handler:
    try:
        os.close(open_private(str(file), os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        return logging.FileHandler(file, encoding="utf-8")
    except OSError as error:
        raise BadConfig(
            f"log file {file} cannot be written: {(error.strerror or str(error)).lower()}",
            fix="give --log-file a file in a folder you may write to",
            param="log-file",
        ) from error
