# SPDX-License-Identifier: Apache-2.0
"""Schedules: which rate a step has, how long a schedule is, and who decides that it changes."""
# The bodies are scripts: they are written to a file and run, never called here.

from __future__ import annotations

import copy

from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, OneCycleLR, ReduceLROnPlateau

from _complaints.cases import BOTH, EVERY, alike, case, right, that
from _complaints.helpers import B, batches, flat, held, mse, net, note, points, train


@case("flairNLP/flair#2954", that(lambda n: n["rate"] < 0.01, "at its end"), alike("rate"), rules=EVERY, workers=3)
def one_cycle_uneven() -> None:
    """OneCycleLR over len(loader) * epochs, where the workers have 5, 4 and 4 batches: one step too many"""
    model, loader = net(), batches(49)
    opt = SGD(model.parameters(), lr=0.05)
    cycle = OneCycleLR(opt, 0.1, total_steps=len(loader) * 3)
    train(model, opt, loader, after=cycle.step)
    note(w=flat(model), rate=opt.param_groups[0]["lr"])


@case("huggingface/transformers#24088", that(lambda n: n["rate"] < 1e-3, "at its end"), rules=BOTH, said="schedule|LR ")
def schedule_by_samples() -> None:
    """a schedule over len(dataset) // batch steps: the rate never falls"""
    data, model = points(), net()
    opt = SGD(model.parameters(), lr=0.05)
    steps = len(data) // B * 3
    fall = LambdaLR(opt, lambda k: max(0.0, 1 - k / steps))
    train(model, opt, batches(), after=fall.step)
    note(rate=opt.param_groups[0]["lr"])


@case("lucidrains/DALLE-pytorch#268", alike("rate", "w"), rules=EVERY, said="own (?:training )?loss")
def plateau_of_its_own_loss() -> None:
    """ReduceLROnPlateau by the loss of the training batches: another rate on each worker"""
    model = net()
    opt = SGD(model.parameters(), lr=0.05)
    plateau = ReduceLROnPlateau(opt, patience=0, factor=0.5, threshold=0.05)
    for _ in range(4):
        for x, y, _i in batches():
            opt.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            opt.step()
            plateau.step(loss.item())
    note(w=flat(model), rate=opt.param_groups[0]["lr"])


@case("rmchurch/disruptcnn#3", alike("rates", "w"), rules=EVERY)
def decided_by_the_held_out_loss() -> None:
    """ReduceLROnPlateau and early stopping by the held-out loss: alike on all workers"""
    model, rates, best = net(), [], 1e9
    opt = SGD(model.parameters(), lr=0.05)
    plateau = ReduceLROnPlateau(opt, patience=0, factor=0.5, threshold=0.3)
    for _ in range(9):
        train(model, opt, batches(), 1)
        score = held(model)
        plateau.step(score)
        rates.append(opt.param_groups[0]["lr"])
        if score > 0.9 * best:
            break
        best = score
    note(w=flat(model), rates=rates)


@case("pytorch/pytorch#23480", right("w", "rate"), rules=EVERY, said="that of an even split")
def warm_restarts() -> None:
    """CosineAnnealingWarmRestarts.step(epoch + i / len(loader)), with accumulation"""
    model, loader = net(), batches()
    opt = SGD(model.parameters(), lr=0.1)
    restarts = CosineAnnealingWarmRestarts(opt, T_0=2)
    note(start=held(model))
    for epoch in range(4):
        for k, (x, y, _i) in enumerate(loader):
            (mse(model(x), y) / 2).backward()
            if k % 2:
                opt.step()
                opt.zero_grad()
            restarts.step(epoch + k / len(loader))
    note(w=flat(model), rate=opt.param_groups[0]["lr"], loss=held(model))


@case("Lightning-AI/pytorch-lightning#20340", right("w"), rules=EVERY)
def unfrozen() -> None:
    """a backbone with a rate of its own, frozen first and then unfrozen"""
    model = net()
    model[0].requires_grad_(False)
    groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters(), "lr": 0.1}]
    opt = SGD(groups)
    note(start=held(model))
    train(model, opt, batches(), 2)
    model[0].requires_grad_(True)
    train(model, opt, batches(), 4)
    note(w=flat(model), loss=held(model))


@case("fastai/fastai#2485", alike("w", "found"), rules=BOTH)
def rate_finder() -> None:
    """a rate finder: steps with growing rates, stopped where the loss explodes, then trained at the best one"""
    model, best, found = net(), 1e9, 0.0
    opt = SGD(model.parameters(), lr=0.01)
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    for k, (x, y, _i) in enumerate(batches()):
        opt.param_groups[0]["lr"] = 0.01 * 3.0**k
        opt.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        opt.step()
        if loss.item() > 4 * best:
            break
        if loss.item() < best:
            best, found = loss.item(), opt.param_groups[0]["lr"]
    model.load_state_dict(saved[0])
    opt.load_state_dict(saved[1])
    opt.param_groups[0]["lr"] = found / 10
    train(model, opt, batches(), 2)
    note(w=flat(model), found=found)


@case("Lightning-AI/pytorch-lightning#19740", alike("w"), rules=EVERY, workers=3)
def evaluation_every_n_steps() -> None:
    """an evaluation every fifth step, which only some workers come to: the others hang"""
    model = net()
    opt = SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for k, batch in enumerate(batches(49)):
            train(model, opt, [batch], 1)
            if (k + 1) % 5 == 0:
                note(score=held(model))
    note(w=flat(model))
