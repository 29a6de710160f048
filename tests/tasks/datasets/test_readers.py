"""Data sets from files: every layout, and one clear line for every invalid file."""

from __future__ import annotations

import gzip
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from defedavg.errors import UserError
from defedavg.tasks import DATASETS, data_dir, load, set_data_dir
from defedavg.tasks.datasets.builtin_datasets import find
from defedavg.tasks.datasets.catalog import Loaded, load_pixels
from defedavg.tasks.datasets.cifar10 import CIFAR10, read_binary, read_pickled
from defedavg.tasks.datasets.dataset import PublishedFile
from defedavg.tasks.datasets.dataset_files import intact, locate, md5
from defedavg.tasks.datasets.fashionmnist import FASHIONMNIST, read_idx
from helpers.data_files import binary_batch, idx, python2_batch, python3_batch, write_cifar, write_fashion
from helpers.user_errors import line_of


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the data folders of this machine: the user's and Debian's."""
    monkeypatch.delenv("DEFEDAVG_DATA", raising=False)
    monkeypatch.setitem(DATASETS._known, "fashionmnist", replace(FASHIONMNIST, layouts=FASHIONMNIST.layouts[:3]))
    set_data_dir(None)
    yield
    set_data_dir(None)


def fashionmnist() -> Loaded:
    return load_pixels("fashionmnist")


def cifar10() -> Loaded:
    return load_pixels("cifar10")


# Locations


def test_the_folder_is_the_options_then_the_environments_then_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert data_dir() == tmp_path / ".cache" / "defedavg"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert data_dir() == tmp_path / ".cache" / "defedavg"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert data_dir() == tmp_path / "caches" / "defedavg"
    monkeypatch.setenv("DEFEDAVG_DATA", "~/mine")
    assert data_dir() == tmp_path / "mine"
    set_data_dir(tmp_path / "said")
    assert data_dir() == tmp_path / "said"
    set_data_dir(None)
    monkeypatch.setenv("DEFEDAVG_DATA", "~nobody-of-this-name/x")
    assert "--data-dir" in line_of(data_dir)


def test_a_missing_data_set_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEFEDAVG_DATA", str(tmp_path))
    for name in ("fashionmnist", "cifar10"):
        line = line_of(lambda name=name: load(name))  # type: ignore[misc]
        assert line == (
            f"the data set {name!r} is not in {tmp_path}; get it with 'defedavg data fetch {name}', "
            "or name a folder that has it with --data-dir or DEFEDAVG_DATA"
        )
    set_data_dir(tmp_path / "a b")
    assert f"fetch cifar10 --data-dir '{tmp_path}/a b'" in line_of(cifar10)


def test_a_part_of_a_data_set_is_not_taken_for_it(tmp_path: Path) -> None:
    set_data_dir(tmp_path)
    write_fashion(tmp_path / "FashionMNIST/raw")
    (tmp_path / "FashionMNIST/raw/t10k-labels-idx1-ubyte").unlink()
    assert "not complete: t10k-labels-idx1-ubyte missing" in line_of(fashionmnist)
    write_cifar(tmp_path)
    (tmp_path / "data_batch_3.bin").rename(tmp_path / "data_batch_3.bin.part")
    assert "not complete: data_batch_3.bin missing" in line_of(cifar10)


@pytest.mark.parametrize("below", ["", "FashionMNIST/raw", "fashion-mnist"])
@pytest.mark.parametrize("packed", [False, True])
def test_fashionmnist_in_every_layout(tmp_path: Path, below: str, packed: bool) -> None:
    pixels, labels = write_fashion(tmp_path / below, packed=packed)
    set_data_dir(tmp_path)
    train, test, classes = fashionmnist()
    assert (find("fashionmnist"), classes, len(test)) == (tmp_path / below, 10, 3)
    assert train.inputs.shape == (7, 1, 28, 28)
    assert np.array_equal(train.inputs[:, 0].numpy(), pixels)
    assert train.targets.tolist() == labels
    assert train.targets.dtype == torch.int64


def test_debians_folder_is_searched_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "usr/share/datasets/fashion-mnist"
    layouts = (*FASHIONMNIST.layouts[:3], (str(named), FASHIONMNIST.layouts[0][1]))
    monkeypatch.setitem(DATASETS._known, "fashionmnist", replace(FASHIONMNIST, layouts=layouts))
    write_fashion(named, packed=True)
    set_data_dir(tmp_path / "own")
    assert find("fashionmnist") == named
    write_fashion(tmp_path / "own")
    assert find("fashionmnist") == tmp_path / "own"


@pytest.mark.parametrize("kind", ["bin", "py", "py3"])
@pytest.mark.parametrize("nested", [False, True])
def test_cifar10_in_every_layout(tmp_path: Path, kind: str, nested: bool) -> None:
    folder = tmp_path / f"cifar-10-batches-{kind[:3].rstrip('3')}" if nested else tmp_path
    pixels, labels = write_cifar(folder, kind)
    set_data_dir(tmp_path)
    train, test, classes = cifar10()
    assert (find("cifar10"), classes, len(test)) == (folder, 10, 4)
    assert train.inputs.shape == (20, 3, 32, 32)
    assert np.array_equal(train.inputs.flatten(1).numpy(), pixels)
    assert train.targets.tolist() == labels


def test_another_folder_is_another_data_set_and_the_same_one_is_read_once(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        write_fashion(tmp_path / name, seed=seed)
    set_data_dir(tmp_path / "a")
    first = load("fashionmnist")
    set_data_dir(tmp_path / "b")
    second = load("fashionmnist")
    assert not torch.equal(first[0].inputs, second[0].inputs)
    set_data_dir(tmp_path / "a")
    assert load("fashionmnist") is first


@pytest.mark.parametrize("name", ["fashionmnist", "cifar10"])
def test_bytes_are_normalised_as_numbers_are(tmp_path: Path, name: str) -> None:
    write_fashion(tmp_path)
    write_cifar(tmp_path)
    set_data_dir(tmp_path)
    raw, raw_test, _ = load_pixels(name)
    train, test, _ = load(name)
    assert (raw.inputs.dtype, train.inputs.dtype) == (torch.uint8, torch.float32)
    wide = raw.inputs.double()
    std, mean = torch.std_mean(wide, dim=(0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(train.inputs, ((wide - mean) / std).float())
    torch.testing.assert_close(test.inputs, ((raw_test.inputs - mean) / std).float())
    assert torch.equal(load(name, "unit")[1].inputs, raw_test.inputs.float() / 255)
    symmetric = load(name, "symmetric")[1].inputs
    assert symmetric.dtype == torch.float32
    assert torch.equal(symmetric, 2 * (raw_test.inputs.float() / 255) - 1)


def test_a_constant_channel_of_bytes_becomes_zero(tmp_path: Path) -> None:
    write_cifar(tmp_path, change=lambda pixels: pixels[:, :1024].fill(9))
    set_data_dir(tmp_path)
    train, _, _ = load("cifar10")
    assert bool((train.inputs[:, 0] == 0).all())


# Invalid files

LABELS = st.lists(st.integers(0, 9), min_size=1, max_size=3)


def images(count: int, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Distinct pixels."""
    return (np.arange(count * width, dtype=np.uint32) * 7 % 256).astype(np.uint8).reshape(count, width)


