"""Versions: which of many dictionaries were changed, without a look into each.

To compare thousands of dictionaries with what they held takes longer than a small training step.
Many versions of CPython give each dictionary a new number whenever it is changed (PEP 509; torch's
compiler and CPython's own specialised instructions rely on it), so one gather of those numbers
tells::

    address of each dictionary + 24 ──► its number ──┐
                                                     ├── equal? then nothing was changed
    the numbers when they were last looked at ───────┘

Where an interpreter has no such numbers, which is tried out and not guessed from its version, the
dictionaries are compared: the same answer, several times slower.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import chain
from operator import is_
from typing import Any

import torch

from evener.arena import normal_mode

#: Where the number is: behind the reference count, the type and the number of entries.
_OFFSET = 24
_values = dict.values


class Versions:
    """Tells which of some dictionaries were changed.

    Setting an entry to what it was may count as a change.

    Args:
        dicts: the dictionaries; they are held.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._watch = (_Counted if dicts and is_counted() else _Compared)(dicts)

    def changed(self) -> list[int]:
        """The numbers of those that were changed since this was last asked, or since the start."""
        return self._watch.changed()


class _Counted:
    """By the interpreter's own count of changes."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = list(dicts)  # held, so that what is read is theirs
        addresses = [id(d) + _OFFSET for d in self._dicts]
        first = min(addresses)
        num_words = (max(addresses) - first) // 8 + 1
        # Of all these words only the dictionaries' own are ever read.
        words = (ctypes.c_int64 * num_words).from_address(first)
        with normal_mode():
            self._words = torch.frombuffer(words, dtype=torch.int64, count=num_words)
            self._where = torch.tensor(
                [(address - first) // 8 for address in addresses], device="cpu"
            )
        self._seen = self._words.take(self._where)

    def changed(self) -> list[int]:
        now = self._words.take(self._where)
        if torch.equal(now, self._seen):
            return []
        numbers: list[int] = (now != self._seen).nonzero().flatten().tolist()
        self._seen = now
        return numbers


class _Compared:
    """By comparison of keys and identities."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = list(dicts)
        self._take()

    def changed(self) -> list[int]:
        # By identity: 1 and 1.0 are equal, and a user's own `==` may fail for what it is not
        # made for.
        full = self._full
        if (
            not any(self._empty)
            and list(map(len, full)) == self._sizes
            and [*chain.from_iterable(full)] == self._keys
            and all(map(is_, chain.from_iterable(map(_values, full)), self._objects))
        ):
            return []
        numbers = [
            number
            for number, (d, before) in enumerate(zip(self._dicts, self._before, strict=True))
            if [*d] != [*before] or not all(map(is_, d.values(), before.values()))
        ]
        self._take()
        return numbers

    def _take(self) -> None:
        self._before = [dict(d) for d in self._dicts]
        self._empty = [d for d in self._dicts if not d]
        self._full = [d for d in self._dicts if d]
        self._sizes = list(map(len, self._full))
        self._keys = [*chain.from_iterable(self._full)]
        self._objects = [*chain.from_iterable(map(_values, self._full))]


@cache
def is_counted() -> bool:
    """Whether this interpreter counts the changes of a dictionary where we look for the count."""

    class Probe:
        pass

    probe = Probe()
    probe.first = 1  # type: ignore[attr-defined]
    attributes = vars(probe)
    for own in ({"first": 1}, attributes):
        word = ctypes.c_int64.from_address(id(own) + _OFFSET)
        counts = [word.value]
        if own.get("first") != 1 or word.value != counts[0]:
            return False
        own["first"] = 2
        counts.append(word.value)
        own["second"] = 3
        counts.append(word.value)
        del own["second"]
        counts.append(word.value)
        if len(set(counts)) != len(counts):
            return False
    before = word.value
    probe.first = 4  # type: ignore[attr-defined] # from here on not through the dictionary
    return word.value != before
