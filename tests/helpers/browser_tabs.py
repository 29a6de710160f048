"""Pages in a real browser: headless Chromium, driven by Playwright. ``make test-browser`` installs both.

A test module that imports this one is skipped if either is missing.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make test-browser")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("chromium is not installed: make test-browser, or apt-get install chromium", allow_module_level=True)

SCHEMES = ("light", "dark")

CONTRAST = """(() => {
  const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(v => { v /= 255;
    return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$|transparent/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
  return [...document.querySelectorAll('p, h1, h2, h3, td, th, dt, dd, label, button, summary, footer, .badge')]
    .filter(e => e.offsetParent && e.textContent.trim()).map(e => {
      const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), e.tagName + ' ' + e.textContent.trim().slice(0, 30)]; })
    .filter(([ratio]) => ratio < 4.5);
})()"""
"""Lists texts whose contrast with their background is below 4.5."""


class Tab:
    """A page with a record of its console messages and its requests."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.messages: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.messages.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.messages.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.requests.append(request.url))

    def traces(self, chart: str, meta: str | None = None) -> int:
        """Return the number of traces of a chart."""
        test = "true" if meta is None else f"t.meta === '{meta}'"
        return int(self.page.evaluate(f"document.getElementById('{chart}').data.filter(t => {test}).length"))

    def until(self, condition: str) -> None:
        """Poll a condition from here, since the page's policy forbids evaluating text inside it."""
        limit = time.monotonic() + 120
        while not self.page.evaluate(condition):
            assert time.monotonic() < limit, condition
            self.page.wait_for_timeout(100)

    def ready(self) -> None:
        """Wait until everything is drawn."""
        self.page.wait_for_selector("html[data-ready=yes]")

    def axis(self, chart: str) -> str:
        """Return the title of the x axis of a chart."""
        return str(self.page.evaluate(f"document.getElementById('{chart}').layout.xaxis.title.text"))


Open = Callable[..., Tab]


@contextmanager
def launched_browser() -> Iterator[Any]:
    """Start Chromium, and close it at the end of the block."""
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        yield launched
        launched.close()


@contextmanager
def tabs_of(browser: Any) -> Iterator[Open]:
    """Yield a function that opens an address in its own tab; close all tabs at the end of the block."""
    contexts = []

    def opened(address: str, width: int = 1280, scheme: str = "light") -> Tab:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(120_000)
        contexts.append(context)
        tab = Tab(context.new_page())
        tab.page.goto(address)
        tab.ready()
        return tab

    yield opened
    for context in contexts:
        context.close()
