"""A chat template does bounded work per conversation, and usual templates stay within the limits."""

import time
import tracemalloc

import pytest

from kelvin.contracts.errors import InvalidRequest, Refused
from runtime.text.chat_template import MAX_SOURCE, ChatTemplate
from runtime.text.template_budget import MAX_UNITS, TemplateBudgetExceeded, charge_filter, work_budget

MESSAGES = [{"role": "user", "content": "hello"}]


def _grow(start: str, step: str, use: str = "") -> str:
    """Return a template with sixty steps that each double a value."""
    loop = "{% for i in range(60) %}{% set ns.x = " + step + " %}{% endfor %}"
    return "{% set ns = namespace(x=" + start + ") %}" + loop + use


LIST, TUPLE = ("[1]", "[ns.x, ns.x]"), ("(1,)", "(ns.x, ns.x)")
DICT = ("{}", "{'a': ns.x, 'b': ns.x}")
TWIN = _grow(*LIST, "{% set one = ns.x %}") + _grow(*LIST)  # equal, but not the same object
DIGITS = "{% set digits = '9' * 4000 %}"
NUMBERS = "{% set all = range(99999) %}"
BACKWARDS = "{% set big = 'a' * 400000 %}{% set part = 'ab' + 'a' * 200000 %}"
BIG = "{% set big = 'a' * 1000000 %}"
LINES = "{{ ('\\n' * 100000) | indent('x' * 100000) }}"
PIECES = "{{ (['a'] * 100000) | join('b' * 100000) }}"
KEPT = "{% set ns = namespace(all=[]) %}{% for i in range(99999) %}{% set ns.all = ns.all + [PART] %}{% endfor %}"
LONG = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

