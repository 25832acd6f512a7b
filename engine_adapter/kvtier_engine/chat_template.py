"""Chat messages to a prompt, by the model's Jinja template.

The environment is the one that model authors test against (Hugging Face's), and it is sandboxed: a
template is code from whoever made the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvtier.errors import ConfigError


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks assistant text for training; in a prompt its body just stands."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a mutable set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Not Jinja's own filter, which escapes HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


class ChatTemplate:
    """A compiled template. Rendering is thread-safe."""

    def __init__(self, source: str) -> None:
        """Compile; raises ``ConfigError`` for a template that is not Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlocks, loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        special_tokens: Mapping[str, str],
    ) -> str:
        """Return the prompt; ``ConfigError`` when the template refuses the messages."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **special_tokens,
            )
        # A template is a program: values of unexpected types fail inside it in Python's own ways.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ConfigError(f"the chat template refused the messages: {error}") from error
