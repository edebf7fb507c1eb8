# SPDX-License-Identifier: Apache-2.0
"""Scaling efficiency of training methods on a slow network: eight hosts on emulated links of 1 Gbit/s and 1 ms.

Each worker has a host of its own (a network namespace with a shaped cable to a switch) and an emulated accelerator that
takes 100 ms a step, a third of it forward, for a model of 25.6 million fp32 parameters, 102 MB. Efficiency is a
worker's steps per second over those of one worker alone that exchanges nothing, measured in the same run. The rows:

    no_exchange       all workers, nothing exchanged: what the shared processors alone take away
    bare_overlap      one all-reduce of the model every 16 steps by gloo alone, in the background, and nothing done
                      with it: what the wire takes from the shared processors, the limit of all that overlap
    ddp, ddp_powersgd torch's DistributedDataParallel, and with its PowerSGD hook of rank 2 (in one bucket)
    torchft_diloco    torchft's DiLoCo, 16 steps a block, its manager replaced by a bare gloo all-reduce (no quorum);
    torchft_overlap   the same with its all-reduce in the background for 15 of the 16 steps
    hivemind          hivemind's local updates, state averaged in the background every 16 steps of each worker (where
                      its peers find each other in time; otherwise the row is skipped)
    sync, one_bit, bmuf, streaming_diloco    paceline's rules, see RULES below

The hosts share this machine's cores, which do the optimizers' steps, the codecs and both ends of every cable. `--scale`
keeps that from being what is measured: it divides the parameters, the links' rate and DDP's buckets alike, so that
every transfer takes as long as before and the share of communication is that of the full size, while the processors
have so many times less to do. The default is 4 workers / cores: with half of it the processors, and not the links,
still take 4 to 6 % from the rows that hide their exchange. `--scale 1` is the raw setting, and `--raw` measures it
too. A method's own arithmetic is thus charged to the processors, not to the accelerator where it would run. `--check`
measures only what the links carry.

    python benchmarks/speed/network.py [--rows ddp,bmuf] [--rules "bmuf=bmuf(period=32, overlap=32)"] [--raw] [--check]

The last line is a JSON object: `efficiency.NAME`, `skipped.NAME` with the reason, and the setting; with `--raw` the
efficiencies at scale 1, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
import torch.distributed as dist
from _emulate import EmulatedModel, Step, emulated_model, idle_share, plain_step, processor_ticks, sgd
from _workers import Copy, is_quick

PERIOD = 16  # steps of a block, for every method that has blocks
RULES = {
    "sync": "sync",
    "one_bit": "one_bit(warmup=2)",
    "bmuf": f"bmuf(period={PERIOD}, overlap={PERIOD})",
    "streaming_diloco": f"streaming_diloco(period={PERIOD})",
}
PEERS = ("bare_overlap", "ddp", "ddp_powersgd", "torchft_diloco", "torchft_overlap", "hivemind")
BLOCKY = {"bare_overlap": PERIOD, "torchft_diloco": PERIOD, "torchft_overlap": PERIOD, "hivemind": PERIOD}
WARM_STEPS = 4  # DDP rebuilds its buckets after one, PowerSGD starts after two
PORT = 29400


class Meeting:
    """Where the workers of a row meet: a store of its own, whatever the method does with its connections."""

    def __init__(self, rank: int, size: int, address: str, timeout_s: float) -> None:
        self.rank, self.size, self.turn = rank, size, 0
        self.store = dist.TCPStore(address, PORT, size, rank == 0, timedelta(seconds=timeout_s))

    def together(self) -> None:
        """Wait until everybody is here."""
        self.turn += 1
        key = f"turn{self.turn}"
        if self.store.add(key, 1) == self.size:
            self.store.set(f"{key}/all", b"")
        self.store.wait([f"{key}/all"])

    def longest(self, seconds: float) -> float:
        """The greatest of everybody's numbers."""
        self.store.set(f"longest{self.turn}/{self.rank}", str(seconds))
        return max(float(self.store.get(f"longest{self.turn}/{r}")) for r in range(self.size))

    def leave(self) -> None:
        """Rank 0 keeps the store, so it leaves last."""
        if self.rank:
            self.store.set(f"left{self.rank}", b"")
        elif self.size > 1:
            self.store.wait([f"left{r}" for r in range(1, self.size)])


# ---- what a worker runs: a step of each method ----------------------------------------------------------------------


def no_exchange(model: EmulatedModel, options: argparse.Namespace) -> Step:
    return plain_step(model, sgd(model))


def link(model: EmulatedModel, options: argparse.Namespace) -> Step:
    """One all-reduce of the model's bytes, and nothing else."""
    dist.init_process_group("gloo")
    flat = torch.ones(options.parameters)

    def step() -> None:
        dist.all_reduce(flat)
        flat.fill_(1.0)

    return step


