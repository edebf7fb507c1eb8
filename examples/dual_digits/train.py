# SPDX-License-Identifier: Apache-2.0
"""Learn to read digits from five labels of each, with the help of a task that nobody asked for.

For each seed three classifiers begin alike and see the same 50 labelled pictures in the same number of steps. After a
warm-up the second also learns from pictures with the labels that it gives them itself; the third from pictures whose
labels an auxiliary model P(picture | digit) judges, which is trained along with it and then thrown away::

    python train.py                                                  # one worker
    paceline run --workers 2 --rule "averaging(period=8)" train.py   # two
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
from model import Look, make_classifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import paceline
from data import CLASSES, Digits, load
from paceline_dual import Classifier, DualInference, LabelPrior, Reward, VirtualPair

WAYS = ("labels only", "own labels", "auxiliary task", "the auxiliary model itself")
WARM = 0.25  # share of the steps in which labelled pictures alone are learned from

Loss = Callable[[Tensor | None], Tensor]
"""Of a batch of pictures without labels, None during the warm-up."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Digits from few labels, with and without an auxiliary task.")
    parser.add_argument("--rule", help='such as "averaging(period=8)"; default: that of `paceline run`')
    parser.add_argument("--seeds", type=int, default=3, help="how often all of it is done")
    parser.add_argument("--first-seed", type=int, default=0, help="other seeds have other labels and another test")
    parser.add_argument("--labels", type=int, default=5, help="of each digit")
    parser.add_argument("--steps", type=int, default=800, help="of all workers together")
    parser.add_argument("--batch", type=int, default=100, help="pictures without labels in a step")
    parser.add_argument("--share", type=float, default=3.0, help="weight of the pictures without labels")
    parser.add_argument("--rate", type=float, default=0.002, help="learning rate of the classifier")
    return parser.parse_args()


def train(model: nn.Module, loss: Loss, digits: Digits, args: argparse.Namespace, seed: int) -> None:
    """The usual loop: the model's parts learn, each with its own rate, in as many steps as there are."""
    rates = [
        {"params": part.parameters(), "lr": 0.01 if isinstance(part, Look) else args.rate} for part in model.children()
    ]
    optimizer = torch.optim.AdamW(rates, weight_decay=0.001)
    pictures = TensorDataset(digits.unlabelled)
    loader = DataLoader(pictures, args.batch, sampler=RandomSampler(pictures, num_samples=args.steps * args.batch))
    run = paceline.attach(model, optimizer, args.rule, seed=seed)
    share = run.share(loader)
    model.train()
    with run:
        for (u,) in share:
            optimizer.zero_grad()
            loss(u if share.progress > WARM else None).backward()
            optimizer.step()
    model.load_state_dict(run.model_for_export().state_dict())
    model.eval()


def labels_only(digits: Digits, args: argparse.Namespace, seed: int) -> tuple[float, ...]:
    model = make_classifier()
    train(nn.ModuleList([model]), lambda u: likelihood(model, digits), digits, args, seed)
    return (accuracy(model, digits),)


def own_labels(digits: Digits, args: argparse.Namespace, seed: int) -> tuple[float, ...]:
    model = make_classifier()

    def loss(u: Tensor | None) -> Tensor:
        found = likelihood(model, digits)
        return found if u is None else found - args.share * model.log_prob(model.beam(u, 1)[0][:, 0], u).mean()

    train(nn.ModuleList([model]), loss, digits, args, seed)
    return (accuracy(model, digits),)


def auxiliary_task(digits: Digits, args: argparse.Namespace, seed: int) -> tuple[float, ...]:
    model, look, prior = make_classifier(), Look(), LabelPrior(CLASSES)
    pair = VirtualPair(model, look, prior, Reward(alpha=0.5, samples=4), args.share)
    generator = torch.Generator().manual_seed(seed)
    train(pair, lambda u: pair(digits.x, digits.y, u, generator).loss, digits, args, seed)
    by_looks = DualInference(model, look, prior, weight=0.0, beam=CLASSES)
    return accuracy(pair.alone(), digits), share_right(by_looks.best(digits.test_x), digits)


def likelihood(model: Classifier, digits: Digits) -> Tensor:
    return -model.log_prob(digits.y, digits.x).mean()


def accuracy(model: nn.Module, digits: Digits) -> float:
    assert isinstance(model, Classifier)
    return share_right(model.beam(digits.test_x, 1)[0][:, 0], digits)


def share_right(found: Tensor, digits: Digits) -> float:
    return float((found == digits.test_y).double().mean())


def compare(args: argparse.Namespace, seed: int) -> list[float]:
    """The accuracies of all ways, in the order of WAYS."""
    digits, found = load(args.labels, seed), []
    for way in (labels_only, own_labels, auxiliary_task):
        torch.manual_seed(seed)
        found += way(digits, args, seed)
    return found


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # models this small gain nothing from a second core
    started, rows = time.perf_counter(), []
    speaks = os.environ.get("RANK", "0") == "0"  # all workers hold the same models, so one says what came out
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        rows.append(compare(args, seed))
        if speaks:
            print(f"seed {seed}: {said(rows[-1])}", flush=True)
    if speaks:
        means = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
        print(f"mean of {args.seeds}: {said(means)}; {time.perf_counter() - started:.0f} s")


def said(accuracies: list[float]) -> str:
    return ", ".join(f"{way} {accuracy:.1%}" for way, accuracy in zip(WAYS, accuracies, strict=True))


if __name__ == "__main__":
    main()
