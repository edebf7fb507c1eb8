# SPDX-License-Identifier: Apache-2.0
"""Workers that are not at the same place of the same pass: rules x programs."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import MismatchError, UnsupportedError
from paceline.communication import virtual
from paceline_plugins.receipts import audit
from tests.helpers import State, adam, attached, follow, learn, make_data, make_net, same_bits, sgd, simulate, state_of
from tests.tables import each_value_fast

SAMPLES, BATCH, EPOCHS, WORKERS = 96, 4, 3, 2
BATCHES = SAMPLES // BATCH // WORKERS
DATA = make_data(SAMPLES)
RULES = [
    "sync",
    "sync(codec='bf16')",
    "one_bit(warmup=3)",
    "power(rank=1, warmup=2)",
    "top_k(ratio=0.2, warmup=2)",
    "one_bit_adam(warmup=4)",
    "averaging(period=3)",
    "averaging(period=3, local_state='average')",
    "bmuf(period=5)",
    "bmuf(period=4, warmup=7)",
    "bmuf_adam(period=4, overlap=3, fragments=2)",
    "streaming_diloco(period=4, overlap=2, fragments=3)",
    "diloco(period=16)",
    "auto(first=3)",
]
FAST = ["sync", "power(rank=1, warmup=2)", "bmuf(period=5)", "bmuf(period=4, warmup=7)", RULES[-3]]
BY_ONE = [pytest.param(rule, marks=[] if rule in FAST else [pytest.mark.full]) for rule in RULES]


def lockstep(rule: str) -> bool:
    return paceline.rule_from_text(rule).schedule.is_lockstep(True)


@dataclass
class Seen:
    """What a worker held at the end of each pass."""

    models: list[State] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    trained: int = 0


Skips = Callable[[int, int, int], bool]


@dataclass
class Program:
    """A training program whose workers skip minibatches where `skips(rank, pass, batch)` says so.

    `leaves` breaks out of the pass there. `late` skips after the backward pass. `each` steps the schedule at each step,
    else after each pass. `failing` lets the backward pass fail instead of skipping it.
    """

    rule: str
    skips: Skips = lambda rank, epoch, batch: False
    leaves: Skips = lambda rank, epoch, batch: False
    late: bool = False
    failing: bool = False
    each: bool = True
    accumulate: int = 1
    samples: int = SAMPLES
    batch: int = BATCH
    epochs: Callable[[int], int] = lambda rank: EPOCHS
    inner: Callable[[paceline.Run, nn.Module], None] | None = None

    def __call__(self) -> Seen:
        model = make_net()
        with_adam = "adam" in self.rule
        optimizer = (adam if with_adam else sgd)(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5 if self.each else 1, 0.8)
        loader = DataLoader(make_data(self.samples), self.batch)
        seen = Seen()
        with paceline.attach(model, optimizer, self.rule) as run:
            shared = run.share(loader)
            for epoch in range(self.epochs(run.world.rank)):
                self._pass(run, model, optimizer, schedule if self.each else None, shared, epoch, seen)
                if not self.each:
                    schedule.step()
                if self.inner is not None:
                    self.inner(run, model)
                seen.models.append(run.global_state())
                seen.rates.append(schedule.get_last_lr()[0])
                seen.states.append([t.clone() for one in optimizer.state.values() for t in one.values()])
                seen.steps.append(run.minibatches)
        seen.models.append(state_of(model))
        return seen

    def _pass(
        self, run: paceline.Run, model: nn.Module, optimizer: Any, schedule: Any, shared: Any, epoch: int, seen: Seen
    ) -> None:
        rank = run.world.rank
        for batch, (x, y) in enumerate(shared):
            if self.leaves(rank, epoch, batch):
                break
            skips = self.skips(rank, epoch, batch)
            if skips and not (self.late or self.failing):
                continue
            loss = nn.functional.cross_entropy(model(x), y) / self.accumulate
            if skips and self.failing:
                with pytest.raises(RuntimeError, match="out of memory"):
                    (loss + Failing.apply(next(model.parameters())).sum()).backward()
                optimizer.zero_grad()
                continue
            loss.backward()
            if skips:
                optimizer.zero_grad()
                continue
            seen.trained += len(y)
            if (batch + 1) % self.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                if schedule is not None:
                    schedule.step()


class Failing(torch.autograd.Function):
    """Its backward pass fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


