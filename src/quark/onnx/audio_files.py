"""WAV files as samples in -1..1: PCM of 8 to 32 bits by Python's own reader, other encodings by soundfile where it is
installed. Several channels become their mean. The rate is not changed: resample before.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quark.errors import DataError
from quark.reading import reason_of, regular_file

SOUNDS = (".wav",)
WIDEST = 4
"""Bytes of a frame of one channel that are read at most."""
LONGEST = 2**28
"""Frames of one file that are read at most."""


class UnreadableSound(DataError):
    """A file that is not a sound, or a damaged one."""


def read_sound(path: Path) -> np.ndarray:
    """The frames of one file, float32 ``[frames]`` in -1..1.

    Raises:
        UnreadableSound: no regular file, damaged, an encoding that needs soundfile, or too long.
    """
    regular_file(path, UnreadableSound, "the sound")
    import wave

    try:
        with wave.open(str(path), "rb") as opened:
            width, channels, frames = opened.getsampwidth(), opened.getnchannels(), opened.getnframes()
            if frames > LONGEST:
                raise UnreadableSound(f"{str(path)!r} has {frames} frames; at most {LONGEST} are read")
            raw = opened.readframes(frames)
    except wave.Error as error:
        return _by_soundfile(path, error)
    except (EOFError, OSError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: chunks beyond the end
        raise UnreadableSound(f"{str(path)!r} is not a readable WAV file: {reason_of(error)}") from error
    if width > WIDEST:
        raise UnreadableSound(f"{str(path)!r} has {8 * width} bits a frame; at most {8 * WIDEST} are read")
    whole = len(raw) // (width * channels) * width * channels
    if not whole:
        raise UnreadableSound(f"{str(path)!r} holds no frame")
    return np.asarray(_scaled(raw[:whole], width).reshape(-1, channels).mean(1), np.float32)


def rate_of(path: Path) -> int | None:
    """Frames a second, where Python's own reader finds them.

    Raises:
        UnreadableSound: no regular file.
    """
    regular_file(path, UnreadableSound, "the sound")
    import wave

    try:
        with wave.open(str(path), "rb") as opened:
            return opened.getframerate()
    except (wave.Error, EOFError, OSError, RuntimeError):
        return None


def _scaled(raw: bytes, width: int) -> np.ndarray:
    if width == 1:  # unsigned
        return (np.frombuffer(raw, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:
        parts = np.frombuffer(raw, np.uint8).reshape(-1, 3).astype(np.int32)
        whole = (parts[:, 0] << 8 | parts[:, 1] << 16 | parts[:, 2] << 24) >> 8
        return whole / np.float32(2**23)
    return np.frombuffer(raw, f"<i{width}") / np.float32(2 ** (8 * width - 1))


def _by_soundfile(path: Path, error: Exception) -> np.ndarray:
    try:
        import soundfile
    except ImportError:
        raise UnreadableSound(
            f"{str(path)!r} is not a readable PCM file: {reason_of(error)}; other encodings need: pip install soundfile"
        ) from error
    try:
        frames, _ = soundfile.read(path, dtype="float32", always_2d=True)
    except (RuntimeError, OSError, ValueError) as broken:
        raise UnreadableSound(f"{str(path)!r} is not a readable sound: {reason_of(broken)}") from broken
    return np.asarray(frames.mean(1), np.float32)