ENDLESS = {
    "nested loops": LONG,
    "nested loops whose condition takes nothing": (
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}"
    ),
    "recursive loops": "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "a macro that calls itself": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "filters in a loop": "{% for i in range(99999) %}{{ range(99999) | select('none') | list | length }}{% endfor %}",
    "searching in a loop": BIG + "{% for i in range(99999) %}{% if 'zz' in big %}x{% endif %}{% endfor %}",
    "its own text in a loop": "{% for i in range(99999) %}" + "x" * 200_000 + "{% endfor %}",
    "a text doubled": _grow("'ab'", "ns.x ~ ns.x"),
    "a text added to itself": _grow("'ab'", "ns.x + ns.x"),
    "a block doubled": _grow("'ab'", "y").replace(
        "{% set ns.x = y %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "a list of itself, shown": _grow(*LIST, "{{ ns.x }}"),
    "a list of itself, as JSON": _grow(*LIST, "{{ ns.x | tojson }}"),
    "a list of itself, in capitals": _grow(*LIST, "{{ ns.x | upper }}"),
    "a list of itself, compared": _grow(*LIST, "{{ ns.x == [ns.x] }}"),
    "a list of itself, tested": TWIN + "{{ one is eq ns.x }}",
    "a list of itself, looked for by a test": TWIN + "{{ one is in [ns.x] }}",
    "a list of itself, selected": TWIN + "{{ [one] | select('eq', ns.x) | list }}",
    "a list of itself, tested for capitals": _grow(*LIST, "{{ ns.x is lower }}"),
    "a list of itself, compared by its loop": TWIN + "{% for x in [one, ns.x] %}{{ loop.changed(x) }}{% endfor %}",
    "a list of itself, compared in a view": TWIN + "{{ {1: one}.items() == {1: ns.x}.items() }}",
    "a list of itself, shown in a view": _grow(*LIST, "{{ {1: ns.x}.values() }}"),
    "a list of itself, as a view's text": _grow(*LIST, "{{ {1: ns.x}.values() | string }}"),
    "a dictionary of itself, shown by its view": _grow(*DICT, "{{ ns.x.keys().mapping }}"),
    "a dictionary of itself, compared by its view": (
        _grow(*DICT, "{% set one = ns.x %}") + _grow(*DICT, "{{ one.keys().mapping == ns.x.keys().mapping }}")
    ),
    "a list of itself, in a complaint": _grow(*LIST, "{{ raise_exception(ns.x) }}"),
    "a list of itself, missed": _grow(*LIST, "{{ {}[ns.x] + 1 }}"),
    "a tuple of itself, as an attribute": _grow(*TUPLE, "{{ 1 | attr(ns.x) }}"),
    "a tuple of itself, taken away": _grow(*TUPLE, "{{ {1: ns.x}.items() - [] }}"),
    "a tuple of itself, as a key": _grow(*TUPLE, "{{ {ns.x: 1} }}"),
    "a tuple of itself, as an index": _grow(*TUPLE, "{{ messages[0][ns.x] }}"),
    "a tuple of itself, looked up": _grow(*TUPLE, "{{ messages[0].get(ns.x) }}"),
    "a namespace of itself": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    "slices kept": BIG + KEPT.replace("PART", "big[1:]"),
    "texts kept": BIG + KEPT.replace("PART", "big.upper()"),
    "a wide number": "{{ '%2000000000d' % 1 }}",
    "a width as argument": "{{ '%*d' % (2000000000, 1) }}",
    "a wide filter": "{{ '%2000000000d' | format(1) }}",
    "a wide field": "{{ '{:2000000000}'.format(1) }}",
    "a width in a field": "{{ '{:{w}}'.format(1, w=2000000000) }}",
    "a text repeated": "{{ 'a' * 2000000000 }}",
    "a text repeated from the left": "{{ 2000000000 * 'a' }}",
    "a list repeated": "{{ ([1] * 2000000000) | length }}",
    "padding": "{{ 'a'.ljust(2000000000) }}",
    "zeros": "{{ '1'.zfill(2000000000) }}",
    "tabs": "{{ '\t'.expandtabs(1000000000) }}",
    "indentation": "{{ 'a' | indent(1000000000) }}",
    "indentation by a text": LINES,
    "indented JSON": "{{ messages | tojson(indent=1000000000) }}",
    "wide separators of JSON": "{{ range(99999) | list | tojson(separators=('x' * 10000, 'y')) }}",
    "replacing by more": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "the method that replaces": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "joining by more": PIECES,
    "the method that joins": "{{ ('b' * 100000).join(['a'] * 100000) }}",
    "joining what comes one by one": "{{ range(99999) | map('string') | join('b' * 100000) }}",
    "translating": "{{ 'a'.translate({97: 'b' * 100000}) }}",
    "adding up lists": "{{ ([['a'] * 1000] * 10000) | sum(start=[]) | length }}",
    "filling up": "{{ [1] | batch(1000000000, 1) | list }}",
    "a power": "{{ 10 ** 1000000000 }}",
    "squares": _grow("9", "ns.x * ns.x"),
    "rounding": "{{ 1 | round(1000000000, 'ceil') }}",
    "rounding before the point": "{{ 1 | round(-1000000000) }}",
    "a negative batch size": "{{ [1] | batch(-1000000000) | list }}" + LONG,
    "a negative number of slices": "{{ [1] | slice(-1000000000) | list }}" + LONG,
    "a number's bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "a number's bytes by name": "{{ (1).to_bytes(length=1000000000, byteorder='big') }}",
    "a number of many digits": "{{ ('f' * 4000000) | int(0, 16) // (('f' * 2000000) | int(0, 16)) }}",
    "digits read in a loop": DIGITS + "{% for i in range(99999) %}{% if digits | int %}{% endif %}{% endfor %}",
    "numbers read in a loop": NUMBERS + "{% for i in range(99999) %}{% if all | max %}{% endif %}{% endfor %}",
    "counting in numbers": NUMBERS + "{% for i in range(99999) %}{% if all.count(0.5) %}{% endif %}{% endfor %}",
    "many arguments of a class": NUMBERS + "{% for i in range(99999) %}{% set y = cycler(*all) %}{% endfor %}",
    "many arguments of a macro": (
        NUMBERS + "{% macro m() %}{{ varargs[0] }}{% endmacro %}{% for i in range(99999) %}{{ m(*all) }}{% endfor %}"
    ),
    "many named arguments": (
        "{% set all = {}.fromkeys(range(9999) | map('string')) %}"
        "{% for i in range(99999) %}{% set y = namespace(**all) %}{% endfor %}"
    ),
    "searching from the end": BACKWARDS + "{{ big.rfind(part) }}",
    "splitting from the end": BACKWARDS + "{{ big.rsplit(part) }}",
    "stripping much": BACKWARDS + "{{ big.strip('b' * 400000 + 'a') }}",
    "trimming much": BACKWARDS + "{{ big | trim('b' * 400000 + 'a') }}",
    "encoding for names": "{{ ('ü' * 1000000).encode('punycode') }}",
    "stripping tags": "{{ (('<!---->' * 100000) | safe).striptags() }}",
    "a wide date": "{{ strftime_now('%250000000d' ~ 'x' * 1000000) }}",
    "a path of attributes": (
        _grow("{}", "{'a': ns.x}").replace("range(60)", "range(2000)")
        + "{{ ([ns.x] * 20000) | map(attribute='a.' * 1999 ~ 'a') | list | length }}"
    ),
}


@pytest.mark.parametrize("source", [pytest.param(source, id=name) for name, source in ENDLESS.items()])
def test_endless_template_is_refused(source: str) -> None:
    """Each of these runs for hours or takes gigabytes in the library's sandbox. Here it is refused by name."""
    began = time.process_time()
    with pytest.raises(Refused) as refused:
        ChatTemplate(source, {}).render(MESSAGES)
    assert isinstance(refused.value.failure, InvalidRequest)
    assert "the model's chat template" in refused.value.failure.message
    assert time.process_time() - began < 15


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        pytest.param(["a", "b" * 9000], {}, id="by position"),
        pytest.param([], {"new": "b" * 9000, "old": "a"}, id="by name"),
        pytest.param(["a"], {"new": "b" * 9000}, id="half by name"),
    ],
)
def test_replacement_is_paid_before_it_is_made(args: list[str], kwargs: dict[str, str]) -> None:
    """Work is charged before it is done, however the arguments are passed, because memory can't be given back."""
    with work_budget(), pytest.raises(TemplateBudgetExceeded):
        charge_filter("replace", "a" * 9000, args, kwargs)


