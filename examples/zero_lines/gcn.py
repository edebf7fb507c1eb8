# SPDX-License-Identifier: Apache-2.0
"""A graph convolutional network that finds the field of a paper from its words and from what it cites."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


def citation_graph(papers, fields, words, generator):
    """Papers of several fields that cite their own field more often than others, and share most of its words.

    Returns the normalized adjacency (papers, papers; sparse), the words (papers, words) and the fields (papers,).
    """
    labels = torch.randint(fields, (papers,), generator=generator)
    source = torch.randint(papers, (6 * papers,), generator=generator)
    target = torch.randint(papers, (6 * papers,), generator=generator)
    likely = torch.where(labels[source] == labels[target], 0.9, 0.08)
    cited = torch.rand(len(source), generator=generator) < likely
    everyone = torch.arange(papers)
    rows = torch.cat([source[cited], target[cited], everyone])
    columns = torch.cat([target[cited], source[cited], everyone])
    degree = torch.bincount(rows, minlength=papers).float()
    values = (degree[rows] * degree[columns]).rsqrt()
    adjacency = torch.sparse_coo_tensor(torch.stack([rows, columns]), values, (papers, papers), check_invariants=True)
    likes = 0.04 + 0.06 * (torch.rand(fields, words, generator=generator) < 0.2).float()
    features = torch.bernoulli(likes[labels], generator=generator)
    return adjacency.coalesce(), features, labels


class GraphConvolution(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x, adjacency):
        return torch.sparse.mm(adjacency, self.linear(x))


class GCN(nn.Module):
    def __init__(self, inputs, hidden, outputs, dropout):
        super().__init__()
        self.first = GraphConvolution(inputs, hidden)
        self.second = GraphConvolution(hidden, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, adjacency):
        x = F.relu(self.first(self.dropout(x), adjacency))
        return self.second(self.dropout(x), adjacency)


def train(model, optimizer, graph, nodes):
    adjacency, features, labels = graph
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(features, adjacency)[nodes], labels[nodes])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model, graph, nodes):
    adjacency, features, labels = graph
    model.eval()
    output = model(features, adjacency)[nodes]
    loss = F.cross_entropy(output, labels[nodes]).item()
    return loss, (output.argmax(1) == labels[nodes]).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--papers", type=int, default=3_000)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--weight-decay", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=20)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    graph = citation_graph(args.papers, fields=7, words=200, generator=generator)
    train_nodes, test_nodes = torch.randperm(args.papers, generator=generator).to(device).tensor_split(2)
    graph = tuple(tensor.to(device) for tensor in graph)
    model = GCN(200, args.hidden, 7, args.dropout).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)

    test_loss, _ = test(model, graph, test_nodes)
    for epoch in range(1, args.epochs + 1):
        loss = train(model, optimizer, graph, train_nodes)
        test_loss, accuracy = test(model, graph, test_nodes)
        if epoch % args.log_interval == 0:
            print(f"epoch {epoch} train loss {loss:.4f}, test loss {test_loss:.4f}, {100 * accuracy:.1f} % right")
    print(f"final loss {test_loss:.4f}")


if __name__ == "__main__":
    main()
