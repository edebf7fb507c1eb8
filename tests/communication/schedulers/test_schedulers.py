# SPDX-License-Identifier: Apache-2.0
"""What a launcher and a worker read out of the environment."""

from __future__ import annotations

import pytest

from paceline.communication import schedulers
from paceline.communication.schedulers import PORTS, Hosts, Worker
from paceline.errors import UnsupportedError

from .environments import batch, step, trainjob

TORCH = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCH |= {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "7"}
OMPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"))}


def test_an_environment_without_a_scheduler() -> None:
    assert schedulers.worker({}) is None and schedulers.hosts({}) is None


def test_torchs_own_variables() -> None:
    assert schedulers.worker(TORCH) == Worker("the launcher", 3, 8, 1, 2, ("a", 29500), env=True)
    assert schedulers.worker({name: value for name, value in TORCH.items() if name != "RANK"}) is None


def test_slurms_step_has_a_launcher_on_each_node() -> None:
    found = [schedulers.hosts(step("gpu[07-09]", 3, node)) for node in range(3)]
    assert all(one is not None for one in found)
    assert [one.index for one in found if one] == [0, 1, 2]
    assert {(one.count, one.master, one.name) for one in found if one} == {(3, ("gpu07", 28_256), "slurm-1234.2")}


def test_a_job_that_is_requeued_has_a_name_of_its_own() -> None:
    found = schedulers.hosts(step("a,b", 2, 0) | {"SLURM_RESTART_COUNT": "1"})
    assert found is not None and found.name == "slurm-1234.2-again-1"


def test_steps_of_a_job_meet_at_ports_of_their_own() -> None:
    ports = set()
    for job in range(1000, 1010):
        for number in range(20):
            found = schedulers.hosts(step("a,b", 2, 0) | {"SLURM_STEP_ID": str(number), "SLURM_JOB_ID": str(job)})
            assert found is not None and found.master is not None and found.master[1] in PORTS
            ports.add(found.master[1])
    assert len(ports) == 200


def test_several_tasks_on_a_node_are_workers_and_no_launchers() -> None:
    for tasks in ("4(x2)", "1,4"):
        with pytest.raises(UnsupportedError, match="has 4 tasks on a node"):
            schedulers.hosts(step("a[1-2]", 2, 0, 4) | {"SLURM_STEP_TASKS_PER_NODE": tasks})
    found = schedulers.worker(step("a[1-2]", 2, 1, 4, 3))
    assert found == Worker("Slurm job 1234, step 2", 7, 8, 3, 4, ("a1", 28_256))


def test_a_batch_script_is_no_worker_and_no_launcher_of_all_nodes() -> None:
    assert schedulers.worker(batch("a[1-2]", 2)) is None
    with pytest.raises(UnsupportedError, match="not started by srun"):
        schedulers.hosts(batch("a[1-2]", 2))
    assert not schedulers.several(batch("a[1-2]", 2)) and schedulers.several(step("a[1-2]", 2, 0))


def test_one_node_is_one_host() -> None:
    assert schedulers.hosts(batch("a1", 1)) == Hosts("Slurm job 1234", name="slurm-1234")
    assert schedulers.worker(step("a1", 1, 0)) is None


def test_the_shell_of_salloc_is_no_step() -> None:
    shell = batch("a[1-2]", 2) | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "a1"}
    with pytest.raises(UnsupportedError, match="not started by srun"):
        schedulers.hosts(shell)
    assert schedulers.worker(shell | {"SLURM_STEP_NUM_TASKS": "2"}) is None


def test_master_addr_is_used_under_slurm() -> None:
    environment = step("a[1-2]", 2, 0) | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
    launcher, task = schedulers.hosts(environment), schedulers.worker(environment)
    assert launcher is not None and task is not None and launcher.master == task.master == ("10.0.0.1", 4000)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"SLURM_NODEID": "one"}, "SLURM_NODEID must be a whole number, and is 'one'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(y2)"}, "tasks per node are written as in"),
        ({"SLURM_STEP_NODELIST": "a[1-3]"}, "has 2 nodes and names 3"),
        ({"SLURM_STEP_NODELIST": "a[1-"}, "not a list of hosts"),
    ],
)
def test_what_slurm_cannot_have_said(wrong: dict[str, str], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says.replace("(", r"\(")):
        schedulers.hosts(step("a[1-2]", 2, 0) | wrong)