def assert_together(outs: Sequence[Seen], rule: str) -> None:
    """All workers held the same global model, rates and, where they step alike, optimizers after each pass."""
    first = outs[0]
    for out in outs[1:]:
        assert len(out.models) == len(first.models)
        assert all(same_bits(one, other) for one, other in zip(out.models, first.models, strict=True))
        assert out.rates == first.rates
        if lockstep(rule):
            assert out.steps == first.steps
            for one, other in zip(out.states, first.states, strict=True):
                assert all(map(torch.equal, one, other))


SKIPS: dict[str, Skips] = {
    "first": lambda rank, epoch, batch: rank == 1 and epoch == 0 and batch == 0,
    "middle": lambda rank, epoch, batch: rank == 1 and batch == 5,
    "last": lambda rank, epoch, batch: rank == 1 and batch == BATCHES - 1,
    "rank 0": lambda rank, epoch, batch: rank == 0 and batch in (3, 4, 5, 9),
    "each its own": lambda rank, epoch, batch: (epoch + rank) % 2 == 0 and batch >= 4 + rank,
    "a whole pass": lambda rank, epoch, batch: rank == 1 and epoch == 0,
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of a worker that made no step in a pass
@pytest.mark.parametrize(
    ("rule", "skips", "each"), each_value_fast(RULES, list(SKIPS), [True, False])[: 2 * len(RULES)]
)
def test_workers_that_skip_minibatches_are_together_after_each_pass(rule: str, skips: str, each: bool) -> None:
    outs = simulate(Program(rule, SKIPS[skips], each=each), WORKERS)
    assert_together(outs, rule)
    skipped = [sum(SKIPS[skips](k, e, b) for e in range(EPOCHS) for b in range(BATCHES)) for k in range(WORKERS)]
    assert [out.trained for out in outs] == [(EPOCHS * BATCHES - n) * BATCH for n in skipped]


@pytest.mark.parametrize("skips", SKIPS)
def test_skipped_minibatches_by_hand(skips: str) -> None:
    """Under `sync` a step is the mean over the workers that still have a minibatch in the pass."""
    outs = simulate(Program("sync", SKIPS[skips]), WORKERS)
    model, data = make_net(), make_data(SAMPLES)
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)
    # a round of the loader's batches, one for each worker
    parts = [[torch.arange(SAMPLES).split(BATCH)[b * WORKERS + k] for b in range(BATCHES)] for k in range(WORKERS)]
    for epoch in range(EPOCHS):
        kept = [[parts[k][b] for b in range(BATCHES) if not SKIPS[skips](k, epoch, b)] for k in range(WORKERS)]
        for together in zip_longest(*kept):
            ids = torch.cat([one for one in together if one is not None])
            learn(model, optimizer, data.tensors[0][ids], data.tensors[1][ids])
            schedule.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(outs[0].models[epoch][name], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=5)"])
def test_a_backward_pass_that_failed_is_a_skipped_one(rule: str) -> None:
    assert_together(simulate(Program(rule, SKIPS["last"], failing=True), WORKERS), rule)
    assert_together(simulate(Program(rule, SKIPS["rank 0"], failing=True), WORKERS), rule)


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=5)"])
def test_skipped_minibatches_of_accumulated_gradients(rule: str) -> None:
    def skips(rank: int, epoch: int, batch: int) -> bool:
        return rank == 1 and batch in (4, 9)

    assert_together(simulate(Program(rule, skips, accumulate=3), WORKERS), rule)


def test_a_skipped_minibatch_that_would_have_made_the_step_of_several_is_named() -> None:
    with pytest.raises(MismatchError, match="gradients of different steps"):
        simulate(Program("sync", lambda rank, epoch, batch: rank == 1 and batch == 5, accumulate=3), WORKERS)


@pytest.mark.parametrize("batch", [3, BATCHES - 1], ids=["middle", "last"])
def test_a_step_that_one_worker_skips_after_backward_is_named(batch: int) -> None:
    skips: Skips = lambda rank, epoch, b: rank == 1 and b == batch  # noqa: E731
    with pytest.raises(MismatchError, match=r"rank 1 \S+ \S+ made no step after a backward pass"):
        simulate(Program("sync", skips, late=True), WORKERS)


