"""Chat templates: a model's Jinja source, rendered in Jinja's sandbox within bounds.

What a template may expect is what Hugging Face's `apply_chat_template` documents: blocks trimmed,
loop controls, `{% generation %}`, `raise_exception`, `strftime_now`, and a `tojson` that leaves
`<`, `>`, `&` and non-ASCII characters as they are.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, NoReturn, TypeVar

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from superfluid_compat.errors import ChatUnsupported, MalformedRequest

LONGEST_SOURCE: Final = 1 << 20
"""Characters of a template."""

LONGEST_PROMPT: Final = 1 << 26
"""Characters of a rendered prompt."""

MOST_STEPS: Final = 1_000_000
"""Loop passes and calls of one rendering, together."""

_LONGEST_PRODUCT: Final = 1 << 20
_LARGEST_EXPONENT: Final = 64
T = TypeVar("T")


class Template:
    """A compiled template. Rendering is thread-safe.

    A template comes with the model file, so it is not trusted: it reaches neither attributes nor
    files, and loops, calls, repeated strings and output are counted. Memory and time beyond that
    are the sandbox's and the supervisor's to bound.

    Raises `ChatUnsupported` for a source that is too long or no Jinja.
    """

    def __init__(self, source: str) -> None:
        if len(source) > LONGEST_SOURCE:
            raise ChatUnsupported(
                f"the chat template has {len(source)} characters, at most {LONGEST_SOURCE} are read"
            )
        try:
            tree = _ENVIRONMENT.parse(source)
            self._variables = find_undeclared_variables(tree)
            self._template = _ENVIRONMENT.from_string(_counting(tree))
        except (TemplateError, RecursionError, SyntaxError, ValueError, OverflowError) as error:
            raise ChatUnsupported(f"the chat template cannot be read: {error}") from error

    def takes(self, variable: str) -> bool:
        """Whether the template looks at `variable`."""
        return variable in self._variables

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt. Raises `MalformedRequest` with the template's own words where it refuses
        the messages, and `ChatUnsupported` where it fails on them or passes its bounds."""
        token = _STEPS.set(_Steps())
        try:
            return self._render(variables)
        except (ChatUnsupported, MalformedRequest):
            raise
        except Exception as error:
            words = str(error) or type(error).__name__
            raise ChatUnsupported(f"the chat template failed on these messages: {words}") from error
        finally:
            _STEPS.reset(token)

    def _render(self, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        length = 0
        for part in self._template.generate(variables):
            length += len(part)
            if length > LONGEST_PROMPT:
                raise _unbounded(f"wrote more than {LONGEST_PROMPT} characters")
            parts.append(part)
        return "".join(parts)


class _Steps:
    """What one rendering spent."""

    def __init__(self) -> None:
        self._left = MOST_STEPS

    def spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise _unbounded(f"took more than {MOST_STEPS} steps")


_STEPS: Final[ContextVar[_Steps]] = ContextVar("steps")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  # as Jinja names them, so that a template's own keywords are free
        _STEPS.get().spend(1)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (_small(left) and _small(right)):
            raise _unbounded(f"raised to a power beyond {_LARGEST_EXPONENT}")
        if operator == "*" and _product(left, right) > _LONGEST_PRODUCT:
            raise _unbounded(f"repeated a text to more than {_LONGEST_PRODUCT} characters")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}` marks an assistant's words for training; here it changes nothing."""

    tags: set[str] = {"generation"}  # noqa: RUF012  # declared so by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _small(value: Any) -> bool:
    return not isinstance(value, int | float) or abs(value) <= _LARGEST_EXPONENT


def _product(left: Any, right: Any) -> int:
    """Length of a repeated text or list; 0 for a product of numbers."""
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            return len(sequence) * count
    return 0


def _counting(tree: nodes.Template) -> nodes.Template:
    """The same template, each pass of its loops counted."""
    for loop in list(tree.find_all(nodes.For)):
        counted = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        loop.iter = counted.set_environment(_ENVIRONMENT)
    return tree


@pass_context
def _counted(context: Context, values: Any) -> Iterator[Any]:
    # Jinja evaluates filters of constants while compiling; asking for the context prevents it.
    steps = _STEPS.get()
    for value in values:
        steps.spend(1)
        yield value


def _range(*bounds: int) -> range:
    values = range(*bounds)
    _STEPS.get().spend(len(values))
    return values


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> NoReturn:
    raise MalformedRequest(
        f"the model's chat template refuses these messages: {message}",
        fix="send messages that it takes",
        param="messages",
    )


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _unbounded(what: str) -> ChatUnsupported:
    return ChatUnsupported(f"the chat template {what}")


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[LoopControlExtension, _GenerationTag],
    )
    environment.filters |= {"tojson": _to_json, "counted": _counted}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "range": _range,
    }
    return environment


_ENVIRONMENT: Final = _environment()
