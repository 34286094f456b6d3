# SPDX-License-Identifier: Apache-2.0
"""A tiny world model of a user's own LeRobot recordings, in minutes on a CPU, for a policy to learn in.

Numbers of an action, which of them are moves, and the size of pictures are read from the recordings; the validation
data are the same ones' part that is held out. Noise levels are those at which dynamics are learnt and at which one
evaluation imagines a chunk. Training goes on while the figures on held-out recordings improve.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray
from omegaconf import ListConfig, OmegaConf

from cosmos_predict2.actions.statistics import column_statistics, order_one_transform
from cosmos_predict2.callbacks.stop_rule import StopRule
from cosmos_predict2.configs.action_conditioned.experiment.toy import NET, tiny_model
from cosmos_predict2.configs.action_conditioned.networks import ACTION_DIM
from cosmos_predict2.configs.base.post_training import tiny_run
from cosmos_predict2.data.lerobot.info import STATE
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.samples import evenly
from cosmos_predict2.data.views import cameras_in
from cosmos_predict2.tokenizers.sizes import small_size
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from imaginaire.config import L, register_experiment
from imaginaire.data.facts import facts_of, known

Floats = NDArray[numpy.float64]

NAME = "world_model_recordings"
ITERATIONS = 1200
EVERY = 100  # iterations between validations
SAME = (  # of validation as of training
    *("root", "split_file", "val_fraction", "video_size", "camera", "action_keys", "embodiment", "action_transform"),
    *("stride", "frame_rate", "combine_actions", "skip_bad_samples", "units", "skip_idle", "state"),
    "missing_cameras",
)
VAL_EVERY = 12  # frames between windows of validation

# Values that the recordings of ``dataloader_train`` decide are read when a configuration is composed, and saved as
# numbers. Where these cannot be read, the values of the tiny model stand in, and the data set's check reports why.
ACTION, MOVES, SIZE = "${recorded_action_dim:}", "${recorded_moves:}", "${recorded_size:}"
STATES = "${recorded_state_range:}"
TINY_SIZE = (48, 48)
NUM_LOOKED_INTO = 64  # recordings, which show the kind of an action's numbers
WINDOW = 12  # actions
AT_ENDS, NEAR = 0.95, 0.05  # of a switch: this share of its values is within so much of its range from an end
LENGTHS = "${steady_and_falling:${trainer.max_iter}}"  # of a scheduler's two cycles
FALLING = 0.25  # of a run


def recordings() -> dict[str, Any]:
    run = tiny_run(ITERATIONS, batch_size=8, lr=0.03, adam_lr=2e-3)
    train, val = run["dataloader_train"], run["dataloader_val"]
    # At the full rate until the stop rule, or three quarters of the run, and then down to zero.
    run["scheduler"] = dict(
        warm_up_steps=[20, 0], cycle_lengths=LENGTHS, f_start=[0.05, 1.0], f_max=[1.0, 1.0], f_min=[1.0, 0.0]
    )
    run["trainer"].update(validation_iter=EVERY, max_val_iter=4)
    run["trainer"]["callbacks"].update(stop_rule=L(StopRule)())
    run["checkpoint"].update(save_iter=EVERY)
    train.update(num_workers=2, dataset=dict(root="datasets/my_robot", split_file="outputs/my_split.json"))
    train["dataset"].update(video_size=SIZE, state="${model.config.pipe_config.state}")
    val.update(num_workers=1, dataset={key: f"${{dataloader_train.dataset.{key}}}" for key in SAME})
    val["dataset"].update(start_interval=VAL_EVERY)
    net = dict(NET, action_dim=ACTION, summed_action_dims=MOVES, state_range=STATES)
    tokenizer = L(TinyTokenizer)(weights="outputs/my_tokenizer.safetensors")
    return tiny_model(NAME, "lerobot_train", "lerobot_val", run, net=net, tokenizer=tokenizer)


register_experiment(NAME, recordings)


# --- values that the recordings decide


def _action_dim(data: Mapping[str, Any]) -> int:
    facts = known(lambda: facts_of(data))
    return (facts and facts.action_dim) or ACTION_DIM["tiny"]


def _moves(data: Mapping[str, Any]) -> ListConfig:
    """The moves among the numbers of an action, of LeRobot data; none of others. A stated target is none."""

    def read() -> list[int]:
        source = LeRobotSource.open(data["root"])
        parts = source.action_parts(data.get("action_keys"), data.get("embodiment"))
        chosen = evenly(len(source), NUM_LOOKED_INTO)
        actions = [source.parts(i, parts)[:-1] for i in chosen]
        has_state = STATE in source.info.features
        states = [source.columns(i, [STATE])[STATE] for i in chosen] if has_state else []
        targets = [part.absolute for part in parts for _ in range(source.width([part]))]
        return [k for k in moving_numbers(actions, states) if not targets[k]]

    return ListConfig(known(read) or [])


def _video_size(data: Mapping[str, Any]) -> ListConfig:
    def read() -> tuple[int, int]:
        source = LeRobotSource.open(data["root"])
        shape = dict(source.info.features[cameras_in(source.camera(data.get("camera")))[0]])
        sides = dict(zip(shape.get("names") or ("height", "width", "channels"), shape["shape"], strict=False))
        return small_size(int(sides["height"]), int(sides["width"]))

    return ListConfig(list(known(read) or TINY_SIZE))


def _state_range(data: Mapping[str, Any]) -> ListConfig:
    facts = known(lambda: facts_of(data)) if data.get("state") else None
    return ListConfig(known(facts.read_state_range) or [] if facts and facts.read_state_range else [])


def _of_data(read: Callable[[Mapping[str, Any]], Any]) -> Callable[..., Any]:
    def resolve(_root_: Any) -> Any:
        return read(OmegaConf.select(_root_, "dataloader_train.dataset") or {})

    return resolve


def _lengths(max_iter: int) -> ListConfig:
    falling = max(1, round(FALLING * max_iter))
    return ListConfig([max(1, max_iter - falling), falling])


OmegaConf.register_new_resolver("steady_and_falling", _lengths, replace=True)
_OF_DATA = {
    "recorded_action_dim": _action_dim,
    "recorded_moves": _moves,
    "recorded_size": _video_size,
    "recorded_state_range": _state_range,
}
for _name, _resolve in _OF_DATA.items():
    OmegaConf.register_new_resolver(_name, _of_data(_resolve), replace=True)


# Moves among the numbers of an action ---------------------------------------------------------------------------------


def moving_numbers(actions: Sequence[Floats], states: Sequence[Floats] = ()) -> list[int]:
    """The numbers of an action whose sums since the start of a clip are places, which a world model needs: the moves.

    Of the actions [T, d] of recordings; ``states`` [T, s] are those before each action. A number is summed unless it is
    constant, a switch (a gripper that is open or closed), or a target (a position of a joint or of the hand, whose sums
    mean nothing). Targets are recognised by usual values that lie apart from zero, or by a state of the robot that
    follows their changes more closely than their sums.
    """
    rows = numpy.concatenate([numpy.asarray(part, numpy.float64) for part in actions])
    transform = order_one_transform(column_statistics(rows))
    low, high = rows.min(axis=0), rows.max(axis=0)
    spread = high - low
    varies = spread > 1e-6 * numpy.maximum(1.0, numpy.abs(high))
    edge = NEAR * spread
    at_ends = ((rows <= low + edge) | (rows >= high - edge)).mean(axis=0)
    is_target = numpy.array(transform.offset or [0.0] * rows.shape[1]) != 0
    if len(states):
        is_target |= _followed(actions, states)
    return numpy.flatnonzero(varies & (at_ends < AT_ENDS) & ~is_target).tolist()


def _followed(actions: Sequence[Floats], states: Sequence[Floats]) -> NDArray[numpy.bool_]:
    """True for numbers whose change over a window predicts the state's change better than their sum does."""
    sums, changes, moved = [], [], []
    for action, state in zip(actions, states, strict=True):
        for start in range(0, min(len(action), len(state) - 1) - WINDOW + 1, WINDOW):
            part = numpy.asarray(action[start : start + WINDOW], numpy.float64)
            sums.append(part.sum(axis=0))
            changes.append(part[-1] - part[0])
            moved.append(numpy.asarray(state[start + WINDOW], numpy.float64) - state[start])
    if len(sums) < 2 * WINDOW:  # too few for a fit
        return numpy.zeros(actions[0].shape[1], dtype=bool)

    def standardised(rows: Sequence[Floats]) -> Floats:
        table = numpy.stack(rows)
        return (table - table.mean(axis=0)) / numpy.maximum(table.std(axis=0), 1e-12)

    # The largest correlation of each number with one of the state, [d].
    of_changes, of_sums = (
        numpy.abs(standardised(values).T @ standardised(moved) / len(moved)).max(axis=1) for values in (changes, sums)
    )
    return of_changes > of_sums
