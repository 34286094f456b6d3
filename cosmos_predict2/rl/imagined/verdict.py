# SPDX-License-Identifier: Apache-2.0
"""The verdict on an imagination: a bound for each figure of `rl.imagined.check`, its reason, and what to do about it.

Bounds are of what was measured to decide: the reward's value ranks what truly happened, at imagined ends. Decibels do
not count, and neither does imagined success, which rose alike whether true success rose or fell.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cosmos_predict2.evaluation.metrics.agreement import Estimate
from cosmos_predict2.rl.policies.null import MUCH
from cosmos_predict2.rl.trust import Verdict
from imaginaire.errors import ConfigError, near

LEAST_EPISODES = 8  # held-out ones of either outcome: with fewer the area under the curve is uncertain by .2 and more
LEAST_PLAYED = 20
MOST_FALSE, MOST_NOTHING = 0.3, 0.12  # where success was paid at .35 and .13, the true one fell to 0
LEAST_FOUND = 0.5  # of imagined successes by the threshold
MOST_IMAGINED = 0.97  # success of what is played: beyond it nothing is left to learn
GO, DOUBTFUL, NO = "go", "doubtful", "no"

DATA = "record {times} times as many episodes, failures and successes: {needed} of either outcome must be held out"
REWARD = "train the reward longer, or on more episodes of either outcome (scripts.train_reward_model)"
IMAGINED_REWARD = (
    "train the reward on imagined pictures, too (scripts.train_reward_model --world_model W); where it is, as"
    " improve_policy does, the world model longer, or on more recordings"
)
SPLIT = "train the world model and the reward by the split (dataset.split_file=FILE, --split FILE)"
TOKENIZER = "fit the tokenizer to the recordings (scripts.fit_tiny_tokenizer), and train the world model on it"
WORLD = "train the world model longer, or on more recordings"
PLAY = "record 20 or more true episodes of this policy (--played; scripts.collect), and train on them, too"
CLONE = "clone a better policy: of another kind, of more or better demonstrations, of two cameras, or for longer"
EXPLORE = (
    "learn with smaller draws, so that attempts are nearer to what it plays (a clone with a smaller"
    " model.config.temperature or model.config.noise), and keep the clone unless true episodes show a gain"
)
LASTS = (
    "keep the clone, which a robot stops at its first success; or clone drivers that stay where they succeed, recorded"
    " for some steps behind it"
)
LIES = (
    "keep the clone, or let a simulator teach it: more iterations of the world model, or 100 true episodes of the"
    " policy, did not help where this was measured; record more, with failures of purposeful actions (a guess)"
)
FULL = (
    "let the robot play 20 episodes of this policy and record them (--played): where it truly succeeds always it has"
    " nothing to learn, else use the clone as it is"
)
WITHIN = "within_starts"
UNSEEN = (
    "whether imagination orders attempts from one start rightly is not known (--policy with --suite plays some): with"
    " all other figures right, policies lost up to .32 of their true success"
)
TRY = "learn by small steps, and play the policy truly beside its clone before you use it"
LEARN = f"{TRY}: python -m scripts.train -- experiment=vla_grpo_recordings"


@dataclass(frozen=True)
class Bound:
    """Bounds of one figure: at ``go`` or better it is right, beyond ``no`` it forbids learning, doubtful between; and
    doubtful where its interval reaches beyond ``no``.

    ``is_least``: larger values are better. None: this figure alone forbids nothing, or is never doubtful. ``unless``
    names a figure that answers the same question better, where it is known this one is not judged. ``by_interval``: it
    forbids learning where its interval reaches beyond ``no``.
    """

    name: str
    text: str  # the figure, for a person
    go: float
    no: float | None
    why: str
    cure: str
    is_least: bool = True
    unless: str = ""
    by_interval: bool = False

    def judged(self, value: float, worst: float) -> Verdict:
        """Judge a figure by its value and the worse end of its interval."""

        def reaches(bound: float, value: float = value) -> bool:
            return value >= bound if self.is_least else value <= bound

        if self.no is not None and not reaches(self.no, worst if self.by_interval else value):
            return "no"
        return "go" if reaches(self.go) and (self.no is None or reaches(self.no, worst)) else "doubtful"

    def as_text(self) -> str:
        sign, other = ("≥", "<") if self.is_least else ("≤", ">")
        other = f"interval {other}" if self.by_interval else other
        return f"{sign} {self.go:.2f}" + ("" if self.no is None else f" (no: {other} {self.no:.2f})")


# In the order of what to do first: the first one that is not right names the next step.
BOUNDS = (
    Bound("explained", "of held-out actions the clone explains", MUCH, 0.00,
        "one that explained -.01 had the success of doing nothing; others explained .11 to .44", CLONE,
        unless="true_above_nothing", by_interval=True),
    Bound("true_above_nothing", "its true success less that of doing nothing", 0.05, 0.01,
        "it teaches nothing: a clone of FetchPush-v4 had .110, as doing nothing, and after learning .110 again", CLONE),
    Bound("played_success", "true success of the played episodes", 0.04, 0.001,
        "attempts that never succeed cannot be compared by success", CLONE),
    Bound("ends_true", "area under the curve, true ends", 0.75, 0.65,
        "the reward on true pictures of recordings that it never saw: imagination cannot do better", REWARD),
    Bound("ends_coded", "the same through the tokenizer", 0.70, 0.60,
        "what the tokenizer loses, no world model on it can show", TOKENIZER),
    Bound("obedience", "actions seen in imagined pictures, of those in true ones", 0.10, 0.00,
        "a world model that ignores its actions imagines the same whatever is decided (-.07 after 100"
        " iterations); at .10, .22 and .28 true success rose by .10, .055 and .295", WORLD),
    Bound("ends_imagined", "area under the curve, imagined ends", 0.64, 0.55,
        ".5 is chance; in 28 learnings at .64 to .96 it did not predict the change of true success (.64: +.055,"
        " .66: +.16)", WORLD, unless=WITHIN),
    Bound("ends_within_tasks", "the same within one task", 0.65, 0.55,
        "attempts at one task are compared with each other, never with those at another", WORLD),
    Bound("nothing_valued", "doing nothing valued above the median success", 0.20, 0.35,
        "what is paid for nothing is learnt first", IMAGINED_REWARD, is_least=False),
    Bound("random_valued", "random actions valued above the median success", 0.25, 0.45,
        "what is paid for noise is learnt, too", IMAGINED_REWARD, is_least=False),
    Bound("spread", "groups of attempts whose values differ", 0.30, 0.10,
        "groups that agree teach nothing", CLONE),
    Bound("above_nothing", "the policy valued above doing nothing", 0.60, 0.52,
        "a clone that does nothing teaches as little as one that does harm", CLONE),
    Bound("like_success", "the policy valued above recordings that succeed", 0.45, None,
        "it is as good as they are, or its failures are imagined as successes: a clone of .11 had .66, and learnt .03",
        PLAY, is_least=False, unless="true_ends"),
    Bound("greedy_imagined_success", "imagined success of what the policy plays", 0.90, MOST_IMAGINED,
        "nothing is left to learn there, and where it fails truly its failures are imagined as successes: of nine"
        " learnings that gained nothing seven began at about 1.0, and of 19 that gained none beyond .94", FULL,
        is_least=False, unless="imagined_above_true"),
    Bound("played_ends_true", "area under the curve, true ends of the policy's own episodes", 0.70, 0.60,
        "a reward may know the recordings and not what this policy does (.38 of a clone, .89 of the recordings)",
        REWARD),
    Bound("played_ends", "area under the curve, the policy's own episodes", 0.66, 0.55,
        "recordings may be easier to judge than what this policy does", WORLD),
    Bound("imagined_above_true", "imagined success of what the policy plays, less its true success", 0.40, 0.56,
        "a policy cannot learn from failures that are imagined as successes: at .58 to .69 true success changed by"
        " -.08 to .00 in six learnings, at .53 and less it rose by .05 or more in 17 of 22", LIES, is_least=False),
    Bound("true_ends", "area under the curve, the policy's true attempts imagined", 0.60, 0.50,
        "what it does is harder to judge than recordings: at .57 to .59 true success changed by -.24 to .00 in four"
        " learnings, at .60 and more it rose by .05 or more in 17 of 24; .5 is chance", PLAY),
    Bound(WITHIN, "imagined value with truth inside a start, correlation", 0.10, 0.05,
        "0 was followed by harm; from .11 on true success could rise by .10 and more", WORLD),
    Bound("within_above_gap", "order of attempts inside a start (correlation), less what they lack beside greedy ones",
        0.12, -0.10, "it learns from attempts: the less these succeed, the better their order must be known (.12 and"
        " more were followed by -.01 to +.48 in 18 learnings, less by -.08 to +.165 in 8, -.18 and -.27 by -.24 and"
        " -.52)",
        EXPLORE),
    Bound("greedy_above_sampled", "true success of what it plays less that of its sampled attempts", 0.38, 0.40,
        "it learns from attempts, and what these lack is forgotten", EXPLORE, is_least=False,
        unless="within_above_gap"),
    Bound("success_lost", "of the greedy true episodes succeed, and lose it again before their end", 0.35, 0.50,
        "what is imagined is paid by its last picture, which such a clone fails: one of faucet-open-v3 that succeeded"
        " always had .62, and learnt to .44 and .75; at .34 another rose by .10", LASTS, is_least=False),
    Bound("actions_outside", "the policy's numbers of actions beyond the recorded ones", 0.10, None,
        "the world model never saw what they lead to", "record such actions, or bound the policy's", is_least=False),
    Bound("pictures_outside", "its imagined ends unlike all recordings", 0.30, None,
        "there the world model and the reward guess", "record episodes of this policy", is_least=False),
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A row of the table: a figure, its bound and how it stands."""

    bound: Bound
    text: str
    shown: str
    verdict: Verdict
    is_allowed: bool
    is_wide: bool  # doubtful by its interval alone

    @property
    def reason(self) -> str:
        wide = ", and its interval within what does not forbid it" if self.is_wide else ""
        return f"{self.text}: {self.shown}, right is {self.bound.as_text()}{wide} ({self.bound.why})"


