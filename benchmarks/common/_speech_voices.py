# SPDX-License-Identifier: Apache-2.0
"""A few words spoken by espeak-ng, and the filter banks of what was said.

Its library takes 2 ms an utterance, where its program would take ten times that to start. What it says depends on what
it has said before, so `spoken` starts a process of its own: this file, which reads JSON and writes arrays. Accent,
variant of the voice, speed and pitch make a manner of speaking; every tenth is held out.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import io
import json
import subprocess
import sys
from functools import cache
from typing import NamedTuple

import numpy as np

RATE = 22_050  # samples a second, espeak-ng's own
WINDOW, HOP = 512, 220  # samples: 23 ms, every 10 ms
BANDS, LOWEST, HIGHEST = 26, 100.0, 6_000.0  # filters, Hz
SILENCE = 20  # amplitude, of 32767, below which an utterance has not begun or is over

ACCENTS = ("en", "en-US", "en-GB-scotland", "en-GB-x-rp", "en-029", "en-US-nyc")
VARIANTS = ("", "+m2", "+m3", "+m5", "+m7", "+f1", "+f2", "+f3", "+f4")
SPEEDS = (180, 205, 230, 260)  # words a minute
PITCHES = (30, 50, 70)

MISSING = "cannot load espeak-ng's library: install espeak-ng (Debian and Ubuntu: apt install espeak-ng)"
# Of speak_lib.h.
_SYNCHRONOUS, _CHARACTERS, _UTF8, _SPEED, _PITCH = 2, 1, 1, 1, 3


class Manner(NamedTuple):
    """How something is said."""

    accent: str
    variant: str
    speed: int
    pitch: int


def manners(held_out: bool) -> list[Manner]:
    """Those of training, or those that no training hears."""
    every = [Manner(a, v, s, p) for a in ACCENTS for v in VARIANTS for s in SPEEDS for p in PITCHES]
    order = np.random.default_rng(0).permutation(len(every))
    return [every[place] for number, place in enumerate(order) if (number % 10 == 0) == held_out]


@cache
def _library() -> ctypes.CDLL:
    for name in (ctypes.util.find_library("espeak-ng"), "libespeak-ng.so.1", "libespeak-ng.dylib"):
        try:
            found = ctypes.CDLL(name) if name else None
        except OSError:
            continue
        if found is not None:
            return found
    raise SystemExit(MISSING)


def missing() -> str:
    """Why nothing can be spoken here; empty where it can."""
    try:
        _library()
    except SystemExit as error:
        return str(error)
    return ""


class Speaker:
    """espeak-ng's library, which has one voice at a time."""

    def __init__(self) -> None:
        self._library, self._parts = _library(), list[np.ndarray]()
        rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, None, 0)
        if rate != RATE:
            raise SystemExit(f"espeak-ng speaks {rate} samples a second, not {RATE}: is its package whole?")
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._heard = kind(self._hear)  # the library does not keep it alive
        self._library.espeak_SetSynthCallback(self._heard)

    def _hear(self, wave: ctypes._Pointer[ctypes.c_short], samples: int, _: object) -> int:
        if wave and samples:
            self._parts.append(np.ctypeslib.as_array(wave, (samples,)).copy())
        return 0

    def take(self, manner: Manner) -> None:
        """Speak in this manner from now on."""
        voice = f"gmw/{manner.accent}{manner.variant}"
        if self._library.espeak_SetVoiceByName(voice.encode()):
            raise SystemExit(f"espeak-ng has no voice {voice}: is its package whole, and of version 1.50 or later?")
        self._library.espeak_SetParameter(_SPEED, manner.speed, 0)
        self._library.espeak_SetParameter(_PITCH, manner.pitch, 0)

    def say(self, text: str) -> np.ndarray:
        """The sound, float32, without silence at its ends."""
        self._parts.clear()
        written = text.encode()
        self._library.espeak_Synth(written, len(written) + 1, 0, _CHARACTERS, 0, _UTF8, None, None)
        wave = np.concatenate([np.zeros(0, np.int16), *self._parts])
        loud = np.flatnonzero(np.abs(wave.astype(np.int32)) > SILENCE)
        return wave[loud[0] : loud[-1] + 1].astype(np.float32) / 32768 if len(loud) else np.zeros(0, np.float32)


@cache
def _filters() -> np.ndarray:
    """(frequencies, BANDS): triangles that are evenly wide on the mel scale."""
    ends = [2595 * np.log10(1 + hertz / 700) for hertz in (LOWEST, HIGHEST)]
    corners = 700 * (10 ** (np.linspace(*ends, BANDS + 2) / 2595) - 1)
    hertz = np.fft.rfftfreq(WINDOW, 1 / RATE)[:, None]
    up = (hertz - corners[:-2]) / (corners[1:-1] - corners[:-2])
    down = (corners[2:] - hertz) / (corners[2:] - corners[1:-1])
    return np.maximum(0, np.minimum(up, down))


def bands(wave: np.ndarray) -> np.ndarray:
    """Power in each band, float32 (frames, BANDS)."""
    padded = np.pad(wave, (0, max(0, WINDOW - len(wave))))
    pieces = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP] * np.hanning(WINDOW)
    return (np.abs(np.fft.rfft(pieces)) ** 2 @ _filters()).astype(np.float32)


def spoken(texts: list[str], how: list[Manner]) -> list[np.ndarray]:
    """Power in each band of each text, (frames, BANDS)."""
    _library()  # complain here where it is missing
    asked = json.dumps(list(zip(texts, how, strict=True))).encode()
    done = subprocess.run([sys.executable, __file__], input=asked, stdout=subprocess.PIPE, check=True)
    found = np.load(io.BytesIO(done.stdout))
    return np.split(found["powers"], np.cumsum(found["frames"])[:-1])


def main() -> None:
    """Speak what standard input asks for; those in one manner follow one another."""
    asked = [(text, Manner(*how)) for text, how in json.load(sys.stdin)]
    speaker, manner, powers = Speaker(), None, dict[int, np.ndarray]()
    for place in sorted(range(len(asked)), key=lambda place: asked[place][1]):
        text, wanted = asked[place]
        if wanted != manner:
            manner = wanted
            speaker.take(manner)
        powers[place] = bands(speaker.say(text))
    parts, out = [powers[place] for place in range(len(asked))], io.BytesIO()
    np.savez(out, powers=np.concatenate(parts), frames=[len(part) for part in parts])
    sys.stdout.buffer.write(out.getvalue())


if __name__ == "__main__":
    main()
