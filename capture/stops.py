"""Stop strings: end a text where one of them is completed, across token boundaries."""

from collections.abc import Sequence


class StopStrings:
    """Cuts a text that arrives in pieces at the first stop string, and holds back what might become one.

    Args:
        stops: non-empty strings; the text ends before the one that begins first.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.found = False
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> str:
        """The part of the text that no stop string can reach any more; sets `found` when one is complete.

        Args:
            text: the next piece.
            may_stop: whether a stop string that this piece completes counts; if not, it is text like any other.
        """
        old, text, self._held = len(self._held), self._held + text, ""
        if may_stop:  # what is complete without this piece had its chance
            starts = [text.find(stop, max(0, old - len(stop) + 1)) for stop in self.stops]
            if starts := [at for at in starts if at >= 0]:
                self.found = True
                return text[: min(starts)]
        held = max(
            (n for stop in self.stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])), default=0
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text
