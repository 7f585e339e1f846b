"""The one place for intermediate files: a folder of our own inside ``TmpDir``, made when it is first needed and removed
with everything in it when the work is over.

What a calibration keeps for a second look goes into files of raw float32 values. Under ``CryptoMode`` nothing goes to
disk: it is kept in memory, or, with ``EncryptionAlgorithm="AES-256"``, encrypted with a key that only this process has
(AES in counter mode; a fresh random key and nonce for every file, nothing of which is stored).
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from quark.config.options import Options
from quark.errors import ConfigError
from quark.files.private import told
from quark.observers import Memory, Store

#: Values that are read back at a time.
PART = 1 << 20
KEY_BYTES, BLOCK = 32, 16


class Scratch:
    """A folder for one job, to be used in a ``with`` block.

    Args:
        options: ``TmpDir``, ``CryptoMode`` and ``EncryptionAlgorithm`` count.
    """

    def __init__(self, options: Options) -> None:
        self._parent = None if options.TmpDir is None else Path(options.TmpDir).resolve()
        self._secret, self._encrypted = options.CryptoMode, options.EncryptionAlgorithm is not None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files = 0

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None:
            self._folder.cleanup()
        if isinstance(error, OSError) and (words := told(error, self._parent, "option TmpDir")):
            raise words from error

    def folder(self, purpose: str) -> Path:
        """The folder, for files that are not encrypted.

        Raises:
            ConfigError: ``CryptoMode`` forbids it; the message names the purpose.
        """
        if self._secret:
            raise ConfigError(f"CryptoMode: {purpose} would write model data to disk")
        return self._made()

    def _made(self) -> Path:
        if self._folder is None:
            if self._parent is not None:
                self._parent.mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(dir=self._parent, prefix="quark-", ignore_cleanup_errors=True)
        return Path(self._folder.name)

    def store(self) -> Store:
        """A place for values: a file, an encrypted one, or memory where nothing may touch the disk."""
        if self._secret and not self._encrypted:
            return Memory()
        self._files += 1
        return Spilled(self._made() / f"{self._files}.values", aes() if self._secret else None)


class Spilled:
    """Float32 values in a file.

    Args:
        path: the file; made with the first values.
        cipher: makes a fresh cipher at the start of the stream, for writing and for reading; ``None``: plain bytes.
    """

    def __init__(self, path: Path, cipher: Callable[[], Any] | None = None) -> None:
        self._path, self._cipher = path, cipher
        self._encryptor = None if cipher is None else cipher()

    def append(self, values: np.ndarray) -> None:
        """Keep float32 values [n]."""
        content = np.ascontiguousarray(values, np.float32).tobytes()
        with self._path.open("ab") as file:
            file.write(content if self._encryptor is None else self._encryptor.update(content))

    def parts(self) -> Iterator[np.ndarray]:
        """All values again, in order, at most ``PART`` at a time."""
        decryptor = None if self._cipher is None else self._cipher()
        with self._path.open("rb") as file:
            while content := file.read(4 * PART):
                yield np.frombuffer(content if decryptor is None else decryptor.update(content), np.float32)


def aes() -> Callable[[], Any]:
    """Ciphers of AES-256 in counter mode, all with one new random key; encrypting is decrypting.

    Raises:
        ConfigError: the package ``cryptography`` is not installed.
    """
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        raise ConfigError(
            'EncryptionAlgorithm "AES-256" needs the package cryptography: pip install cryptography'
        ) from (error)
    cipher = Cipher(algorithms.AES256(secrets.token_bytes(KEY_BYTES)), modes.CTR(secrets.token_bytes(BLOCK)))
    return cipher.encryptor
