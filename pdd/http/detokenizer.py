"""Between a sampled token and the text that the client sees: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from pdd.http.vocabulary import Vocabulary


class Detokenizer:
    """Text of tokens that come one at a time; a character is held back until its last byte is there.

    What comes out in total does not depend on where the borders between tokens lie.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if self._skip_special_tokens and self._vocabulary.is_special(token):
            return ""
        return self._utf8.decode(self._vocabulary.piece(token))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", final=True)


class StopString:
    """Finds one stop string in a text that comes in parts (Knuth, Morris, Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        """Length of the longest beginning of `text` that the text so far ends with."""
        self._fallback = _fallbacks(text)

    def push(self, character: str) -> bool:
        """Whether the stop string is complete with this character."""
        while self.num_matched and self.text[self.num_matched] != character:
            self.num_matched = self._fallback[self.num_matched]
        if self.text[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == len(self.text)


def _fallbacks(text: str) -> list[int]:
    """Entry k: length of the longest proper prefix of text[:k] that is also its suffix."""
    table = [0] * (len(text) + 1)
    length = 0
    for end in range(1, len(text)):
        while length and text[end] != text[length]:
            length = table[length]
        if text[end] == text[length]:
            length += 1
        table[end + 1] = length
    return table


class StopScanner:
    """Lets text through up to the first stop string to be completed, holding back what may become one.

    text so far   ... the answer is 4.\\n\\nUs          stop "\\n\\nUser:"
                      released         | held
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool) -> None:
        self._stops = [StopString(text) for text in stop]
        self._include_stop = include_stop
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that may now be shown; after a stop string was `found`, nothing more."""
        if not self._stops:
            return text
        for position, character in enumerate(text):
            # every one must see the character: no short cut
            complete = [stop for stop in self._stops if stop.push(character)]
            if complete:
                return self._finish(self._held + text[: position + 1], max(complete, key=lambda stop: len(stop.text)))
        text = self._held + text
        shown = len(text) - max(stop.num_matched for stop in self._stops)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What is still held when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _finish(self, text: str, stop: StopString) -> str:
        self.found = stop.text
        self._held = ""
        return text if self._include_stop else text[: len(text) - len(stop.text)]
