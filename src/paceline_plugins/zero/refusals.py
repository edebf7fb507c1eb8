# SPDX-License-Identifier: Apache-2.0
"""Errors for programs that zero lines cannot serve safely, each with the lines to add instead."""

from __future__ import annotations

import re

from paceline.errors import UnsupportedError

ATTACH = "    run = paceline.attach(model, optimizer)   # after `import paceline`, before the loop"
SHARE = "    for batch in run.share(batches):          # around whatever gives the batches"
GIVEN = "    loader = run.share(loader)                # before the loop of {} gets it"


class Refusal(UnsupportedError):
    """Zero lines cannot serve this program; the message ends with what to add."""


def refusal(why: str, *lines: str) -> Refusal:
    """The reason, which may end with an open "or", and below it the lines to add (by default two)."""
    module = re.match(r"\S+ \((\S+):\d", why)  # the loop is there
    share = SHARE if module is None else GIVEN.format(module[1])
    added = lines or (ATTACH, share)
    number = {1: "this line", 2: "these two lines"}[len(added)]
    last = why.rpartition(". ")[2]
    between = " " if last.endswith((" or", " and")) else ", " if last.startswith(("Where ", "If ")) else "; "
    return Refusal("\n".join([f"{why}{between}add {number} to the program:", *added]))


def no_loader(where: str, optimizer: str, workers: int) -> Refusal:
    """The optimizer steps, and no loader was split."""
    return refusal(
        f"{where}: {optimizer} steps, and no DataLoader was gone through in training that could be split: {workers} "
        "workers would train on the same samples. Where the program makes its samples itself, at random, say "
        "`paceline run --random-data`. Where its batches come from anything else"
    )


def same_samples(where: str, first: int, second: int, steps: int) -> Refusal:
    """Two workers train on the same samples under `--random-data`."""
    return refusal(
        f"{where}: workers {first} and {second} trained on the same samples in each of {steps} steps, and "
        "--random-data is for programs that draw them at random. If this program goes through its data in order"
    )


def shared_parameter(shape: tuple[int, ...], first: str, second: str, inside: str) -> Refusal:
    """Two optimizers step the same parameter; `inside`: the attribute of the first that holds the second, or ""."""
    why = (
        f"{first} and {second} both train one parameter of shape {shape}, so that it is unknown which of them made "
        "a step of it; give each parameter to one optimizer"
    )
    if not inside:
        return Refusal(why)
    inner = ATTACH.replace("(model, optimizer)   ", f"(model, optimizer.{inside})  ")
    return refusal(f"{why}. {first} steps by the {second} inside of it, which can be attached", inner, SHARE)


def across_a_step(where: str, names: list[str]) -> Refusal:
    """A backward pass goes through a forward pass from before the end of a block."""
    return Refusal(
        f"{where}: this backward pass goes through a forward pass from before the step of another optimizer, and a "
        f"block may have ended there, which writes all parameters. Of {', '.join(names)}, in the order in which they "
        f"were made, the last ({names[-1]}) closes a minibatch: make the one last that steps last in the loop, or "
        "compute the forward pass after the other's step"
    )


def later_optimizer(where: str, name: str) -> Refusal:
    """An optimizer was constructed in the middle of a pass."""
    return refusal(
        f"{where}: {name} steps, which was made in the middle of a pass over the training data; a new phase "
        "begins after a pass. Make the optimizer before it, or"
    )


def earlier_optimizer(where: str, name: str) -> Refusal:
    """An optimizer of an earlier phase steps again."""
    return refusal(
        f"{where}: {name} steps again, after another optimizer was made and trained with, which began a new phase of "
        "training; make all that train together before the first of their steps, or"
    )


def unowned_parameter(shape: tuple[int, ...], optimizer: str) -> Refusal:
    """No module owns the parameter."""
    return refusal(
        f"{optimizer} trains a tensor of shape {shape} that no torch module has, so that it cannot be found by name; "
        "put it into a module (nn.ParameterList), or"
    )


