# SPDX-License-Identifier: Apache-2.0
"""The control plane of elastic runs: membership, commits of exchanges, and leases of data.

A :class:`.server.ControlServer` lives in the launcher, a :class:`.client.ControlClient` in every worker;
:class:`.state_machine.StateMachine` decides.
"""