def test_whatever_a_template_raises_is_its_own_fault() -> None:
    """An exception such as RuntimeError of a template is reported as the template's fault."""
    with pytest.raises(Refused) as refused:
        ChatTemplate("{{ cycler() }}", {}).render(MESSAGES)
    assert "RuntimeError" in refused.value.failure.message


DEEP = {
    "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "loops": "{% for x in [1] %}" * 30 + "{% endfor %}" * 30,
    "branches": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "attributes": "{{ a" + ".b" * 5000 + " }}",
    "sums": "{{ 1" + "+1" * 5000 + " }}",
    "filters": "{{ 1" + "|abs" * 5000 + " }}",
    "digits": "{{ " + "9" * 5000 + " }}",
    "its length": "x" * (MAX_SOURCE + 1),
    "filters that make much of little": "{{ 'a' | center(2000000000) }}",
}


@pytest.mark.parametrize("source", [pytest.param(source, id=name) for name, source in DEEP.items()])
def test_template_that_does_not_compile_is_a_value_error(source: str) -> None:
    """Any error of the compiler is reported as the template's fault."""
    with pytest.raises(ValueError, match="the chat template"):
        ChatTemplate(source, {})


def test_long_conversation_is_within_the_budget() -> None:
    """The longest conversation of a request, a megabyte of text, stays within the budget."""
    source = (
        "{% for message in messages %}{% if loop.first and message.role != 'system' %}{{ 'You help.' }}{% endif %}"
        "{% if message.role == 'assistant' and '</think>' in message.content %}"
        "{{ message.content.split('</think>')[-1].lstrip('\\n') }}"
        "{% else %}{{ '<|' + message.role + '|>' + message.content | trim + '<|end|>' }}{% endif %}{% endfor %}"
    )
    messages = [{"role": role, "content": "x" * 256} for role in ("user", "assistant")] * 2048
    assert len(ChatTemplate(source, {}).render(messages)) > 1 << 20
    assert MAX_UNITS >= 1_000_000


def test_budget_is_of_one_rendering() -> None:
    """Each rendering has the whole budget."""
    template = ChatTemplate("{% for i in range(90000) %}{{ i }}{% endfor %}", {})
    for _ in range(20):
        template.render(MESSAGES)


WIDE = {
    "a number": "{{ '%200000000d' % 1 }}",
    "a number by name": "{{ '%(a)200000000d' % {'a': 1} }}",
    "a number by a name with parentheses": "{{ '%(a(b)c)200000000d' % {'a(b)c': 1} }}",
    "a precise number by name": "{{ '%(a)1.200000000d' % {'a': 1} }}",
    "many padded numbers by name": "{{ ('%(a)9999d' * 20000) % {'a': 1} }}",
    "a filter by name": "{{ '%(a)200000000d' | format(a=1) }}",
    "a field": "{{ '{:200000000}'.format(1) }}",
    "a field in Arabic digits": "{{ '{:\u0662\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660}'.format(1) }}",
    "a field behind a brace": "{{ '{0[}]:200000000}'.format({'}': 1}) }}",
    "a field behind a bracket and a brace": "{{ '{0[[}]:200000000}'.format({'[}': 1}) }}",
}


@pytest.mark.parametrize("source", [pytest.param(source, id=name) for name, source in WIDE.items()])
def test_wide_format_is_refused_before_it_is_made(source: str) -> None:
    """Each of these would take 200 MB, and the budget counts only characters that exist."""
    template = ChatTemplate(source, {})
    tracemalloc.start()
    try:
        with pytest.raises(Refused):
            template.render(MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        pytest.param("{{ '%(a)08.3f (%(b)s)**' % {'a': 1.5, 'b': 2} }}", "0001.500 (2)**", id="conversions with keys"),
        pytest.param("{{ '**(%s)** %5d' % ('x', 7) }}", "**(x)**     7", id="conversions without keys"),
        pytest.param("{{ '(UTC) 20241231: %s' % 'x' }}", "(UTC) 20241231: x", id="a number behind a parenthesis"),
        pytest.param(
            "{{ '[INST] {0[role]:>6} [/INST]: {1}'.format(messages[0], 2) }}", "[INST]   user [/INST]: 2", id="fields"
        ),
    ],
)
def test_usual_formats_are_served(source: str, text: str) -> None:
    """Negative control: usual formats are rendered."""
    assert ChatTemplate(source, {}).render(MESSAGES) == text
