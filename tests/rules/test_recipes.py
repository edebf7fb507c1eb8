# SPDX-License-Identifier: Apache-2.0
"""Rules by name, by hand and as text, and what is said about text that makes no sense."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import Rule, RuleError, rule_from_text
from paceline.rules import BlockSettings, describe
from paceline.rules.codec import Dense
from paceline.rules.codec.half import Half
from paceline.rules.outer import (
    AdaDelay,
    Arrival,
    Average,
    BlockMomentum,
    DelayCompensated,
    Elastic,
    Nesterov,
    Share,
    StalenessAware,
    Sum,
    TunedMomentum,
)
from paceline.rules.payload import Delta, FirstMoment, Gradient, Parameters
from paceline.rules.recipes import make_rule
from paceline.rules.schedule import Bounded, EveryBlock, EveryStep, Pace, Paced, Probe
from paceline.rules.topology import Flat, Ordered, Sharded
from paceline.rules.traffic import bytes_formula, bytes_per_block, overhead_bytes


def test_the_table() -> None:
    names = "auto sync one_bit power top_k one_bit_adam averaging bmuf bmuf_adam diloco streaming_diloco"
    names += " asgd ssp adadelay staleness_aware momentum_tuned dc_asgd easgd"
    assert list(paceline.RECIPES) == names.split()
    for name, recipe in paceline.RECIPES.items():
        rule = recipe.build()
        assert rule.name == recipe.name == name
        assert recipe.summary and recipe.equation and recipe.source
        assert bytes_formula(rule).startswith("2 (N-1)/N") == rule.codec.exact
        assert "P" in bytes_formula(rule)
        for part in (rule.schedule, rule.payload, rule.codec, rule.topology, rule.outer):
            assert part.describe(4)


def test_five_choices_of_each_recipe() -> None:
    def parts(text: str) -> tuple[Any, ...]:
        r = rule_from_text(text)
        return r.schedule, r.payload, r.codec, r.topology, r.outer

    assert parts("sync") == (EveryStep(), Gradient(), Dense(), Flat(), Average())
    assert parts("averaging") == (EveryBlock(16), Delta(), Dense(), Flat(), Average())
    assert parts("bmuf(period=8, reproducible=True, chunks=2)") == (
        *(EveryBlock(8), Delta(), Dense(), Ordered(2), BlockMomentum()),
    )
    assert parts("auto") == (Paced(4, probe=Probe()), Delta("fitting", beta1=0.5), Dense(), Flat(), BlockMomentum())
    assert parts("auto(first=2, longest=8, share=0.1)")[0] == Paced(
        2, pace=Pace(share=0.1, least=2, longest=8), probe=Probe()
    )
    assert parts("bmuf_adam")[:2] == (EveryBlock(8), Delta("compensate", adam_only=True, beta1=0.5))
    assert parts("diloco(gain='paper')")[1:] == (Delta("keep"), Dense(), Flat(), Nesterov(gain="paper"))


def test_a_first_beta_that_is_none_is_refused() -> None:
    assert rule_from_text("bmuf_adam(beta1=None)").payload == Delta("compensate", adam_only=True)
    for wrong in ("1", "-0.1", "True", "'half'"):
        with pytest.raises(RuleError, match="beta1 must be a number from 0 to below 1, or None, got"):
            rule_from_text(f"bmuf_adam(beta1={wrong})")


def test_auto_says_what_is_wrong_with_its_first_period() -> None:
    with pytest.raises(RuleError, match="first must be a whole number of minibatches, at least 1, got 0"):
        rule_from_text("auto(first=0)")


def test_five_choices_of_each_asynchronous_recipe() -> None:
    def parts(text: str) -> tuple[Any, ...]:
        r = rule_from_text(text)
        assert r.codec == Dense() and r.settings.within == ""
        return r.schedule, r.payload, r.topology, r.outer

    free = Bounded()
    assert parts("asgd") == (free, Gradient(), Sharded(), Sum())
    assert parts("asgd(period=8, overlap=0, piece=640)") == (Bounded(None, 8, 0), Delta("keep"), Sharded(640), Sum())
    assert parts("ssp") == (Bounded(3, 1, 0), Gradient(), Sharded(), Share())
    assert parts("ssp(staleness=2, period=4)") == (Bounded(2, 4, 0), Delta("keep"), Sharded(), Share())
    assert parts("adadelay") == (free, Gradient(), Sharded(), AdaDelay("adaptive"))
    assert parts("adadelay(c=2, overlap=0)") == (Bounded(None, 1, 0), Gradient(), Sharded(), AdaDelay(2))
    assert parts("staleness_aware") == (free, Gradient(), Sharded(), StalenessAware())
    assert parts("momentum_tuned(keep_gain=False)") == (free, Gradient(), Sharded(), TunedMomentum(False))
    assert parts("dc_asgd(kind='adaptive', strength=1.5, decay=0.5, limit=1)") == (
        *(free, Gradient(), Sharded(), DelayCompensated("adaptive", 1.5, 0.5, 1)),
    )
    assert parts("dc_asgd(kind='normalized', start=0.5)")[3] == DelayCompensated("normalized", start=0.5)
    assert parts("easgd") == (Bounded(None, 16, 1), Parameters(), Sharded(), Elastic(0.9))


def test_no_staleness_is_the_synchronous_rule() -> None:
    for text, other in [
        ("ssp(staleness=0)", "sync(reproducible=True)"),
        ("ssp(staleness=0, period=4)", "averaging(period=4, reproducible=True)"),
    ]:
        rule, want = rule_from_text(text), rule_from_text(other)
        for choice in ("schedule", "payload", "codec", "topology", "outer", "settings"):
            assert getattr(rule, choice) == getattr(want, choice)
        assert rule.schedule.workers_meet


def test_what_kind_of_rule_it_is() -> None:
    kinds = {
        name: (not r.schedule.workers_meet, r.schedule.exchanges_blocks)
        for name, r in ((n, rule_from_text(n)) for n in paceline.RECIPES)
    }
    lockstep = ("sync", "one_bit", "power", "top_k", "one_bit_adam")
    blocks = ("auto", "averaging", "bmuf", "bmuf_adam", "diloco", "streaming_diloco")
    assert kinds == {name: (name not in lockstep + blocks, name in blocks) for name in kinds}
    gradients = {name for name in kinds if rule_from_text(name).steps_with_gradients}
    assert gradients == {*lockstep, "asgd", "ssp", "adadelay", "staleness_aware", "momentum_tuned", "dc_asgd"}
    assert not rule_from_text("asgd(period=2)").steps_with_gradients
    assert rule_from_text("bmuf(warmup=3)").steps_with_gradients


def test_the_parts_by_kind() -> None:
    alone, together = rule_from_text("ssp"), rule_from_text("bmuf")
    assert isinstance(alone.outer, Arrival) and not isinstance(together.outer, Arrival)
    assert (alone.arrival, alone.sharded) == (Share(), Sharded())
    assert (together.merging, together.common) == (BlockMomentum(), Flat())
    for rule, wrong in [(alone, "merging"), (alone, "common"), (together, "arrival"), (together, "sharded")]:
        with pytest.raises(AssertionError):
            getattr(rule, wrong)


def test_numbers_of_asynchronous_rules() -> None:
    free = {"period": 1, "staleness": "any", "overlap": 1, "hold": 1}
    want = {
        "asgd": free,
        "asgd(period=4)": free | {"period": 4},
        "ssp(staleness=2)": free | {"staleness": 2, "overlap": 0, "share": 1 / 8},
        "adadelay(c=0.5)": free | {"c": 0.5},
        "staleness_aware": free,
        "momentum_tuned": free | {"implicit_momentum": 0.875},
        "dc_asgd": free | {"strength": 0.04},
        "dc_asgd(kind='adaptive', limit=1)": free | {"strength": 2.0, "decay": 0.95, "limit": 1},
        "dc_asgd(start=100)": free | {"strength": 0.04, "start": 100},
        "easgd(period=5)": free | {"period": 5, "beta": 0.9, "alpha": 0.9 / 8},
    }
    assert {text: describe.numbers(rule_from_text(text), 8) for text in want} == want


def test_bytes_of_asynchronous_rules() -> None:
    rule = rule_from_text("asgd(piece=128, overlap=0)")
    assert bytes_per_block(rule, 4, 1024) == 2 * 3 * 4 * 1024 // 4
    assert bytes_per_block(rule, 1, 1024) == 0
    # each worker owns 256 numbers in two pieces: pushes the six others, answers three workers about two
    assert [overhead_bytes(rule, 4, 1024, rank=r) for r in range(4)] == [88 * 12] * 4
    late = rule_from_text("asgd(piece=128)")  # pushes and pulls apart
    assert [overhead_bytes(late, 4, 1024, rank=r) for r in range(4)] == [88 * 24] * 4
    assert overhead_bytes(rule, 4) == 88 * 6  # at least: three pushes, three answers
    assert overhead_bytes(rule, 1) == overhead_bytes(rule, 1, 1024) == 0
    assert bytes_formula(rule) == (
        "2 (N-1)/N * 4 P bytes a step from each worker, pushed and answered, P parameters; a header of 88 bytes a piece"
    )
    assert "bytes a block" in bytes_formula(rule_from_text("easgd"))
    assert overhead_bytes(rule_from_text("sync"), 4, 1024) == 3 * 128


@pytest.mark.parametrize(
    "text",
    ["bmuf", "bmuf()", " bmuf ( period = 16 ) ", "bmuf(momentum=0.9, lr=1)", "bmuf(gain='paper', nesterov=False)"],
)
def test_text_goes_there_and_back(text: str) -> None:
    rule = rule_from_text(text)
    assert rule_from_text(rule.text()) == rule


@pytest.mark.parametrize(
    "text",
    [
        *("asgd", "asgd(overlap=0, rescaled=True)", "ssp", "ssp(staleness=None)", "ssp(staleness=0, period=3)"),
        *("adadelay", "adadelay(c=0.25)", "staleness_aware(overlap=0)", "momentum_tuned(keep_gain=False)"),
        *("dc_asgd", "dc_asgd(kind='adaptive', strength=1, decay=0, limit=0.5, overlap=0)", "easgd(beta=1)"),
        *("dc_asgd(kind='normalized', start=0.5)", "dc_asgd(start=20)"),
    ],
)
def test_text_of_asynchronous_rules_goes_there_and_back(text: str) -> None:
    rule = rule_from_text(text)
    again = rule_from_text(rule.text())
    assert again == rule and again.text() == rule.text()
    assert rule.text().startswith(text.rstrip(")"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bmf", r"there is no rule 'bmf'; there are auto, sync, .*did you mean 'bmuf'"),
        ("sync(codec=3)", r"codec must be a word such as 'int8'.*got 3"),
        ("sync(codec='int9')", r"there is no codec 'int9'.*did you mean 'int8'"),
        ("one_bit(warmup=-1)", r"warmup must be a whole number of steps, at least 0, got -1"),
        ("top_k(warmup=True)", r"warmup must be"),
        ("streaming_diloco(mixing=1.5)", r"mixing must be a number from 0 to below 1, or None, got 1.5"),
        ("bmuf(overlap=20)", r"overlap must be .* from 0 to the period \(16\), got 20"),
        ("sync(dimensions=(2, 0))", r"dimensions must be"),
        ("bmuf(perod=3)", r"bmuf has no setting 'perod' \(did you mean 'period'\?\); it has period"),
        ("bmuf(3)", "need names, like bmuf"),
        ('auto("1%")', "name the setting that '1%' is for, or leave it out"),
        ("bmuf(period=", "cannot read the rule"),
        ("bmuf(period=int('3'))", "the value of period .* is not a plain number"),
        ("bmuf(period=__import__('os').getpid())", "is not a plain number"),
        ("os.system('true')", "cannot read the rule"),
        ("bmuf + 1", "cannot read the rule"),
        ("", "cannot read the rule"),
        ("a\0b", "cannot read the rule"),
        ("bmuf(period=0)", "period must be .* at least 1, got 0"),
        ("bmuf(period=2.5)", "got 2.5"),
        ("bmuf(period=True)", "got True"),
        ("bmuf(warmup=-1)", "warmup must be"),
        ("bmuf(chunks=0)", "chunks must be"),
        ("bmuf(local_state='frozen')", "local_state must be one of auto, keep"),
        ("sync(period=4)", "sync has no setting 'period'"),
        ("asgd(period=0)", "period must be .* at least 1, got 0"),
        ("asgd(period=True)", "period must be .* got True"),
        ("asgd(overlap=2)", r"overlap must be 0 \(wait for each answer\) or 1 .*, got 2"),
        ("asgd(overlap=True)", "overlap must be .* got True"),
        ("asgd(piece=100)", "piece must be a whole multiple of 64 elements.* got 100"),
        ("asgd(piece=0)", "got 0"),
        ("asgd(piece=True)", "got True"),
        ("asgd(codec='int8')", "asgd has no setting 'codec'"),
        ("ssp(staleness=-1)", r"staleness must be None \(free\) or a whole number of clocks, at least 1 .*got -1"),
        ("ssp(staleness=False)", "staleness must be .* got False"),
        ("ssp(staleness=1.5)", "got 1.5"),
        ("adadelay(c=-1)", 'c must be "adaptive" or a number, at least 0, got -1'),
        ("adadelay(c='auto')", "got 'auto'"),
        ("adadelay(c=True)", "got True"),
        ("adadelay(c=1e999)", "got inf"),
        ("momentum_tuned(keep_gain=1)", "keep_gain must be True or False, got 1"),
        ("dc_asgd(kind='c')", "kind must be one of constant, adaptive, normalized, got 'c'"),
        ("dc_asgd(strength=-0.1)", "strength must be a number, at least 0, or None, got -0.1"),
        ("dc_asgd(decay=1)", "decay must be a number from 0 to below 1, got 1"),
        ("dc_asgd(limit=0)", "limit must be a number above 0, or None, got 0"),
        ("dc_asgd(start=-1)", "start must be a whole number of updates, at least 0, or a fraction .* got -1"),
        ("dc_asgd(start=1.0)", "between 0 and 1, got 1.0"),
        ("dc_asgd(start=True)", "got True"),
        ("easgd(beta=0)", "beta must be a number above 0, at most 1, got 0"),
        ("easgd(beta=1.5)", "got 1.5"),
        ("easgd(beta=None)", "got None"),
        ("bmuf(**{'period': 3})", "plain number|has no setting|names"),
    ],
)
def test_senseless_text_is_refused_with_help(text: str, said: str) -> None:
    with pytest.raises(RuleError, match=said):
        rule_from_text(text)


def test_a_rule_error_is_a_value_error_and_ours() -> None:
    with pytest.raises(ValueError):
        rule_from_text("nothing")
    with pytest.raises(paceline.PacelineError):
        rule_from_text("nothing")


def test_what_attach_takes() -> None:
    by_hand = Rule(EveryBlock(4), Delta(), outer=BlockMomentum(0.9, 1.0))
    assert make_rule(by_hand, {}) is by_hand
    assert make_rule("bmuf", {"period": 4, "momentum": 0.9, "lr": 1.0}) == by_hand.__class__(
        by_hand.schedule, by_hand.payload, outer=by_hand.outer, name="bmuf"
    )
    assert make_rule("bmuf(period=4)", {"ramp": 3}) == rule_from_text("bmuf(period=4, ramp=3)")
    assert make_rule("bmuf(period=4)", {"period": 5}) == rule_from_text("bmuf(period=5)")
    with pytest.raises(RuleError, match="beside a finished Rule"):
        make_rule(by_hand, {"period": 4})
    with pytest.raises(RuleError, match="must be a Rule, or text"):
        make_rule(3, {})  # type: ignore[arg-type]


def test_choices_that_do_not_go_together() -> None:
    with pytest.raises(RuleError, match="Gradient does not go with EveryBlock"):
        Rule(EveryBlock(4), Gradient())
    with pytest.raises(RuleError, match="Delta does not go with EveryStep"):
        Rule(EveryStep(), Delta())
    with pytest.raises(RuleError, match="not through BlockMomentum"):
        Rule(EveryStep(), Gradient(), outer=BlockMomentum())


ALONE: dict[str, Any] = {"schedule": Bounded(), "payload": Gradient(), "topology": Sharded(), "outer": Sum()}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schedule": EveryStep()}, "EveryStep, Sharded, Sum do not go together.*the schedule Bounded"),
        ({"schedule": EveryBlock(4)}, "EveryBlock, Sharded, Sum do not go together"),
        ({"topology": Flat()}, "Bounded, Flat, Sum do not go together"),
        ({"outer": Average()}, "Bounded, Sharded, Average do not go together"),
        ({"schedule": EveryStep(), "outer": Average()}, "EveryStep, Sharded, Average do not go together"),
        ({"schedule": EveryStep(), "topology": Flat()}, "EveryStep, Flat, Sum do not go together"),
        ({"outer": BlockMomentum(), "topology": Flat()}, "Bounded, Flat, BlockMomentum do not go together"),
        ({"codec": Half("bf16")}, r"pushes are written dense so far, not as Half; use Dense\(\)"),
        ({"settings": BlockSettings("host")}, 'within="host" is for rules whose workers exchange blocks together'),
        ({"payload": FirstMoment(3)}, "FirstMoment is exchanged in lockstep"),
        ({"schedule": Bounded(period=2)}, "gradients are exchanged every minibatch, got period 2"),
        ({"payload": Parameters()}, r"Parameters does not go with Sum: Parameters\(\) and Elastic\(\) need each other"),
        ({"outer": Elastic()}, "Gradient does not go with Elastic"),
        ({"outer": Elastic(), "payload": Delta("keep")}, "Delta does not go with Elastic"),
        (
            {"outer": DelayCompensated(), "payload": Delta("keep")},
            "DelayCompensated is defined for gradients, not for D",
        ),
        ({"outer": AdaDelay(), "payload": Delta("keep")}, "AdaDelay is defined for gradients"),
        ({"outer": TunedMomentum(), "payload": Delta("keep")}, "TunedMomentum is defined for gradients"),
        ({"payload": Delta("average")}, "keeps its optimizer's state .* got local_state='average'"),
        ({"payload": Delta("keep", mixing=0.5)}, "mixing=0.5"),
    ],
)
def test_choices_of_asynchronous_rules_that_do_not_go_together(changed: dict[str, Any], said: str) -> None:
    assert not Rule(**ALONE).schedule.workers_meet
    with pytest.raises(RuleError, match=said):
        Rule(**{**ALONE, **changed})


def test_where_workers_can_be_made_of_processes() -> None:
    with pytest.raises(RuleError, match='within must be "" or "host", got \'rack\''):
        BlockSettings("rack")


@pytest.mark.parametrize("rule", ["auto(within='1%')", "auto(within=0.01)", "bmuf(within='1%')"])
def test_a_bound_on_the_loss_is_refused_with_what_to_take(rule: str) -> None:
    with pytest.raises(RuleError, match=r"got ('1%'|0\.01); .* take auto; it chooses by the network and the length"):
        rule_from_text(rule)


def test_parameters_are_for_elastic_averaging() -> None:
    for schedule in (EveryBlock(4), EveryStep()):
        with pytest.raises(RuleError, match="Parameters is for elastic averaging"):
            Rule(schedule, Parameters())


def test_a_rule_by_hand_says_all_five_choices() -> None:
    text = Rule(EveryBlock(4), Delta(), outer=BlockMomentum(0.9, 1.0)).text()
    assert all(word in text for word in ("custom", "EveryBlock(period=4", "Delta", "Dense", "Flat", "BlockMomentum"))


def test_a_rule_of_a_module_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    text = "from paceline.rules import Delta, EveryBlock, Rule\nrule, number = Rule(EveryBlock(3), Delta()), 5\n"
    Path("some_rules.py").write_text(text + "def made(period):\n    return Rule(EveryBlock(period), Delta())\n")
    Path("broken_rules.py").write_text("import no_such_module_at_all\n")
    assert make_rule("some_rules:rule", {}).schedule.period == 3
    assert make_rule("some_rules:made(period=5)", {}) == make_rule("some_rules:made", {"period": 5})
    with pytest.raises(RuleError, match="cannot read the rule"):  # that of a log, which imports nothing
        rule_from_text("some_rules:rule")
    for wrong, said in {
        "no_rules:rule": "the module no_rules, and there is none beside the program",
        "broken_rules:rule": "importing broken_rules failed with ModuleNotFoundError: .*no_such_module_at_all",
        "some_rules:ruel": r"has no 'ruel' \(did you mean 'rule'\?\)",
        "some_rules:number": "gives a int: it has to be, or to return, a Rule",
        "some_rules:rule(period=2)": "is no function, so it takes no settings, got period",
        "some_rules:made(perod=2)": "cannot be called with {'perod': 2}: .*unexpected keyword",
        "some_rules:": "write it like module:name",
    }.items():
        with pytest.raises(RuleError, match=said):
            make_rule(wrong, {})
