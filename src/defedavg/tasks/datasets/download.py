"""Downloads of data sets: an interrupted download is resumed, and a file is checked before it is used.

A file is received as ``NAME.part`` and renamed atomically once its checksum is right. Nothing that a server sends is
trusted, neither its length nor its archive.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from ...errors import UserError
from ...fileio import write_whole, writing
from .builtin_datasets import DATASETS
from .dataset import DataSet, Download, PublishedFile
from .dataset_files import DECOMPRESSION_ERRORS, intact, locate, md5

Stream = BufferedReader | BufferedRandom
ProgressCallback = Callable[[str, int, int], None]
"""Receives the name of a file, the bytes received so far, and its size."""

TIMEOUT: Final = 30.0
BLOCK: Final = 1 << 16
MAX_MEMBERS: Final = 100  # an archive with more is not the published one


class _MirrorError(Exception):
    """A mirror did not deliver a file; the message says why."""


def fetch(
    dataset: str | DataSet, root: Path, *, url: str | None = None, watch: ProgressCallback = lambda *_: None
) -> Path:
    """Download a data set into the data folder and return its own folder there; leave one alone that is complete.

    ``url`` names another mirror: a folder that has the published files, or the one file itself.
    """
    if isinstance(dataset, str):
        dataset = DATASETS.find(dataset)
    download = dataset.download
    if download is None:
        source = f"comes with {dataset.package[0]}" if dataset.package else "has no download source"
        raise UserError(f"the data set {dataset.name!r} {source}; there is nothing to fetch")
    if url is not None and not url.startswith(("http://", "https://", "file://")):
        raise UserError(f"--url {url!r} is not an address; write it as https://…")
    complete = _complete_folder(dataset, download, root)
    if complete is not None:
        return complete
    folder = root / download.folder
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for file in download.files:
        mirrors = [url] if url else file.mirrors or download.mirrors
        _download(file, [_address(base, file) for base in mirrors], root if download.members else folder, watch)
    if download.members:
        archive = root / download.files[0].name
        unpack(archive, folder, download.members)
        with writing(archive):
            archive.unlink(missing_ok=True)
    return folder


def _complete_folder(dataset: DataSet, download: Download, root: Path) -> Path | None:
    """Return the folder that has all published files already."""
    with suppress(UserError):
        found = locate(dataset, root)
        if found and intact(dataset, found):
            return found[0].parent
    folder, members = root / download.folder, download.members
    return folder if members and all(_matches(folder / member.name, member) for member in members) else None


def _address(base: str, file: PublishedFile) -> str:
    return base if base.endswith(f"/{file.name}") else f"{base.rstrip('/')}/{file.name}"


def _digest(stream: Stream) -> str:
    stream.seek(0)
    return hashlib.file_digest(stream, md5).hexdigest()


def _whole(stream: Stream, file: PublishedFile) -> bool:
    """Return whether the file is complete and correct."""
    return stream.seek(0, os.SEEK_END) == file.size and _digest(stream) == file.md5


def _matches(path: Path, file: PublishedFile) -> bool:
    try:
        with path.open("rb") as stream:
            return _whole(stream, file)
    except OSError:
        return False


# Downloading.


def _download(file: PublishedFile, urls: list[str], folder: Path, watch: ProgressCallback) -> None:
    """Download a file from the first mirror that delivers it."""
    path, part = folder / file.name, folder / f"{file.name}.part"
    with _locked(part):
        if _matches(path, file):
            return
        part.touch()
        with part.open("r+b") as stream:
            if not _whole(stream, file):
                _from_any(file, urls, stream, watch)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)


@contextmanager
def _locked(part: Path) -> Iterator[None]:
    """Reserve an unfinished file for this process; turn a failure to write it into one line."""
    lock = part.with_name(f"{part.name}.lock")
    try:
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                with suppress(OSError):  # Windows removes it when it is unlocked
                    lock.unlink()
    except Timeout:
        raise UserError(f"{part} is being downloaded by another process; wait for it, or stop it") from None
    except OSError as error:
        raise UserError(
            f"{part} cannot be written: {error.strerror or error}; "
            "correct that or choose another folder with --data-dir, and run the command again to resume"
        ) from None


def _from_any(file: PublishedFile, urls: list[str], stream: Stream, watch: ProgressCallback) -> None:
    failures: list[str] = []
    for url in urls:
        try:
            if _receive(file, url, stream, watch) and not _whole(stream, file):
                _cut(stream, 0)  # the part belonged to another file: download all of it
                _receive(file, url, stream, watch)
        except _MirrorError as failure:
            failures.append(str(failure))
            continue
        if _whole(stream, file):
            return
        wrong = f"{url} has the MD5 {_digest(stream)}, not the published {file.md5}; try another mirror with --url"
        failures.append(wrong)
        _cut(stream, 0)
    raise UserError(" | ".join(dict.fromkeys(failures)))


def _receive(file: PublishedFile, url: str, stream: Stream, watch: ProgressCallback) -> bool:
    """Receive what is missing, or everything if the server cannot resume; return whether it resumed."""
    have = stream.seek(0, os.SEEK_END)
    have = have if have < file.size else 0
    headers = {"User-Agent": "defedavg", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 (the scheme was checked: http, https or file)
    with _network(url):
        response = urllib.request.urlopen(request, timeout=TIMEOUT)  # noqa: S310 (the scheme was checked)
    with closing(response):
        resumed = have > 0 and response.status == 206
        have = have if resumed else 0
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise _MirrorError(f"{url} did not send the requested part; try another mirror with --url")
        length = response.headers.get("Content-Length", "")
        if length.isdecimal() and have + int(length) != file.size:
            found = f"{have + int(length):,} bytes"
            raise _MirrorError(f"{url} has {found}, not the published {file.size:,}; use another --url")
        _cut(stream, have)
        watch(file.name, have, file.size)
        while block := _block(url, response):
            have += len(block)
            if have > file.size:
                _cut(stream, 0)
                found = f"more than the published {file.size:,} bytes"
                raise _MirrorError(f"{url} has {found}; try another mirror with --url")
            stream.write(block)
            watch(file.name, have, file.size)
    if have < file.size:
        raise _MirrorError(f"{url} ended after {have:,} of {file.size:,} bytes; run the command again to resume")
    return resumed


def _block(url: str, response: http.client.HTTPResponse) -> bytes:
    with _network(url):
        return response.read(BLOCK)


def _cut(stream: Stream, size: int) -> None:
    """Truncate a file, and continue at its end."""
    if stream.seek(0, os.SEEK_END) > size:
        stream.truncate(size)
    stream.seek(size)


@contextmanager
def _network(url: str) -> Iterator[None]:
    """Attribute network errors to the mirror; disk errors have the same type, so nothing may be written in here."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        raise _MirrorError(f"{url} answers {error.code} {error.reason}; try another mirror with --url") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise _MirrorError(f"{url} cannot be read: {text.splitlines()[0]}; run the command again to resume") from None


