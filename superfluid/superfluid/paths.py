"""Where superfluid keeps things: config, data, cache and state folders, private to their user."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from superfluid.text import is_text
from superfluid_compat.errors import BadConfig

HOME_VARIABLE: Final = "SUPERFLUID_HOME"
FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600


@dataclass(frozen=True, slots=True)
class Paths:
    """The four folders; none exists before `private_folder` makes it."""

    config: Path
    data: Path
    cache: Path
    state: Path

    @property
    def models(self) -> Path:
        return self.data / "models"

    @property
    def runtimes(self) -> Path:
        return self.data / "runtimes"

    @property
    def config_file(self) -> Path:
        return self.config / "superfluid.toml"

    @classmethod
    def under(cls, root: Path) -> Paths:
        """All four below one root."""
        return cls(root / "config", root / "data", root / "cache", root / "state")

    @classmethod
    def find(cls) -> Paths:
        """Below `SUPERFLUID_HOME` where that is set, else where the platform keeps such things.

        Raises `BadConfig` for paths that are no text.
        """
        home = os.environ.get(HOME_VARIABLE)
        if home:
            found = cls.under(Path(home).expanduser().absolute())
        else:
            dirs = platformdirs.PlatformDirs("superfluid", appauthor=False)
            config, data = dirs.user_config_path, dirs.user_data_path
            found = cls(config, data, dirs.user_cache_path, dirs.user_state_path)
        for folder in (found.config, found.data, found.cache, found.state):
            if not is_text(str(folder)):
                raise BadConfig(
                    f"{folder} is no UTF-8, wanted a path that is text",
                    fix=f"set {HOME_VARIABLE} to a folder whose path is text",
                )
        return found


def private_folder(path: Path) -> Path:
    """`path` as a folder that only its user may enter; what is missing above it is made alike.

    Raises `BadConfig` where it cannot be made or written to.
    """
    try:
        for folder in (*reversed(path.parents), path):
            if not folder.exists():
                folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        if path.stat().st_mode & 0o077:
            path.chmod(FOLDER_MODE)
    except OSError as error:
        raise unwritable(path, error) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise unwritable(path, PermissionError("Permission denied"))
    return path


def unwritable(path: Path, error: OSError) -> BadConfig:
    """The refusal of a home that cannot be written to."""
    reason = (error.strerror or str(error)).lower()
    return BadConfig(
        f"{path} cannot be written: {reason}; wanted a folder of your own",
        fix=f"set {HOME_VARIABLE} to a folder you may write to",
    )


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open`: files it creates are 0600."""
    return os.open(path, flags, FILE_MODE)
