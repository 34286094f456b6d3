# SPDX-License-Identifier: Apache-2.0
"""One page about a way from recordings to a policy: its verdict, the ladder with a figure and a picture each, what it
cost, and what to do next. It is written after every step, so that it shows what there is.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_predict2.evaluation.reports.evaluation_page import Page, PageVideo, Points
from cosmos_predict2.evaluation.reports.run_report import by_name, plots_of, read_records
from cosmos_predict2.rl.imagined.verdict import lines_of, table
from cosmos_predict2.tools.improve import way
from cosmos_predict2.tools.improve.steps import DONE, FAILED, Runner
from cosmos_predict2.tools.improve.way import Clone, Options, Phase, chosen, clones_of, phases_of
from imaginaire import foreign_json, storage
from imaginaire.log import duration

VERDICT = "verdict.json"
MOST_CLIPS, MOST_REASONS = 4, 2
# The metrics of runs that are drawn together.
LOOKS = {"Loss": ("val/stop_loss", "val/stop_loss_seen"), "Imagined pictures, dB": ("val/stop_psnr",)}
LEARNING = {
    "Imagined: reward and success": ("train/reward_mean", "train/success", "val/imagined_greedy_success"),
    "Change from update to update": ("train/approx_kl",),
}


@dataclass(frozen=True)
class WayVerdict:
    """The end of a way in one word, one sentence, and the one thing to do next."""

    word: str  # better, worse, unclear, kept, refused, unmeasured, unfinished or ended
    sentence: str
    next_step: str


@dataclass(frozen=True)
class WayResults:
    """The results that the programs of a way have written so far."""

    out: Path

    def read(self, name: str) -> dict[str, Any]:
        try:
            return foreign_json.load_object(self.out / name)
        except (OSError, ValueError):
            return {}

    def card(self, phase: Phase) -> dict[str, Any]:
        return self.read(str(phase.card.relative_to(self.out)))

    def success(self, name: str) -> dict[str, Any]:
        """Rate, low and high of an evaluation."""
        found = self.read(f"{name}/evaluation.json").get("success", {})
        return found if isinstance(found, dict) else {}


def verdict_of(options: Options, runner: Runner, figures: WayResults) -> WayVerdict:
    """The verdict of what there is: of steps that are done, with their inputs as they are now."""
    refused = refusals(options, runner, figures)
    left_out = without(options, runner, figures, refused)
    due = {step.name: step for step in runner.steps if runner.why(step)}
    for step in due.values():
        if (marker := runner.marker(step)).get("state") == FAILED:
            sentence = f"The way ended at step {runner.steps.index(step) + 1}, {step.title}: {marker['error']}"
            return WayVerdict("ended", sentence, "Mend what it names, and start the same command again.")
    if due.keys() - left_out:
        return WayVerdict("unfinished", "The way is not at its end.", "Start the same command again: it goes on.")
    done = [phase for phase in phases_of(options) if f"learning{phase.end}" not in due]
    better = [phase for phase in phases_of(options) if brings(phase, runner, figures, refused)]
    if not done and not better:
        reasons = "; ".join(figures.card(refused[-1])["reasons"][:MOST_REASONS])  # the worst first; all are below
        sentence = f"The gate says no, and nothing was trained in imagination: {reasons}.{_choice(options, figures)}"
        again = f". --phases {options.phases + 1} records 100 of this policy and goes the way again"
        next_step = figures.card(refused[-1])["next_step"] + (again if options.suite else "")
        return WayVerdict("refused", sentence, next_step)
    checked = f"the gate says {figures.card(done[-1])['verdict']}" if done else "the gate says no"
    if done and figures.card(done[-1])["verdict"] == "no":
        checked += ", which was overruled"
    for phase in refused:
        checked += f", and no to phase {phase.number}"
    for phase in done:
        if better and became_worse(phase, runner, figures):
            checked += f"; what was learnt in phase {phase.number} was worse and is not kept"
    for phase in better:
        if phase.is_anew and (phase in refused or became_worse(phase, runner, figures)):
            checked += f"; phase {phase.number} ends with its new clone"
    if not options.suite:
        sentence = f"A policy has learnt in imagination ({checked}); how often it truly succeeds was not measured."
        return WayVerdict("unmeasured", sentence, _NEXT["unmeasured"])
    before = figures.success(_truth_of(chosen(options), options))
    if not better:
        sentence = f"What was learnt is not kept: {_tried(done[-1], figures)} ({checked}). RUN/policy is the clone."
        return WayVerdict("kept", sentence + _choice(options, figures), _NEXT["kept"])
    after = figures.success(f"after{better[-1].end}")
    low, high = difference(before, after)
    word = "better" if low > 0 else "worse" if high < 0 else "unclear"
    sentence = (
        f"{_SAID[word]}: true success {before['rate']:.3f} before, {after['rate']:.3f} after, of {after['episodes']}"
        f" episodes by whose starts nothing was chosen ({_change(before, after)}; {checked})."
    )
    return WayVerdict(word, sentence + _choice(options, figures), _NEXT[word])


def _change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    low, high = difference(before, after)
    return f"{after['rate'] - before['rate']:+.3f}, with 95 % between {low:+.3f} and {high:+.3f}"


def _truth_of(clone: Clone, options: Options) -> str:
    """The name of the step that measures the clone that learns."""
    return "before" if clone == clones_of(options)[0] else way.CHOSEN


def _choice(options: Options, figures: WayResults) -> str:
    """A sentence on the clone that imagination has chosen among several; empty of one."""
    first, *others = clones_of(options)
    if not others:
        return ""
    text = f" Imagination ranks {chosen(options).title}, first of {1 + len(others)} clones"
    one, best = figures.success("before"), figures.success(way.CHOSEN)
    if chosen(options) == first or not one or not best:
        return f"{text}."
    rates = f"its true success is {best['rate']:.3f}, that of {first.title}, {one['rate']:.3f}"
    return f"{text}: {rates} ({_change(one, best)})."


def refusals(options: Options, runner: Runner, figures: WayResults) -> list[Phase]:
    """The phases that the gate refuses, of what there is now, unless that is overruled."""
    steps = {step.name: step for step in runner.steps}
    asked = [phase for phase in phases_of(options) if not runner.why(steps[f"{way.GATE}{phase.end}"])]
    return [phase for phase in asked if figures.card(phase)["verdict"] == "no" and not options.allow_unchecked]


def became_worse(phase: Phase, runner: Runner, figures: WayResults) -> bool | None:
    """True where the learnt policy truly succeeds less than the one that learnt it, on starts of their own; None where
    that was not tried."""
    names = [*phase.trials_before, f"{way.TRIAL_AFTER}{phase.end}"]
    steps = {step.name: step for step in runner.steps}
    if any(name not in steps or runner.why(steps[name]) for name in names):
        return None
    *before, after = (way.rate_of(figures.out / name / "evaluation.json") for name in names)
    return bool(after < max(before))


def brings(phase: Phase, runner: Runner, figures: WayResults, refused: Sequence[Phase]) -> bool:
    """True where a phase ends with another policy than it began with: its new clone, or what was learnt."""
    return phase.is_anew is True or (phase not in refused and not became_worse(phase, runner, figures))


def _tried(phase: Phase, figures: WayResults) -> str:
    before = max((figures.success(name) for name in phase.trials_before), key=lambda found: found["rate"])
    after = figures.success(f"{way.TRIAL_AFTER}{phase.end}")
    rates = f"{after['rate']:.3f} of {after['episodes']} true episodes, and {before['rate']:.3f} before"
    return f"it succeeded in {rates}, from the same starts, which serve for nothing else"


def without(options: Options, runner: Runner, figures: WayResults, refused: Sequence[Phase]) -> set[str]:
    """Names of the steps that are left out: learning where the gate refuses, and where no phase follows all others;
    the truth of what is not kept."""
    names = {f"{name}{phase.end}" for phase in refused for name in ("learning", "export", way.TRIAL_AFTER)}
    names |= {f"{way.TRIAL_BEFORE}{phase.end}" for phase in refused if phase.clone is None}
    if refused and refused[-1] == phases_of(options)[-1]:
        steps = [step.name for step in runner.steps]
        names |= set(steps[steps.index(f"{way.GATE}{refused[-1].end}") + 1 :])
    if any(step.name == way.CHOSEN for step in runner.steps):  # then what the choice brought is known
        names -= {"before", way.CHOSEN}
    for phase in phases_of(options):
        after = {f"after{phase.end}"}
        names = names - after if brings(phase, runner, figures, refused) else names | after
    return names


_SAID = {
    "better": "The policy became better",
    "worse": "The policy became worse",
    "unclear": "It is not clear that the policy became better",
}
_AGAIN = "Give one more of --phases: 100 true episodes of this policy are recorded, and the way is gone again."
_NEXT = {
    "better": _AGAIN,
    "kept": "Use the clone, and record episodes of it: what the world model has not seen of them misled the policy.",
    "worse": "Use the clone, and record episodes of it: what the world model has not seen of them misled the policy.",
    "unclear": _AGAIN,
    "unmeasured": "Let the robot play 20 episodes with the clone and 20 with the policy, from the same starts; count.",
}


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[float, float]:
    """Bounds of the change of a rate, in 95 of 100 cases, from both intervals (Newcombe 1998, method 10)."""
    change = after["rate"] - before["rate"]
    low = math.hypot(after["rate"] - after["low"], before["high"] - before["rate"])
    high = math.hypot(after["high"] - after["rate"], before["rate"] - before["low"])
    return change - low, change + high


def _ladder(options: Options, figures: WayResults) -> Iterator[tuple[str, str, str, str]]:
    """A tile for each rung that there is: name, figure, what it is, and whether it is good."""
    if split := figures.read("split.json"):
        known = [outcome for outcome in split["outcomes"] if outcome is not None]
        yield "recordings", str(len(split["outcomes"])), f"{sum(known)} succeed, {len(known) - sum(known)} fail", ""
    if found := figures.read("tokenizer.json"):
        kind = {"good": "good", "bad": "bad"}.get(found["verdict"], "")
        verdict = f"{found['verdict']}; the shipped one {found['psnr_of_shipped']:.1f}"
        yield "tokenizer", f"{found['psnr']:.1f} dB", verdict, kind
    if found := figures.read("imagined/figures.json"):
        word = found["verdict"]["word"]
        yield "world model", word, "its actions", {"follows": "good", "ignores": "bad"}.get(word, "")
    for phase in phases_of(options):
        if found := figures.card(phase):
            kind = {"go": "good", "no": "bad"}.get(found["verdict"], "")
            yield f"gate{phase.title}", found["verdict"], "is what it imagines to be trusted?", kind
    played = {f"after{phase.end}": f"policy{phase.title}, truly" for phase in phases_of(options)}
    clones = {"before": "first clone, truly", _truth_of(chosen(options), options): "clone, truly"}
    for name, title in {**clones, **played}.items():
        if found := figures.success(name):
            yield title, f"{found['rate']:.3f}", f"{found['low']:.3f} to {found['high']:.3f} of {found['episodes']}", ""


def _recordings(page: Page, options: Options, figures: WayResults, found: dict[str, Any]) -> None:
    counts = ", ".join(f"{count} {what}" for what, count in found["counts"].items())
    page.heading("1. Recordings", f"{counts}; {len(found['faults']) or 'no'} faults.")
    if split := figures.read("split.json"):
        outcomes = {part: [split["outcomes"][i] for i in split[part]] for part in ("train", "calibrate", "test")}
        page.findings([f"{part}: {o.count(True)} succeed, {o.count(False)} fail" for part, o in outcomes.items()])
        page.note("What is held out (calibrate, test) is seen by no training; test by no threshold and no stop rule.")
    page.clips(_illustrations(figures, "split"))


def _tokenizer(page: Page, options: Options, figures: WayResults, found: dict[str, Any]) -> None:
    here, shipped = f"{found['psnr']:.1f} dB", f"{found['psnr_of_shipped']:.1f}"
    figures_of = f"{here} on held-out ones, where the tokenizer that ships has {shipped}"
    page.heading("2. Tokenizer", f"Fitted to these pictures, it is {found['verdict']}: {figures_of}.")
    page.findings(found["reasons"])
    page.clips(_illustrations(figures, "tokenizer"))


def _world_model(page: Page, options: Options, figures: WayResults, rule: dict[str, Any]) -> None:
    page.heading("3. World model", rule["text"])
    page.plots(_plots(options.out / way.WORLD_MODEL, LOOKS), "iteration")
    if found := figures.read("imagined/figures.json"):
        page.verdict(f"It {found['verdict']['sentence']}.")
        page.clips(_clips(options.out, "imagined", "clip_*.mp4"))
        page.note("Held-out recordings, and what is imagined of their first picture and their own actions.")
        page.link("its evaluation, with all figures and videos", "imagined/index.html")


def _reward(page: Page, options: Options, figures: WayResults, found: dict[str, Any]) -> None:
    page.heading("4. Reward", "A success classifier of pictures; figures of held-out recordings.")
    columns = ("precision", "recall", "accuracy", "calibration_error")
    rows = [(name, [_number(one.get(key)) for key in columns]) for name, one in found["quality"].items()]
    page.table("pictures", [name.replace("_", " ") for name in columns], rows)
    bins = {name: [(bin["probability"], bin["rate"]) for bin in one["bins"]] for name, one in found["quality"].items()}
    page.plots({"Share of true successes": {**bins, "as it should be": [(0, 0), (1, 1)]}}, "probability")


def _clone(page: Page, options: Options, figures: WayResults) -> None:
    places = {clone: clone.folder(options.out).relative_to(options.out) for clone in clones_of(options)}
    found = {clone: figures.read(str(place / "clone.json")) for clone, place in places.items()}
    if not (learns := found[chosen(options)]):
        return
    page.heading("5. Clone", learns["best"]["verdict"]["text"])
    losses = {
        clone.title: [(one["iteration"], _number(one["loss"])) for one in content["history"]]
        for clone, content in found.items()
        if content
    }
    page.plots({"Held-out loss": losses}, "iteration")
    if len(found) > 1 and (ranking := figures.read(way.RANKING)):
        rows = [(Path(row["policy"]).parent.name.replace("_", " "), row["value"]) for row in ranking["policies"]]
        columns = ("value", "low", "high")
        page.table("imagined", columns, [(name, [_number(value[key]) for key in columns]) for name, value in rows])
        page.verdict(f"{chosen(options).title}, learns: it has the highest imagined value.")
    name = _truth_of(chosen(options), options)
    _truth(page, options, name, figures.success(name))


def _gate(page: Page, phase: Phase, card: dict[str, Any]) -> None:
    page.heading(f"6. Gate{phase.title}", f"Is what is imagined to be trusted? {card['verdict']}.")
    page.findings(card["reasons"])
    figures = card["figures"]
    groups = {"": figures, **{name: figures[name] for name in figures if name.partition("/")[0] == "policy"}}
    allowed = figures.get("allowed", ())
    page.text(table([line for name, group in groups.items() for line in lines_of(name, group, allowed)]))
    page.note(f"Next, says the gate: {card['next_step']}")


def _policy(page: Page, options: Options, phase: Phase, runner: Runner, figures: WayResults) -> None:
    page.heading(f"7. Policy{phase.title}", "It learnt in what the world model imagines.")
    page.plots(_plots(phase.learnt, LEARNING), "iteration")
    if (is_worse := became_worse(phase, runner, figures)) is not None:
        page.verdict(f"{'It is not kept' if is_worse else 'It is kept'}: {_tried(phase, figures)}.")
    if not is_worse:
        _truth(page, options, f"after{phase.end}", figures.success(f"after{phase.end}"))


def _truth(page: Page, options: Options, name: str, found: dict[str, Any]) -> None:
    """The success and the episodes of an evaluation, where there is one."""
    if found:
        interval = f"({found['low']:.3f} to {found['high']:.3f})"
        page.verdict(f"It truly succeeds on {found['rate']:.3f} of {found['episodes']} episodes {interval}.")
        page.clips(_clips(options.out, name, "*.mp4"))
        page.note("Left as it truly goes, right what is imagined of the same actions.")


_RUNGS = {  # what each is made of
    "recordings.json": _recordings,
    "tokenizer.json": _tokenizer,
    f"{way.WORLD_MODEL}/stop_rule.json": _world_model,
    "reward/quality.json": _reward,
}


def _clips(out: Path, folder: str, pattern: str) -> list[PageVideo]:
    """The first videos of a step, named as their files are, true ones before imagined ones."""
    files = sorted((out / folder).glob(pattern), key=lambda file: file.stem.replace("_imagined", "_with"))
    names = {file: file.stem.replace("_", " ").replace("--", ", ") for file in files[:MOST_CLIPS]}
    return [PageVideo(name, f"{folder}/{file.name}") for file, name in names.items()]


def _illustrations(figures: WayResults, name: str) -> list[PageVideo]:
    """The clips that `improve.illustrate` wrote for a step."""
    captions = figures.read("page/captions.json").get(name, {})
    return [PageVideo(caption, f"page/{file}") for file, caption in captions.items()]


def _plots(run: Path, table: Mapping[str, Sequence[str]]) -> Mapping[str, Mapping[str, Points]]:
    return plots_of(by_name(read_records(str(run))), table)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def write_page(options: Options, runner: Runner, figures: WayResults) -> Path:
    """Write RUN/index.html and RUN/verdict.json; gives the page."""
    found = verdict_of(options, runner, figures)
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
    page.tiles(list(_ladder(options, figures)))
    for file, draw in _RUNGS.items():
        if content := figures.read(file):
            draw(page, options, figures, content)
    _clone(page, options, figures)
    for phase in phases_of(options):
        if card := figures.card(phase):
            _gate(page, phase, card)
    for phase in phases_of(options):
        if (phase.learnt / "metrics.jsonl").exists():
            _policy(page, options, phase, runner, figures)
    page.heading("What it cost", "Minutes by the clock, and of all processors together.")
    page.table("step", ["minutes", "processor minutes"], [*costs, ("all", [minutes, used])])
    page.heading("Commands", "Each step can be run alone.")
    page.text("\n".join(runner.command(step) for step in runner.steps))
    content = {"verdict": found.word, "sentence": found.sentence, "next": found.next_step}
    storage.write_json(options.out / VERDICT, content)
    return page.write(options.out)
