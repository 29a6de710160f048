"""The cached arrays of data sets: equal to what the reader returns, whatever happened to the cache."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.errors import FallbackWarning
from defedavg.tasks.datasets.array_cache import FOLDER, Parts, read_through_cache
from defedavg.tasks.datasets.builtin_datasets import BUILT_IN_READERS
from defedavg.tasks.datasets.catalog import load_pixels
from defedavg.tasks.datasets.dataset_files import locate, set_data_dir
from defedavg.tasks.datasets.fashionmnist import FASHIONMNIST
from helpers.data_files import write_fashion


class Counted:
    """A reader that counts its calls; with ``users`` it returns their ids too."""

    def __init__(self, users: bool = False) -> None:
        self.calls, self.users = 0, users
        self.dataset = replace(FASHIONMNIST, read=self)

    def __call__(self, paths: Sequence[Path]) -> Parts:
        self.calls += 1
        parts = FASHIONMNIST.read(paths)
        if not self.users:
            return parts
        train, test = ((*part[:2], np.array([f"user {i % 3}" for i in range(len(part[0]))])) for part in parts)
        return train, test


def same(one: Parts, other: Parts) -> bool:
    arrays = [list(zip(a, b, strict=True)) for a, b in zip(one, other, strict=True)]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for part in arrays for a, b in part)


@pytest.mark.parametrize("users", [False, True])
def test_files_are_read_once_and_the_cache_has_the_same_arrays(tmp_path: Path, users: bool) -> None:
    write_fashion(tmp_path)
    reader = Counted(users)
    paths = locate(reader.dataset, tmp_path)
    first = read_through_cache(reader.dataset, paths, tmp_path)
    second = read_through_cache(reader.dataset, paths, tmp_path)
    assert reader.calls == 1
    assert same(first, second)
    assert all(array.flags.writeable for part in second for array in part)  # PyTorch shares their memory
    assert [path.suffix for path in (tmp_path / FOLDER).iterdir()] == [".npz"]


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    write_fashion(tmp_path)
    reader = Counted()
    paths = locate(reader.dataset, tmp_path)
    first = read_through_cache(reader.dataset, paths, tmp_path)
    data = bytearray(paths[0].read_bytes())
    data[-1] ^= 1
    paths[0].write_bytes(data)
    second = read_through_cache(reader.dataset, paths, tmp_path)
    assert reader.calls == 2
    assert not same(first, second)
    assert same(second, FASHIONMNIST.read(paths))
    assert same(second, read_through_cache(reader.dataset, paths, tmp_path))
    assert reader.calls == 2


@given(st.data())
def test_a_damaged_cache_is_found_and_made_again(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        write_fashion(root)
        reader = Counted()
        paths = locate(reader.dataset, root)
        first = read_through_cache(reader.dataset, paths, root)
        (cache,) = (root / FOLDER).iterdir()
        content = bytearray(cache.read_bytes())
        position = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            del content[position:]
        else:
            content[position] ^= data.draw(st.integers(1, 255))
        cache.write_bytes(content)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert same(first, read_through_cache(reader.dataset, paths, root))
        # Some bytes of an archive mean nothing, such as a time; then the arrays are used, and they are right.
        assert {warning.category for warning in caught} <= {FallbackWarning}
        if caught:
            assert f"the cache {cache} is damaged" in str(caught[0].message)
            assert reader.calls == 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            calls = reader.calls
            assert same(first, read_through_cache(reader.dataset, paths, root))
            assert reader.calls == calls


def test_a_damaged_header_of_an_array_is_found(tmp_path: Path) -> None:
    """NumPy parses the header before the checksum of the file is known, and its parser has errors of its own."""
    write_fashion(tmp_path)
    reader = Counted()
    paths = locate(reader.dataset, tmp_path)
    first = read_through_cache(reader.dataset, paths, tmp_path)
    (cache,) = (tmp_path / FOLDER).iterdir()
    content = cache.read_bytes()
    for old, new in (
        (b"'fortran_order'", b"'fortran_order("),
        (b"{'descr'", b"(((((((("),
        (b"'shape': (", b"'shape': )"),
    ):
        assert old in content
        cache.write_bytes(content.replace(old, new))
        with pytest.warns(FallbackWarning, match="is damaged"):
            assert same(first, read_through_cache(reader.dataset, paths, tmp_path))


def test_a_folder_that_cannot_be_written_to_works_without_a_cache(tmp_path: Path) -> None:
    write_fashion(tmp_path)
    (tmp_path / FOLDER).write_text("not a folder")
    reader = Counted()
    paths = locate(reader.dataset, tmp_path)
    first = read_through_cache(reader.dataset, paths, tmp_path)
    assert same(first, read_through_cache(reader.dataset, paths, tmp_path))
    assert reader.calls == 2


def test_data_sets_of_the_package_are_cached_and_those_of_a_plugin_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from defedavg.tasks import DATASETS

    assert FASHIONMNIST.read in BUILT_IN_READERS
    set_data_dir(tmp_path)
    try:
        write_fashion(tmp_path)
        load_pixels("fashionmnist")
        assert len(list((tmp_path / FOLDER).iterdir())) == 1
        monkeypatch.setitem(DATASETS._known, "mine", replace(Counted().dataset, name="mine"))
        load_pixels("mine")
        assert len(list((tmp_path / FOLDER).iterdir())) == 1
    finally:
        set_data_dir(None)
