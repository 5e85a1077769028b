# SPDX-License-Identifier: Apache-2.0
"""Text of the machine that runs this, as token ids: documentation and sources that come with Python and its packages.

Nothing is fetched. Files are taken in the order of a seeded shuffle of their relative paths, so that a machine with the same
packages gives the same text; a hash says which text it was.

A token is a byte, or one of the most common pieces of the text: a word with the space before it, one digit, a line break with
the indentation behind it, some signs. Words that a question needs are pieces in any text.
"""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

BEGIN, END, BYTES = 0, 1, 2
"""The first ids: a document's begin and end, then 256 bytes; pieces follow."""
SUFFIXES: Final = frozenset({".py", ".md", ".rst", ".txt"})
HELD_OUT: Final = 0.05
"""Share of the tokens that nothing is trained on, the last ones."""
_PIECE: Final = re.compile(r" ?[A-Z]?[a-z]+| ?[A-Z]+| ?[0-9]|\n+ *|[^\S\n]+| ?[^\sA-Za-z0-9]{1,3}")
_DOCUMENT: Final = (600, 120_000)
"""Characters: shorter files are left out, longer ones are cut."""


def default_roots() -> list[Path]:
    """The standard library and the installed packages."""
    paths = sysconfig.get_paths()
    return [Path(paths[name]) for name in ("stdlib", "purelib")]


def documents(roots: Iterable[Path], size: int, *, seed: int) -> Iterator[str]:
    """Texts of files below `roots` until `size` characters are there; each content once.

    A file that is no UTF-8 is left out. Raises: ValueError for less than a quarter of `size`.
    """
    found: dict[str, Path] = {}
    for root in roots:
        for path in root.rglob("*"):
            if path.suffix in SUFFIXES and path.is_file():
                found.setdefault(path.relative_to(root).as_posix(), path)
    names = sorted(found)
    random.Random(seed).shuffle(names)
    seen: set[bytes] = set()
    shortest, longest = _DOCUMENT
    taken = 0
    for name in names:
        if taken >= size:
            return
        try:
            text = found[name].read_text("utf-8")[:longest]
        except UnicodeDecodeError:
            continue
        key = hashlib.sha256(text.encode()).digest()
        if len(text) >= shortest and key not in seen:
            seen.add(key)
            taken += len(text)
            yield text
    if taken < size // 4:
        raise ValueError(f"only {taken} characters of text below {', '.join(map(str, roots))}; name more folders with --text")


class Vocabulary:
    """Pieces by their id. `encode` never fails: what is no piece is written in bytes."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = tuple(pieces)
        self._ids = {piece: BYTES + 256 + number for number, piece in enumerate(self.pieces)}

    @classmethod
    def of(cls, texts: Iterable[str], size: int, needed: Iterable[str]) -> Vocabulary:
        """The most common pieces of `texts`, and all of those that the texts `needed` are made of.

        Raises: ValueError where `size` ids do not hold those that are needed.
        """
        own = dict.fromkeys(piece for text in needed for piece in _PIECE.findall(text))
        counts = Counter(piece for text in texts for piece in _PIECE.findall(text))
        ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))
        room = size - BYTES - 256
        if len(own) > room:
            raise ValueError(f"a vocabulary of {size} has no room for {len(own)} needed pieces")
        chosen = dict.fromkeys((*own, *(piece for piece in ranked if len(piece.encode()) > 1)))
        return cls(list(chosen)[:room])

    def encode(self, text: str) -> list[int]:
        """Token ids."""
        found: list[int] = []
        for piece in _PIECE.findall(text):
            known = self._ids.get(piece)
            if known is None:
                found += [BYTES + byte for byte in piece.encode()]
            else:
                found.append(known)
        return found


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on, and held-out ones, [n] uint16 each. digest: SHA-256 of the text and the pieces."""

    vocabulary: Vocabulary
    train: NDArray[np.uint16]
    held: NDArray[np.uint16]
    digest: str


def make_corpus(texts: Sequence[str], vocab: int, needed: Iterable[str]) -> Corpus:
    """The tokens of all documents, one after the other."""
    vocabulary = Vocabulary.of(texts, vocab, needed)
    arrays = [np.array([BEGIN, *vocabulary.encode(text), END], np.uint16) for text in texts]
    tokens = np.concatenate(arrays)
    held = int(HELD_OUT * len(tokens))
    digest = hashlib.sha256("\0".join((*texts, *vocabulary.pieces)).encode()).hexdigest()
    return Corpus(vocabulary, tokens[:-held], tokens[-held:], digest)