def bare_overlap(model: EmulatedModel, options: argparse.Namespace) -> Step:
    """The limit of every overlapped method: gloo sums the model's bytes once a block, and nothing is done with it."""
    dist.init_process_group("gloo")
    pieces = torch.ones(options.parameters).chunk(3)
    inner, under_way, made = plain_step(model, sgd(model)), [], 0

    def step() -> None:
        nonlocal made, under_way
        inner()
        made += 1
        if made % PERIOD == 0:
            for work in under_way:
                work.wait()
            under_way = [dist.all_reduce(piece, async_op=True) for piece in pieces]

    return step


def ddp(model: EmulatedModel, options: argparse.Namespace) -> Step:
    dist.init_process_group("gloo")
    wrapped = _wrap(model, options)
    return plain_step(wrapped, sgd(model))


def _wrap(model: EmulatedModel, options: argparse.Namespace) -> torch.nn.parallel.DistributedDataParallel:
    """DDP with as many buckets as the full size would have."""
    return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=25 / options.scale)


def ddp_powersgd(model: EmulatedModel, options: argparse.Namespace) -> Step:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    dist.init_process_group("gloo")
    # One bucket: the hook starts all-reduces from callbacks, which run in another order on every rank where there are
    # several, and over gloo, unlike NCCL's streams, that is a deadlock.
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100_000)
    state = power.PowerSGDState(None, matrix_approximation_rank=options.power_rank, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, power.powerSGD_hook)
    return plain_step(wrapped, sgd(model))


def torchft(model: EmulatedModel, delay_steps: int) -> Step:
    """torchft's DiLoCo over a bare gloo group: no lighthouse, no quorum, no vote, which flatters it."""
    from unittest.mock import create_autospec

    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager

    dist.init_process_group("gloo")
    manager = create_autospec(Manager)
    manager._use_async_quorum = False
    manager.should_commit.return_value = True
    manager.current_step.return_value = 0
    manager.allreduce.side_effect = lambda tensor, **_: dist.all_reduce(tensor, async_op=True)
    inner = sgd(model)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    DiLoCo(manager, [model], inner, outer, sync_every=PERIOD, fragment_sync_delay=delay_steps).__enter__()
    return plain_step(model, inner)


def torchft_diloco(model: EmulatedModel, options: argparse.Namespace) -> Step:
    return torchft(model, 0)


def torchft_overlap(model: EmulatedModel, options: argparse.Namespace) -> Step:
    return torchft(model, PERIOD - 1)


def hivemind(model: EmulatedModel, options: argparse.Namespace) -> Step:
    """Local updates and parameters averaged in the background, once every 16 steps of each worker."""
    import hivemind as hm

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], PORT + 1, size, rank == 0, timedelta(seconds=60))
    listen = [f"/ip4/{os.environ['ADDRESS']}/tcp/0"]
    peers = [] if rank == 0 else store.get("dht").decode().split()
    dht = hm.DHT(host_maddrs=listen, initial_peers=peers, start=True)
    if rank == 0:
        store.set("dht", " ".join(map(str, dht.get_visible_maddrs())))
    optimizer = hm.Optimizer(
        dht=dht,
        run_id="benchmark",
        batch_size_per_step=1,
        target_batch_size=PERIOD * size,
        optimizer=sgd(model),
        use_local_updates=True,
        delay_state_averaging=True,
        matchmaking_time=3.0,
        averaging_timeout=30.0,
        averager_opts={"bandwidth": options.rate / 8 * 1e6, "target_group_size": size, "request_timeout": 1.0},
    )
    return plain_step(model, optimizer)


def ours(model: EmulatedModel, options: argparse.Namespace) -> Step:
    import paceline

    optimizer = sgd(model)
    run = paceline.attach(model, optimizer, rule=options.rule)
    step = plain_step(model, optimizer)
    step.run = run  # type: ignore[attr-defined]
    return step


def block_of(name: str, rule: str) -> int:
    """Steps of a block; 1 for methods that have none."""
    if not rule:
        return BLOCKY.get(name, 1)
    from paceline.rules.recipes import rule_from_text

    return int(getattr(rule_from_text(rule).schedule, "period", 1))


