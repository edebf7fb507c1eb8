# SPDX-License-Identifier: Apache-2.0
"""Gradients: what a backward pass, an accumulation, a clip and an optimizer's step come to on several workers."""
# The bodies are scripts: they are written to a file and run, never called here.

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD

from _complaints.cases import EVERY, alike, as_alone, case, right
from _complaints.helpers import PARTS, batches, fit, flat, held, mse, net, note, points, train


@case("pytorch/pytorch#47562", right("w"), rules=EVERY)
def gradient_penalty() -> None:
    """a gradient penalty: autograd.grad(create_graph=True) before the backward pass"""
    model = net()

    def loss(x, y, i):
        out = model(x.requires_grad_())
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return mse(out, y) + 0.01 * (slope**2).sum(1).mean()

    fit(model, loss=loss)


@case("pytorch/pytorch#63812", right("w"), rules=EVERY)
def gradients_by_hand() -> None:
    """gradients from autograd.grad, written into .grad: there is no backward pass"""
    model = net()
    opt = SGD(model.parameters(), lr=0.05)
    note(start=held(model))
    for _ in range(3):
        for x, y, _i in batches():
            grads = torch.autograd.grad(mse(model(x), y), list(model.parameters()))
            for p, g in zip(model.parameters(), grads, strict=True):
                p.grad = g
            opt.step()
    note(w=flat(model), loss=held(model))


@case("facebookresearch/fairseq2#484", right("w"), rules=EVERY)
def layer_drop() -> None:
    """layers that are skipped in some steps, other ones on each worker"""
    model = nn.ModuleList([net(), nn.Linear(4, 1)])
    opt = SGD(model.parameters(), lr=0.05, momentum=0.5)
    note(start=held(model[0]))

    def loss(x, y, i):
        parts = zip(*(t.chunk(PARTS) for t in (x, y, i)), strict=True)
        return sum(mse(model[0](x) + (model[1](x) if int(i[0]) // 4 % 3 else 0), y) / PARTS for x, y, i in parts)

    train(model[0], opt, batches(), loss=loss)
    note(w=flat(model), loss=held(model[0]) / 9)


@case("pytorch/pytorch#28294", as_alone("w"), alike("w"))
def unused_everywhere() -> None:
    """weight decay and momentum act on parameters that no worker used in the step"""
    model = nn.ModuleList([net(), nn.Linear(4, 1)])
    opt = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    for used in (0, 1, 0):
        train(model, opt, batches(), 1, lambda x, y, i, used=used: mse(model[0](x) + (model[1](x) if used else 0), y))
    note(w=flat(model))


@case("huggingface/diffusers#721", right("w"), rules=EVERY)
def accumulated_and_clipped() -> None:
    """accumulation over two batches, clipped by norm: after the workers' gradients are averaged, not before"""
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.02)
    note(start=held(model))
    for _ in range(4):
        for k, (x, y, _i) in enumerate(batches()):
            (mse(model(x), y) / 2).backward()
            if k % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                opt.step()
                opt.zero_grad()
    note(w=flat(model), loss=held(model))


@case("huggingface/transformers#608", as_alone("w"), alike("w"))
def ragged_last_batch() -> None:
    """the mean of the workers' means, where the last batch is smaller"""
    fit(net(), 0.1, loader=batches(46))


@case("huggingface/transformers#34242", as_alone("w"), alike("w"), page="Losses that are no mean over samples")
def mean_over_tokens() -> None:
    """a loss averaged over the tokens of a batch, of which each worker has another number"""
    model = net()
    fit(model, loss=lambda x, y, i: ((model(x) - y) ** 2)[i % 5 > 0].sum() / (i % 5 > 0).sum())


@case("pytorch/pytorch#47260", right("w"), rules=EVERY)
def two_backward_passes() -> None:
    """two backward passes before a step: retain_graph, then inputs= for a part of the model"""
    model = net()

    def loss(x, y, i):
        out = model(x)
        (0.1 * (out**2).mean()).backward(retain_graph=True, inputs=list(model[2].parameters()))
        return mse(out, y)

    fit(model, loss=loss)


@case("facebookresearch/fairscale#180", right("w", "scale"))
def overflow_on_one_worker() -> None:
    """GradScaler: an inf on one worker, and only that one skips its step"""
    model = net()
    opt, scaler = SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    note(start=held(model))
    for epoch in range(3):
        for x, y, i in batches():
            opt.zero_grad()
            bad = epoch == 1 and 9 in i.tolist()
            scaler.scale(mse(model(x), y) * (float("inf") if bad else 1)).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(opt)
            scaler.update()
    note(w=flat(model), loss=held(model), scale=scaler.get_scale())


@case("pytorch/pytorch#22037", right("w"), rules=EVERY)
def sparse_gradients() -> None:
    """an embedding with sparse=True"""
    torch.manual_seed(2)
    table, y = nn.Embedding(48, 1, sparse=True), points().tensors[1]
    note(start=float(mse(table.weight, y)))
    train(table, SGD(table.parameters(), lr=0.5), batches(), 6, lambda x, y, i: mse(table(i), y))
    note(w=flat(table), loss=float(mse(table.weight, y)))


@case("pytorch/pytorch#109581", as_alone("whole"), rules=("sync", "asgd"), whole=False)
def norms_of_whole_tensors() -> None:
    """an optimizer that takes the norm of a whole tensor (LARS, LAMB, Adafactor), given slices of it"""

    class Unit(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.sub_(0.01 * p.grad / p.grad.norm())

    model, loader = nn.Linear(700, 3, bias=False), batches()
    nn.init.zeros_(model.weight)
    train(model, Unit(model.parameters()), loader, 2, lambda x, y, i: -model(torch.ones(len(x), 700)).mean())
    each = float(model.weight.norm()) / 0.01  # steps along one direction, of length 1 each
    note(whole=min(abs(each - k) for k in (12, 24)) < 4, each=each)


@case("iCog-Labs-Dev/PC-Transformers#135", fails=True)
def parameters_without_a_module() -> None:
    """learnt weights of losses, in no module: they must not go unexchanged"""
    model, scale = net(), torch.zeros(2, requires_grad=True)
    opt = SGD([*model.parameters(), scale], lr=0.05)
    train(model, opt, batches(), 2, lambda x, y, i: mse(model(x), y) * torch.exp(-scale[0]) + scale.sum())
