# SPDX-License-Identifier: Apache-2.0
"""Model files: the numbers come out and go back in, all other bytes stay, and what is damaged is refused."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from paceline.errors import DataError
from paceline_plugins.files.formats import NAMES, ModelFile, check_same, named, recognise

W = np.arange(12, dtype=np.float32).reshape(3, 4) / 7
B = np.array([0.5, -1.5, 3.0], dtype=np.float32)


def kaldi_matrix(values: np.ndarray[Any, Any]) -> bytes:
    token = b"FM " if values.dtype == np.float32 else b"DM "
    rows, columns = values.shape
    return token + b"\4" + struct.pack("<i", rows) + b"\4" + struct.pack("<i", columns) + values.tobytes()


def kaldi_vector(values: np.ndarray[Any, Any]) -> bytes:
    token = b"FV " if values.dtype == np.float32 else b"DV "
    return token + b"\4" + struct.pack("<i", len(values)) + values.tobytes()


def nnet1() -> bytes:
    """Of Kaldi's nnet1: sizes and a coefficient between the numbers, and numbers that look like a token."""
    tricky = np.frombuffer(b"FM \4\1\0\0\0\4\1\0\0\0 FV", dtype=np.float32)
    affine = b"<AffineTransform> \4" + struct.pack("<i", 3) + b"\4" + struct.pack("<i", 4)
    rate = b"<LearnRateCoef> \4" + struct.pack("<f", 1.0)
    layer = affine + rate + kaldi_matrix(W) + kaldi_vector(B) + b"<!EndOfComponent> "
    return b"\0B<Nnet> " + layer + b"<AddShift> " + kaldi_vector(tricky) + b"</Nnet> "


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def caffe() -> bytes:
    """A net of two layers, one of the old kind, with unknown fields, a diff and a shape in four fields."""
    new = field(7, field(1, varint(3) + varint(4))) + field(5, W.tobytes()) + field(6, W[::-1].tobytes())
    old = b"".join(varint(k << 3) + varint(size) for k, size in ((1, 1), (2, 1), (3, 1), (4, 3))) + field(
        5, B.tobytes()
    )
    layer = field(1, b"conv1") + field(2, b"Convolution") + field(7, new) + field(7, field(8, B.astype("f8").tobytes()))
    return field(1, b"net") + field(100, layer) + field(2, field(4, b"ip") + field(6, old)) + varint(999 << 3) + b"\5"


def npy(values: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def npz(write: Callable[..., None] = np.savez) -> bytes:
    file = io.BytesIO()
    write(file, w=W, b=B.astype("f8"), steps=np.arange(3), one=np.float32(2))
    return file.getvalue()


SAFE = {"w": torch.from_numpy(W.copy()), "half": torch.tensor([1.5, 2]).bfloat16(), "n": torch.arange(3)}
LAYOUT = "skip:5, w:f32:3x4, b:f64:2"
FILES = {
    "a.npy": npy(W),
    "column.npy": npy(np.asfortranarray(W)),
    "a.npz": npz(),
    "packed.npz": npz(np.savez_compressed),
    "a.safetensors": save(SAFE, {"framework": "ours"}),
    "final.nnet": nnet1(),
    "final.mdl": b"\0B<TransitionModel> \4" + kaldi_vector(B) + b"</TransitionModel> " + nnet1()[2:],
    "feats.ark": b"one \0B" + kaldi_matrix(W.astype("f8")) + b"two \0B" + kaldi_vector(B),
    "net.caffemodel": caffe(),
    "raw.bin": b"head " + W.tobytes() + B[:2].astype("f8").tobytes() + b" and a tail",
}


def form_of(name: str) -> Any:
    return named("flat", LAYOUT) if name == "raw.bin" else recognise(Path(name), FILES[name])


@pytest.mark.parametrize("name", FILES)
def test_what_was_read_is_written_byte_for_byte(name: str) -> None:
    data, form = FILES[name], form_of(name)
    assert form.write(form.read(data)) == data


@pytest.mark.parametrize("name", FILES)
def test_other_numbers_go_back_in_and_nothing_else_changes(name: str) -> None:
    form = form_of(name)
    model = form.read(FILES[name])
    more = {key: tensor + 1 for key, tensor in model.tensors.items()}
    found = form.read(form.write(ModelFile(more, model.skeleton)))
    assert list(found.tensors) == list(model.tensors)
    for key, tensor in found.tensors.items():
        assert torch.equal(tensor, more[key])
    assert form.write(ModelFile(model.tensors, found.skeleton)) == FILES[name]


@pytest.mark.parametrize("name", FILES)
def test_tensors_that_are_kept_stay_in_the_skeleton(name: str) -> None:
    form = form_of(name)
    first, *others = form.read(FILES[name]).tensors
    model = form.read(FILES[name], {first})
    assert list(model.tensors) == others
    assert form.write(model) == FILES[name]


@pytest.mark.parametrize("name", FILES)
def test_every_truncated_file_is_refused(name: str) -> None:
    """By its format, or because it is not the model that was read; white space and a tail of no meaning may miss."""
    form, data = form_of(name), FILES[name]
    model = form.read(data)
    meaningless = {"raw.bin": len(b" and a tail"), "net.caffemodel": 3}.get(name, 1)
    for length in range(len(data) - meaningless):
        with pytest.raises(DataError):
            check_same(model, form.read(data[:length]), "the file")


@given(
    data=st.binary(max_size=200), name=st.sampled_from(sorted(NAMES)), begin=st.sampled_from([b"", b"FM \4", b"\0B"])
)
def test_bytes_of_any_kind_are_read_or_refused(data: bytes, name: str, begin: bytes) -> None:
    form = named(name, None)
    try:
        model = form.read(begin + data)
    except DataError:
        return
    assert form.write(model) == begin + data or name == "npz"


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in form_of(name).read(FILES[name]).tensors.items()}


