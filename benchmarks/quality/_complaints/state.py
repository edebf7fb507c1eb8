# SPDX-License-Identifier: Apache-2.0
"""State: buffers, and weights between steps; what is kept, saved, loaded, replaced, and who sees it."""
# The bodies are scripts: they are written to a file and run, never called here.

from __future__ import annotations

import copy
import os
import threading

import torch
from torch import nn
from torch.optim import SGD

from _complaints.cases import BOTH, EVERY, alike, as_alone, case, right, that
from _complaints.helpers import batches, fit, flat, held, kept, mse, net, normed, note, train


@case("huggingface/pytorch-image-models#45", alike("buffers", "saved", "scores"), rules=EVERY)
def statistics_in_the_checkpoint() -> None:
    """running statistics that differ by rank: those of rank 0 in the checkpoint, others in the evaluation"""
    model, scores = normed(), []
    opt = SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        train(model, opt, batches(), 1)
        scores.append(held(model))
    note(buffers=kept(model), saved=[v.double().flatten().tolist() for v in model.state_dict().values()], scores=scores)


@case("pytorch/pytorch#31498", as_alone("mean", tolerance=0.05), alike("mean"), rules=EVERY)
def cumulative_average() -> None:
    """BatchNorm(momentum=None): its average depends on num_batches_tracked, which must not be summed"""
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 1))
    train(model, SGD(model.parameters(), lr=0.01), batches())
    note(mean=model[0].running_mean.tolist())


@case("pytorch/pytorch#13350", that(lambda n: abs(n["u"] - 1) < 1e-3, "of length 1"), alike("w", "u"), rules=EVERY)
def spectral_norm() -> None:
    """spectral_norm: its vectors are buffers of length 1, which a mean shortens"""
    model = net()
    nn.utils.parametrizations.spectral_norm(model[0])
    train(model, SGD(model.parameters(), lr=0.05), batches(), 6)
    note(u=float(model[0].parametrizations.weight[0]._u.norm()), w=flat(model))


@case("NVIDIA/apex#380", alike("w", "buffers"), rules=BOTH)
def sync_batch_norm() -> None:
    """convert_sync_batchnorm: its statistics take a process group"""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(normed())
    fit(model)
    note(buffers=kept(model))


@case("timgaripov/swa#22", alike("w", "buffers"), rules=EVERY)
def averaged_weights() -> None:
    """AveragedModel and update_bn over the training loader, at the end"""
    from torch.optim.swa_utils import AveragedModel, update_bn

    model, loader = normed(), batches()
    opt, mean = SGD(model.parameters(), lr=0.05), AveragedModel(model)
    for _ in range(3):
        train(model, opt, loader, 1)
        mean.update_parameters(model)
    update_bn(((x,) for x, _y, _i in loader), mean)
    note(w=flat(mean), buffers=kept(mean))


@case("lucidrains/ema-pytorch#9", alike("ema"), rules=EVERY, said="cop(?:y|ies) of|moving average")
def moving_average_of_weights() -> None:
    """an exponential mean of the weights, updated by the program after each step, evaluated and saved"""
    model = net()
    ema = copy.deepcopy(model).requires_grad_(False)
    pairs = list(zip(ema.parameters(), model.parameters(), strict=True))
    update = torch.no_grad()(lambda: [mine.lerp_(new, 0.1) for mine, new in pairs])
    opt = SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        train(model, opt, batches(), 1, after=update)
        held(ema)
        torch.save(ema.state_dict(), "ema.pt")
    note(ema=flat(ema))


@case("facebookresearch/unbiased-teacher#31", right("w"), rules=EVERY)
def teacher() -> None:
    """a teacher, an exponential mean of the student, whose output is the target (BYOL, mean teacher)"""
    model = net()
    mean = copy.deepcopy(model).requires_grad_(False)
    pairs = list(zip(mean.parameters(), model.parameters(), strict=True))
    update = torch.no_grad()(lambda: [old.mul_(0.9).add_(new, alpha=0.1) for old, new in pairs])
    fit(model, loss=lambda x, y, i: mse(model(x), y) + 0.5 * mse(model(x + 0.1), mean(x)), after=update)


@case("KevinMusgrave/pytorch-metric-learning#10", as_alone("w"), alike("w"), said="batch|negative")
def negatives_in_the_batch() -> None:
    """a contrastive loss over the pairs of a batch, of which a worker has a part"""
    model = net(out=4)

    def loss(x, y, i):
        return nn.functional.cross_entropy(model(x) @ model(x + 0.1).t(), torch.arange(len(x)))

    train(model, SGD(model.parameters(), lr=0.1), batches(), loss=loss)
    note(w=flat(model))


@case("KempnerInstitute/KempnerForge#115", right("w"), rules=EVERY)
def resumed_by_the_program() -> None:
    """the program's own checkpoint: model and optimizer loaded into new ones between epochs"""
    model = net()
    opt = SGD(model.parameters(), lr=0.02, momentum=0.5)
    note(start=held(model))
    for _ in range(3):
        train(model, opt, batches(), 1)
        torch.save([model.state_dict(), opt.state_dict()], "mine.pt")
        states = torch.load("mine.pt")
        model = net()
        opt = SGD(model.parameters(), lr=0.02, momentum=0.5)
        model.load_state_dict(states[0])
        opt.load_state_dict(states[1])
    note(w=flat(model), loss=held(model))


@case("Lightning-AI/pytorch-lightning#20953", alike("w"), rules=EVERY)
def weights_read_by_a_thread() -> None:
    """a thread of the program that reads state_dict() now and then (a monitor, an asynchronous checkpoint)"""
    model, stop = net(), threading.Event()

    def watch():
        while not stop.wait(0.01):
            torch.save(model.state_dict(), os.devnull)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    fit(model, epochs=4)
    stop.set()
    thread.join()


@case("vllm-project/speculators#324", alike("w"), rules=EVERY)
def saved_where_the_loss_is_best() -> None:
    """a checkpoint in mid-epoch, where the batch's loss is the lowest so far: other moments by worker"""
    model, best = net(), 1e9
    opt = SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        for x, y, _i in batches():
            opt.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            opt.step()
            if loss.item() < best:
                best = loss.item()
                torch.save(model.state_dict(), "best.pt")
    note(w=flat(model))


@case("pytorch/pytorch#19024", right("w"), rules=BOTH)
def wrapped_in_data_parallel() -> None:
    """nn.DataParallel around the model, as many programs have it"""
    fit(nn.DataParallel(net()))
