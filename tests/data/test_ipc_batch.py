# SPDX-License-Identifier: Apache-2.0
"""Several batches in one message: what comes out is what went in, and no two batches share memory."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper

from paceline.data.workers.batching import LARGE_BYTES, IpcBatch, Packer

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Custom:
    """A batch of the user's own kind, with something of its own to do when it is pinned."""

    x: Tensor
    pinned: bool = False

    def pin_memory(self) -> Custom:
        return Custom(self.x.pin_memory(), pinned=True)


class Sub(Tensor):
    pass


class Encoding(UserDict):  # type: ignore[type-arg]
    """As text libraries give it."""


def arrived(packer: Packer) -> IpcBatch:
    """As it arrives: pickled as a queue does it."""
    ipc_batch: IpcBatch = ForkingPickler.loads(bytes(ForkingPickler.dumps(packer)))
    return ipc_batch


def sent(*batches: Any) -> IpcBatch:
    packer = Packer()
    for batch in batches:
        packer.add(batch)
    return arrived(packer)


TENSORS: dict[str, Tensor] = {
    "matrix": torch.arange(12.0).view(3, 4),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 5, dtype=torch.int32),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, 3 - 1j]),
    "bf16": torch.tensor([1.5, -2.0, 0.1], dtype=torch.bfloat16),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "double": torch.tensor([1e-300], dtype=torch.float64),
    "transposed": torch.arange(12).view(3, 4).t(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "slice": torch.arange(100)[10:20],
    "gaps": torch.arange(20)[::2],
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "leaf": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_out_as_they_went_in(name: str) -> None:
    want = TENSORS[name]
    for odd in (torch.ones(3, dtype=torch.uint8), torch.ones(1)):  # whatever lies before it
        _, got = sent([odd, want]).batch(0)
        assert got.dtype == want.dtype and got.shape == want.shape and got.stride() == want.stride()
        assert got.requires_grad == want.requires_grad and got.is_leaf
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_structures_come_out_as_they_went_in() -> None:
    batch = {
        "pair": Pair(torch.ones(2), [torch.zeros(3), "text", b"bytes", None, 3, 2.5]),
        "tuple": (torch.arange(4), {"deep": torch.arange(2)}),
        "ordered": OrderedDict(b=1, a=torch.ones(1)),
        "own": Custom(torch.full((2,), 7.0)),
        "none": np.empty((0, 2)),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "objects": np.array(["a", None], dtype=object),
    }
    got = sent(batch).batch(0)
    assert type(got["pair"]) is Pair and type(got["ordered"]) is OrderedDict and type(got["own"]) is Custom
    assert got["pair"].y[1:] == ["text", b"bytes", None, 3, 2.5] and list(got["ordered"]) == ["b", "a"]
    assert got["pair"].y[0].tolist() == [0, 0, 0] and got["tuple"][1]["deep"].tolist() == [0, 1]
    assert got["own"].x.tolist() == [7, 7] and got["objects"].tolist() == ["a", None]
    assert got["array"].dtype == np.int16 and got["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert got["none"].shape == (0, 2)
    got["array"][0, 0] = 9  # may be written


def test_writing_into_one_batch_changes_no_other() -> None:
    constant = torch.zeros(3, dtype=torch.uint8)  # the same object in every batch
    ipc_batch = sent(*[(constant, torch.full((5,), k), np.full(3, k)) for k in range(4)])
    batches = [ipc_batch.batch(k) for k in range(4)]
    for tensor in batches[1][:2]:
        tensor.fill_(99)
    batches[1][2][:] = 99
    for k in (0, 2, 3):
        assert (
            batches[k][0].tolist() == [0] * 3
            and batches[k][1].tolist() == [k] * 5
            and batches[k][2].tolist() == [k] * 3
        )
    assert constant.tolist() == [0] * 3


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ["large", "sparse", "parameter", "subclass"])
def test_what_is_no_small_plain_tensor_travels_by_itself(name: str) -> None:
    tensor = {
        "large": torch.arange(LARGE_BYTES // 8 + 1),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "subclass": torch.ones(3).as_subclass(Sub),
    }[name]
    packer = Packer()
    packer.add({"a": torch.ones(2), "b": tensor, "c": torch.zeros(2)})
    ipc_batch = arrived(packer)
    got = ipc_batch.batch(0)
    assert type(got["b"]) is type(tensor) and got["b"].shape == tensor.shape
    assert got["b"].to_dense().tolist() == tensor.to_dense().tolist()
    assert got["a"].tolist() == [1, 1] and got["c"].tolist() == [0, 0]
    assert ipc_batch.nbytes >= 3 * 4 and (name != "large" or ipc_batch.nbytes > LARGE_BYTES)


def test_a_packed_sequence_and_a_mapping_with_more_than_items() -> None:
    encoding = Encoding(ids=torch.arange(3))
    encoding.note = "kept"  # type: ignore[attr-defined]
    sequence = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(1)])
    ipc_batch = sent((encoding, sequence))
    assert isinstance(encoding["ids"], Tensor)  # the user's own was not touched
    got, other = ipc_batch.batch(0)
    assert type(got) is Encoding and got.note == "kept" and got["ids"].tolist() == [0, 1, 2]  # type: ignore[attr-defined]
    assert type(other) is type(sequence) and other.batch_sizes.tolist() == [2, 1, 1] and other.data.tolist() == [1] * 4


def test_an_error_stands_in_the_place_of_its_batch() -> None:
    packer = Packer()
    packer.add(torch.ones(1))
    try:
        raise KeyError("gone")
    except KeyError:
        packer.add_error(ExceptionWrapper(where="there"))
    packer.add(torch.zeros(1))
    packer.made_s = 2.0
    ipc_batch = arrived(packer)
    assert ipc_batch.made_s == 2.0 and len(ipc_batch) == 3
    assert ipc_batch.batch(0).item() == 1 and ipc_batch.batch(2).item() == 0
    with pytest.raises(KeyError, match=r"(?s)there.*gone"):
        ipc_batch.batch(1)


def test_pinning_keeps_batches_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor.clone())
    ipc_batch = sent({"x": torch.arange(4.0), "n": np.arange(3)}, Custom(torch.ones(2)), torch.tensor(7)).pin_memory()
    first, own, scalar = (ipc_batch.batch(k) for k in range(3))
    assert own.pinned and own.x.tolist() == [1, 1] and scalar.item() == 7 and first["n"].tolist() == [0, 1, 2]
    version = scalar._version
    first["x"].fill_(-1)
    assert scalar.item() == 7 and scalar._version == version
