# SPDX-License-Identifier: Apache-2.0
"""libpaceline: paceline for training tools in C and C++.

`paceline.h` and `paceline.hpp` are what a tool includes, `paceline.c` is the library, and :mod:`.build` compiles it
with any C compiler (`paceline config --cflags --libs`). The library starts Python inside the tool, or uses the one that
the tool has, and calls :mod:`.bridge`.
"""
