"""A page of the daemon as a browser reads it."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser


class Page(HTMLParser):
    """What is on a page: its tags, attributes, texts, and the titles of shapes by the picture that they are in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.titles: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self.text = ""
        self._picture = ""
        self.feed(text)
        self.close()
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "svg":
            self._picture = dict(attrs).get("aria-label") or ""
        if tag == "tr":
            self.rows.append([])
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "title":
            self.titles.setdefault(self._picture, []).append(data)
        elif "style" not in self.open:
            self.text += data
            if self.open and self.open[-1] in ("td", "th"):
                self.rows[-1].append(data)
