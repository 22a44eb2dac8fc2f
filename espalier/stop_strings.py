"""Finds stop strings in a text that comes in parts, and holds back what may be the beginning of one."""

from collections.abc import Sequence


class StopFinder:
    """stop: the strings; keep_stop: the text includes the one that is found.  stopped: that one, None so far."""

    def __init__(self, stop: Sequence[str], keep_stop: bool = False):
        self.stop = tuple(stop)
        self.keep_stop = keep_stop
        self.stopped: str | None = None
        self._ready = ""
        self._held = ""

    def add(self, text: str, counts: bool = True, ahead: str = "") -> None:
        """Add text.  counts: stop strings in it count; ahead: text that comes later, where one may end already."""
        if not counts:
            self._ready += text
            return
        self._held += text
        self._end_at_stop(ahead if self.stop else "")

    def take(self, final: bool) -> str:
        """The new text since the last take.  final: nothing is held back."""
        keep = 0 if final or self.stopped or not self.stop else self._may_begin_stop()
        text = self._ready + self._held[: len(self._held) - keep]
        self._ready, self._held = "", self._held[len(self._held) - keep :]
        return text

    def _end_at_stop(self, ahead: str) -> None:
        """End the text at its first stop string, if any; if several begin there, at the shortest."""
        text = self._held + ahead
        matches = [(start, len(stop), stop) for stop in self.stop if (start := text.find(stop)) >= 0]
        if matches:
            start, size, self.stopped = min(matches)
            self._held = text[: start + size if self.keep_stop else start]

    def _may_begin_stop(self) -> int:
        """Number of characters at the end of the held text with which a stop string may begin."""
        longest = max(len(text) for text in self.stop)
        for size in range(min(longest - 1, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(text.startswith(tail) for text in self.stop):
                return size
        return 0
