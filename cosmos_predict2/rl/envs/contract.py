# SPDX-License-Identifier: Apache-2.0
"""A check that an environment keeps the contract of `VecEnv`: for environments of yours as for those here.

    from cosmos_predict2.rl.envs.contract import check_environment

    def test_my_environment_keeps_the_contract():
        check_environment(MyEnv(num_envs=3))

Each function that begins with ``check_`` is one rule. What is checked needs three environments at least, and episodes
of two chunks of actions or more where "not at the same time" is to be seen.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.rl.envs.first_frames import whole_pictures
from cosmos_predict2.rl.interfaces import ContractError, EnvDefaults, VecEnv, completed, require, require_rules, rows_of
from imaginaire.errors import DataError

PICTURES = ("full_image", "wrist_image")
FORMS = {"full_image": (torch.uint8, 4), "wrist_image": (torch.uint8, 5), "state": (torch.float32, 2)}
METADATA = ("suite", "action_dim", "chunk", "max_steps")
BOUNDS = {"low": -1.0, "high": 1.0}  # of actions, where metadata has no action_low and action_high
SAME = 1e-6  # of states, and of rewards that come of the same pictures

Step = tuple[Any, Tensor, Tensor, Tensor, Any]


def check_environment(env: VecEnv, *, picture_levels: int = 0) -> None:
    """Raise `ContractError` for the first rule that ``env`` breaks; closes it at the end.

    ``picture_levels`` is how far pictures may differ, of 255, where environments are stepped in another company: above
    0 for one that computes them in batches. Draws are seeded and few; the rules hold for all.
    """
    require_rules(RULES, completed(env, EnvDefaults), picture_levels)


# --- rules


def check_metadata(env: VecEnv, levels: int) -> None:
    """metadata has suite, action_dim, chunk and max_steps, and there are three environments or more."""
    missing = [key for key in METADATA if key not in env.metadata]
    require(not missing, f"metadata lacks {missing}")
    numbers = {key: env.metadata[key] for key in METADATA[1:]}
    require(all(isinstance(n, int) and n >= 1 for n in numbers.values()), f"metadata {numbers}: whole numbers above 0")
    cost = env.metadata.get("reset_chunks", 0)
    require(isinstance(cost, int) and cost >= 0, f"metadata has reset_chunks={cost!r}: a whole number, 0 or more")
    require(env.num_envs >= 3, f"num_envs={env.num_envs}: check it with 3 at least")


def check_observations(env: VecEnv, levels: int) -> None:
    """Observations have their four entries, in shapes and types that do not change, and sentences that are texts."""
    observed, _ = _reset(env)
    first = _form(observed, env.num_envs)
    observed, *_ = env.chunk_step(_actions(env))
    then = _form(observed, env.num_envs)
    require(then == first, f"observations are {first} and then {then}")
    two, _ = env.reset(options={"env_ids": [2, 0], "trial_ids": [0, 1]})
    require(_form(two, 2) == first, "an observation of two environments has another form than that of all")


def check_values_of_a_step(env: VecEnv, levels: int) -> None:
    """Reward, terminated and truncated are [E, A]; info has success, active, finish_step and executed."""
    _reset(env)
    actions = _actions(env)
    _, reward, terminated, truncated, info = env.chunk_step(actions)
    shape = tuple(actions.shape[:2])
    for name, value, dtype in (
        ("reward", reward, torch.float32),
        ("terminated", terminated, torch.bool),
        ("truncated", truncated, torch.bool),
        ("info['executed']", info["executed"], torch.bool),
    ):
        _require_tensor(name, value, shape, dtype)
    for name in ("success", "active"):
        _require_tensor(f"info['{name}']", info[name], shape[:1], torch.bool)
    _require_tensor("info['finish_step']", info["finish_step"], shape[:1], None)
    require(not (terminated & truncated).any(), "a step is both terminated and truncated: success wins")


def check_others_are_untouched(env: VecEnv, levels: int) -> None:
    """A reset and a step of some environments change nothing in the others."""
    _reset(env)
    before = _seen_by(env, [1])
    env.chunk_step(_actions(env)[[2, 0]], env_ids=[2, 0])
    env.reset(options={"env_ids": [0], "trial_ids": [5]})
    _require_equal("an environment that no call named", _seen_by(env, [1]), before, levels)


def check_subset_reset(env: VecEnv, levels: int) -> None:
    """An environment that is reset while others go on begins as in a reset of all."""
    expected, _ = _reset(env)
    env.chunk_step(_actions(env))
    found, info = env.reset(options=_options(env, [1]))
    _require_equal("an environment that was reset alone", found, rows_of(expected, [1]), levels)
    require(bool(info["active"].all()), "info['active'] is false after a reset")


def check_episodes_end(env: VecEnv, levels: int) -> None:
    """An episode has max_steps executed steps at most; finish_step counts them, and it ends once."""
    _reset(env)
    ends, executed = torch.zeros(env.num_envs), torch.zeros(env.num_envs)
    for _ in range(-(-env.metadata["max_steps"] // env.metadata["chunk"])):
        _, _, terminated, truncated, info = env.chunk_step(_actions(env))
        ended = terminated | truncated
        require(not (ended & ~info["executed"]).any(), "an end is flagged at an action that was not executed")
        ends += ended.sum(dim=1)
        executed += info["executed"].sum(dim=1)
    require(bool((ends == 1).all()), f"max_steps were executed, and episodes ended {ends.tolist()} times: once each")
    require(not info["active"].any(), "info['active'] is true after max_steps")
    finish = info["finish_step"].float()
    require(torch.equal(finish, executed), f"finish_step is {finish.tolist()}, executed were {executed.tolist()}")
    require(bool((executed <= env.metadata["max_steps"]).all()), "more than max_steps were executed")


def check_a_finished_episode_stays(env: VecEnv, levels: int) -> None:
    """Stepping an episode that is over executes nothing, pays nothing, and gives its last observation."""
    last, info = _played(env)
    for _ in range(2):
        found, reward, terminated, truncated, after = env.chunk_step(_actions(env, 3))
        _require_equal("the observation of a finished episode", found, last, 0)
        require(not reward.any() and not after["executed"].any(), "a finished episode executes or earns something")
        require(not (terminated | truncated).any(), "a finished episode ends again")
        for name in ("success", "finish_step"):
            require(torch.equal(after[name], info[name]), f"info['{name}'] of a finished episode changes")


def check_success_wins(env: VecEnv, levels: int) -> None:
    """An episode that ends with success is terminated, any other truncated."""
    _reset(env)
    ended = [torch.zeros(env.num_envs, dtype=torch.bool) for _ in range(2)]
    for _ in range(-(-env.metadata["max_steps"] // env.metadata["chunk"])):
        _, _, terminated, truncated, info = env.chunk_step(_actions(env))
        ended = [ended[0] | terminated.any(dim=1), ended[1] | truncated.any(dim=1)]
    require(torch.equal(ended[0], info["success"]), "terminated and info['success'] of finished episodes differ")
    require(torch.equal(ended[1], ~info["success"]), "an episode without success is not truncated")


def check_episodes_of_different_age(env: VecEnv, levels: int) -> None:
    """An environment whose episode is over begins the next one while others go on: each has its own length and end."""
    expected, info = _played(env)[1]["finish_step"], _reset(env)[1]
    actions = _actions(env)
    while bool(info["active"][-1]):
        info = env.chunk_step(actions[[1]], env_ids=[1])[4]  # the others wait at their starts
    _, info = env.reset(options=_options(env, [1]))
    while bool(info["active"].any()):
        info = env.chunk_step(actions)[4]
    found, expected = info["finish_step"].tolist(), expected.tolist()
    text = "one began anew while others were at their first step: finish_step is"
    require(found == expected, f"{text} {found}, not {expected}")


def check_execute(env: VecEnv, levels: int) -> None:
    """``execute`` carries out the first actions of a chunk: the rest changes nothing but what is planned."""
    count = max(1, env.metadata["chunk"] // 2)
    _reset(env)
    info = env.chunk_step(_actions(env), execute=count)[4]
    expected = torch.arange(env.metadata["chunk"]) < count
    require(bool((info["executed"] == expected).all()), f"execute={count}, but info['executed'] is {info['executed']}")


def check_actions_are_clipped(env: VecEnv, levels: int) -> None:
    """Actions beyond their bounds are as those at them; those that are not finite raise DataError."""
    low, high = (torch.as_tensor(env.metadata.get(f"action_{end}", value)) for end, value in BOUNDS.items())
    results = []
    for scale in (1.0, 3.0):
        _reset(env)
        results.append(env.chunk_step(torch.where(_actions(env) > 0, high * scale, low * scale)))
    _require_step("actions at their bounds and three times as far", results[1], results[0], 0)
    bad = _actions(env)
    bad[1, 0, 0] = float("nan")
    before = _seen_by(env, None)
    try:
        env.chunk_step(bad)
    except DataError:
        _require_equal("after actions that are not finite", _seen_by(env, None), before, 0)
    else:
        raise ContractError("an action that is not a number raises no DataError")


def check_same_numbers_same_episode(env: VecEnv, levels: int) -> None:
    """The same task, trial, seed and actions lead to the same; another trial begins otherwise."""
    results, firsts = [], []
    for _ in range(2):
        firsts.append(_reset(env)[0])
        results.append(env.chunk_step(_actions(env)))
    _require_equal("the start of the same trials", firsts[1], firsts[0], 0)
    _require_step("the same episode", results[1], results[0], 0)
    other, _ = env.reset(options={"trial_ids": [7, 8, 9, *range(10, 7 + env.num_envs)]})
    require(not torch.equal(other["full_image"], firsts[0]["full_image"]), "another trial shows the same pictures")
    sentences = set(_reset(env)[0]["task_description"])
    require(len(sentences) == 1, "the sentence of one task differs between environments")


def check_order_does_not_matter(env: VecEnv, levels: int) -> None:
    """Episodes that are played by other environments, in another order, are the same."""
    _reset(env)
    actions = _actions(env)
    expected = env.chunk_step(actions)
    order = [*range(1, env.num_envs), 0]
    options = {key: [values[i] for i in order] for key, values in _options(env, None).items()}
    env.reset(options=options)
    _require_step("permuted environments", env.chunk_step(actions[order]), expected, levels, order)


def check_company_does_not_matter(env: VecEnv, levels: int) -> None:
    """An environment that is stepped alone does as it does among others."""
    _reset(env)
    actions = _actions(env)
    expected = env.chunk_step(actions)
    _reset(env)
    _require_step("an environment alone", env.chunk_step(actions[[1]], env_ids=[1]), expected, levels, [1])


def check_frames(env: VecEnv, levels: int) -> None:
    """With ``keep_frames``, where an environment has it, info['frames'] shows each action; the last is observed: its
    full_image, of several ``views`` with wrist_image below it."""
    before = env.keep_frames
    if before is None:
        return
    env.keep_frames = True
    try:
        _reset(env)
        actions = _actions(env)
        observed, *_, info = env.chunk_step(actions)
        require("frames" in info, "keep_frames is true, but info has no 'frames' after chunk_step")
        whole = whole_pictures(observed, len(env.views))
        _require_tensor("info['frames']", info["frames"], (*actions.shape[:2], *whole.shape[1:]), torch.uint8)
        is_last = torch.equal(info["frames"][:, -1].cpu(), whole.cpu())
        require(is_last, "the last of info['frames'] is not the observed full_image")
    finally:
        env.keep_frames = before


def check_state_round_trip(env: VecEnv, levels: int) -> None:
    """A state that is loaded goes on as the saved one did, and is made of bytes."""
    _reset(env)
    env.chunk_step(_actions(env)[[0]], env_ids=[0])
    state = env.get_state()
    require(isinstance(state, bytes), f"get_state gives {type(state).__name__}, not bytes")
    expected = env.chunk_step(_actions(env, 1))
    env.reset(options={"trial_ids": [11, *range(12, 11 + env.num_envs)]})
    env.load_state(state)
    _require_step("after a state was loaded", env.chunk_step(_actions(env, 1)), expected, 0)


def check_closing_twice(env: VecEnv, levels: int) -> None:
    """close may be called twice."""
    env.close()
    env.close()


RULES: list[Callable[[VecEnv, int], None]] = [
    rule for name, rule in [*globals().items()] if name.startswith("check_") and rule is not check_environment
]


# --- parts


def _options(env: VecEnv, env_ids: Sequence[int] | None) -> dict[str, list[int]]:
    """Trials and seeds of a reset, each environment's always the same."""
    ids = list(range(env.num_envs)) if env_ids is None else list(env_ids)
    numbers = {"task_ids": [0] * len(ids), "trial_ids": ids, "seeds": [100 + i for i in ids]}
    return numbers if env_ids is None else {**numbers, "env_ids": ids}


