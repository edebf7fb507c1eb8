# SPDX-License-Identifier: Apache-2.0
"""Zero lines: a training program that has never heard of paceline, on several workers.

    python -m paceline.zero train.py [ARGUMENTS]

runs one worker of it; `paceline run` starts that for programs that do not mention paceline, and any launcher that sets
torch.distributed's variables can: `torchrun --nproc-per-node 4 -m paceline.zero train.py`.

What a worker does beside the program:

- The rule attaches when an optimizer is there and the program comes to its first training batch (:mod:`.attachment`,
  :mod:`.find`).
- Loaders that are gone through in training give each worker its part; others are whole (:mod:`.loaders`).
- In evaluation, and in what is saved, the model holds the global parameters (:mod:`.models`).
- Only rank 0 writes the program's files; the others write theirs into the log directory (:mod:`.files`).
- What cannot be done safely is refused by name, with the two lines to add (:mod:`.refusals`).
"""
