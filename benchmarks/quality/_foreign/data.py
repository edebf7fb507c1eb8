# SPDX-License-Identifier: Apache-2.0
"""Small data of the kinds that programs look for in files, made at the places that a table names.

pictures:FOLDER:CLASSES:COUNT:SIZE   a folder a class, COUNT pictures each, SIZE x SIZE
flat:FOLDER:COUNT:SIZE               COUNT pictures in one folder
words:FOLDER:COUNT                   train.txt, valid.txt and test.txt of COUNT, COUNT/10 and COUNT/10 words
text:FILE:COUNT                      COUNT characters of prose
sentences:FILE:COUNT                 COUNT lines of six words
masks:FOLDER:COUNT:SIZE              COUNT pictures of two values, for the pictures of `flat` of that many
listed:FOLDER:COUNT:SIZE             as `flat`, of ten classes, and FOLDER_labels.txt, a name and a class a line
few:FOLDER:CLASSES:COUNT:SIZE        images/ with COUNT pictures of each class, train.csv, test.csv
rays:FILE:COUNT                      (COUNT, 9): where from, where to, colour
utterances:FOLDER:COUNT              features as Kaldi has them, fbank.scp, text; a phone is five frames alike
"""

from __future__ import annotations

import array
import io
import json
import pickle
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

VOCABULARY = 200


def make(what: str, folder: Path) -> None:
    """Make what a line of the table says, in the program's folder."""
    kind, place, *sizes = what.split(":")
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    KINDS[kind](folder / place, *map(int, sizes))


def pictures(folder: Path, classes: int, count: int, size: int) -> None:
    """A folder a class."""
    for number in range(classes):
        flat(folder / f"class{number}", count, size, number)


def flat(folder: Path, count: int, size: int, number: int = 0) -> None:
    """Pictures of one class: its own colours, and noise."""
    import numpy
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    own = numpy.random.RandomState(number).uniform(0, 255, (size, size, 3))
    draw = numpy.random.RandomState(1000 + number)
    for each in range(count):
        noisy = 0.5 * own + 0.5 * draw.uniform(0, 255, own.shape)
        Image.fromarray(noisy.astype(numpy.uint8)).save(folder / f"{each:04d}.png")


def prose(count: int, seed: int) -> list[str]:
    """Words of which each is mostly followed by the same one."""
    draw = random.Random(seed)
    words = [0]
    for _ in range(count - 1):
        words.append((3 * words[-1] + 1) % VOCABULARY if draw.random() < 0.7 else draw.randrange(VOCABULARY))
    return [f"w{word}" for word in words]


def words(folder: Path, count: int) -> None:
    """Three files of lines of ten words."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, much) in enumerate((("train", count), ("valid", count // 10), ("test", count // 10))):
        found = prose(much, seed)
        lines = [" ".join(found[first : first + 10]) for first in range(0, much, 10)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def text(file: Path, count: int) -> None:
    """Prose of so many characters."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(" ".join(prose(count, 0))[:count], encoding="utf-8")


def tokens(folder: Path, count: int) -> None:
    """Numbers below the size of the vocabulary, two bytes each."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, much) in enumerate((("train", count), ("val", count // 10))):
        array.array("H", [int(word[1:]) for word in prose(much, seed)]).tofile((folder / f"{name}.bin").open("wb"))
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": VOCABULARY}))


def rows(file: Path, found: list[dict[str, object]]) -> None:
    """A line of JSON each."""
    file.write_text("".join(json.dumps(each) + "\n" for each in found), encoding="utf-8")


PAIRS = """---
configs:
- config_name: mrpc
  data_files:
  - {split: train, path: train.jsonl}
  - {split: validation, path: validation.jsonl}
dataset_info:
- config_name: mrpc
  features:
  - {name: sentence1, dtype: string}
  - {name: sentence2, dtype: string}
  - {name: label, dtype: {class_label: {names: {'0': not_equivalent, '1': equivalent}}}}
  - {name: idx, dtype: int64}
---
"""


def pairs(folder: Path, count: int) -> None:
    """Sentences of six words; the second is the first one, of the upper or of the lower half of the vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(PAIRS, encoding="utf-8")
    draw, half = random.Random(0), VOCABULARY // 2
    for name, much in (("train", count), ("validation", count // 4)):
        made: list[dict[str, object]] = []
        for number in range(much):
            first, equal = [draw.randrange(half) for _ in range(6)], draw.random() < 0.5
            second = [word if equal else word + half for word in first]
            sentences = [" ".join(f"w{word}" for word in each) for each in (first, second)]
            made.append({"sentence1": sentences[0], "sentence2": sentences[1], "label": int(equal), "idx": number})
        rows(folder / f"{name}.jsonl", made)


def tasks(folder: Path, count: int) -> None:
    """Go on counting."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    made: list[dict[str, object]] = []
    for _ in range(count):
        words = [f"w{(first + n) % VOCABULARY}" for first in [draw.randrange(VOCABULARY)] for n in range(10)]
        made.append({"instruction": " ".join(words[:5]), "input": "", "output": " ".join(words[5:])})
    rows(folder / "train.jsonl", made)


def bert(folder: Path) -> None:
    """One layer."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{word}" for word in range(VOCABULARY))]
    BertTokenizerFast(vocab={name: n for n, name in enumerate(names)}, do_lower_case=False).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertForSequenceClassification(BertConfig(vocab_size=len(names), **sizes)).save_pretrained(folder)