def test_a_pod_of_kubeflow() -> None:
    assert schedulers.hosts(trainjob(1)) == Hosts("Kubeflow", 1, 2, ("train-node-0-0.train", 29500))
    assert schedulers.hosts(trainjob(1, each="4")) == Hosts("Kubeflow", 1, 2, ("train-node-0-0.train", 29500), 4)
    assert schedulers.worker(trainjob(1, each="1")) == Worker("Kubeflow", 1, 2, master=("train-node-0-0.train", 29500))
    assert schedulers.worker(trainjob(0, count=1)) is None
    with pytest.raises(UnsupportedError, match="PET_NPROC_PER_NODE=auto workers"):
        schedulers.worker(trainjob(1))
    with pytest.raises(UnsupportedError, match="one number of pods"):
        schedulers.hosts(trainjob(1) | {"PET_NNODES": "1:4"})


def test_a_pod_of_an_indexed_job_knows_its_index_and_where_pod_0_is() -> None:
    found = schedulers.indexed({"JOB_COMPLETION_INDEX": "12"}, lambda: "train-12.train.space.svc.cluster.local")
    assert found is not None and (found.index, found.count) == (12, None)
    assert found.master == ("train-0.train.space.svc.cluster.local", schedulers.INDEXED_PORT)
    nameless = schedulers.indexed({"JOB_COMPLETION_INDEX": "12"}, lambda: "train-12")
    assert nameless is not None and nameless.master is None
    named = schedulers.indexed({"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "b", "MASTER_PORT": "1"}, lambda: "")
    assert named is not None and named.master == ("b", 1)
    assert schedulers.worker({"JOB_COMPLETION_INDEX": "1"}) is None


def test_hydras_processes() -> None:
    assert schedulers.worker(MPICH) == Worker("MPI", 1, 4, 1, 2)
    named = schedulers.worker(MPICH | {"MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert named is not None and named.master == ("a", 1)
    assert schedulers.worker(MPICH | {"PMI_SIZE": "1", "PMI_RANK": "0"}) is None
    with pytest.raises(UnsupportedError, match="set MASTER_ADDR to the host of rank 0"):
        schedulers.worker({name: value for name, value in MPICH.items() if name != "PMI_FD"})


def test_open_mpis_processes_find_their_store_on_one_host() -> None:
    here = OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-vm-77@1"}
    found, other = schedulers.worker(here), schedulers.worker(here | {"OMPI_COMM_WORLD_RANK": "0"})
    assert found is not None and other is not None and found.master == other.master and found.master is not None
    assert (found.rank, found.size, found.local_rank, found.local_size) == (1, 2, 1, 2)
    assert found.master[0] == "127.0.0.1" and found.master[1] in PORTS
    with pytest.raises(UnsupportedError, match=r"mpirun -x MASTER_ADDR=HOST"):
        schedulers.worker(here | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_the_inner_launcher_knows_more_than_the_outer() -> None:
    node = step("a[1-2]", 2, 1)  # mpiexec and mpirun begin on each node with one task of srun
    inner = schedulers.worker(node | MPICH)
    assert inner is not None and (inner.says, inner.size) == ("MPI", 4)
    same = schedulers.worker(node | MPICH | {"PMI_SIZE": "2"})  # srun --mpi=pmi2
    assert same is not None and same.says.startswith("Slurm") and same.master is not None
    mpirun = schedulers.worker(node | OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert mpirun is not None and mpirun.says == "Open MPI" and mpirun.master == same.master
    launched = schedulers.worker(node | MPICH | TORCH)
    assert launched is not None and launched.env


def test_a_process_by_itself_keeps_nothing_of_them() -> None:
    everything = step("a", 1, 0) | trainjob(0) | MPICH | OMPI | TORCH | {"PATH": "/bin", "PACELINE_CONTROL": "x"}
    assert schedulers.alone(everything) == {"PATH": "/bin"}


def test_a_rank_beyond_the_size() -> None:
    with pytest.raises(UnsupportedError, match=r"the rank must lie in 0\.\.3, got 9"):
        schedulers.worker(MPICH | {"PMI_RANK": "9"})
