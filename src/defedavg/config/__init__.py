"""Settings: frozen tables, checked once, TOML in and out."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..compat import warn_renamed


def __getattr__(name: str) -> Any:
    """Resolve names from when this package was one module; they are in ``config.study`` now."""
    if name == "study":
        return import_module(".study", __name__)
    if name in ("Settings", "Study", "TABLES", "load", "override", "single") or name.endswith("Settings"):
        warn_renamed(f"{__name__}.{name}", f"{__name__}.study.{name}")
        return getattr(import_module(".study", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
