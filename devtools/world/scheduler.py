# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a simulated world: one thread runs at a time, and a seed decides which one is next.

A thread keeps the turn until it has to wait, or until a lock, a frame or an event gives the scheduler an occasion to
take it away. If no thread can run, time goes on to the next timer. Nothing reads the clock of this machine, so a seed
and a program give the same history each time.
"""

from __future__ import annotations

import _thread
import heapq
import random
import threading
from collections.abc import Callable
from typing import Any

from paceline.core import runtime

STEP_S = 2e-5
"""Most seconds that a thread takes from one turn to the next."""
YIELDS = 0.15
"""How often an occasion to take the turn away is used."""
MOST_TURNS = 500_000
"""With more the world does not come to an end."""


class Killed(BaseException):
    """The simulated process of this thread is dead: the thread ends, whatever it was doing."""


class Broken(Exception):
    """The world itself cannot go on: no end, or an error in a timer."""


class _Carriers:
    """Threads of the interpreter that carry simulated threads, one after another."""

    def __init__(self) -> None:
        self._idle: list[tuple[Any, list[Callable[[], None]]]] = []
        self._guard = threading.Lock()

    def carry(self, call: Callable[[], None]) -> None:
        with self._guard:
            one = self._idle.pop() if self._idle else None
        if one is None:
            go, work = _thread.allocate_lock(), [call]
            go.acquire()
            threading.Thread(target=self._run, args=(go, work), name="paceline-world", daemon=True).start()
        else:
            go, work = one
            work.append(call)
        go.release()

    def _run(self, go: Any, work: list[Callable[[], None]]) -> None:
        while True:
            go.acquire()
            work.pop()()
            with self._guard:
                self._idle.append((go, work))


_CARRIERS = _Carriers()


class SimThread:
    """A thread of a simulated process.

    Attributes:
        name: for messages.
        ended: whether it has run.
    """

    daemon = True

    def __init__(self, owner: Owner, target: Callable[..., object], args: tuple[Any, ...], name: str) -> None:
        self.owner, self.name, self.ended = owner, name, False
        self._target, self._args = target, args
        self._world = owner.world
        self.go = _thread.allocate_lock()
        self.go.acquire()
        self.token = 0  # of its present wait; a timer of an earlier one does nothing
        self.parked = self.woken = False
        self._joining: list[SimThread] = []

    def start(self) -> None:
        self.owner.check()
        self.launch()

    def launch(self) -> None:
        """`start`, from outside of its process."""
        self.owner.threads[self] = None
        self._world.ready(self)
        _CARRIERS.carry(self._body)

    def is_alive(self) -> bool:
        return not self.ended

    def join(self, timeout: float | None = None) -> None:
        until = None if timeout is None else self._world.now + timeout
        while not self.ended and self._world.running:
            self._joining.append(self._world.current)
            if not self._world.park(until):
                return

    def _body(self) -> None:
        self.go.acquire()
        runtime.enter(self.owner.as_machine())
        error: BaseException | None = None
        try:
            if not self.owner.dead:
                self._target(*self._args)
        except BaseException as raised:
            error = raised
        finally:
            runtime.enter(None)
            self.ended = True
            self.owner.threads.pop(self, None)
            for one in self._joining:
                self._world.wake(one)
            self.owner.thread_ended(self, error)
            self._world.pass_on()


class Owner:
    """What has threads: a simulated process. See `devtools.world.process`."""

    world: Scheduler
    dead: bool
    stopped: bool
    threads: dict[SimThread, None]

    def as_machine(self) -> object:
        """What `paceline.core.runtime` asks in its threads."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `Killed` in a thread of a dead process."""

    def thread_ended(self, thread: SimThread, error: BaseException | None) -> None:
        """A thread has ended, with this error if any."""


