"""Chat templates for models that ship none, by what their vocabulary knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_CHATML: Final = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- raise_exception('the fallback template has no tool messages') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_GEMMA: Final = """\
{{- bos_token }}
{%- set lead = namespace(text='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set lead.text = lead.text + message.content | trim + '\\n\\n' %}
    {%- elif message.role == 'user' %}
        {{- '<start_of_turn>user\\n' + lead.text + message.content | trim + '<end_of_turn>\\n' }}
        {%- set lead.text = '' %}
    {%- elif message.role == 'assistant' %}
        {{- '<start_of_turn>model\\n' + message.content | trim + '<end_of_turn>\\n' }}
    {%- else %}
        {{- raise_exception('the fallback template has no ' + message.role + ' messages') }}
    {%- endif %}
{%- endfor %}
{%- if lead.text %}
    {{- '<start_of_turn>user\\n' + lead.text | trim + '<end_of_turn>\\n' }}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""

_LLAMA3: Final = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- raise_exception('the fallback template has no tool messages') }}
    {%- endif %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_MISTRAL: Final = """\
{{- bos_token }}
{%- set lead = namespace(text='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set lead.text = lead.text + message.content + '\\n\\n' %}
    {%- elif message.role == 'user' %}
        {{- '[INST] ' + lead.text + message.content + '[/INST]' }}
        {%- set lead.text = '' %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('the fallback template has no ' + message.role + ' messages') }}
    {%- endif %}
{%- endfor %}
{%- if lead.text %}
    {{- '[INST] ' + lead.text | trim + '[/INST]' }}
{%- endif %}
"""

_PHI3: Final = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- raise_exception('the fallback template has no tool messages') }}
    {%- endif %}
    {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class Family:
    """A way of writing turns that models of some architectures were trained on.

    `markers` are the tokens it writes: a vocabulary without them was trained on another. `stop`
    ends a turn; where it is empty, the end of text does.
    """

    name: str
    architectures: frozenset[str]
    markers: tuple[str, ...]
    stop: str
    source: str


FAMILIES: Final = (
    Family(
        "gemma",
        frozenset({"gemma", "gemma2", "gemma3"}),
        ("<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        _GEMMA,
    ),
    Family(
        "llama3",
        frozenset({"llama"}),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        _LLAMA3,
    ),
    Family(
        "mistral",
        frozenset({"llama", "mistral"}),
        ("[INST]", "[/INST]"),
        "",
        _MISTRAL,
    ),
    Family(
        "phi3",
        frozenset({"phi3"}),
        ("<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        _PHI3,
    ),
    Family(
        "chatml",
        frozenset({"llama", "mistral", "qwen2", "qwen3"}),
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        _CHATML,
    ),
)


def fallback(architecture: str, knows: Callable[[str], bool]) -> Family | None:
    """The family to take for a model of `architecture` without a template, or None.

    `knows` says whether a text is one token of the model's vocabulary.
    """
    fitting = (family for family in FAMILIES if architecture in family.architectures)
    return next((family for family in fitting if all(map(knows, family.markers))), None)