@dataclass(frozen=True)
class ImaginationVerdict:
    verdict: Verdict
    reasons: tuple[str, ...]
    next_step: str
    lines: tuple[Line, ...]
    warnings: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The verdict in a sentence."""
        meaning = {
            "go": "what this reward values in this imagination is what truly happens; a policy may learn in it",
            "doubtful": "a policy may learn in this imagination, but look at true success soon",
            "no": "a policy would learn nothing here that is true",
        }
        more = f"; and {len(self.reasons) - 1} more below" if len(self.reasons) > 1 else ""
        return f"{meaning[self.verdict]}{': ' if self.reasons else ''}{''.join(self.reasons[:1])}{more}."


def require_known(names: Collection[str]) -> None:
    """Raise for a name that no figure with a bound has."""
    known = [bound.name for bound in BOUNDS]
    for name in names:
        if name not in known:
            raise ConfigError(f"--allow {name}: there is no figure of that name.{near(name, known)}")


def judge(
    figures: Mapping[str, Any], by_policy: Mapping[str, Mapping[str, Any]] | None = None, allowed: Collection[str] = ()
) -> ImaginationVerdict:
    """The verdict of figures by name, and of those of each policy. Figures that are ``allowed`` do not count, and those
    that are missing neither."""
    by_policy = by_policy or {}
    fewest = min(figures["successes"], figures["episodes"] - figures["successes"])
    lines = tuple(lines_of(figures, by_policy, allowed))
    if is_few := fewest < LEAST_EPISODES:  # what needs both outcomes is not known, neither good nor bad
        lines = tuple(replace(one, verdict="doubtful") if one.bound.name.startswith("ends_") else one for one in lines)
    wrong = [line for line in lines if not line.is_allowed and line.verdict != GO]
    wrong.sort(key=lambda line: (line.verdict != NO, BOUNDS.index(line.bound)))
    verdict: Verdict = wrong[0].verdict if wrong else "go"
    next_step, reasons = wrong[0].bound.cure if wrong else LEARN, [line.reason for line in wrong]
    if is_few:
        reasons.append(f"only {fewest} held-out recordings of one outcome, too few to judge by")
        if verdict != NO:
            verdict, reasons = "doubtful", reasons[::-1]
            next_step = DATA.format(times=math.ceil(LEAST_EPISODES / max(1, fewest)), needed=LEAST_EPISODES)
    if leaked := list(figures.get("leaks", ())):
        reasons += leaked
        if verdict == GO:
            verdict, next_step = "doubtful", SPLIT
    if WITHIN not in allowed and not _is_known(WITHIN, figures, by_policy):
        reasons.append(UNSEEN)
        if verdict == GO:
            verdict, next_step = "doubtful", TRY
    warnings = tuple(text for group in (figures, *by_policy.values()) for text in _warnings(group))
    return ImaginationVerdict(verdict, tuple(reasons), next_step, lines, warnings)


def lines_of(
    figures: Mapping[str, Any], by_policy: Mapping[str, Mapping[str, Any]], allowed: Collection[str] = ()
) -> Iterator[Line]:
    """The figures that have a bound, as they were measured or as a card has them: those of the recordings, and those of
    each policy."""
    for policy, group in {"": figures, **by_policy}.items():
        of_one = policy.partition("/")[2]  # of several policies, its number
        others = {} if policy else by_policy
        for bound in BOUNDS:
            estimate = _estimate(group.get(bound.name))
            if math.isnan(estimate.value) or (bound.unless and _is_known(bound.unless, group, others)):
                continue
            end = estimate.low if bound.is_least else estimate.high
            worst = estimate.value if math.isnan(end) else end
            text = f"{bound.text}, policy {of_one}" if of_one else bound.text
            verdict, by_value = bound.judged(estimate.value, worst), bound.judged(estimate.value, estimate.value)
            yield Line(bound, text, estimate.as_text(), verdict, bound.name in allowed, verdict != by_value)


def _estimate(found: Any) -> Estimate:
    """A figure as it was measured or as a card has it; NaN where there is none."""
    if isinstance(found, Mapping):
        number: Any = {name: math.nan if value is None else value for name, value in found.items()}
        return Estimate(**number)
    return found if isinstance(found, Estimate) else Estimate(math.nan if found is None else found)


def _is_known(name: str, figures: Mapping[str, Any], by_policy: Mapping[str, Mapping[str, Any]]) -> bool:
    """True where a figure was measured, of all policies if there are some."""
    groups = [{**figures, **one} for one in (by_policy or {"": {}}).values()]
    return not any(math.isnan(_estimate(group.get(name)).value) for group in groups)


def _warnings(figures: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on what does not decide."""
    paid, played = figures.get("noise_is_paid"), figures.get("played_episodes")
    false, nothing = figures.get("false_success_imagined", 0.0), figures.get("nothing_success", 0.0)
    found = figures.get("recall_imagined", 1.0)
    if false > MOST_FALSE or nothing > MOST_NOTHING or found < LEAST_FOUND:
        yield (
            f"by its threshold the reward sees success at {found:.2f} of imagined successes, {false:.2f} of imagined"
            f" failures and {nothing:.2f} of doing nothing: pay its value and not success (scoring.sparse=false),"
            " and do not believe imagined success"
        )
    if paid is not None and paid.low > 0:
        yield (
            f"sampled actions are valued above greedy ones by {paid.as_text()}: the reward pays noise; compare true"
            " success of both after learning"
        )
    if played is not None and played < LEAST_PLAYED:
        yield f"{played} played episodes are few: from {LEAST_PLAYED} on they decide"
    within = figures.get(WITHIN)
    if isinstance(within, Estimate) and math.isnan(within.value):
        yield (
            "too few starts of its true attempts have both outcomes, or values that differ, for the figure inside a"
            " start"
        )
    if "ends_true" in figures and "obedience" not in figures:
        yield "true pictures hardly show the actions, so that whether imagined ones obey them is not measured"
    explained = figures.get("explained")
    if isinstance(explained, Estimate) and explained.low <= 0 and "true_above_nothing" in figures:
        yield (f"the clone explains {explained.as_text()} of held-out actions, as one does that sees nothing: {CLONE}")
    first, last = (figures.get(name, math.nan) for name in ("obedience", "obedience_last"))
    if last < first / 2:
        yield (
            f"of the actions that true pictures show, imagined ones show {last:.2f} in the last chunk and {first:.2f}"
            " in the first: shorter episodes, or starts nearer to contact, are imagined better"
        )


def table(lines: Sequence[Line]) -> str:
    """The figures that were measured beside their bounds."""
    width = max((len(line.text) for line in lines), default=0)
    rows = []
    for line in lines:
        mark = {GO: "ok", DOUBTFUL: "doubtful", NO: "NO"}[line.verdict] + (" (allowed)" if line.is_allowed else "")
        rows.append(f"  {line.text:{width}s}  {line.shown:20s} {line.bound.as_text():22s} {mark}")
    return "\n".join(rows)
