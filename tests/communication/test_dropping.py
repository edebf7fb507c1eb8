# SPDX-License-Identifier: Apache-2.0
"""Which thread ends a group that is dropped while another thread still holds it."""

from __future__ import annotations

import threading

import pytest

from paceline.communication.torch import dropping


class Group:
    """Says which thread destroyed it."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.by = ""

    def child(self) -> Child:
        return Child(self)


class Child:
    """Refers to nothing that refers to it, so its last reference ends it at once."""

    def __init__(self, group: Group) -> None:
        self._said = group

    def __del__(self) -> None:
        self._said.by = threading.current_thread().name
        self._said.ended.set()


def test_the_dropper_ends_a_group_that_another_thread_still_held() -> None:
    said = Group()
    held = [said.child()]
    has, release, released = threading.Event(), threading.Event(), threading.Event()

    def begin() -> None:
        group = held[0]
        has.set()
        release.wait(60)
        del group
        released.set()

    starting = threading.Thread(target=begin, name="training")
    starting.start()
    assert has.wait(60)
    groups = [held.pop()]
    dropping.drop([], groups)  # returns, though the group is held
    assert not said.ended.is_set()
    release.set()
    assert released.wait(60) and said.ended.wait(60)
    starting.join()
    assert said.by == "paceline-drop"


def test_a_group_that_stays_held_is_left_to_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Group()
    child = said.child()
    monkeypatch.setattr(dropping, "HELD_S", 0.0)
    groups = [child]
    dropping.drop([], groups)
    assert not groups and not said.ended.is_set()
    del child
    assert said.by == threading.current_thread().name