def test_names_and_shapes_are_those_of_the_file() -> None:
    assert shapes("final.nnet") == {"<LearnRateCoef>": (3, 4), "object 2": (3,), "<AddShift>": (4,)}
    assert shapes("feats.ark") == {"one": (3, 4), "two": (3,)}
    assert shapes("net.caffemodel") == {"conv1[0]": (3, 4), "conv1[1]": (3,), "ip[0]": (1, 1, 1, 3)}
    assert shapes("a.npz") == {"w.npy": (3, 4), "b.npy": (3,), "one.npy": ()}
    assert shapes("a.safetensors") == {"w": (3, 4), "half": (2,)}
    assert shapes("raw.bin") == {"w": (3, 4), "b": (2,)}


def test_pickled_objects_are_never_loaded() -> None:
    file = io.BytesIO()
    np.savez(file, w=W, bad=np.array([print], dtype=object))
    form = named("npz", None)
    model = form.read(file.getvalue())
    assert list(model.tensors) == ["w.npy"] and form.write(model) == file.getvalue()
    with pytest.raises(DataError, match="holds object"):
        named("npy", None).read(npy(np.array([print], dtype=object)))


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("w:f32", "the entry 'w:f32'"),
        ("w:i32:3", "the entry 'w:i32:3'"),
        ("w:f32:*, b:f32:3", "only the last"),
        ("w:f32:3, w:f32:3", "names a tensor twice"),
        ("skip:3", "names no tensor"),
        ("", "the entry ''"),
    ],
)
def test_a_layout_that_is_none_is_refused(layout: str, why: str) -> None:
    with pytest.raises(DataError, match=why.replace("*", r"\*")):
        named("flat", layout)


def test_kaldiio_reads_what_is_written(tmp_path: Path) -> None:
    kaldiio = pytest.importorskip("kaldiio")
    form = form_of("feats.ark")
    model = form.read(FILES["feats.ark"])
    path = tmp_path / "feats.ark"
    path.write_bytes(form.write(ModelFile({name: one * 2 for name, one in model.tensors.items()}, model.skeleton)))
    theirs = dict(kaldiio.load_ark(str(path)))
    assert np.array_equal(theirs["one"], W.astype("f8") * 2) and np.array_equal(theirs["two"], B * 2)
    kaldiio.save_ark(str(path), {"a": W, "b": B})
    ours = form.read(path.read_bytes()).tensors
    assert np.array_equal(ours["a"], W) and np.array_equal(ours["b"], B)


def test_protobuf_reads_what_is_written() -> None:
    """protobuf's own library, with the fields of caffe.proto that are needed."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="caffe.proto", package="caffe", syntax="proto2")
    for name, rows in {
        "BlobProto": [("data", 5, 2, ""), ("diff", 6, 2, "")],
        "LayerParameter": [("name", 1, 9, ""), ("blobs", 7, 11, ".caffe.BlobProto")],
        "NetParameter": [("name", 1, 9, ""), ("layer", 100, 11, ".caffe.LayerParameter")],
    }.items():
        message = file.message_type.add(name=name)
        for label, number, kind, type_name in rows:
            one = message.field.add(name=label, number=number, type=kind, label=1 if kind == 9 else 3)
            if type_name:
                one.type_name = type_name
            elif kind == 2:
                one.options.packed = True
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    net = message_factory.GetMessageClass(pool.FindMessageTypeByName("caffe.NetParameter"))
    form = form_of("net.caffemodel")
    model = form.read(caffe())
    model.tensors["conv1[0]"].mul_(2)
    said = net.FromString(form.write(model))
    assert said.layer[0].blobs[0].data == pytest.approx((2 * W).reshape(-1).tolist())
    assert said.layer[0].blobs[0].diff == pytest.approx(W[::-1].reshape(-1).tolist())
    made = net(layer=[{"name": "fc", "blobs": [{"data": [1.0, 2.0, 3.0]}]}]).SerializeToString()
    assert form.read(made).tensors["fc[0]"].tolist() == [1.0, 2.0, 3.0]