def worker(options: argparse.Namespace) -> None:
    """One rank of one row: warm up, start together, measure whole blocks."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = Meeting(rank, size, os.environ["MASTER_ADDR"], options.row_timeout)
    torch.manual_seed(rank)
    compute_s = options.compute_ms / 1e3
    model = emulated_model(options.parameters, 16, compute_s / 3, 2 * compute_s / 3)
    block = block_of(options.worker, options.rule)
    steps = block * max(options.blocks, math.ceil(options.steps / block)) if block > 1 else options.steps
    step = (ours if options.rule else globals()[options.worker])(model, options)
    for _ in range(max(WARM_STEPS, 2 * block if block > 1 else 0)):
        step()
    meeting.together()
    sent, ticks, began = _sent_bytes(), processor_ticks(), time.perf_counter()
    for _ in range(steps):
        step()
    seconds = meeting.longest(time.perf_counter() - began)
    meeting.together()
    found = {
        "step_s": seconds / steps,
        "steps": steps,
        "idle": idle_share(ticks, processor_ticks()),
        "sent_bytes": (_sent_bytes() - sent) / steps,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    if rank == 0:
        Path(options.answer).write_text(json.dumps(found))
    meeting.leave()
    os._exit(0)  # without the closing exchanges of each method, which are not what is measured


def _sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


# ---- what starts them -----------------------------------------------------------------------------------------------


class RowError(Exception):
    """A row could not be measured; the message says why."""


def measure(network: Any, options: argparse.Namespace, name: str, workers: int, rule: str = "") -> dict[str, float]:
    """Start the workers of one row and return what rank 0 found."""
    python = _interpreter(options, name)
    with tempfile.TemporaryDirectory() as directory:
        answer, arguments = Path(directory) / "answer", _arguments(options)
        command = [python, str(Path(__file__).resolve()), "--worker", name, "--rule", rule, *arguments]
        command += ["--answer", str(answer)]
        errors = [Path(directory) / f"err.{k}" for k in range(workers)]
        processes = [_start(network, k, workers, command, errors[k]) for k in range(workers)]
        try:
            _wait(processes, errors, options.row_timeout)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
        found: dict[str, float] = json.loads(answer.read_text())
        return found


def _wait(processes: list[Any], errors: list[Path], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        failed = [k for k, process in enumerate(processes) if process.poll()]
        if failed:
            raise RowError(f"rank {failed[0]}: {_last_line(errors[failed[0]])}")
        if time.monotonic() > deadline:
            raise RowError(f"not done within {timeout_s:g} s")
        time.sleep(0.05)
    failed = [k for k, process in enumerate(processes) if process.returncode]
    if failed:
        raise RowError(f"rank {failed[0]}: {_last_line(errors[failed[0]])}")


def _last_line(path: Path) -> str:
    """The first exception, which caused the others, or else whatever was said last."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip() and line[0] not in " ["]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (errors or lines[-1:] or ["no message"])[0][:300]


def variables(network: Any, host: int, workers: int) -> dict[str, str]:
    """All that a worker of one thread is given."""
    return {
        **os.environ,
        **network.environment(host),
        "RANK": str(host),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(PORT + 2),
        "OMP_NUM_THREADS": "1",
    }


def _start(network: Any, host: int, workers: int, command: list[str], errors: Path) -> Any:
    environment = {
        **variables(network, host, workers),
        "ADDRESS": network.address(host),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # buffers of a layer's size are used again and not faulted in anew
        "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    }
    with errors.open("wb") as sink:
        start = Copy if is_quick() else subprocess.Popen
        return start(
            [*network.prefix(host), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=sink,
            start_new_session=True,
        )


def _interpreter(options: argparse.Namespace, name: str) -> str:
    if name.startswith("torchft"):
        python = options.torchft_python
    elif name == "hivemind":
        python = options.hivemind_python
    else:
        return sys.executable
    package = name.split("_")[0]
    done = subprocess.run([python, "-c", f"import {package}"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RowError(f"{package} is not installed in {python} (give --{package}-python)")
    return str(python)


def _arguments(options: argparse.Namespace) -> list[str]:
    names = ("rate", "parameters", "compute_ms", "steps", "blocks", "row_timeout", "power_rank", "scale")
    return [word for n in names for word in (f"--{n.replace('_', '-')}", str(getattr(options, n)))]


def run(options: argparse.Namespace, scale: float) -> dict[str, Any]:
    """All rows at one scale."""
    from devtools.emulation import EmulatedNetwork

    at = argparse.Namespace(**vars(options))
    at.parameters, at.rate, at.scale = int(options.parameters / scale), options.rate / scale, scale
    print(
        f"{at.workers} workers, links of {at.rate:g} Mbit/s and {at.delay:g} ms, {at.parameters / 1e6:g} M parameters, "
        f"{at.compute_ms:g} ms of compute a step; {'raw' if scale == 1 else f'scale {scale:g}'}, {os.cpu_count()} cores"
    )
    result: dict[str, Any] = {"efficiency": {}, "steps": {}, "skipped": {}}
    with EmulatedNetwork(at.workers, at.rate, at.delay) as network:
        result["link_share"] = _link(network, at)
        if not options.check:
            _rows(network, at, result)
    return result


def _link(network: Any, options: argparse.Namespace) -> float:
    """Whether the links or the processors are the limit: a bare all-reduce of the model, over what the links allow."""
    found = measure(network, options, "link", options.workers)
    size = options.workers
    least_s = 2 * (size - 1) / size * 4 * options.parameters / (options.rate * 1e6 / 8)
    share = least_s / found["step_s"]
    limit = "the links are" if found["idle"] > 0.05 or share > 0.9 else "the processors are"
    print(
        f"all-reduce of the model: {found['step_s']:.3f} s, {100 * share:.0f} % of what the links allow "
        f"({least_s:.3f} s); processors {100 * found['idle']:.0f} % idle: {limit} the limit"
    )
    return round(share, 3)


def _rows(network: Any, options: argparse.Namespace, result: dict[str, Any]) -> None:
    alone = measure(network, options, "no_exchange", 1)
    result["alone_step_ms"] = round(1e3 * alone["step_s"], 2)
    print(f"\n{'row':18} {'a step':>10} {'efficiency':>11} {'sent a step':>12} {'of the link':>12} {'idle':>6}")
    _show("one worker alone", alone, alone, options)
    for name in ("no_exchange", *options.rows):
        try:
            found = measure(network, options, name, options.workers, options.texts.get(name, ""))
        except RowError as error:
            result["skipped"][name] = str(error)
            print(f"{name:18} skipped: {error}", flush=True)
            continue
        result["efficiency"][name] = round(alone["step_s"] / found["step_s"], 4)
        result["steps"][name] = int(found["steps"])
        _show(name, found, alone, options)


def _show(name: str, found: dict[str, float], alone: dict[str, float], options: argparse.Namespace) -> None:
    share = found["sent_bytes"] / found["step_s"] / (options.rate * 1e6 / 8)
    print(
        f"{name:18} {1e3 * found['step_s']:7.1f} ms {100 * alone['step_s'] / found['step_s']:9.1f} % "
        f"{found['sent_bytes'] / 1e6:9.2f} MB {100 * share:10.0f} % {100 * found['idle']:4.0f} %",
        flush=True,
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workers", type=int, default=8)
    add("--rate", type=float, default=1000.0, help="of each link, each direction, Mbit/s, at full size")
    add("--delay", type=float, default=1.0, help="from host to host, one way, ms")
    add("--parameters", type=int, default=25_600_000, help="at full size")
    add("--compute-ms", type=float, default=100.0, help="of the emulated accelerator, a step")
    add("--scale", type=float, default=0.0, help="see above; default 4 workers / cores, 1 = raw")
    add("--raw", action="store_true", help="measure at scale 1, too")
    add("--check", action="store_true", help="only what the links carry")
    add("--rows", default=",".join([*PEERS, *RULES]), help="comma between; any key of --rules, too")
    add("--rules", action="append", default=[], metavar="NAME=TEXT", help="a rule's text for a row, new or known")
    add("--steps", type=int, default=12, help="measured, at least")
    add("--blocks", type=int, default=3, help="measured, at least, of methods with blocks")
    add("--power-rank", type=int, default=2, help="of PowerSGD")
    add("--row-timeout", type=float, default=300.0, help="seconds after which a row is given up")
    add("--torchft-python", default=sys.executable, help="an interpreter that has torchft")
    add("--hivemind-python", default=sys.executable, help="an interpreter that has hivemind")
    add("--worker", default="", help=argparse.SUPPRESS)
    add("--rule", default="", help=argparse.SUPPRESS)
    add("--answer", default="", help=argparse.SUPPRESS)
    options = _quick.parse(
        parser, workers=2, rows="sync,bmuf", steps=3, blocks=1, raw=False, parameters=2_560_000, compute_ms=20.0
    )
    given = dict(text.split("=", 1) for text in options.rules)
    options.texts = RULES | given
    options.rows = [name for name in options.rows.split(",") if name]
    unknown = [name for name in options.rows if name not in PEERS and name not in options.texts]
    if unknown:
        parser.error(f"unknown rows {', '.join(unknown)}; known are {', '.join([*PEERS, *options.texts])}")
    return options


def main() -> None:
    """Measure at the recommended scale, and raw where asked."""
    options = parse()
    if options.worker:
        worker(options)
        return
    from devtools.emulation import EmulatedNetwork

    reason = EmulatedNetwork.possible()
    if reason:
        print(json.dumps({"skipped": {"all": reason}}))
        return
    scale = options.scale or max(1.0, 4 * options.workers / (os.cpu_count() or 1))
    found = run(options, scale)
    if options.raw and scale != 1:
        print()
        raw = run(options, 1.0)
        found |= {f"{key}_raw": value for key, value in raw.items()}
    setting = {"workers": options.workers, "rate_mbit": options.rate, "delay_ms": options.delay, "scale": scale}
    print(json.dumps({**found, **setting, "parameters": options.parameters, "compute_ms": options.compute_ms}))


if __name__ == "__main__":
    main()
