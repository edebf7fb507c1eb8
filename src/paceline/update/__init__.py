# SPDX-License-Identifier: Apache-2.0
"""Service 3, the parameter update: exchanges among workers, engines that run a rule, and the parameter server."""
