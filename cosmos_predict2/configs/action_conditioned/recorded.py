# SPDX-License-Identifier: Apache-2.0
"""Values of a configuration that its recordings decide: ``${recorded_action_dim:}`` and others.

They are read from the data set of ``dataloader_train`` when a configuration is composed, and saved as numbers. Where
it cannot be read, the values of the tiny model stand in, and the check of the data set reports what is wrong.
"""

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import ListConfig, OmegaConf

from cosmos_predict2.actions.moves import moving_numbers
from cosmos_predict2.configs.action_conditioned.networks import ACTION_DIM
from cosmos_predict2.data.lerobot.info import STATE
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.samples import evenly
from cosmos_predict2.data.sizes import small_size
from imaginaire.data.facts import facts_of, known

TINY_SIZE = (48, 48)
NUM_LOOKED_INTO = 64  # recordings, which show the kind of an action's numbers


ACTION, MOVES, SIZE = "${recorded_action_dim:}", "${recorded_moves:}", "${recorded_size:}"
LENGTHS = "${steady_and_falling:${trainer.max_iter}}"  # of a scheduler's two cycles
FALLING = 0.25  # of a run


def _action_dim(data: Mapping[str, Any]) -> int:
    facts = known(lambda: facts_of(data))
    return (facts and facts.action_dim) or ACTION_DIM["tiny"]


def _moves(data: Mapping[str, Any]) -> ListConfig:
    """The moves among the numbers of an action, of LeRobot data; none of others."""

    def read() -> list[int]:
        source = LeRobotSource.open(data["root"])
        parts = source.action_parts(data.get("action_keys"), data.get("embodiment"))
        chosen = evenly(len(source), NUM_LOOKED_INTO)
        actions = [source.parts(i, parts)[:-1] for i in chosen]
        has_state = STATE in source.info.features
        states = [source.columns(i, [STATE])[STATE] for i in chosen] if has_state else []
        return moving_numbers(actions, states)

    return ListConfig(known(read) or [])


def _video_size(data: Mapping[str, Any]) -> ListConfig:
    def read() -> tuple[int, int]:
        source = LeRobotSource.open(data["root"])
        shape = dict(source.info.features[source.camera(data.get("camera"))])
        sides = dict(zip(shape.get("names") or ("height", "width", "channels"), shape["shape"], strict=False))
        return small_size(int(sides["height"]), int(sides["width"]))

    return ListConfig(list(known(read) or TINY_SIZE))


def _of_data(read: Callable[[Mapping[str, Any]], Any]) -> Callable[..., Any]:
    def resolve(_root_: Any) -> Any:
        return read(OmegaConf.select(_root_, "dataloader_train.dataset") or {})

    return resolve


def _lengths(max_iter: int) -> ListConfig:
    falling = max(1, round(FALLING * max_iter))
    return ListConfig([max(1, max_iter - falling), falling])


OmegaConf.register_new_resolver("steady_and_falling", _lengths, replace=True)
for _name, _resolve in (
    ("recorded_action_dim", _action_dim),
    ("recorded_moves", _moves),
    ("recorded_size", _video_size),
):
    OmegaConf.register_new_resolver(_name, _of_data(_resolve), replace=True)
