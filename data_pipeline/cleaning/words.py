"""Words and sentences by regular expressions: datatrove's language interface without a download."""

import re

from datatrove.utils.word_tokenizers import WordTokenizer

WORD = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]+")
SENTENCE_END = re.compile(r"[.!?。！？][\"'”’)\]]*\s|\n\s*\n")


class Words(WordTokenizer):
    """Word and sentence splitter for datatrove's steps, given as `language`.

    Words are runs of letters and digits, or of punctuation; a sentence ends at . ! ? or a blank line. All instances are
    equal, so that datatrove's cache of split texts is shared.
    """

    def word_tokenize(self, text: str) -> list[str]:
        """Return the words of a text, punctuation included."""
        return WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        """Return the sentences of a text, without surrounding white space."""
        return [sentence for start, end in self.span_tokenize(text) if (sentence := text[start:end].strip())]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Return (start, end) of the sentences, which together cover the text."""
        ends = [match.end() for match in SENTENCE_END.finditer(text)]
        if not ends or ends[-1] < len(text):
            ends.append(len(text))
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Words)

    def __hash__(self) -> int:
        return hash(Words)
