"""Render a conversation with a model's own chat template, in the same sandbox and dialect as transformers.

A template is untrusted data. It sees the messages, the special tokens and the date, and can write nothing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from kelvin.contracts.errors import InvalidRequest, Refused
from runtime.text.template_budget import charge_text, rendered_size, work_budget
from runtime.text.template_sandbox import BoundedEnvironment

Message = Mapping[str, str]

MAX_SOURCE: Final = 1 << 18  # characters of a template; ten times the longest in use
MAX_DATE_FORMAT: Final = 256  # characters of a date's layout, which the C library can expand 256 times
_SHOWN: Final = 200  # characters of a template's own error message that the caller sees


class _Generation(Extension):
    """The `{% generation %}` tag, which marks an assistant's words for training. Here it renders only its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeDict:
    """`dict(...)` for templates without the type `dict`, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        charge_text(rendered_size([args, kwargs]))
        return dict(*args, **kwargs)


class _SafeNamespace(Namespace):
    """A namespace that refuses names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may call `namespace(self=...)`
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Render JSON without jinja2's HTML escapes, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(layout: str) -> str:
    if len(layout) > MAX_DATE_FORMAT:
        raise TemplateError(f"a date's layout has more than {MAX_DATE_FORMAT} characters")
    return datetime.now(UTC).strftime(layout)


class ChatTemplate:
    """A compiled template and the special tokens that it may use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ValueError if the template is too long or does not parse."""
        if len(source) > MAX_SOURCE:
            raise ValueError(f"the chat template has {len(source)} characters; the limit is {MAX_SOURCE}")
        environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.add_filter("tojson", _to_json)
        names: dict[str, Callable[..., Any]] = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _SafeDict(),
            "namespace": _SafeNamespace,
        }
        environment.globals.update(names)
        try:
            with work_budget():
                self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template does not parse: {error}") from error
        except Exception as error:  # blocks nested 20 deep are a SyntaxError of the generated code
            rule = (
                "it is nested too deeply" if isinstance(error, RecursionError | SyntaxError) else type(error).__name__
            )
            raise ValueError(f"the chat template does not parse: {rule}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt's text, with special tokens as text, ready for the assistant's reply.

        Raises `Refused(InvalidRequest)`: with the template's own message if it rejects the messages, with the sandbox's
        message if it needs too much work, and with the exception's class if it fails otherwise.
        """
        try:
            with work_budget():
                return self._template.render(
                    messages=[dict(message) for message in messages],
                    tools=None,
                    documents=None,
                    add_generation_prompt=True,
                    **self._special_tokens,
                )
        except TemplateError as error:
            rule = f"the model's chat template refuses them: {str(error)[:_SHOWN]}"
            raise Refused(InvalidRequest("messages", f"({len(messages)})", rule)) from error
        except Exception as error:  # any exception is the template's fault
            rule = f"the model's chat template fails on them ({type(error).__name__})"
            raise Refused(InvalidRequest("messages", f"({len(messages)})", rule)) from error
