# SPDX-License-Identifier: Apache-2.0
"""Ends: signals, exceptions, threads, processes of the program, and exit codes."""
# The bodies are scripts: they are written to a file and run, never called here.

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time

import torch
from torch.optim import SGD

from _complaints.cases import BOTH, EVERY, alike, case, right, that
from _complaints.helpers import ALONE, batches, fit, flat, mse, net, note, train


@case("ray-project/ray#42893", right("w"), rules=EVERY)
def trained_in_a_thread() -> None:
    """the whole training in a thread of the program, beside another thread that fails"""
    threading.excepthook = lambda _: None
    threads = [threading.Thread(target=fit, args=(net(),)), threading.Thread(target=lambda: 1 / 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@case("huggingface/accelerate#996", alike("w"), rules=BOTH, code=3)
def exit_code_of_its_own() -> None:
    """sys.exit(3) at the end, after the same training on all workers"""
    fit(net())
    sys.exit(3)


@case("NovaSky-AI/SkyRL#76", fails=True, rules=EVERY)
def exception_in_one_worker() -> None:
    """an exception at one sample: the other workers must end, too, and soon"""
    model = net()
    opt = SGD(model.parameters(), lr=0.05)
    for _ in range(500):
        if 9 in train(model, opt, batches(), 1) and not ALONE:
            raise KeyError("sample 9")
        if ALONE:
            break


@case("pytorch/pytorch#44353", alike("w"), rules=EVERY)
def failed_batch_skipped() -> None:
    """a batch whose forward pass raises (out of memory) is caught and skipped on one worker"""
    model = net()
    opt = SGD(model.parameters(), lr=0.05)

    def loss(x, y, i):
        if 9 in i.tolist():
            raise RuntimeError("out of memory")
        return mse(model(x), y)

    for _ in range(3):
        for batch in batches():
            try:
                train(model, opt, [batch], 1, loss)
            except RuntimeError as error:
                if "out of memory" not in str(error):
                    raise
    note(w=flat(model))


@case("Lightning-AI/pytorch-lightning#6823", alike("w"), rules=EVERY)
def stopped_by_the_clock() -> None:
    """training that ends after a time, by each worker's own clock"""
    model, end = net(), time.monotonic() + 1.5
    opt = SGD(model.parameters(), lr=0.01)
    while time.monotonic() < end:
        train(model, opt, batches(), 1)
    note(w=flat(model))


@case("kyutai-labs/pocket-tts#277", alike("w"), rules=EVERY)
def stopped_by_a_signal() -> None:
    """a handler of SIGUSR1 that lets the epoch end and saves: the signal comes to one process"""
    model, stop = net(), threading.Event()
    opt = SGD(model.parameters(), lr=0.01)
    signal.signal(signal.SIGUSR1, lambda *_: stop.set())
    for epoch in range(12):
        if 9 in train(model, opt, batches(), 1) and epoch == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        if stop.is_set():
            break
    note(w=flat(model))


@case("uberduck-ai/uberduck-ml-dev#66", that(lambda n: n["saved"], "saved"), alike("w"), rules=EVERY)
def interrupt_caught() -> None:
    """KeyboardInterrupt in one worker, in mid-epoch, caught by the program, which saves and ends in order"""
    model = net()
    opt = SGD(model.parameters(), lr=0.01)
    try:
        for epoch in range(6):
            for batch in batches():
                if 9 in train(model, opt, [batch], 1) and epoch == 2:
                    os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        pass
    torch.save(model.state_dict(), "interrupted.pt")
    note(w=flat(model), saved=os.path.exists("interrupted.pt"))


@case("coqui-ai/Trainer#102", that(lambda n: n["at_exit"] == n["w"], "the final weights"), alike("w"), rules=EVERY)
def saved_at_exit() -> None:
    """a file that the program writes by atexit"""
    model = net()
    atexit.register(lambda: note(at_exit=flat(model)))
    fit(model)
