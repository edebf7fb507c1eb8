# SPDX-License-Identifier: Apache-2.0
"""A recurrent network that guesses the next word of what Python's standard library says about itself."""

import argparse
import math
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


def read_words(limit):
    """The words of the library's docstrings; one file in ten is for testing."""
    train, test = [], []
    for number, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        text = path.read_text(encoding="utf-8", errors="replace")
        docstrings = " ".join(re.findall(r'"""(.*?)"""', text, re.DOTALL))
        words = re.findall(r"[a-z]+|\d+|[.,:;()?!]", docstrings.lower())
        (test if number % 10 == 0 else train).extend(words)
    return train[:limit], test[: limit // 5]


def batchify(numbers, batch_size):
    """One long text as columns that are read side by side: (steps, batch_size)."""
    steps = len(numbers) // batch_size
    return numbers[: steps * batch_size].view(batch_size, steps).t().contiguous()


class LanguageModel(nn.Module):
    def __init__(self, words, size, dropout):
        super().__init__()
        self.encoder = nn.Embedding(words, size)
        self.dropout = nn.Dropout(dropout)
        self.rnn = nn.LSTM(size, size)
        self.decoder = nn.Linear(size, words)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words, hidden=None):
        output, hidden = self.rnn(self.dropout(self.encoder(words)), hidden)
        return self.decoder(self.dropout(output)).flatten(0, 1), hidden


def get_batch(source, i, bptt):
    """`bptt` words of each column, and the words that follow them."""
    length = min(bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].flatten()


def train(args, model, source, optimizer, epoch):
    model.train()
    hidden, total, batches = None, 0.0, 0
    for i in range(0, len(source) - 1, args.bptt):
        data, targets = get_batch(source, i, args.bptt)
        if hidden is not None:  # the text goes on, the graph does not
            hidden = tuple(state.detach() for state in hidden)
        optimizer.zero_grad()
        output, hidden = model(data, hidden)
        loss = F.cross_entropy(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        total, batches = total + loss.item(), batches + 1
        if batches % args.log_interval == 0:
            print(f"epoch {epoch} word {i}/{len(source)} loss {total / batches:.4f}")
            total, batches = 0.0, 0


@torch.no_grad()
def evaluate(args, model, source):
    model.eval()
    hidden, total = None, 0.0
    for i in range(0, len(source) - 1, args.bptt):
        data, targets = get_batch(source, i, args.bptt)
        output, hidden = model(data, hidden)
        total += F.cross_entropy(output, targets).item() * len(data)
    loss = total / (len(source) - 1)
    print(f"test loss {loss:.4f}, perplexity {math.exp(loss):.1f}")
    return loss


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--words", type=int, default=300_000, help="of the text to train on, at most")
    parser.add_argument("--vocabulary", type=int, default=1_000, help="the rest are unknown")
    parser.add_argument("--size", type=int, default=48, help="of the embeddings and of the hidden state")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--bptt", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-2)
    parser.add_argument("--gamma", type=float, default=0.5, help="the rate falls by this factor each epoch")
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=200)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_words, test_words = read_words(args.words)
    known = [word for word, _ in Counter(train_words).most_common(args.vocabulary - 1)]
    number = {word: index for index, word in enumerate(known, start=1)}
    train_data, test_data = (
        batchify(torch.tensor([number.get(word, 0) for word in words], device=device), args.batch_size)
        for words in (train_words, test_words)
    )
    model = LanguageModel(len(known) + 1, args.size, args.dropout).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, args.gamma)

    loss = evaluate(args, model, test_data)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_data, optimizer, epoch)
        loss = evaluate(args, model, test_data)
        scheduler.step()
    print(f"final loss {loss:.4f}")


if __name__ == "__main__":
    main()
