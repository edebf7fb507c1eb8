# SPDX-License-Identifier: Apache-2.0
"""`paceline verify`: the receipts of a run are checked, and a block is made again."""