def given_file(name: str, content: bytes, read: Callable[[Path], Any]) -> Any:
    """Return what is read from a file with that content."""
    with TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        return read(path)


def idx_of(path: Path) -> np.ndarray[Any, Any]:
    return read_idx(path, ())


def whole_files(labels: list[int]) -> list[tuple[str, bytes, Callable[[Path], Any]]]:
    """Return a small valid file of every format, with its reader."""
    pixels = images(len(labels), 3072)
    return [
        ("x", idx(np.array(labels, np.uint8)), idx_of),
        ("x.gz", gzip.compress(idx(np.array(labels, np.uint8))), idx_of),
        ("data_batch_1.bin", binary_batch(pixels, labels), read_binary),
        ("data_batch_1", python2_batch(pixels, labels), read_pickled),
        ("data_batch_1", python3_batch(pixels, labels), read_pickled),
    ]


@given(LABELS, st.integers(1, 4), st.integers(1, 4))
def test_idx_round_trip(labels: list[int], height: int, width: int) -> None:
    array = images(len(labels), height * width).reshape(-1, height, width)
    for name, content in (("x", idx(array)), ("x.gz", gzip.compress(idx(array)))):
        found = given_file(name, content, lambda path: read_idx(path, (height, width)))
        assert np.array_equal(found, array)


