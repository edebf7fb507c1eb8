# SPDX-License-Identifier: Apache-2.0
"""Zero lines: run a training program that does not import paceline on several workers.

    python -m paceline_plugins.zero train.py [ARGUMENTS]

runs one worker. `paceline run` starts this for programs that do not mention paceline. So can any launcher that sets
torch.distributed's variables: `torchrun --nproc-per-node 4 -m paceline_plugins.zero train.py`.

What zero lines add on each worker:

- The rule attaches once an optimizer exists and the program requests its first training batch (:mod:`.attachment`,
  :mod:`.module_discovery`).
- A loader used for training gives each worker its part; other loaders are not split (:mod:`.loaders`).
- For evaluation and saving, the model holds the global parameters (:mod:`.models`).
- Only rank 0 writes the program's files; other ranks write into the log directory (:mod:`.file_redirection`).
- Programs that cannot be served safely are refused, with the two lines to add (:mod:`.refusals`).
"""
