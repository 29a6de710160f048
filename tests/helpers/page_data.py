"""Reads the data block of a report page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

from defedavg.report.page import PLOTLY, asset


def page_data(page: str) -> dict[str, Any]:
    """Return the data block of a page, as a browser parses it."""

    class PayloadParser(HTMLParser):
        inside, text = False, ""

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.inside = tag == "script" and ("id", "payload") in attrs

        def handle_endtag(self, tag: str) -> None:
            self.inside = False

        def handle_data(self, data: str) -> None:
            if self.inside:
                self.text += data

    parser = PayloadParser()
    parser.feed(page.replace(asset(PLOTLY), ""))
    data: dict[str, Any] = json.loads(parser.text)
    return data