@given(LABELS)
def test_cifar_round_trip(labels: list[int]) -> None:
    for name, content, read in whole_files(labels)[2:]:
        pixels, targets = given_file(name, content, read)
        assert np.array_equal(pixels.reshape(-1, 3072), images(len(labels), 3072))
        assert targets.tolist() == labels


@given(LABELS, st.integers(0, 4), st.data())
def test_a_truncated_file_is_refused(labels: list[int], kind: int, data: st.DataObject) -> None:
    name, content, read = whole_files(labels)[kind]
    cut = data.draw(st.one_of(st.integers(0, min(200, len(content) - 1)), st.integers(0, len(content) - 1)))
    if name.endswith(".bin") and cut and cut % 3073 == 0:
        assert len(given_file(name, content[:cut], read)[1]) == cut // 3073  # whole records, only fewer
        return
    line = line_of(lambda: given_file(name, content[:cut], read))
    assert name in line
    assert "defedavg data fetch" in line


@given(LABELS, st.integers(0, 4), st.data())
def test_a_file_with_wrong_bytes_is_read_or_refused_and_nothing_else(
    labels: list[int], kind: int, data: st.DataObject
) -> None:
    name, content, read = whole_files(labels)[kind]
    spoilt = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.one_of(st.integers(0, min(300, len(content) - 1)), st.integers(0, len(content) - 1)))
        spoilt[position] = data.draw(st.integers(0, 255))
    said = ""
    try:
        assert len(given_file(name, bytes(spoilt), read)) > 0
    except UserError as error:
        said = str(error)
    assert "\n" not in said


@given(st.binary(max_size=300))
def test_bytes_that_are_not_a_pickle_are_refused(content: bytes) -> None:
    assert "is damaged" in line_of(lambda: given_file("data_batch_1", b"\x80\x02" + content, read_pickled))


