# SPDX-License-Identifier: Apache-2.0
"""Blocks: a worker trains alone for some minibatches, then the workers merge what they made.

`model` cuts the model into fragments, knows when each one's block ends, and runs the exchanges; `fragment` is one
fragment and the optimizers of its parameters; `outer_state` what it counts, its tensors, what goes on the wire, and
what is made of the mean; `saved` its checkpoint. The exchange itself, without knowledge of blocks, is
:mod:`paceline.update.exchange.exchanger`.

One exchange, in order:

    step      `BlockExchanges.advance`, after every step of the optimizer. `FragmentSchedule.ends` says at which step
              the next fragment's block is over: `FragmentedModel.begin`
    begin     `BlockUpdate.begin` freezes the coefficients of the outer step (`BlockNumbers.freeze`), and cuts the outer
              state for the wire, once (`cut_states`)
    pack      `ParameterState.norm` packs parameters - start into the wire memory and takes the norm, in one pass; what
              is full leaves at once (`Exchanger.begin_early`)
    header    `BlockUpdate._header`: norm, whether it is finite, checksum of the last result. An unusual norm is voted
              on before anything else is sent (`Exchanger.pre_vote`)
    send      `Exchanger.start` sends the header (`PendingHeader`) and three chunks (`InFlightExchange.send_more`). Each
              goes through the codec's operations in a pipeline (`Exchanger.sum`, `Pipeline.start`)

    wait      `PendingHeader.summary` has all headers, the same on every worker
    judge     `agree`: same place, same checksums, else an error on all. `with_outliers_dropped`: a contribution far
              beyond the others' has weight 0, and chunks that have left are summed once more (`_repeat`)
    apply     `InFlightExchange.finish`: `OuterStateChunk.land` divides the sum by the weight, and
              `ParameterState.apply` takes the outer step, writes the next start, and folds its checksum
    count     `BlockUpdate.land`: `BlockNumbers.advance`, `LocalOptimizers.advance`. A worker whose block was rejected
              begins it again (`restart`)
    log       `BlockExchanges._note`: `Monitor.end`. Observers have seen the exchange (`gave`, `merged`)

With overlap, `begin` takes a snapshot (`take_snapshot`), and a thread packs, sends and applies the mean to the outer
state (`OuterState.prepare`) while the next block computes. `FragmentedModel.landing` says when the exchange lands:
`OuterState.move` then changes the parameters, `made` minibatches later.

A worker that is out of data joins with what it has made so far (`BlockExchanges.wait`, `FragmentedModel.stand`), and at
the end of the run until all workers leave (`BlockExchanges.finish`).
"""
