# SPDX-License-Identifier: Apache-2.0
"""Results of a way's programs so far, and what follows from them: steps to leave out, the policy to keep, a verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cosmos_predict2.evaluation.reports.run_report import Lines, by_name, read_records
from cosmos_predict2.rl.imagined.verdict import CLONE
from cosmos_predict2.rl.imagined.watch import FILE as WATCHED
from cosmos_predict2.tools.improve import phases
from cosmos_predict2.tools.improve.phases import Clone, Options, Phase, chosen, clones_of, phases_of
from cosmos_predict2.tools.improve.steps import FAILED, Runner, WayStep
from imaginaire import foreign_json
from imaginaire.config.compose import quoted
from imaginaire.errors import DataError

MOST_REASONS = 2
SIZE = "--image_size"
# What imagined value has to rise by, in what a success is worth above a failure, where nothing can be tried: behind .71
# to 2.5 of it truth rose by .08 to .32 (and once by .00), behind .09 to .65 it changed by -.52 to +.17.
VALUE, LEAST_GAIN = "val/imagined_greedy_return", 0.7


@dataclass(frozen=True)
class WayVerdict:
    """The end of a way in one word, one sentence with its figures, the one thing to do next, and notes."""

    word: str  # better, worse, unclear, kept, full, refused, unmeasured, unfinished or ended
    sentence: str
    next_step: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class WayResults:
    """Results of the programs of a way so far, and what follows from those of steps that are done, with their inputs as
    they are now."""

    options: Options
    runner: Runner

    def read(self, name: str) -> dict[str, Any]:
        try:
            return foreign_json.load_object(self.options.out / name)
        except (OSError, ValueError):
            return {}

    def card(self, phase: Phase) -> dict[str, Any]:
        return self.read(str(phase.card.relative_to(self.options.out)))

    def success(self, name: str) -> dict[str, Any]:
        """Rate, low and high of an evaluation."""
        found = self.read(f"{name}/evaluation.json").get("success", {})
        return found if isinstance(found, dict) else {}

    def is_done(self, name: str) -> bool:
        return any(step.name == name and not self.runner.why(step) for step in self.runner.steps)

    @cached_property
    def phases(self) -> list[Phase]:
        return phases_of(self.options)

    @cached_property
    def refused(self) -> list[Phase]:
        """The phases that the gate refuses, unless that is overruled."""
        asked = [phase for phase in self.phases if self.is_done(f"{phases.GATE}{phase.end}")]
        return [one for one in asked if self.card(one)["verdict"] == "no" and not self.options.allow_unchecked]

    @cached_property
    def stopped(self) -> dict[int, str]:
        """Why the watch ended learning at its first look, with the weights that it began with, by phases' numbers."""
        found = {}
        for phase in self.phases:
            seen = self.read(str((phase.run / WATCHED).relative_to(self.options.out)))
            if self.is_done(f"learning{phase.end}") and seen.get("ended") and len(seen["looks"]) == 1:
                found[phase.number] = seen["ended"]
        return found

    @cached_property
    def is_full(self) -> bool:
        """True where the clone that is chosen truly succeeds (nearly) always, and nothing has learnt of it: the way
        ends there."""
        return (
            self.is_done(phases.CHOICE)
            and not self.is_done("learning")
            and any(map(phases.is_full, self.played.values()))
        )

    @property
    def played(self) -> Mapping[str, Mapping[str, Any]]:
        return phases.played_clones(self.options)

    def clone_verdict(self, name: str) -> dict[str, Any]:
        """The words on how much a clone explains of held-out actions; empty where it is not made."""
        best = self.read(f"{phases.CLONED}/{name}/clone.json").get("best", {})
        return best.get("verdict", {}) if isinstance(best, dict) else {}

    def lines(self, phase: Phase) -> Lines:
        """Values of each metric of learning, by iteration; empty before its first record."""
        try:
            return by_name(read_records(str(phase.run)))
        except ValueError as error:
            path = phase.run / "metrics.jsonl"
            if path.exists() and b"\n" in path.read_bytes():  # one line may be half written
                cure = f"Restore it; or remove {phase.run}, which is then made again"
                raise DataError(f"{path} is damaged: no record can be read from it. {cure}.") from error
            return {}

    def gain(self, phase: Phase) -> float:
        """The rise of the imagined value of what is played, in what a success is worth there above a failure; NaN where
        that is not known."""
        lines = self.lines(phase)
        end = phase.best or lines.get("watch/returned_to", [(0, math.inf)])[-1][1]  # the iteration that is kept
        values = [value for iteration, value in lines.get(VALUE, []) if iteration <= end]
        reward = self.read(str((phase.reward / "quality.json").relative_to(self.options.out)))
        *_, imagined = reward.get("ends", {"": {}}).values()
        worth = number(imagined.get("value_of_successes")) - number(imagined.get("value_of_failures"))
        return (values[-1] - values[0]) / worth if len(values) > 1 and worth > 0 else math.nan

    def risen(self, phase: Phase) -> str:
        gain = self.gain(phase)
        rose = "rose" if gain >= 0 else "fell"
        rose = f"{rose} by {abs(gain):.2f}" if math.isfinite(gain) else "changed by an unknown share"
        return f"its imagined value {rose} of what a success is worth above a failure"

    def kept(self, phase: Phase) -> Path | None:
        """The learnt policy, or the one that learnt where that truly succeeds more, on starts that serve for nothing
        else; where nothing can be played, by what imagination gained. None before that is known."""
        if phase.number in self.stopped:
            return phase.policy
        if not phase.is_tried:
            if not all(self.is_done(f"{name}{phase.end}") for name in ("learning", "export")):
                return None  # what learnt, or what it learnt in, is being made anew
            return phase.learnt if self.options.suite or self.gain(phase) >= LEAST_GAIN else phase.policy
        names = [*phase.trials_before, phase.trial_after]
        if not all(map(self.is_done, names)):
            return None
        *before, after = (phases.rate_of(self.options.out / name / "evaluation.json") for name in names)
        return phase.learnt if after >= max(before) else phase.policy

    def is_dropped(self, phase: Phase) -> bool:
        """True where what was learnt is not kept."""
        return self.kept(phase) == phase.policy

    def brings(self, phase: Phase) -> bool:
        """True where a phase ends with another policy than it began with: its new clone, or what was learnt."""
        is_learnt = phase not in self.refused and not self.is_dropped(phase)
        return not self.is_full and (phase.is_anew is True or is_learnt)

    def _starts(self, what: str) -> str:
        """The starts of the truth, in words. Only those of gym: are without an end; named suites have few."""
        if (suite := self.options.suite).startswith(phases.GYM):
            return f"by whose starts {what} chosen"
        return (
            "from other starts than the gate's, if the suite has so many"
            if ":" in suite
            else "from starts that the gate has, too"
        )

    def left_out(self) -> set[str]:
        """Names of the steps that are left out: learning where the gate refuses, and where no phase follows all others;
        the trials of what the watch stopped at once, and of iterations that it did not come to; the gate and all
        behind it where nothing is left to learn; the truth of what is not kept."""
        refused, steps = self.refused, [step.name for step in self.runner.steps]
        untried = [*refused, *(phase for phase in self.phases if phase.number in self.stopped)]
        names = {f"{name}{phase.end}" for phase in untried for name in ("learning", "export", phases.TRIAL_AFTER)}
        names |= {f"{phases.TRIAL_BEFORE}{phase.end}" for phase in untried if phase.clone is None}
        if refused and refused[-1] == self.phases[-1]:
            names |= set(steps[steps.index(f"{phases.GATE}{refused[-1].end}") + 1 :])
        if self.is_full:
            names |= set(steps[steps.index(phases.GATE) :])
        is_other = chosen(self.options) != clones_of(self.options)[0]
        if is_other or self.is_full:  # then what the choice brought is known
            names -= {"before", phases.CHOSEN}
        if not is_other:  # it is the one of "before"
            names |= {phases.CHOSEN}
        for phase in self.phases:
            after = {f"after{phase.end}"}
            names = names - after if self.brings(phase) else names | after
            has_ended = self.is_done(f"learning{phase.end}")  # by the watch, perhaps
            names |= {
                phase.look(i)
                for i in phase.saved_at
                if phase in untried or (has_ended and not phase.weights(i).exists())
            }
        return names

    def verdict(self) -> WayVerdict:
        options, refused, left_out = self.options, self.refused, self.left_out()
        due = {step.name: step for step in self.runner.steps if self.runner.why(step)}
        for step in (step for name, step in due.items() if name not in left_out):
            if (marker := self.runner.marker(step)).get("state") == FAILED:
                number = self.runner.steps.index(step) + 1
                sentence = f"The way ended at step {number}, {step.title}: {marker['error']}"
                return WayVerdict("ended", sentence, "Mend what it names, and start the same command again.")
        if due.keys() - left_out:
            cure = "Wait while it runs; else start the same command again: it goes on."
            return WayVerdict("unfinished", "The way is not at its end.", cure)
        if self.is_full:
            truth = self.success(self.truth_of(chosen(options)))
            rate = f"{truth['rate']:.3f} of {truth['episodes']} episodes {self._starts('it was not')}"
            sentence = f"Nothing is left to learn: a clone truly succeeds (nearly) always, in {rate}."
            return WayVerdict("full", sentence, _NEXT["full"], self._choice())
        done = [phase for phase in self.phases if f"learning{phase.end}" not in due]
        better = [phase for phase in self.phases if self.brings(phase)]
        if not done and not better:
            reasons = self.card(refused[-1])["reasons"][:MOST_REASONS]  # the worst first; all are below
            sentence = "The gate says no, and nothing was trained in imagination."
            again = f". --phases {options.phases + 1} records 100 of this policy and goes the way again"
            next_step = self.card(refused[-1])["next_step"] + (again if options.suite else "")
            return WayVerdict("refused", sentence, next_step, (*reasons, *self._choice()))
        notes = (*self._checked(done, better), *self._choice())
        if not better:
            sentence = f"What was learnt is not kept: {self.tried(done[-1])}. RUN/policy is the clone."
            is_kept = options.suite or done[-1].number in self.stopped
            next_step = _NEXT["kept"] if is_kept else self._unmeasured()
            return WayVerdict("kept", sentence, next_step + self._in_simulator(), notes)
        if not options.suite:
            sentence = f"A policy has learnt in imagination: {self.tried(done[-1])}. True success is not known."
            return WayVerdict("unmeasured", sentence, self._unmeasured(), notes)
        before = self.success(self.truth_of(chosen(options)))
        after = self.success(f"after{better[-1].end}")
        low, high = difference(before, after)
        word = "better" if low > 0 else "worse" if high < 0 else "unclear"
        sentence = (
            f"{_SAID[word]}: true success {before['rate']:.3f} before, {after['rate']:.3f} after, of"
            f" {after['episodes']} episodes {self._starts('nothing was')} ({_change(before, after)})."
        )
        next_step = self.card(done[-1])["next_step"] if word == "unclear" and done else ""
        next_step = next_step if next_step == CLONE else _NEXT["full" if after["rate"] >= phases.FULL else word]
        return WayVerdict(word, sentence, next_step + ("" if word == "better" else self._in_simulator()), notes)

    def _unmeasured(self) -> str:
        clone = f"RUN/{phases.CLONED}/{chosen(self.options).name}/policy"
        asked = (
            "" if self.options.played else " Recorded, those of the clone are measured by the gate: --played FOLDER."
        )
        return (
            f"Let the robot play 20 episodes with {clone} and 20 with RUN/learnt, from the same starts; count.{asked}"
        )

    def _in_simulator(self) -> str:
        """The command by which the simulator itself teaches; nothing of a robot, and of policies that were not tried
        so."""
        options, names = self.options, [step.name for step in self.runner.steps]
        if phases.TRIAL_BEFORE not in names or chosen(options).policy != "conv":
            return ""
        words, suite = self.runner.steps[names.index(phases.TRIAL_BEFORE)].words, options.suite
        if SIZE in words:  # as it was played
            suite += f"{'&' if '?' in suite else '?'}image_size={words[words.index(SIZE) + 1]}"
        imports = [word for name in options.imports for word in ("--import", name)]
        given = {
            "model.config.policy.path": quoted(options.out / "policy"),
            "model.config.env": quoted(suite),
        }
        overrides = ["experiment=vla_grpo_suite_conv", "job.name=simulator", *(f"{k}={v}" for k, v in given.items())]
        step = WayStep("simulator", "", ("-m", "scripts.train", *imports, "--", *overrides), (), ())
        return f" Or let the simulator itself teach, where it counts: {self.runner.command(step)}"

    def _checked(self, done: Sequence[Phase], better: Sequence[Phase]) -> list[str]:
        """The words of the gate on each phase, and of the trials that overrule them."""
        checked = f"the gate says {self.card(done[-1])['verdict']}" if done else "the gate says no"
        if done and self.card(done[-1])["verdict"] == "no":
            checked += ", which was overruled"
        for phase in self.refused:
            checked += f", and no to phase {phase.number}"
        notes = [checked]
        for phase in done:
            if better and self.is_dropped(phase):
                why = "cannot be trusted" if phase.number in self.stopped else "was worse"
                notes.append(f"what was learnt in phase {phase.number} {why} and is not kept")
        for phase in better:
            if phase.is_anew and (phase in self.refused or self.is_dropped(phase)):
                notes.append(f"phase {phase.number} ends with its new clone")
        return notes

    def truth_of(self, clone: Clone) -> str:
        """The name of the step that measures the clone that learns."""
        return "before" if clone == clones_of(self.options)[0] else phases.CHOSEN

    def _choice(self) -> tuple[str, ...]:
        """A note on the clone that was chosen among several; none of one."""
        learns, (first, *others) = chosen(self.options), clones_of(self.options)
        if not others:
            return ()
        how = "truly succeeds most" if any(self.played.values()) else "is first in imagination"
        text = f"of {1 + len(others)} clones {learns.title}, {how}"
        one, best = self.success("before"), self.success(phases.CHOSEN)
        if learns == first or not one or not best:
            return (text,)
        rates = f"its true success is {best['rate']:.3f}, that of {first.title}, {one['rate']:.3f}"
        return (f"{text}: {rates} ({_change(one, best)})",)

    def tried(self, phase: Phase) -> str:
        """Why what a phase learnt is kept, or not."""
        if phase.number in self.stopped:
            return self.stopped[phase.number].rstrip(".")
        if not phase.is_tried and self.options.suite:
            return "the suite may have too few starts for a trial"
        if not phase.is_tried:
            return f"{self.risen(phase)}, where {LEAST_GAIN:g} is asked"
        before = max((self.success(name) for name in phase.trials_before), key=lambda found: found["rate"])
        after = self.success(phase.trial_after)
        rates = f"{after['rate']:.3f} of {after['episodes']} true episodes, and {before['rate']:.3f} before"
        return f"it succeeded in {rates}, from the same starts, which serve for nothing else"


def _change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    low, high = difference(before, after)
    return f"{after['rate'] - before['rate']:+.3f}, with 95 % between {low:+.3f} and {high:+.3f}"


_SAID = {
    "better": "The policy became better",
    "worse": "The policy became worse",
    "unclear": "It is not clear that the policy became better",
}
_AGAIN = "Give one more of --phases: 100 true episodes of this policy are recorded, and the way is taken again."
_CLONE = "Use the clone, and record episodes of it: what the world model has not seen of them misled the policy."
_NEXT = {
    **dict.fromkeys(("better", "unclear"), _AGAIN),
    **dict.fromkeys(("kept", "worse"), _CLONE),
    "full": "Use RUN/policy; what it cannot do yet takes other recordings: harder starts, another task.",
}


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[float, float]:
    """Bounds of the change of a rate, in 95 of 100 cases, from both intervals (Newcombe 1998, method 10)."""
    change = after["rate"] - before["rate"]
    low = math.hypot(after["rate"] - after["low"], before["high"] - before["rate"])
    high = math.hypot(after["high"] - after["rate"], before["rate"] - before["low"])
    return change - low, change + high


def number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
