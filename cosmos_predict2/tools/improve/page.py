# SPDX-License-Identifier: Apache-2.0
"""One page about a way from recordings to a policy: its verdict, the ladder with a figure and a picture each, what it
cost, and what to do next. It is written after every step, so that it shows what there is.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cosmos_predict2.evaluation.reports.evaluation_page import Page, PageVideo
from cosmos_predict2.evaluation.reports.run_report import by_name, plots_of, read_records
from cosmos_predict2.rl.imagined.verdict import CLONE, lines_of, table
from cosmos_predict2.rl.imagined.watch import FILE as WATCHED
from cosmos_predict2.tools.improve import phases
from cosmos_predict2.tools.improve.phases import Clone, Options, Phase, chosen, clones_of, phases_of
from cosmos_predict2.tools.improve.steps import DONE, FAILED, Runner, WayStep
from imaginaire import foreign_json, storage
from imaginaire.log import duration

MOST_CLIPS, MOST_REASONS = 4, 2
BOUNDS = ("rate", "low", "high")
# The metrics of runs that are drawn together.
SIZE = "--image_size"
LOOKS = {"Loss": ("val/stop_loss", "val/stop_loss_seen"), "Imagined pictures, dB": ("val/stop_psnr",)}
LEARNING = {
    "Imagined: reward and success": ("train/reward_mean", "train/success", "val/imagined_greedy_success"),
    "Change from update to update": ("train/approx_kl",),
}


@dataclass(frozen=True)
class WayVerdict:
    """The end of a way in one word, one sentence, and the one thing to do next."""

    word: str  # better, worse, unclear, kept, full, refused, unmeasured, unfinished or ended
    sentence: str
    next_step: str


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

    def kept(self, phase: Phase) -> Path | None:
        """The learnt policy, or the one that learnt where that truly succeeds more, on starts that serve for nothing
        else; None where not all were tried."""
        if phase.number in self.stopped:
            return phase.policy
        names = [*phase.trials_before, phase.trial_after]
        if not all(map(self.is_done, names)):
            return None
        *before, after = (phases.rate_of(self.options.out / name / "evaluation.json") for name in names)
        return phase.learnt if after >= max(before) else phase.policy

    def became_worse(self, phase: Phase) -> bool:
        """True where nothing that was learnt succeeds as often as the policy that learnt it, as far as was tried."""
        return self.kept(phase) == phase.policy

    def brings(self, phase: Phase) -> bool:
        """True where a phase ends with another policy than it began with: its new clone, or what was learnt."""
        is_learnt = phase not in self.refused and not self.became_worse(phase)
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
                for i in phases.SAVED_AT
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
            sentence = f"Nothing is left to learn: a clone truly succeeds (nearly) always, in {rate}.{self._choice()}"
            return WayVerdict("full", sentence, _NEXT["full"])
        done = [phase for phase in self.phases if f"learning{phase.end}" not in due]
        better = [phase for phase in self.phases if self.brings(phase)]
        if not done and not better:
            reasons = "; ".join(self.card(refused[-1])["reasons"][:MOST_REASONS])  # the worst first; all are below
            sentence = f"The gate says no, and nothing was trained in imagination: {reasons}.{self._choice()}"
            again = f". --phases {options.phases + 1} records 100 of this policy and goes the way again"
            next_step = self.card(refused[-1])["next_step"] + (again if options.suite else "")
            return WayVerdict("refused", sentence, next_step)
        checked = self._checked(done, better)
        if not better:
            sentence = f"What was learnt is not kept: {self.tried(done[-1])} ({checked}). RUN/policy is the clone."
            return WayVerdict("kept", sentence + self._choice(), _NEXT["kept"] + self._in_simulator())
        if not options.suite:
            sentence = f"A policy has learnt in imagination ({checked}); how often it truly succeeds was not measured."
            return WayVerdict("unmeasured", sentence, _NEXT["unmeasured"])
        before = self.success(self.truth_of(chosen(options)))
        after = self.success(f"after{better[-1].end}")
        low, high = difference(before, after)
        word = "better" if low > 0 else "worse" if high < 0 else "unclear"
        sentence = (
            f"{_SAID[word]}: true success {before['rate']:.3f} before, {after['rate']:.3f} after, of"
            f" {after['episodes']} episodes {self._starts('nothing was')} ({_change(before, after)}; {checked})."
        )
        next_step = self.card(done[-1])["next_step"] if word == "unclear" and done else ""
        next_step = next_step if next_step == CLONE else _NEXT[word]
        return WayVerdict(
            word, sentence + self._choice(), next_step + ("" if word == "better" else self._in_simulator())
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
            "model.config.policy.path": options.out / "policy",
            "model.config.env": json.dumps(suite, ensure_ascii=False),
        }
        overrides = ["experiment=vla_grpo_suite_conv", "job.name=simulator", *(f"{k}={v}" for k, v in given.items())]
        step = WayStep("simulator", "", ("-m", "scripts.train", *imports, "--", *overrides), (), ())
        return f" Or let the simulator itself teach, where it counts: {self.runner.command(step)}"

    def _checked(self, done: Sequence[Phase], better: Sequence[Phase]) -> str:
        """The words of the gate on each phase, and of the trials that overrule them."""
        checked = f"the gate says {self.card(done[-1])['verdict']}" if done else "the gate says no"
        if done and self.card(done[-1])["verdict"] == "no":
            checked += ", which was overruled"
        for phase in self.refused:
            checked += f", and no to phase {phase.number}"
        for phase in done:
            if better and self.became_worse(phase):
                why = "cannot be trusted" if phase.number in self.stopped else "was worse"
                checked += f"; what was learnt in phase {phase.number} {why} and is not kept"
        for phase in better:
            if phase.is_anew and (phase in self.refused or self.became_worse(phase)):
                checked += f"; phase {phase.number} ends with its new clone"
        return checked

    def truth_of(self, clone: Clone) -> str:
        """The name of the step that measures the clone that learns."""
        return "before" if clone == clones_of(self.options)[0] else phases.CHOSEN

    def _choice(self) -> str:
        """A sentence on the clone that was chosen among several; empty of one."""
        learns, (first, *others) = chosen(self.options), clones_of(self.options)
        if not others:
            return ""
        how = "truly succeeds most" if any(self.played.values()) else "is first in imagination"
        text = f" Of {1 + len(others)} clones {learns.title}, {how}"
        one, best = self.success("before"), self.success(phases.CHOSEN)
        if learns == first or not one or not best:
            return f"{text}."
        rates = f"its true success is {best['rate']:.3f}, that of {first.title}, {one['rate']:.3f}"
        return f"{text}: {rates} ({_change(one, best)})."

    def tried(self, phase: Phase) -> str:
        """Why what a phase learnt is kept, or not."""
        if phase.number in self.stopped:
            return self.stopped[phase.number].rstrip(".")
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
_AGAIN = "Give one more of --phases: 100 true episodes of this policy are recorded, and the way is gone again."
_CLONE = "Use the clone, and record episodes of it: what the world model has not seen of them misled the policy."
_NEXT = {
    **dict.fromkeys(("better", "unclear"), _AGAIN),
    **dict.fromkeys(("kept", "worse"), _CLONE),
    "full": "Use RUN/policy; what it cannot do yet takes other recordings: harder starts, another task.",
    "unmeasured": "Let the robot play 20 episodes with the clone and 20 with the policy, from the same starts; count.",
}


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[float, float]:
    """Bounds of the change of a rate, in 95 of 100 cases, from both intervals (Newcombe 1998, method 10)."""
    change = after["rate"] - before["rate"]
    low = math.hypot(after["rate"] - after["low"], before["high"] - before["rate"])
    high = math.hypot(after["high"] - after["rate"], before["rate"] - before["low"])
    return change - low, change + high


def _ladder(results: WayResults) -> Iterator[tuple[str, str, str, str]]:
    """A tile for each rung that there is: name, figure, what it is, and whether it is good."""
    if split := results.read("split.json"):
        known = [outcome for outcome in split["outcomes"] if outcome is not None]
        yield "recordings", str(len(split["outcomes"])), f"{sum(known)} succeed, {len(known) - sum(known)} fail", ""
    if found := results.read("tokenizer.json"):
        kind = {"good": "good", "bad": "bad"}.get(found["verdict"], "")
        verdict = f"{found['verdict']}; the shipped one {found['psnr_of_shipped']:.1f}"
        yield "tokenizer", f"{found['psnr']:.1f} dB", verdict, kind
    if found := results.read("imagined/figures.json"):
        word = found["verdict"]["word"]
        yield "world model", word, "its actions", {"follows": "good", "ignores": "bad"}.get(word, "")
    if found := results.clone_verdict(chosen(results.options).name):
        word = {True: "sees", False: "blind"}.get(found["is_better"], "not known")
        yield "clone", word, "held-out actions", {"sees": "good", "blind": "bad"}.get(word, "")
    for phase in results.phases:
        if found := results.card(phase):
            kind = {"go": "good", "no": "bad"}.get(found["verdict"], "")
            yield f"gate{phase.title}", found["verdict"], "is what it imagines to be trusted?", kind
    played = {f"after{phase.end}": f"policy{phase.title}, truly" for phase in results.phases}
    clones = {"before": "first clone, truly", results.truth_of(chosen(results.options)): "clone, truly"}
    for name, title in {**clones, **played}.items():
        if found := results.success(name):
            yield title, f"{found['rate']:.3f}", f"{found['low']:.3f} to {found['high']:.3f} of {found['episodes']}", ""


def _recordings(page: Page, results: WayResults, found: dict[str, Any]) -> None:
    counts = ", ".join(f"{count} {what}" for what, count in found["counts"].items())
    page.heading("1. Recordings", f"{counts}; {len(found['faults']) or 'no'} faults.")
    if split := results.read("split.json"):
        outcomes = {part: [split["outcomes"][i] for i in split[part]] for part in ("train", "calibrate", "test")}
        page.findings([f"{part}: {o.count(True)} succeed, {o.count(False)} fail" for part, o in outcomes.items()])
        page.note("What is held out (calibrate, test) is seen by no training; test by no threshold and no stop rule.")
    page.clips(_illustrations(results, "split"))


def _tokenizer(page: Page, results: WayResults, found: dict[str, Any]) -> None:
    here, shipped = f"{found['psnr']:.1f} dB", f"{found['psnr_of_shipped']:.1f}"
    figures = f"{here} on held-out ones, where the tokenizer that ships has {shipped}"
    page.heading("2. Tokenizer", f"Fitted to these pictures, it is {found['verdict']}: {figures}.")
    page.findings(found["reasons"])
    page.clips(_illustrations(results, "tokenizer"))


def _world_model(page: Page, results: WayResults, rule: dict[str, Any]) -> None:
    page.heading("3. World model", rule["text"])
    _plots(page, results.options.out / phases.WORLD_MODEL, LOOKS)
    if found := results.read("imagined/figures.json"):
        page.verdict(f"It {found['verdict']['sentence']}.")
        chunks = {name: values for name, values in found.get("by_chunk", {}).items() if name.startswith("PSNR")}
        page.findings([f"{name}, by chunk: {', '.join(f'{one:.1f}' for one in each)}" for name, each in chunks.items()])
        page.clips(_clips(results.options.out, "imagined", "clip_*.mp4"))
        page.note("Held-out recordings, and what is imagined of their first picture and their own actions.")
        page.link("its evaluation, with all figures and videos", "imagined/index.html")


def _reward(page: Page, results: WayResults, found: dict[str, Any]) -> None:
    page.heading("4. Reward", "A success classifier of pictures; figures of held-out recordings.")
    columns = ("precision", "recall", "accuracy", "calibration_error")
    rows = [(name, [_number(one.get(key)) for key in columns]) for name, one in found["quality"].items()]
    page.table("pictures", [name.replace("_", " ") for name in columns], rows)
    bins = {name: [(bin["probability"], bin["rate"]) for bin in one["bins"]] for name, one in found["quality"].items()}
    page.plots({"Share of true successes": {**bins, "as it should be": [(0, 0), (1, 1)]}}, "probability")


def _clone(page: Page, results: WayResults) -> None:
    options, learns = results.options, chosen(results.options)
    found = {clone: results.read(f"{phases.CLONED}/{clone.name}/clone.json") for clone in clones_of(options)}
    if not found[learns]:
        return
    verdict = results.clone_verdict(learns.name)
    page.heading("5. Clone", f"{verdict['text']} {verdict['next_step']}".rstrip())
    losses = {
        clone.title: [(one["iteration"], _number(one["loss"])) for one in content["history"]]
        for clone, content in found.items()
        if content
    }
    page.plots({"Held-out loss": losses}, "iteration")
    if len(found) > 1 and (ranking := results.read(phases.RANKING)):
        ranked = {Path(row["policy"]).parent.name.replace("_", " "): row for row in ranking["policies"]}
        columns, is_played = ("value", "low", "high"), all(row.get("true_success") for row in ranked.values())
        for kind, title in (("value", "imagined"), *([("true_success", "true success")] if is_played else [])):
            rows = [(name, [_number(row[kind][key]) for key in columns]) for name, row in ranked.items()]
            page.table(title, columns, rows)
        why = "it truly succeeds most" if is_played else "it has the highest imagined value"
        page.verdict(f"{learns.title}, learns: {why}.")
    _truth(page, results, results.truth_of(learns))


def _gate(page: Page, phase: Phase, card: dict[str, Any]) -> None:
    page.heading(f"6. Gate{phase.title}", f"Is what is imagined to be trusted? {card['verdict']}.")
    page.findings(card["reasons"])
    figures = card["figures"]
    groups = {"": figures, **{name: figures[name] for name in figures if name.partition("/")[0] == "policy"}}
    allowed = figures.get("allowed", ())
    page.text(table([line for name, group in groups.items() for line in lines_of(name, group, allowed)]))
    page.note(f"Next, says the gate: {card['next_step']}")


def _policy(page: Page, results: WayResults, phase: Phase) -> None:
    page.heading(f"7. Policy{phase.title}", "It learnt in what the world model imagines.")
    _plots(page, phase.run, LEARNING)
    if (kept := results.kept(phase)) is not None:
        words = f"What it learnt is {'not kept' if kept == phase.policy else 'kept'}"
        page.verdict(f"{words}: {results.tried(phase)}.")
        names = [name for name in (*phase.trials_before, phase.trial_after) if results.is_done(name)]
        if rows := [(name.replace("_", " "), [results.success(name)[key] for key in BOUNDS]) for name in names]:
            page.table("true success, trials", list(BOUNDS), rows)
    looks = [(i, phase.look(i)) for i in phases.SAVED_AT if results.is_done(phase.look(i))]
    if rows := [(f"iteration {i}", [results.success(name)[key] for key in BOUNDS]) for i, name in looks]:
        page.table("true success while it learnt, from other starts", list(BOUNDS), rows)
        page.note(f"Iteration {phase.best} is tried: the last one within a standard error of the best.")
    if not results.became_worse(phase):
        _truth(page, results, f"after{phase.end}")


def _truth(page: Page, results: WayResults, name: str) -> None:
    """The success and the episodes of an evaluation, where there is one."""
    if found := results.success(name):
        interval = f"({found['low']:.3f} to {found['high']:.3f})"
        page.verdict(f"It truly succeeds on {found['rate']:.3f} of {found['episodes']} episodes {interval}.")
        page.clips(_clips(results.options.out, name, "*.mp4"))
        page.note("Left as it truly goes, right what is imagined of the same actions.")


_RUNGS = {  # what each is made of
    "recordings.json": _recordings,
    "tokenizer.json": _tokenizer,
    f"{phases.WORLD_MODEL}/stop_rule.json": _world_model,
    "reward/quality.json": _reward,
}


def _clips(out: Path, folder: str, pattern: str) -> list[PageVideo]:
    """The first videos of a step, named as their files are, true ones before imagined ones."""
    files = sorted((out / folder).glob(pattern), key=lambda file: file.stem.replace("_imagined", "_with"))
    names = {file: file.stem.replace("_", " ").replace("--", ", ") for file in files[:MOST_CLIPS]}
    return [PageVideo(name, f"{folder}/{file.name}") for file, name in names.items()]


def _illustrations(results: WayResults, name: str) -> list[PageVideo]:
    """The clips that `improve.illustrate` wrote for a step."""
    captions = results.read("page/captions.json").get(name, {})
    return [PageVideo(caption, f"page/{file}") for file, caption in captions.items()]


def _plots(page: Page, run: Path, table: Mapping[str, Sequence[str]]) -> None:
    page.plots(plots_of(by_name(read_records(str(run))), table), "iteration")


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def write_page(results: WayResults) -> Path:
    """Write RUN/index.html and RUN/verdict.json; gives the page."""
    options, runner, found = results.options, results.runner, results.verdict()
    title = f"From {options.data.name} to a policy" + (f", {options.suite}" if options.suite else "")
    markers = [(step.title, runner.marker(step)) for step in runner.steps]
    done = [(title, marker) for title, marker in markers if marker.get("state") == DONE]
    costs = [(title, [marker["seconds"] / 60, marker["processor_seconds"] / 60]) for title, marker in done]
    minutes, used = (sum(cost[k] for _, cost in costs) for k in range(2))
    facts = [
        f"{len(costs)} of {len(markers)} steps done, in {duration(60 * minutes)}; {used:.1f} processor minutes",
        f"recordings: {options.data}; policy: {', '.join(options.policies)}; seed {options.seed}",
    ]
    page = Page(title, facts, video_width=192)
    page.verdict(found.sentence)
    page.verdict(f"Next: {found.next_step}")
    page.tiles(list(_ladder(results)))
    for file, draw in _RUNGS.items():
        if content := results.read(file):
            draw(page, results, content)
    _clone(page, results)
    for phase in results.phases:
        if card := results.card(phase):
            _gate(page, phase, card)
    for phase in results.phases:
        if (phase.run / "metrics.jsonl").exists():
            _policy(page, results, phase)
    page.heading("What it cost", "Minutes by the clock, and of all processors together.")
    page.table("step", ["minutes", "processor minutes"], [*costs, ("all", [minutes, used])])
    page.heading("Commands", "Each step can be run alone.")
    page.text("\n".join(runner.command(step) for step in runner.steps))
    content = {"verdict": found.word, "sentence": found.sentence, "next": found.next_step}
    storage.write_json(options.out / "verdict.json", content)
    return page.write(options.out)
