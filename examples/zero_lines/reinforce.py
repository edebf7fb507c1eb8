# SPDX-License-Identifier: Apache-2.0
"""REINFORCE learns to balance a pole on a cart. Some carts are driven side by side, in NumPy."""

import argparse
from collections import deque

import numpy as np
import torch
from torch import nn


class Carts:
    """Carts with poles. A step pushes each to one side; it is over when pole or cart has gone too far."""

    GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02

    def __init__(self, count, seed):
        self.count = count
        self.random = np.random.default_rng(seed)

    def reset(self):
        """Begin anew; returns place, speed, angle and turning speed of each: (count, 4)."""
        self.state = self.random.uniform(-0.05, 0.05, (self.count, 4))
        return self.state

    def step(self, right):
        """Push where `right` (count,) is 1 to the right, else to the left; returns the state, and who has fallen."""
        _, speed, angle, turning = self.state.T
        sine, cosine = np.sin(angle), np.cos(angle)
        mass = self.CART + self.POLE
        push = (self.FORCE * (2 * right - 1) + self.POLE * self.HALF_LENGTH * turning**2 * sine) / mass
        bend = self.HALF_LENGTH * (4 / 3 - self.POLE * cosine**2 / mass)
        turning_change = (self.GRAVITY * sine - cosine * push) / bend
        speed_change = push - self.POLE * self.HALF_LENGTH * turning_change * cosine / mass
        change = np.stack([speed, speed_change, turning, turning_change], axis=1)
        self.state = self.state + self.SECONDS * change
        fallen = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > np.radians(12))
        return self.state, fallen


class Policy(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, state):
        """The log odds of a push to the right."""
        return self.layers(state).squeeze(-1)


def play(policy, carts, longest):
    """An episode on each cart: states (steps, carts, 4), pushes and whether the cart still stood (steps, carts)."""
    states, pushes, standing = [], [], []
    state, stands = carts.reset(), np.ones(carts.count, dtype=bool)
    while stands.any() and len(states) < longest:
        states.append(torch.tensor(state, dtype=torch.float32))
        with torch.no_grad():
            pushes.append(torch.bernoulli(torch.sigmoid(policy(states[-1]))))
        standing.append(torch.from_numpy(stands))
        state, fallen = carts.step(pushes[-1].numpy())
        stands = stands & ~fallen
    return torch.stack(states), torch.stack(pushes), torch.stack(standing).float()


def returns(rewards, discount):
    """What is still to come at each step, discounted: (steps, carts)."""
    found, later = torch.empty_like(rewards), torch.zeros_like(rewards[0])
    for step in reversed(range(len(rewards))):
        later = rewards[step] + discount * later
        found[step] = later
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--updates", type=int, default=20, help="updates in an epoch")
    parser.add_argument("--carts", type=int, default=16)
    parser.add_argument("--longest", type=int, default=150, help="steps of an episode, at most")
    parser.add_argument("--discount", type=float, default=0.99)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    carts = Carts(args.carts, args.seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    lengths = deque(maxlen=args.updates)
    for epoch in range(1, args.epochs + 1):
        policy.train()
        for _ in range(args.updates):
            states, pushes, standing = play(policy, carts, args.longest)
            still_to_come = returns(standing, args.discount)
            mean = (still_to_come * standing).sum() / standing.sum()
            advantage = (still_to_come - mean) / (still_to_come[standing > 0].std() + 1e-6)
            log_likelihood = -nn.functional.binary_cross_entropy_with_logits(policy(states), pushes, reduction="none")
            loss = -(advantage * log_likelihood * standing).sum() / standing.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lengths.append(standing.sum().item() / args.carts)
        policy.eval()
        _, _, standing = play(policy, carts, args.longest)
        print(f"epoch {epoch} loss {loss.item():.4f}, episodes of {np.mean(lengths):.1f} steps, ", end="")
        print(f"in a test {standing.sum().item() / args.carts:.1f}")
    print(f"final return {np.mean(lengths):.4f}")


if __name__ == "__main__":
    main()