HOSTILE = {
    "system": b"cposix\nsystem\n(S'touch hacked'\ntR.",
    "system, protocol 4": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0ctouch hacked\x85R.",
    "instance": b"(S'touch hacked'\nios\nsystem\n.",
    "new object": b"\x80\x02cos\nsystem\n)\x81.",
    "evaluated": b"\x80\x02}(U\x04datacbuiltins\neval\nU\x0eopen('hacked','w')\x85Ru.",
    "in a good place": b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncos\nsystem\nK\x00\x85U\x01b\x87Ru.",
    "called twice": b"\x80\x02cnumpy\ndtype\nU\x02u1\x85RU\x02u1\x85R.",
    "built": b"\x80\x02}}U\x01a}sb.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"Phacked\n.",
    "next buffer": b"\x80\x05\x97.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_in_a_pickle_is_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(HOSTILE[name])
    modules = set(sys.modules)
    line = line_of(lambda: read_pickled(tmp_path / "data_batch_1"))
    assert "data_batch_1 is damaged: it " in line
    assert set(sys.modules) == modules
    assert [p.name for p in tmp_path.iterdir()] == ["data_batch_1"]


def test_a_pickle_that_names_a_function_says_which(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(HOSTILE["system"])
    assert "asks to run 'posix.system', which was refused" in line_of(lambda: read_pickled(tmp_path / "x"))


GOOD = python2_batch(images(2, 3072), [3, 4])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"U\x04data", b"U\x04dada", "not an array"),
        (b"U\x06labels", b"U\x06lapels", "not a list"),
        (b"U\x02u1", b"U\x02i1", "not bytes"),
        (b"M\x00\x0c\x86", b"M\x01\x0c\x86", "not rows of 3072"),
        (b"K\x02M\x00\x0c", b"K\x03M\x00\x0c", "not 3 rows"),
        (b"K\x02M\x00\x0c", b"K\x00M\x00\x0c", "not rows of 3072"),
        (b"K\x03K\x04e", b"K\x03K\x0ae", "label 1 is 10"),
        (b"K\x03K\x04e", b"K\x03J\xff\xff\xff\xffe", "label 1 is -1"),
        (b"K\x03K\x04e", b"K\x03\x88e", "not a list of whole numbers"),
        (b"K\x03K\x04e", b"K\x03e", "1 labels for 2 images"),
    ],
)
def test_inconsistent_batches_are_refused(tmp_path: Path, old: bytes, new: bytes, said: str) -> None:
    assert GOOD.count(old) == 1
    (tmp_path / "x").write_bytes(GOOD.replace(old, new))
    assert said in line_of(lambda: read_pickled(tmp_path / "x"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it begins with , not with 00000801"),
        (b"\0\0\x08\3" + bytes(20), "it begins with 00000803"),
        (b"\0\0\x08\1\0\0", "it ends after 6 bytes"),
        (b"\0\0\x08\1\0\0\0\0", "announces 0 items"),
        (b"\0\0\x08\1\xff\xff\xff\xff", "announces 4,294,967,295 items"),
        (b"\0\0\x08\1\0\0\0\2\1", "it has 1 bytes after its header, not the announced 2"),
        (b"\0\0\x08\1\0\0\0\2\1\2\3", "it has more bytes after its header, not the announced 2"),
    ],
)
def test_inconsistent_idx_files_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    for name, whole in (("x", content), ("x.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(whole)
        assert said in line_of(lambda name=name: idx_of(tmp_path / name))  # type: ignore[misc]


def test_images_and_labels_must_match(tmp_path: Path) -> None:
    set_data_dir(tmp_path)
    write_fashion(tmp_path)
    labels, images_ = tmp_path / "t10k-labels-idx1-ubyte", tmp_path / "t10k-images-idx3-ubyte"
    labels.write_bytes(idx(np.array([1, 2], np.uint8)))
    assert "it has 2 labels for 3 images in t10k-images-idx3-ubyte" in line_of(fashionmnist)
    labels.write_bytes(idx(np.array([1, 2, 10], np.uint8)))
    assert "label 2 is 10, outside 0..9" in line_of(fashionmnist)
    images_.write_bytes(idx(np.zeros((3, 28, 27), np.uint8)))
    assert "its images are 28x27, not 28x28" in line_of(fashionmnist)
    write_cifar(tmp_path)
    (tmp_path / "data_batch_4.bin").write_bytes(binary_batch(images(2, 3072), [1, 2]))
    assert "data_batch_4.bin is damaged: it has 2 images, and data_batch_1.bin has 4" in line_of(cifar10)
    (tmp_path / "data_batch_4.bin").write_bytes(binary_batch(images(2, 3072), [1, 11]))
    assert "label 1 is 11" in line_of(cifar10)


def test_a_damaged_file_is_named_with_both_checksums(tmp_path: Path) -> None:
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    path.write_bytes(b"<html>no such page</html>")
    line = line_of(lambda: idx_of(path))
    assert line.startswith(f"{path} is damaged: it cannot be decompressed")
    assert md5(path.read_bytes()).hexdigest() in line
    assert FASHIONMNIST.published[path.name].md5 in line
    assert line.endswith("move it away and run 'defedavg data fetch fashionmnist'")


def test_a_file_of_the_published_size_must_be_the_published_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fashion(tmp_path, packed=True)
    set_data_dir(tmp_path)
    paths = locate(FASHIONMNIST, tmp_path)
    assert not intact(FASHIONMNIST, paths)
    contents = {path.name.removesuffix(".gz"): gzip.decompress(path.read_bytes()) for path in paths}
    for name, content in contents.items():
        file = PublishedFile(name, len(content), md5(content).hexdigest())
        monkeypatch.setitem(FASHIONMNIST.published, name, file)
    assert intact(FASHIONMNIST, paths)
    fashionmnist()
    own = idx(np.array([0, 0, 0], np.uint8))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(own)
    line = line_of(lambda: idx_of(tmp_path / "t10k-labels-idx1-ubyte"))
    assert "is not the published file" in line
    assert md5(own).hexdigest() in line
    assert FASHIONMNIST.published["t10k-labels-idx1-ubyte"].md5 in line


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    write_cifar(tmp_path)
    monkeypatch.setattr(np, "fromfile", deny)
    assert line_of(lambda: read_binary(tmp_path / "test_batch.bin")).endswith("Permission denied; make it readable")
    monkeypatch.setattr(Path, "is_file", deny)
    assert "make it readable" in line_of(lambda: locate(CIFAR10, tmp_path))


def test_the_published_formats_are_as_described() -> None:
    """The helpers write files as they are published, byte for byte where that is known."""
    assert idx(np.zeros((2, 28, 28), np.uint8))[:16] == struct.pack(">IIII", 2051, 2, 28, 28)
    assert GOOD.startswith(
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05("
    )
    assert len(binary_batch(images(1, 3072), [3])) == 3073
