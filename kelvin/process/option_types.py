"""Types of command-line options that are stricter than click's."""

import math
from typing import Any

import click


class FiniteNumber(click.FloatRange):
    """A finite number within bounds. click's FloatRange accepts NaN, because NaN is neither above nor below a bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value}: must be a finite number", param, ctx)
        return number
