# SPDX-License-Identifier: Apache-2.0
"""The ways to several workers that `front_doors.py` compares: which program, which commands, on how many machines."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).with_name("_front_doors")
PLAIN = "plain.py"
LIGHTHOUSE = "http://localhost:29510"
Commands = Callable[[int], list[str]]


@dataclass(frozen=True)
class Door:
    """One way.

    Attributes:
        name: in the table.
        program: the version of the program, in `_front_doors/`.
        package: whose version is shown; where it is not installed the door is skipped.
        workers: the commands that start so many workers on one machine; {ADDRESS} is what `server` says.
        server: a command that has to run beside them, for so many workers.
        address: what in the server's output is its address, a regular expression; without one nobody waits for it.
        hosts: what is typed for two machines of two workers each.
        besides: what else has to be there.
        every_step: whether workers exchange in every step.
    """

    name: str
    program: str
    package: str
    workers: Commands
    server: Callable[[int], str] | None = None
    address: str = ""
    hosts: str = ""
    besides: str = ""
    every_step: bool = False


def groups(count: int) -> list[str]:
    """torchft: a command for each replica group."""
    return [
        f"REPLICA_GROUP_ID={group} NUM_REPLICA_GROUPS={count} TORCHFT_LIGHTHOUSE={LIGHTHOUSE} "
        f"torchrun --master_port={29600 + group} --nnodes=1 --nproc_per_node=1 torchft_local_sgd.py"
        for group in range(count)
    ]


def peers(count: int) -> list[str]:
    """hivemind: a command for each peer."""
    return [f"python hivemind_peer.py {peer} {count} {{ADDRESS}}" for peer in range(count)]


ALONE = Door("one device", PLAIN, "torch", lambda count: ["python plain.py"])
DOORS = (
    Door(
        "paceline, zero lines",
        PLAIN,
        "paceline",
        lambda count: [f'paceline run --workers {count} --rule "bmuf(period=8)" plain.py'],
        hosts="one command on one of them, with `--hosts a,b`; it uses ssh",
    ),
    Door(
        "paceline, two lines",
        "paceline_two_lines.py",
        "paceline",
        lambda count: [f"paceline run --workers {count} paceline_two_lines.py"],
        hosts="one command on one of them, with `--hosts a,b`; it uses ssh",
    ),
    Door(
        "PyTorch DDP",
        "ddp.py",
        "torch",
        lambda count: [f"torchrun --nproc-per-node={count} ddp.py"],
        hosts="one command on each, with `--nnodes=2 --node-rank=I --master-addr=HOST --master-port=PORT`",
        every_step=True,
    ),
    Door(
        "torchft, LocalSGD",
        "torchft_local_sgd.py",
        "torchft",
        groups,
        server=lambda count: f"torchft_lighthouse --min_replicas {count} --quorum_tick_ms 100 --join_timeout_ms 10000",
        hosts="one command for each worker, and the lighthouse on one of them",
        besides="the lighthouse",
    ),
    Door(
        "hivemind, local updates",
        "hivemind_peer.py",
        "hivemind",
        peers,
        server=lambda count: "hivemind-dht --host_maddrs /ip4/127.0.0.1/tcp/0",
        address=r"(/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+)",
        hosts="one command for each worker, and the DHT's first peer on one of them; the program needs `host_maddrs`",
        besides="the DHT's first peer, whose address the others are given",
    ),
    Door(
        "Horovod",
        "horovod_sgd.py",
        "horovod",
        lambda count: [f"horovodrun -np {count} python horovod_sgd.py"],
        hosts="one command on one of them, with `-H HOST1:2,HOST2:2`",
        besides="for two machines: ssh from the first to the second without a password",
        every_step=True,
    ),
    Door(
        "accelerate, LocalSGD",
        "accelerate_local_sgd.py",
        "accelerate",
        lambda count: [f"torchrun --nproc-per-node={count} accelerate_local_sgd.py"],
        hosts="one command on each, with `--num_machines 2 --machine_rank I --main_process_ip HOST "
        "--main_process_port PORT`, or the answers of `accelerate config` on each",
    ),
)


def installed(package: str, python: str) -> str:
    """The version that an interpreter has; empty where it has none."""
    ask = f"import importlib.metadata as m, json; print(json.dumps(m.version({package!r})))"
    said = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    return str(json.loads(said.stdout)) if said.returncode == 0 else ""


def version(package: str) -> str:
    """Of this interpreter."""
    return importlib.metadata.version(package)
