"""The data inside a report page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

from defedavg.report.page import PLOTLY, asset


def told(page: str) -> dict[str, Any]:
    """The data of a page, as a browser would find them."""

    class Reader(HTMLParser):
        inside, text = False, ""

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.inside = tag == "script" and ("id", "payload") in attrs

        def handle_endtag(self, tag: str) -> None:
            self.inside = False

        def handle_data(self, data: str) -> None:
            if self.inside:
                self.text += data

    reader = Reader()
    reader.feed(page.replace(asset(PLOTLY), ""))
    found: dict[str, Any] = json.loads(reader.text)
    return found