def test_a_schedule_that_counts_minibatches_of_its_own_is_named() -> None:
    def program() -> None:
        with attached(make_net(), "sync") as (run, model, optimizer):
            for batch, (x, y) in enumerate(run.share(DataLoader(make_data(SAMPLES), BATCH))):
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + batch)
                if run.world.rank == 1 and batch == 3:
                    continue
                learn(model, optimizer, x, y)

    with pytest.raises(MismatchError, match=r"different learning rates: rank 0 .* at 0.025; rank 1 .* at 0.02,"):
        simulate(program, WORKERS)


@pytest.mark.parametrize("hosts", ["aabb", "aab"])
@pytest.mark.parametrize("rule", ["bmuf(period=3, within='host')", "averaging(period=3, warmup=4, within='host')"])
def test_processes_of_a_host_that_skip_minibatches(rule: str, hosts: str) -> None:
    def skips(rank: int, epoch: int, batch: int) -> bool:
        return (rank == 1 and batch in (1, 2)) or (rank == 2 and epoch == 1 and batch == 3)

    torch.manual_seed(5)
    outs: list[Seen] = list(paceline.simulate(Program(rule, skips), len(hosts), hosts=list(hosts)))
    for out in outs[1:]:
        assert all(map(same_bits, out.models, outs[0].models)) and out.rates == outs[0].rates


@pytest.mark.parametrize("known", [True, False])
def test_a_grad_scaler_of_a_worker_that_skips(known: bool) -> None:
    """Its scale grows with the steps that were made; workers of different scales would take a wrong mean."""

    def program() -> list[Any]:
        model, seen = make_net(), []
        optimizer = sgd(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=5)
        with paceline.attach(model, optimizer, "sync", **({"scaler": scaler} if known else {})) as run:
            shared = run.share(DataLoader(make_data(SAMPLES), BATCH))
            for epoch in range(EPOCHS):
                for batch, (x, y) in enumerate(shared):
                    if SKIPS["rank 0"](run.world.rank, epoch, batch):
                        continue
                    optimizer.zero_grad()
                    scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                seen.append([scaler.state_dict(), *(p.sum().item() for p in model.parameters())])
        return seen

    one, other = simulate(program, WORKERS)
    assert one == other and one[-1][0]["scale"] > 2.0


@pytest.mark.parametrize("rule", ["sync(reproducible=True)", "bmuf(period=5, reproducible=True)"])
def test_receipts_of_workers_that_skip(rule: str, tmp_path: Any) -> None:
    def program() -> None:
        with attached(make_net(), rule, receipts=tmp_path) as (run, model, optimizer):
            for epoch in range(EPOCHS):
                for batch, (x, y) in enumerate(run.share(DataLoader(DATA, BATCH))):
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x), y)
                    if SKIPS["rank 0"](run.world.rank, epoch, batch):
                        continue
                    loss.backward()
                    optimizer.step()

    simulate(program, WORKERS)
    assert not audit.audit(tmp_path, audit.find(tmp_path)).problems


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=5)"])
def test_a_resume_after_skipped_minibatches_has_the_same_bits(rule: str, tmp_path: Any) -> None:
    def program(first: int, last: int) -> State:
        with attached(make_net(), rule) as (run, model, optimizer):
            if first:
                run.resume(tmp_path / "saved")
            shared = run.share(DataLoader(make_data(SAMPLES), BATCH))
            for epoch in range(first, last):
                for batch, (x, y) in enumerate(shared):
                    if epoch == 0 and SKIPS["rank 0"](run.world.rank, epoch, batch):
                        continue
                    learn(model, optimizer, x, y)
                if epoch == 0:
                    run.save(tmp_path / "saved")
        return state_of(model)

    whole = simulate(lambda: program(0, 3), WORKERS)
    assert all(same_bits(out, whole[0]) for out in [*whole, *simulate(lambda: program(1, 3), WORKERS)])