class Scheduler:
    """Who runs, and what time it is.

    Args:
        seed: decides everything.

    Attributes:
        now: seconds since the world began.
        rng: draws all that is not decided.
        turns: of threads, so far.
        further_turns: that it may have beyond MOST_TURNS.
    """

    def __init__(self, seed: int) -> None:
        self.rng, self.now = random.Random(seed), 0.0
        self.turns = self.further_turns = 0
        self._turn: SimThread | None = None  # None: the driver
        self._ready: list[SimThread] = []
        self._held: list[SimThread] = []  # of stopped processes
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._driver = _thread.allocate_lock()
        self._driver.acquire()
        self._stop: Callable[[], bool] = lambda: False
        self._end = 0.0
        self.error: BaseException | None = None

    @property
    def current(self) -> SimThread:
        """The thread that has the turn."""
        assert self._turn is not None
        return self._turn

    @property
    def running(self) -> bool:
        """Whether a thread has the turn, and not the driver."""
        return self._turn is not None

    # -- time -------------------------------------------------------------------------------------

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call at this time, while no thread runs: it must not wait."""
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call in so many seconds."""
        self.at(self.now + seconds, call)

    # -- threads ----------------------------------------------------------------------------------

    def ready(self, thread: SimThread) -> None:
        """It can run."""
        self._ready.append(thread)

    def park(self, until: float | None = None) -> bool:
        """The current thread waits until it is woken; False at `until`."""
        if self._turn is None:
            raise Killed("the world is over")
        me = self._turn
        me.owner.check()
        me.parked, me.woken = True, False
        me.token += 1
        if until is not None:
            token = me.token
            self.at(until, lambda: self._timeout(me, token))
        self._switch(me)
        return me.woken

    def wake(self, thread: SimThread, woken: bool = True) -> None:
        """End the wait of a thread."""
        if thread.parked:
            thread.parked, thread.woken = False, woken
            self._ready.append(thread)

    def _timeout(self, thread: SimThread, token: int) -> None:
        if thread.token == token:
            self.wake(thread, woken=False)

    def occasion(self) -> None:
        """Here another thread may get the turn."""
        if self._turn is None:  # the driver, or this interpreter at its exit
            return
        me = self._turn
        me.owner.check()
        if self.rng.random() < YIELDS:
            self._ready.append(me)
            self._switch(me)

    def sleep(self, seconds: float) -> None:
        """The current thread waits."""
        self.park(self.now + seconds)

    def release_held(self) -> None:
        """Threads of processes that go on can run again."""
        held, self._held = self._held, []
        for one in held:
            (self._held if one.owner.stopped and not one.owner.dead else self._ready).append(one)

    # -- turns ------------------------------------------------------------------------------------

    def _switch(self, me: SimThread) -> None:
        following = self._following()
        if following is not me:
            self._give(following)
            me.go.acquire()
        me.owner.check()

    def pass_on(self) -> None:
        """The current thread has ended: the next one gets the turn."""
        self._give(self._following())

    def _give(self, following: SimThread | None) -> None:
        self._turn = following
        (self._driver if following is None else following.go).release()

    def _following(self) -> SimThread | None:
        """Who runs next; None: the driver."""
        try:
            while not self._over():
                timers = self._timers
                while timers and (timers[0][0] <= self.now or not self._ready):
                    when, _, call = heapq.heappop(timers)
                    self.now = max(self.now, when)
                    call()
                    if self.now >= self._end:
                        return None
                if not self._ready:
                    return None
                place = self.rng.randrange(len(self._ready)) if len(self._ready) > 1 else 0
                one, self._ready[place] = self._ready[place], self._ready[-1]
                self._ready.pop()
                if one.owner.stopped and not one.owner.dead:
                    self._held.append(one)
                    continue
                self.now += self.rng.random() * STEP_S
                self.turns += 1
                return one
        except BaseException as error:
            self.error = self.error or error
        return None

    def _over(self) -> bool:
        if self.turns > MOST_TURNS + self.further_turns:
            raise Broken(f"the world has not come to an end after {self.turns} turns, at {self.now:.3f} s")
        return self.error is not None or self._stop()

    def run(self, stop: Callable[[], bool], seconds: float) -> bool:
        """Let the world go on until `stop()`; False if that did not come within so many seconds, or never can."""
        self._stop, self._end = stop, self.now + seconds
        self.at(self._end, lambda: None)
        following = self._following()
        if following is not None:
            self._give(following)
            self._driver.acquire()
        if self.error is not None:
            raise self.error
        return stop()