# Unpacking.


def unpack(archive: Path, folder: Path, members: tuple[PublishedFile, ...]) -> None:
    """Write the expected members of an archive to a folder, and no others."""
    missing = {f"{folder.name}/{member.name}": member for member in members}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for count, entry in enumerate(tar):
                member = missing.pop(entry.name.removeprefix("./"), None)
                if count >= MAX_MEMBERS or entry.size > max(m.size for m in members):
                    raise _wrong_archive(archive, "it has more members than the published one")
                if member is not None:
                    write_whole(folder / member.name, _content(archive, tar, entry, member))
    except (tarfile.TarError, *DECOMPRESSION_ERRORS) as error:
        raise _wrong_archive(archive, str(error) or type(error).__name__) from None
    except OSError as error:
        raise UserError(f"{archive} cannot be read: {error.strerror or error}; make it readable") from None
    if missing:
        raise _wrong_archive(archive, f"{', '.join(missing)} missing")


def _content(archive: Path, tar: tarfile.TarFile, entry: tarfile.TarInfo, member: PublishedFile) -> bytes:
    stream = tar.extractfile(entry) if entry.isreg() and entry.size == member.size else None
    if stream is None:
        raise _wrong_archive(archive, f"{member.name} is not a file of {member.size:,} bytes")
    data = stream.read(member.size + 1)
    if (found := md5(data).hexdigest()) != member.md5:
        raise _wrong_archive(archive, f"{member.name} has the MD5 {found}, not the published {member.md5}")
    return data


def _wrong_archive(archive: Path, what: str) -> UserError:
    return UserError(f"{archive} is not the published archive: {what.splitlines()[0]}; delete it and fetch it again")