# -- parts of different lengths ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", BY_ONE)
def test_parts_of_different_lengths(rule: str) -> None:
    outs = simulate(Program(rule, samples=41, batch=1), 3)
    assert_together(outs, rule)
    assert sorted(out.trained for out in outs) == [13 * EPOCHS, 14 * EPOCHS, 14 * EPOCHS]


def test_a_worker_without_a_batch() -> None:
    assert_together(simulate(Program("sync", samples=4, batch=1), 3), "sync")


# -- passes that the program leaves ------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", BY_ONE)
def test_all_leave_the_pass_at_the_same_batch(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        for skips in (SKIPS["middle"], SKIPS["rank 0"]):
            outs = simulate(Program(rule, skips, leaves=lambda rank, epoch, batch: batch == 7), WORKERS)
            assert_together(outs, rule)
    assert not [one for one in caplog.records if "left pass" in one.getMessage()]


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("samples", [6, 7, 8])
@pytest.mark.parametrize("rule", ["sync", "bmuf(period=4)", "asgd"])
def test_a_program_that_trains_for_a_number_of_steps(rule: str, samples: int, two: bool) -> None:
    """Parts of different lengths, gone through again and again, perhaps beside another loader."""

    def program() -> tuple[int, list[float]]:
        with attached(make_net(), rule) as (run, model, optimizer):
            shares = [run.share(DataLoader(make_data(count), 1, shuffle=True)) for count in (samples, 10)]
            iterators = [iter(one) for one in shares]
            for _ in range(30):
                drawn = []
                for k in range(1 + two):
                    if (batch := next(iterators[k], None)) is None:
                        iterators[k] = iter(shares[k])
                        batch = next(iterators[k])
                    drawn.append(batch)
                follow(optimizer, sum(nn.functional.cross_entropy(model(x), y) for x, y in drawn))
        return 30, [p.sum().item() for p in model.parameters()]

    outs = simulate(program, 3)
    assert all(out == outs[0] for out in outs)


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=2)"])
def test_one_worker_leaves_the_pass_by_a_condition_of_its_own(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        outs = simulate(
            Program(rule, leaves=lambda rank, epoch, batch: rank == 1 and (epoch, batch) == (0, 4)), WORKERS
        )
    assert_together(outs, rule)
    (said,) = caplog.records
    assert "left pass 1 over its data after 5 batches" in said.getMessage()


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=2)", "streaming_diloco(period=4, overlap=2, fragments=3)"])
def test_one_worker_ends_by_a_condition_of_its_own(rule: str) -> None:
    with pytest.raises(MismatchError, match=r"rank 1 \S+ \S+ ended pass 2 .* and its program ended there"):
        simulate(Program(rule, epochs=lambda rank: 2 if rank == 1 else 4), WORKERS)


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=2)"])
@pytest.mark.parametrize("batch", [4, BATCHES - 2])
def test_one_worker_exits_in_the_middle_of_a_pass(rule: str, batch: int) -> None:
    def leaves(rank: int, epoch: int, at: int) -> bool:
        if rank == 1 and epoch == 1 and at == batch:
            raise SystemExit(0)
        return False

    with pytest.raises(MismatchError, match=rf"rank 1 \S+ \S+ left pass 2 over its data after {BATCHES + batch} steps"):
        simulate(Program(rule, leaves=leaves, epochs=lambda rank: 2), WORKERS)


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=5)"])
def test_all_exit_in_the_middle_of_a_pass(rule: str) -> None:
    def leaves(rank: int, epoch: int, at: int) -> bool:
        if epoch == 1 and at == 4 + rank:  # as if they looked at the clock
            raise SystemExit(0)
        return False

    simulate(Program(rule, leaves=leaves), WORKERS)


def test_passes_that_not_all_workers_begin_are_named() -> None:
    def program() -> None:
        with attached(make_net(), "sync") as (run, model, optimizer):
            shared = run.share(DataLoader(make_data(SAMPLES), BATCH))
            if run.is_main:
                next(iter(shared))
            for x, y in shared:
                learn(model, optimizer, x, y)

    with pytest.raises(MismatchError, match=r"different passes over their data: rank 0 .* in pass 2; rank 1 .* pass 1"):
        simulate(program, WORKERS)


