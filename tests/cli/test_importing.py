"""Imports that the garbage collector does not search."""

from __future__ import annotations

import gc

from defedavg.cli.importing import importing


def test_the_collector_is_off_during_imports_and_leaves_out_what_was_imported() -> None:
    before = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
            imported: list[list[int]] = [[]]
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
        assert all(found is not imported for found in gc.get_objects())
    finally:
        gc.unfreeze()
