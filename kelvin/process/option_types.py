"""Types of command-line options that click has no strict one for."""

import math
from typing import Any

import click


class FiniteNumber(click.FloatRange):
    """A finite number within bounds. click's own range takes NaN, which is neither above nor below any bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value}: must be a finite number", param, ctx)
        return number
