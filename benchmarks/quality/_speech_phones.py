# SPDX-License-Identifier: Apache-2.0
"""Speech whose sounds are known to the sample: espeak-ng says where each phone begins.

As `_speech_voices.py`, this file is also the process that speaks. One accent, since each has phones of its own.
"""

from __future__ import annotations

import ctypes
import io
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))  # also as the process that speaks

import numpy as np
from _speech_voices import HOP, SPEEDS, VARIANTS, WINDOW, Manner, Speaker, bands

ACCENT, PITCHES = "en", (30, 40, 50, 60, 70)
# Of speak_lib.h.
_LAST, _PHONE, _PHONES_WANTED = 0, 7, 1


class _Name(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("pointer", ctypes.c_char_p), ("text", ctypes.c_char * 8))


class _Event(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("kind", "unique", "place", "length", "milliseconds", "sample")),
        ("user", ctypes.c_void_p),
        ("name", _Name),
    )


class PhoneSpeaker(Speaker):
    """A speaker that tells its phones, too."""

    def __init__(self) -> None:
        super().__init__()
        self.begins: list[tuple[int, str]] = []
        self._library.espeak_Initialize(2, 0, None, _PHONES_WANTED)
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Event))
        self._told = kind(self._tell)  # the library does not keep it alive
        self._library.espeak_SetSynthCallback(self._told)

    def _tell(self, wave: int | None, samples: int, events: ctypes._Pointer[_Event]) -> int:
        place = 0
        while events and events[place].kind != _LAST:
            if events[place].kind == _PHONE:
                self.begins.append((events[place].sample, events[place].name.text.decode()))
            place += 1
        return self._hear(ctypes.cast(wave, ctypes.POINTER(ctypes.c_short)), samples, None) if wave else 0

    def phones(self, text: str) -> tuple[np.ndarray, list[tuple[int, str]]]:
        """The sound, float32, with what silence it has, and where each phone begins, in samples."""
        self._parts.clear()
        self.begins.clear()
        written = text.encode()
        self._library.espeak_Synth(written, len(written) + 1, 0, 1, 0, 1, None, None)
        wave = np.concatenate([np.zeros(0, np.int16), *self._parts]).astype(np.float32) / 32768
        return wave, list(self.begins)


def manners(held_out: bool) -> list[Manner]:
    """Those of training, or those that no training hears."""
    every = [Manner(ACCENT, v, s, p) for v in VARIANTS for s in SPEEDS for p in PITCHES]
    order = np.random.default_rng(0).permutation(len(every))
    return [every[place] for number, place in enumerate(order) if (number % 10 == 0) == held_out]


def aligned(frames: int, begins: list[tuple[int, str]], samples: int) -> list[tuple[str, int]]:
    """The phone at the middle of each frame, and which third of it (0, 1, 2)."""
    starts = np.array([begin for begin, _ in begins])
    ends = np.append(starts[1:], samples)
    middles = np.arange(frames) * HOP + WINDOW // 2
    at = np.clip(np.searchsorted(starts, middles, side="right") - 1, 0, len(begins) - 1)
    through = (middles - starts[at]) / np.maximum(1, ends[at] - starts[at])
    thirds = np.clip((through * 3).astype(int), 0, 2)
    return [(begins[place][1], int(third)) for place, third in zip(at, thirds, strict=True)]


def spoken(texts: list[str], how: list[Manner]) -> tuple[list[np.ndarray], list[list[tuple[str, int]]]]:
    """Power in each band of each text, (frames, BANDS), and the phone and its third at each frame."""
    asked = json.dumps(list(zip(texts, how, strict=True))).encode()
    done = subprocess.run([sys.executable, __file__], input=asked, stdout=subprocess.PIPE, check=True)
    found = np.load(io.BytesIO(done.stdout))
    cuts = np.cumsum(found["frames"])[:-1]
    names, thirds = np.split(found["names"], cuts), np.split(found["thirds"], cuts)
    phones = [list(zip(a.tolist(), b.tolist(), strict=True)) for a, b in zip(names, thirds, strict=True)]
    return np.split(found["powers"], cuts), phones


def main() -> None:
    """Speak what standard input asks for; those in one manner follow one another."""
    asked = [(text, Manner(*how)) for text, how in json.load(sys.stdin)]
    speaker, manner = PhoneSpeaker(), None
    made: dict[int, tuple[np.ndarray, list[tuple[str, int]]]] = {}
    for place in sorted(range(len(asked)), key=lambda place: asked[place][1]):
        text, wanted = asked[place]
        if wanted != manner:
            manner = wanted
            speaker.take(manner)
        wave, begins = speaker.phones(text)
        powers = bands(wave)
        made[place] = powers, aligned(len(powers), begins, len(wave))
    parts = [made[place] for place in range(len(asked))]
    flat, out = [one for _, phones in parts for one in phones], io.BytesIO()
    np.savez(
        out,
        powers=np.concatenate([powers for powers, _ in parts]),
        frames=[len(powers) for powers, _ in parts],
        names=np.array([name for name, _ in flat]),
        thirds=np.array([third for _, third in flat]),
    )
    sys.stdout.buffer.write(out.getvalue())


if __name__ == "__main__":
    main()
