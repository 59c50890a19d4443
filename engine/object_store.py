"""Copies folders to and from object stores, such as ``s3://bucket/folder``, through fsspec.

A store cannot rename a folder in one step, so a reader could find half a folder. Therefore each
folder has a *marker*: a file that is written last and removed first. A folder without its marker is
not used. fsspec reads credentials from the environment.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from .environment.process import cache_folder
from .errors import ConfigError, StoreError, shorten

log = logging.getLogger("sdp")

ATTEMPTS = 4  # attempts of an operation, besides those that the library of a store makes itself
THREADS = 8  # threads that copy files of a folder to this host
FIRST_WAIT_SECONDS = 1.0  # before the second attempt; twice as long before each further one
MOST_BYTES = 1 << 30  # the largest file that is read into memory
FETCHING = ".sdp-fetching"  # holds the marker of the folder that is being fetched

_URL = re.compile(r"[a-z][a-z0-9+.-]*://.")
_CUT_URL = re.compile(r"(s3|gs|gcs|az|abfs|file):/", re.IGNORECASE)  # also how pathlib writes a URL
T = TypeVar("T")


def is_url(path: str | Path) -> bool:
    """Whether ``path`` names a folder in an object store.

    Raises ConfigError if ``path`` is an incomplete URL, or a Path that was made from a URL.
    """
    if isinstance(path, str) and _URL.match(path):
        return True
    if _CUT_URL.match(str(path)):
        was = "was a URL that pathlib.Path has changed; give the URL as text"
        raise ConfigError(f"{path}: {was if isinstance(path, Path) else 'is no URL such as s3://bucket/folder'}")
    return False


class Store:
    """Reads and writes the files of a folder in an object store.

    Names of files are relative to ``url``, the folder. Operations that fail are repeated. After
    several attempts, a method raises StoreError.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs

            options = {"auto_mkdir": True} if self.url.startswith("file:") else {}
            self._files, root = url_to_fs(self.url, use_listings_cache=False, **options)
        except ImportError as error:
            raise StoreError(
                f"{url}: a package is missing ({shorten(error)}); for s3://, run pip install "
                "'sdp-engine[object-stores]'"
            ) from None
        except ValueError as error:
            raise StoreError(f"{url}: fsspec knows no such store ({shorten(error)})") from None
        self._root = root.rstrip("/")

    def sizes(self) -> dict[str, int]:
        """Return the size of every file in bytes, by name."""
        found = self._attempt("list", lambda: self._files.find(self._root, detail=True), {})
        return {path.removeprefix(self._root).lstrip("/"): info["size"] for path, info in found.items()}

    def get_all(self, folder: Path) -> str:
        """Copy the file or folder at ``url`` to a local folder. ``url`` may be a glob pattern.

        Returns the URL of the deepest folder in the store that contains all of the copied files.
        """

        def copy() -> str:
            matches = [self._root] if self._files.exists(self._root) else self._files.glob(self._root)
            files = [file for match in matches for file in self._files.find(match)]
            if not files:
                raise FileNotFoundError("there is no such file")
            top = os.path.commonpath([file.rpartition("/")[0] for file in files])
            self._files.get(files, [str(inside(folder, file.removeprefix(f"{top}/"))) for file in files])
            return self._files.unstrip_protocol(top)

        folder.mkdir(parents=True, exist_ok=True)
        return self._attempt("read", copy)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, or None if there is none."""

        def content() -> bytes:
            if (size := self._files.info(self._path(name))["size"]) > MOST_BYTES:
                raise StoreError(f"{self.url}/{name}: has {size:,} bytes, and {MOST_BYTES:,} are allowed")
            return self._files.cat_file(self._path(name))

        return self._attempt(f"read {name} of", content, None)

    def write(self, name: str, content: str | bytes) -> None:
        """Write a small file in one step."""
        data = content.encode() if isinstance(content, str) else content
        self._attempt(f"write {name} to", lambda: self._files.pipe_file(self._path(name), data))

    def put(self, file: Path, name: str) -> None:
        """Copy a local file to the store, and check the size of the copy."""

        def copy() -> None:
            self._files.put_file(str(file), self._path(name))
            found, expected = self._files.info(self._path(name))["size"], file.stat().st_size
            if found != expected:
                raise OSError(f"{found:,} bytes arrived instead of {expected:,}")

        self._attempt(f"write {name} to", copy)

    def get(self, name: str, file: Path, size: int) -> None:
        """Copy a file of ``size`` bytes from the store to ``file``, which is never incomplete."""
        partial = file.with_name(f"{file.name}{FETCHING}")

        def copy() -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(self._path(name), str(partial))
            if (found := partial.stat().st_size) != size:
                raise OSError(f"{found:,} bytes arrived instead of {size:,}")
            partial.replace(file)

        try:
            self._attempt(f"read {name} of", copy)
        finally:
            with suppress(OSError):
                partial.unlink()

    def remove(self, names: Iterable[str]) -> None:
        """Remove files. Missing files are no error."""
        for name in names:
            self._attempt(f"remove {name} from", lambda name=name: self._files.rm_file(self._path(name)), None)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _attempt(self, what: str, action: Callable[[], T], *missing: Any) -> T:
        """Return the result of ``action``, which is repeated if it fails.

        ``missing``: the result if the file does not exist. By default, a missing file is an error.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return action()
            except FileNotFoundError as error:
                if missing:
                    return missing[0]
                raise self._failure(what, error) from None
            except (StoreError, PermissionError) as error:
                raise self._failure(what, error) from None
            except Exception as error:  # the libraries of stores have their own classes
                if attempt == ATTEMPTS or "Credentials" in type(error).__name__:
                    raise self._failure(what, error) from None
                log.warning("%s, attempt %d of %d", self._failure(what, error), attempt, ATTEMPTS)
                time.sleep(FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("unreachable: the last attempt has returned a result or raised an error")

    def _failure(self, what: str, error: Exception) -> StoreError:
        if isinstance(error, StoreError):
            return error
        return StoreError(f"cannot {what} {self.url}: {shorten(str(error).strip() or type(error).__name__)}")


def upload(folder: Path, url: str, marker: str, replaced: re.Pattern[str]) -> None:
    """Copy all files of a local folder to an object store, and replace an older copy.

    Files named ``marker`` are removed first and written last. Old files whose names match
    ``replaced`` are removed from the folders that are written. Raises StoreError.
    """

    def order(name: str) -> tuple[bool, int, str]:
        # Markers come first, and the marker of a folder before the markers of its subfolders.
        return name.rpartition("/")[2] != marker, name.count("/"), name

    store = Store(url)
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    folders = {"", *(name.rpartition("/")[0] for name in files)}
    there = [name.rpartition("/") for name in store.sizes()]
    old = ["".join(parts) for parts in there if parts[0] in folders and replaced.fullmatch(parts[2])]
    store.remove(sorted(old, key=order))
    for name in sorted(files, key=order, reverse=True):
        store.put(folder / name, name)


def fetch(url: str, marker: str, folder: Path | None = None) -> Path | None:
    """Copy a folder of an object store to this host, unless an equal copy exists already.

    A copy is equal if it has the same file ``marker``. By default, the copy is in the cache. If
    several processes of this host call this, one of them copies and the others wait.

    Returns:
        The path of the copy. None if the folder in the store has no file ``marker``.

    Raises:
        StoreError: The store does not answer, the folder changed while it was copied, or the copy
            cannot be written.
    """
    store, folder = Store(url), local_copy(url) if folder is None else folder
    with _only_one(folder):
        if (content := store.read(marker)) is None:
            return None
        if _content_of(folder / marker) == content:
            return folder
        begun = folder / FETCHING
        if _content_of(begun) != content:  # another version, or nothing
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            begun.write_bytes(content)
        sizes = {name: size for name, size in store.sizes().items() if name != marker}
        log.info("fetching %s to %s: %d files, %.1f MB", store.url, folder, len(sizes), sum(sizes.values()) / 1e6)
        missing = [name for name in sizes if not inside(folder, name).is_file()]
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda name: store.get(name, folder / name, sizes[name]), missing))
        if store.read(marker) != content:
            raise StoreError(f"{url}: changed while it was read; run the command again")
        begun.replace(folder / marker)
    return folder


def local_copy(url: str) -> Path:
    """Return the folder in the cache to which :func:`fetch` copies ``url``."""
    scheme, _, path = url.partition("://")
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        raise ConfigError(f"{url}: has '..', which leads out of the store's folder; write the path without it")
    return cache_folder().joinpath(scheme, *parts)


def inside(folder: Path, name: str) -> Path:
    """Return ``folder / name``. Raises StoreError if the name leads out of the folder.

    Names of files in a store are not trusted.
    """
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise StoreError(f"{shorten(name)}: this name of a file in the store leads out of the folder")
    return folder / name


def _content_of(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """A context in which no other process changes ``folder``. OSError becomes StoreError."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f".{folder.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written ({error})") from None
