#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts and trains the program through every door (an hour on two loaded cores) and draws the picture. Rows are kept in
# out/front_doors, so that it goes on where it was stopped. Peers are taken from the virtual environments that TORCHFT, HIVEMIND
# and HOROVOD name; each needs torch, and torchrun where torchft is. What is not there is skipped.
#
# Horovod 0.28.1 asks for C++14, which torch 2.13 no longer compiles with. In its source, CMAKE_CXX_STANDARD 14 becomes 20 in
# CMakeLists.txt and horovod/torch/CMakeLists.txt; then, with setuptools below 70 and wheel installed:
#   HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
#   CMAKE_POLICY_VERSION_MINIMUM=3.5 pip install --no-build-isolation .
# shellcheck disable=SC2046
. "$(dirname "$0")/../common.sh"
peer() { [ -z "$2" ] || echo "--peer $1=$2/bin/python"; }
# shellcheck disable=SC2046
bench seeds/front_doors results $(peer torchft "${TORCHFT:-}") $(peer hivemind "${HIVEMIND:-}") $(peer horovod "${HOROVOD:-}") \
    --repetitions "${REPETITIONS:-3}" --out out/front_doors --plot "$results/plot.png"