def llama(folder: Path) -> None:
    """One layer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *(f"w{word}" for word in range(VOCABULARY))]
    words = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **marks).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(names), intermediate_size=64, **sizes)).save_pretrained(folder)


def papers(file: Path, count: int) -> None:
    """Papers of seven fields with 56 words, mostly of their field; each cites two, mostly of its field."""
    draw = random.Random(0)
    content, cites = [], []
    for paper in range(count):
        words = [str(int(draw.random() < (0.5 if word // 8 == paper % 7 else 0.05))) for word in range(56)]
        content.append("\t".join([str(1000 + paper), *words, "abcdefg"[paper % 7]]))
        cites += [f"{1000 + paper}\t{1000 + (paper + 7 * (draw.randrange(count // 7) or 1)) % count}" for _ in range(2)]
    bodies = {f"cora.{name}": "\n".join(lines) + "\n" for name, lines in (("content", content), ("cites", cites))}
    if not file.suffix:
        file.mkdir(exist_ok=True)
        for name, body in bodies.items():
            (file / name).write_text(body, encoding="utf-8")
        return
    with tarfile.open(file, "w:gz") as archive:
        for name, body in bodies.items():
            entry = tarfile.TarInfo(f"cora/{name}")
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body.encode()))


def waves(file: Path, count: int) -> None:
    """(count, 60), as numpy has them in a file of torch."""
    import numpy
    import torch

    shifts = numpy.random.RandomState(2).randint(-80, 80, count).reshape(count, 1)
    torch.save(numpy.sin((numpy.arange(60) + shifts) / 20.0), file)


def sentences(file: Path, count: int) -> None:
    """Of the same prose."""
    found = prose(6 * count, 3)
    file.write_text("".join(" ".join(found[n : n + 6]) + "\n" for n in range(0, 6 * count, 6)), encoding="utf-8")


def masks(folder: Path, count: int, size: int) -> None:
    """A box each."""
    from PIL import Image, ImageDraw

    folder.mkdir(parents=True, exist_ok=True)
    for each in range(count):
        picture = Image.new("L", (size, size))
        ImageDraw.Draw(picture).rectangle([each % 8, each % 8, size // 2, size // 2], fill=255)
        picture.save(folder / f"{each:04d}.png")


def listed(folder: Path, count: int, size: int) -> None:
    """A class in ten has a colour of its own."""
    flat(folder, count, size)
    lines = [f"{each:04d}.png {each % 10}\n" for each in range(count)]
    folder.with_name(f"{folder.name}_labels.txt").write_text("".join(lines), encoding="utf-8")


def few(folder: Path, classes: int, count: int, size: int) -> None:
    """The first nine letters of a picture's name are its class."""
    names = []
    for number in range(classes):
        flat(folder / "images" / "now", count, size, number)
        for file in sorted((folder / "images" / "now").iterdir()):
            name = f"n{number:08d}{file.name}"
            file.rename(folder / "images" / name)
            names.append(f"{name},n{number:08d}\n")
    for part in ("train", "test"):
        (folder / f"{part}.csv").write_text("filename,label\n" + "".join(names), encoding="utf-8")


def rays(file: Path, count: int) -> None:
    """Colours that the direction decides."""
    import numpy

    found = numpy.random.RandomState(4).normal(size=(count, 9)).astype(numpy.float32)
    found[:, 6:] = 1 / (1 + numpy.exp(-found[:, 3:6]))
    with file.open("wb") as opened:
        numpy.save(opened, found)


def utterances(folder: Path, count: int) -> None:
    """Six phones of eight."""
    import numpy

    folder.mkdir(parents=True, exist_ok=True)
    draw = numpy.random.RandomState(count)
    own = numpy.random.RandomState(5).normal(size=(8, 24))
    listed, texts = [], []
    for each in range(count):
        phones = draw.randint(0, 8, 6)
        frames = (own[phones].repeat(5, axis=0) + 0.3 * draw.normal(size=(30, 24))).astype("<f4")
        head = b"\0BFM \4" + (30).to_bytes(4, "little") + b"\4" + (24).to_bytes(4, "little")
        (folder / f"u{each}.mat").write_bytes(head + frames.tobytes())
        listed.append(f"u{each} {folder / f'u{each}.mat'}\n")
        texts.append(f"u{each} " + " ".join(f"p{phone}" for phone in phones) + "\n")
    (folder / "fbank.scp").write_text("".join(listed), encoding="utf-8")
    (folder / "phn_text").write_text("".join(texts), encoding="utf-8")


KINDS: dict[str, Callable[..., None]] = {
    one.__name__: one
    for many in (
        (pictures, flat, words, text, tokens, pairs, tasks, bert, llama, papers, waves),
        (sentences, masks, listed, few, rays, utterances),
    )
    for one in many
}