# -- between two passes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["sync", "bmuf(period=5)"])
def test_evaluation_between_passes(rule: str) -> None:
    held = TensorDataset(*make_data(16, seed=9).tensors)

    def inner(run: paceline.Run, model: nn.Module) -> None:
        model.eval()
        with run.global_model(), torch.no_grad():
            sums = [float(model(x).sum()) for x, _ in run.share(DataLoader(held, 2))]
        model.train()
        total = torch.tensor([sum(sums)])
        run.messages.all_reduce(total)

    assert_together(simulate(Program(rule, SKIPS["rank 0"], inner=inner), WORKERS), rule)


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=5)"])
def test_an_iterator_that_the_program_keeps(rule: str) -> None:
    """Steps are counted, and the iterator begins again where it ends."""

    def program() -> Seen:
        model, seen = make_net(), Seen()
        with attached(model, rule) as (run, _, optimizer):
            shared = run.share(DataLoader(make_data(SAMPLES), BATCH))
            batches = iter(shared)
            for number in range(2 * BATCHES + 3):
                try:
                    x, y = next(batches)
                except StopIteration:
                    seen.models.append(run.global_state())
                    batches = iter(shared)
                    x, y = next(batches)
                if run.world.rank == 1 and number % 7 == 3:
                    continue
                learn(model, optimizer, x, y)
        seen.models.append(state_of(model))
        return seen

    one, other = simulate(program, WORKERS)
    assert len(one.models) == 3 and all(map(same_bits, one.models, other.models))


def test_a_checkpoint_that_falls_due_while_one_worker_waits_at_the_end_of_its_pass(tmp_path: Any) -> None:
    def program(epochs: int, resume: bool) -> Seen:
        model, seen = make_net(), Seen()
        with attached(model, "sync", checkpoint=tmp_path, every_blocks=BATCHES - 1, keep=9) as (run, _, optimizer):
            assert run.resume() == resume
            shared = run.share(DataLoader(make_data(SAMPLES), BATCH))
            for epoch in range(run.epoch, epochs):
                for batch, (x, y) in enumerate(shared):
                    if SKIPS["rank 0"](run.world.rank, epoch, batch):
                        continue
                    learn(model, optimizer, x, y)
        seen.models.append(state_of(model))
        return seen

    whole = simulate(lambda: program(3, False), WORKERS)
    steps = sorted(int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*"))
    assert steps[0] == BATCHES and len(steps) > 1  # the first was due one step earlier, and waited
    for path in tmp_path.glob("step-*"):
        if int(path.name.removeprefix("step-")) != steps[0]:
            path.rename(tmp_path.parent / path.name)
    resumed = simulate(lambda: program(3, True), WORKERS)
    assert all(same_bits(out.models[-1], whole[0].models[-1]) for out in [*whole, *resumed])


# -- layers that change weights in the forward pass --------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["sync", "bmuf(period=4, warmup=2)"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_a_largest_norm_is_refused_where_weights_are_the_same(rule: str, kind: Any) -> None:
    def program() -> None:
        model = nn.Sequential(kind(9, 3, max_norm=1.0), nn.Linear(3, 1))
        paceline.attach(model, sgd(model.parameters()), rule)

    with pytest.raises(UnsupportedError, match=r"0 has max_norm=1, .* in the forward pass"):
        simulate(program, WORKERS)


# -- batches that another thread reads ---------------------------------------------------------------------------------
class ReadAhead:
    """Reads a loader in a thread, as prefetchers do."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        ready: queue.Queue[Any] = queue.Queue(2)
        here = virtual.current()

        def read() -> None:
            with contextlib.suppress(BaseException):
                for batch in self._batches:
                    ready.put(batch)
            ready.put(None)

        assert here is not None
        threading.Thread(target=read, name="reader", daemon=True).start()
        return iter(ready.get, None)


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=5)", "asgd()"])
def test_batches_that_another_thread_reads_are_refused(rule: str) -> None:
    def program() -> None:
        with attached(make_net(), rule) as (run, model, optimizer):
            for x, y in ReadAhead(run.share(DataLoader(make_data(SAMPLES), BATCH))):
                learn(model, optimizer, x, y)

    with pytest.raises(UnsupportedError, match="the thread reader reads the training data ahead"):
        simulate(program, WORKERS)
