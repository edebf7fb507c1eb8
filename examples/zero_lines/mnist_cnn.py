# SPDX-License-Identifier: Apache-2.0
"""A convolutional network that reads handwritten digits: scikit-learn's, of 8x8 pixels."""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.dropout = nn.Dropout(0.1)
        self.fc1 = nn.Linear(16 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(torch.flatten(x, 1))
        return self.fc2(F.relu(self.fc1(x)))


class Shifted(Dataset):
    """Digits moved by up to a pixel each way, so that there is always a new one."""

    def __init__(self, images, labels, copies):
        self.images = F.pad(images, (1, 1, 1, 1))
        self.labels = labels
        self.copies = copies

    def __len__(self):
        return self.copies * len(self.labels)

    def __getitem__(self, index):
        digit = index % len(self.labels)
        down, right = torch.randint(3, (2,)).tolist()
        return self.images[digit, :, down : down + 8, right : right + 8], self.labels[digit]


def load_data(copies):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = parts
    return Shifted(train_images, train_labels, copies), TensorDataset(test_images, test_labels)


def train(args, model, device, loader, optimizer, epoch):
    model.train()
    for batch, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels, label_smoothing=args.label_smoothing)
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0:
            print(f"epoch {epoch} batch {batch}/{len(loader)} loss {loss.item():.4f}")


def test(args, model, device, loader):
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            output = model(images)
            loss += F.cross_entropy(output, labels, label_smoothing=args.label_smoothing, reduction="sum").item()
            correct += (output.argmax(dim=1) == labels).sum().item()
    count = len(loader.dataset)
    print(f"test loss {loss / count:.4f}, {correct} of {count} right ({100 * correct / count:.1f} %)")
    return loss / count


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--copies", type=int, default=10, help="shifted copies of each digit in an epoch")
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--lr", type=float, default=0.45)
    parser.add_argument("--gamma", type=float, default=0.6, help="the rate falls by this factor each epoch")
    parser.add_argument("--label-smoothing", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=200)
    parser.add_argument("--save-model", default="", help="the file to save the model in")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, test_set = load_data(args.copies)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=150)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    loss = test(args, model, device, test_loader)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        loss = test(args, model, device, test_loader)
        scheduler.step()
    if args.save_model:
        torch.save(model.state_dict(), args.save_model)
    print(f"final loss {loss:.4f}")


if __name__ == "__main__":
    main()
