"""What the filters' page counts: verdicts by direction, what was found by entity. Neither has a caller's values."""

from typing import Final

from contracts.filters import Direction, Looked
from telemetry.policy.instruments import Page

_FILTER: Final = "pii"


class Meters:
    """Made once per process."""

    def __init__(self, page: Page) -> None:
        self._verdicts = page.counter(
            "kelvin_filter_verdicts_total", "Pieces of text that were looked at", ("filter", "direction", "verdict")
        )
        self._found = page.counter(
            "kelvin_filter_found_total", "What was found in pieces of text", ("filter", "direction", "entity", "action")
        )
        self._unseen = page.counter(
            "kelvin_filter_unseen_total", "Pieces that passed without being looked at, as their policy allows"
        )

    def unseen(self, texts: int) -> None:
        """So many passed without being looked at."""
        if texts:
            self._unseen.add((), texts)

    def looked(self, direction: Direction, looked: Looked) -> None:
        """One text was looked at."""
        actions = {span.action for span in looked.spans}
        verdict = "stop" if "stop" in actions else "redact" if actions else "allow"
        self._verdicts.add((_FILTER, direction, verdict))
        for span in looked.spans:
            self._found.add((_FILTER, direction, span.label, span.action))
