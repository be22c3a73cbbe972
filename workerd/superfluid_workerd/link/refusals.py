"""Errors across a process boundary: to a `Refusal` and back, by code."""

from __future__ import annotations

from superfluid_compat.errors import BY_CODE, SuperfluidError, one_line
from superfluid_workerd.link.answers import Refusal


def refusal(error: SuperfluidError) -> Refusal:
    """The record of `error`."""
    return Refusal(
        code=error.code,
        message=error.message,
        fix=error.fix,
        param=error.param,
        dossier=error.dossier,
    )


def in_words(error: BaseException) -> str:
    """An exception of no tree on one line, for the message of one that is."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def error_of(refusal: Refusal) -> SuperfluidError:
    """The error that `refusal` records, printable; an unknown code becomes the root class."""
    kind = BY_CODE.get(refusal.code, SuperfluidError)
    param = None if refusal.param is None else one_line(refusal.param)
    dossier = None if refusal.dossier is None else one_line(refusal.dossier)
    return kind(one_line(refusal.message), fix=one_line(refusal.fix), param=param, dossier=dossier)
