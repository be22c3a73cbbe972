"""Text from outside, such as a file's name."""

from __future__ import annotations


def is_text(text: str) -> bool:
    """Whether it stands for itself: a file's name of bytes that are no UTF-8 does not, and can
    neither be sent nor written as text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
