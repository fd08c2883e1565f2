"""Render metric families in Prometheus' text format 0.0.4, and merge pages of several processes.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from collections.abc import Iterable, Iterator
from typing import Final

from kelvin.telemetry.policy.instruments import Labels, MetricFamily, MetricKind

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def render(families: Iterable[MetricFamily], process: str) -> str:
    """Return one block per family with series. Each series has the label `process`."""
    return "".join(_block(family, process) for family in families if family.values or family.spreads)


def merge(pages: Iterable[str]) -> str:
    """Merge pages that `render` made. Equal series of several pages are added up. So a process that comes and goes must
    not keep counters.
    """
    blocks: dict[str, tuple[list[str], dict[str, float]]] = {}
    for page in pages:
        head: list[str] = []
        series: dict[str, float] = {}
        # A label's value may contain other characters that Python treats as line ends
        for line in filter(None, page.split("\n")):
            if line.startswith("# HELP "):
                head, series = blocks.setdefault(line.split(" ", 3)[2], ([], {}))
                new = not head
            if line.startswith("# "):
                if new:
                    head.append(line)
                continue
            name, _, value = line.rpartition(" ")
            series[name] = series.get(name, 0.0) + float(value)
    lines = (
        [*head, *(f"{name} {_number(value)}" for name, value in series.items())]
        for head, series in blocks.values()
        if series
    )
    return "".join("\n".join(block) + "\n" for block in lines)


def _block(family: MetricFamily, process: str) -> str:
    lines = [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
    if family.kind is MetricKind.HISTOGRAM:
        lines += _histogram(family, process)
    else:
        for values, value in family.values.items():
            lines.append(f"{family.name}{_labels(family, values, process)} {_number(value)}")
    return "\n".join(lines) + "\n"


def _histogram(family: MetricFamily, process: str) -> Iterator[str]:
    for values, spread in (family.spreads or {}).items():
        below = 0
        for bound, count in zip((*family.bounds, float("inf")), spread.counts, strict=True):
            below += count
            limit = "+Inf" if bound == float("inf") else _number(bound)
            yield f"{family.name}_bucket{_labels(family, values, process, le=limit)} {below}"
        labels = _labels(family, values, process)
        yield f"{family.name}_sum{labels} {_number(spread.total)}"
        yield f"{family.name}_count{labels} {below}"


def _labels(family: MetricFamily, values: Labels, process: str, **more: str) -> str:
    named = {"process": process, **dict(zip(family.labels, values, strict=True)), **more}
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in named.items()) + "}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(value)