def _reset(env: VecEnv) -> tuple[Any, Any]:
    return env.reset(options=_options(env, None))


def _actions(env: VecEnv, seed: int = 0) -> Tensor:
    shape = (env.num_envs, env.metadata["chunk"], env.metadata["action_dim"])
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def _played(env: VecEnv) -> tuple[Any, Any]:
    """The last observation and info of whole episodes."""
    observed, info = _reset(env)
    while bool(info["active"].any()):
        observed, _, _, _, info = env.chunk_step(_actions(env))
    return observed, info


def _seen_by(env: VecEnv, env_ids: Sequence[int] | None) -> Any:
    """The next results of environments from where they are, which is not changed."""
    state = env.get_state()
    actions = _actions(env, 2)
    observed = env.chunk_step(actions if env_ids is None else actions[list(env_ids)], env_ids=env_ids)[0]
    env.load_state(state)
    return observed


def _form(observed: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Shapes and types of an observation without its first dimension."""
    form: dict[str, Any] = {}
    for name, (dtype, dimensions) in FORMS.items():
        value = observed[name]
        is_right = isinstance(value, Tensor) and (value.dtype, value.ndim, len(value)) == (dtype, dimensions, count)
        is_right = is_right and (name not in PICTURES or value.shape[-1] == 3)
        require(is_right, f"{name} is {_shown(value)}; {dtype} of {dimensions} dimensions, {count} rows")
        form[name] = tuple(value.shape[1:])
    sentences = observed["task_description"]
    are_right = len(sentences) == count and all(isinstance(sentence, str) and sentence for sentence in sentences)
    require(are_right, f"task_description is {sentences!r}; {count} sentences")
    return form


def _require_tensor(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    is_right = isinstance(value, Tensor) and tuple(value.shape) == shape and dtype in (None, value.dtype)
    require(is_right, f"{name} is {_shown(value)}; {dtype or 'numbers'} {list(shape)}")


def _shown(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _require_equal(what: str, found: Mapping[str, Any], expected: Mapping[str, Any], levels: int) -> None:
    for name in PICTURES:
        difference = (found[name].int() - expected[name].int()).abs()
        worst = int(difference.max()) if difference.numel() else 0
        require(worst <= levels, f"{what}: {name} differs by {worst} of 255")
    require(torch.allclose(found["state"], expected["state"], atol=SAME), f"{what}: state differs")
    are_equal = list(found["task_description"]) == list(expected["task_description"])
    require(are_equal, f"{what}: task_description differs")


def _require_step(what: str, found: Step, expected: Step, levels: int, rows: Sequence[int] | None = None) -> None:
    """Equal results of a step; of ``rows`` of the expected one."""
    chosen = list(range(len(expected[1]))) if rows is None else list(rows)
    _require_equal(what, found[0], rows_of(expected[0], chosen), levels)
    is_near = torch.allclose(found[1], expected[1][chosen], atol=0.02 if levels else SAME)
    require(is_near, f"{what}: reward differs, {found[1].tolist()} and {expected[1][chosen].tolist()}")
    flags = [{"terminated": step[2], "truncated": step[3], **step[4]} for step in (found, expected)]
    for name in ("terminated", "truncated", "success", "active", "finish_step", "executed"):
        require(torch.equal(flags[0][name], flags[1][name][chosen]), f"{what}: {name} differs")
