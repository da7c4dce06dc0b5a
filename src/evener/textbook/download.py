"""Fetching files from a server, so that a file under its own name is always whole and right.

Whatever happens, a reader finds a file complete or not at all::

    the server's answer ──► NAME.part   written and counted, its SHA-256 taken on the way
                            size and SHA-256 as expected?   no: deleted, DownloadError
                            fsync       the bytes are on the disk ...
    NAME                ◄── os.replace  ... before they get their name, in one step

One process at a time downloads into a folder: it holds a lock on the folder, which the system
gives back when the process ends, however it ends. So a ``NAME.part`` that is found under the
lock was left by a process that was killed, and is overwritten.
"""

import fcntl
import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from evener.errors import EvenerError

__all__ = ["DownloadError", "OnBytes", "RemoteFile", "fetch"]

#: Called as ``on_bytes(name, bytes so far, bytes in all)`` while a file arrives.
OnBytes = Callable[[str, int, int], None]

_BLOCK_BYTES = 1 << 16


class DownloadError(EvenerError, OSError):
    """A file could not be fetched, or is not the one that was expected."""


@dataclass(frozen=True)
class RemoteFile:
    """A file on a server, and how to know that one got it.

    Attributes:
        name: its name, both on the server and in the folder.
        num_bytes: its size.
        sha256: the SHA-256 of its bytes, as 64 hexadecimal digits.
    """

    name: str
    num_bytes: int
    sha256: str


def fetch(
    base_url: str,
    files: Iterable[RemoteFile],
    folder: Path,
    *,
    timeout_s: float = 30.0,
    on_bytes: OnBytes | None = None,
) -> None:
    """Fetch those of the files that the folder does not have yet, whole and right.

    Args:
        base_url: where the files lie; ``base_url/NAME`` is asked for.
        files: which files.
        folder: where they go; made if it is not there.
        timeout_s: how long the server may stay silent, in seconds. Default 30.
        on_bytes: told of the progress (see :data:`OnBytes`). Default: nobody is told.

    Raises:
        DownloadError: if the server cannot be reached, stays silent, refuses, breaks off or sends
            something else, if the folder cannot be written, or if another process is
            downloading into it. Files that were complete before stay; nothing half is left.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            for file in files:
                if not _has(folder, file):
                    _fetch_one(base_url, file, folder, timeout_s, on_bytes)
    except DownloadError:
        raise
    except OSError as error:
        raise DownloadError(f"cannot download into {folder}: {error}") from error


def _has(folder: Path, file: RemoteFile) -> bool:
    """Say whether the folder holds the file as it should be."""
    path = folder / file.name
    if not path.exists() or path.stat().st_size != file.num_bytes:
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256


def _fetch_one(
    base_url: str, file: RemoteFile, folder: Path, timeout_s: float, on_bytes: OnBytes | None
) -> None:
    url = f"{base_url.rstrip('/')}/{file.name}"
    part = folder / f"{file.name}.part"
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with part.open("wb") as out:
            for block in _blocks(url, timeout_s):
                out.write(block)
                digest.update(block)
                num_bytes += len(block)
                if on_bytes is not None:
                    on_bytes(file.name, num_bytes, file.num_bytes)
                if num_bytes > file.num_bytes:
                    break
            out.flush()
            os.fsync(out.fileno())
        if num_bytes < file.num_bytes:
            raise DownloadError(f"{url} broke off after {num_bytes} of {file.num_bytes} bytes")
        if num_bytes > file.num_bytes or digest.hexdigest() != file.sha256:
            raise DownloadError(
                f"{url} is not the expected file: got {num_bytes} bytes with SHA-256 "
                f"{digest.hexdigest()}, expected {file.num_bytes} bytes with SHA-256 {file.sha256}"
            )
        part.replace(folder / file.name)
    finally:
        part.unlink(missing_ok=True)


def _blocks(url: str, timeout_s: float) -> Iterator[bytes]:
    """Give the bytes of a server's answer as they come; its failures as DownloadError."""
    try:
        # What arrives is compared with a SHA-256 that the caller knows, from wherever it comes.
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:  # noqa: S310
            while block := answer.read(_BLOCK_BYTES):
                yield block
    except urllib.error.HTTPError as error:
        error.close()
        raise DownloadError(f"cannot download {url}: {error}") from error
    except (OSError, HTTPException) as error:
        raise DownloadError(f"cannot download {url}: {error}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, and have what changed in it on the disk at the end."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DownloadError(
                f"another process is downloading into {folder}; try again when it is done"
            ) from error
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
