"""shakespeare-roles: one megabyte of Shakespeare's plays; a user is a role, and every character is to be predicted.

The file is that of Karpathy's char-rnn. A speech begins with the name of its role and a colon on a line of its own,
after an empty line. The speeches of a role are joined and cut into windows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ..users import held_out
from .characters import CLASSES, LENGTH, windows
from .dataset import DataSet, Download, PublishedFile, UserPart
from .dataset_files import check_published, damaged, open_file, reading

MAX_BYTES: Final = 64 << 20
SPEECH: Final = re.compile(r"(?:\A|\n\n)([^\n:]{1,80}):\n")

_NAMES: Final = ("input.txt", "tinyshakespeare.txt")
_PUBLISHED: Final = {name: PublishedFile(name, 1_115_394, "6fb458f1232090904fb40fe944165e91") for name in _NAMES}
_FILES: Final = tuple(spelling for name in _NAMES for spelling in (name, f"{name}.gz"))


def _read(paths: Sequence[Path]) -> tuple[UserPart, UserPart]:
    path = paths[0]
    with reading(SHAKESPEARE_ROLES, path), open_file(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise damaged(SHAKESPEARE_ROLES, path, f"it has more than {MAX_BYTES:,} bytes")
    check_published(SHAKESPEARE_ROLES, path, memoryview(content))
    try:
        text = content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise damaged(SHAKESPEARE_ROLES, path, f"byte {error.start:,} is not UTF-8") from None
    cut = {role: windows(spoken) for role, spoken in speeches(text).items()}
    users = np.repeat(np.array(list(cut), dtype=str), [len(inputs) for inputs, _ in cut.values()])
    if not len(users):
        raise damaged(SHAKESPEARE_ROLES, path, f"no role, a line 'NAME:', speaks more than {LENGTH} characters")
    inputs, targets = (np.concatenate([pair[i] for pair in cut.values()]) for i in (0, 1))
    testing = held_out(users, SHAKESPEARE_ROLES.name)
    train, test = ((inputs[part], targets[part], users[part]) for part in (~testing, testing))
    return train, test


def speeches(text: str) -> dict[str, str]:
    """Return all that each role says, in the order of the roles' first speeches."""
    _, *parts = SPEECH.split(text)
    said: dict[str, list[str]] = {}
    for role, speech in zip(parts[::2], parts[1::2], strict=True):
        said.setdefault(role, []).append(speech.strip("\n"))
    return {role: "\n".join(all_speeches) for role, all_speeches in said.items()}


SHAKESPEARE_ROLES = DataSet(
    name="shakespeare-roles",
    summary="characters of Shakespeare's plays; users are the roles",
    credit="Shakespeare, in the public domain; the selection is Karpathy's (char-rnn)",
    image=(LENGTH,),
    train_samples=10_168,
    test_samples=2_534,
    classes=CLASSES,
    read=_read,
    layouts=(("tinyshakespeare", (_FILES,)), ("", (_FILES[2:],))),
    published=_PUBLISHED,
    download=Download(
        folder="tinyshakespeare",
        mirrors=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",),
        files=(_PUBLISHED["input.txt"],),
    ),
    inputs="tokens",
)
