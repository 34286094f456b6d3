# SPDX-License-Identifier: Apache-2.0
"""Go the way: look at the inputs, run the steps that are to be done, learn nothing where the gate refuses, write the
page."""

import logging
import shutil
from types import SimpleNamespace

from cosmos_predict2.rl.envs import suites
from cosmos_predict2.tools.improve.illustrations import illustrate
from cosmos_predict2.tools.improve.page import Figures, Verdict, refusals, verdict_of, without, write_page
from cosmos_predict2.tools.improve.steps import Runner, digest
from cosmos_predict2.tools.improve.way import Options, Phase, Recorded, look, phases_of, steps_of
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)


def improve(options: Options) -> Verdict:
    """Go as far as the gate lets; the verdict of what there is then."""
    recorded = look(options)
    if options.suite:
        require_suite(options, recorded)
    figures = Figures(options.out)
    with Runner(options.out, steps_of(options, recorded)) as runner:
        for step in runner.steps:
            refused = refusals(options, runner, figures)
            if step.name in without(options, runner, refused):
                continue
            for phase in refused:
                if phase != phases_of(options)[-1]:
                    keep(phase)
            try:
                if runner.run(step):
                    illustrate(step.name, options, recorded)
            finally:
                page = write_page(options, runner, figures)
    found = verdict_of(options, runner, figures)
    print(f"\n{found.sentence}\nNext: {found.next_step}\npage: {page}", file=runner.shown)
    return found


def keep(phase: Phase) -> None:
    """The policy that does not learn in this phase goes on to the next one as it is."""
    if digest(phase.result) != digest(phase.policy):
        shutil.rmtree(phase.result, ignore_errors=True)
        shutil.copytree(phase.policy, phase.result)


def commands(options: Options) -> list[str]:
    """The commands that would be started, as a user would type them."""
    steps = steps_of(options, look(options))
    runner = Runner(options.out, steps)
    return [runner.command(step) for step in steps]


def require_suite(options: Options, recorded: Recorded) -> None:
    """Build one place of the suite, so that a misfit with the recordings is reported before anything is trained."""
    policy = SimpleNamespace(action_dim=recorded.action_dim, chunk=1)
    try:
        env = suites.find(options.suite).env(1, policy)
    except ConfigError as error:
        raise ConfigError(
            f"--suite {options.suite} does not fit the recordings, whose actions have {recorded.action_dim} numbers:"
            f" {error}"
        ) from error
    try:
        most = env.metadata["max_steps"]
        if most != recorded.num_actions:
            log.warning(
                "an episode of %s has at most %d actions, the longest recording %d: success after more time than was"
                " recorded is not imagined",
                *(options.suite, most, recorded.num_actions),
            )
    finally:
        env.close()