def pass_without_step(where: str, samples: str, part: str) -> Refusal:
    """A loader was split that does not serve training."""
    return refusal(
        f"{where} went through {samples} with the model in training mode and made no step of the optimizer, so this "
        f"worker saw {part} only. Say that it is an evaluation: call model.eval() before it, or put it inside "
        "`with torch.no_grad():`. If it was training (with fewer batches a worker than gradients are accumulated over)"
    )


def pass_cut_short(where: str, samples: str, part: str) -> Refusal:
    """An evaluation stopped after as many batches as a worker's part has."""
    return Refusal(
        f"{where} went through {samples} without a step, and left them after {part}, which is what it was told that "
        "the loader has, since each worker trains on so many: this evaluation is not of all of them. Ask for "
        "len(loader) inside of torch.no_grad(), or evaluate with a loader of its own"
    )


def step_in_whole_pass(where: str, optimizer: str, loop: str, samples: str, workers: int, gradients: bool) -> Refusal:
    """A pass that was taken as evaluation is training."""
    why = "the model was in evaluation mode" if gradients else "gradients were off"
    what = "call model.train()" if gradients else "let gradients be on"
    return refusal(
        f"{where}: {optimizer} steps in the pass of {loop}, and each of the {workers} workers goes through all of its "
        f"{samples}: {why} when it began, or no step was made in it until now, as in an evaluation. If it is training, "
        f"{what} before the loop, and make steps in it from its first pass on, or"
    )


def other_weights(where: str) -> Refusal:
    """The program loaded other weights into a model in training."""
    return refusal(
        f"{where}: the program loaded other weights into the model, and now trains on from them, which the other "
        "workers' blocks know nothing of; go on from a checkpoint with run.save and run.resume"
    )


def trained_copy(where: str, name: str) -> Refusal:
    """The program loads weights into one of two alike models in training."""
    return Refusal(
        f"{where}: the program trains two models {name}, and loads weights into one of them in training: a copy for an "
        "inner loop is each worker's own. Make the copy and its optimizer within the pass (copy.deepcopy), then it is "
        "not shared"
    )


def distributed(where: str) -> Refusal:
    """The program has a cluster of its own."""
    return refusal(
        f"{where}: the program starts torch.distributed itself; say `paceline run --as-is` to start it without zero "
        "lines, or, to let paceline average instead of DistributedDataParallel, let it run as on one device (zero "
        "lines hide RANK and WORLD_SIZE from it), or take the cluster out and"
    )


def nothing_attached(program: str, workers: int) -> Refusal:
    """The program ended without a step of a torch optimizer."""
    return refusal(
        f"{program}: no optimizer of torch trained anything in this process: each of the {workers} workers has done "
        "the whole job by itself. A framework that owns the loop, or processes that the program starts, need an "
        "adapter (docs/guide/frameworks.md); `paceline run --as-is` says that copies are wanted. Where the program "
        "steps by itself"
    )


def by_hand(where: str, workers: int) -> Refusal:
    """Gradients are computed, and there is no optimizer."""
    return refusal(
        f"{where}: the program computes gradients and has made no optimizer of torch, so {workers} workers would each "
        "do the whole job. Let an optimizer step (torch.optim.SGD(model.parameters(), lr=..) for p -= lr * p.grad), or"
    )


def other_data(where: str, first: str, rank: int, other: str) -> Refusal:
    """The workers have different training data."""
    return Refusal(
        f"{where}: the training data are not the same on all workers: {first} on rank 0, {other} on rank {rank}. "
        "One would train on what another holds out. Draw the split from a seed of its own (generator=torch.Generator()."
        "manual_seed(0), random_state=0), sort the names of files, and let every host have the same data"
    )


def other_seeds(where: str, generators: str, rank: int) -> Refusal:
    """Random draws before training differ between workers."""
    return Refusal(
        f"{where}: the random generators of {generators} stand elsewhere on rank {rank} than on rank 0, so "
        "that splits drawn from them differ: a seed that comes from the clock or the process, or PACELINE_SEED not "
        "the same on all hosts? Let the program set the same seed everywhere"
    )
