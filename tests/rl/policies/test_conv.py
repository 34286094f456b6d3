# SPDX-License-Identifier: Apache-2.0
"""The convolutional policy learns where a small thing is, and is read again as it was written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Observation, observation_of
from cosmos_predict2.rl.policies.conv import ConvPolicy
from cosmos_predict2.rl.policies.files import read_policy, write_policy
from cosmos_predict2.rl.policies.toy import ToyPolicy
from imaginaire.errors import ConfigError
from tests.rl.policies.seen import generators

ACTIONS = {"q01": [-0.5, -0.5, 0.0], "q99": [0.5, 0.5, 0.0]}  # the last number never changes


def dots(num: int, seed: int) -> tuple[Observation, Tensor]:
    """Pictures of a dot on noise, and motions to it that are held for a chunk of four."""
    draws = torch.Generator().manual_seed(seed)
    places = torch.rand(num, 2, generator=draws)
    pictures = torch.randint(150, 180, (num, 64, 64, 3), generator=draws, dtype=torch.uint8)
    for picture, (x, y) in zip(pictures, (places * 57).int().tolist(), strict=True):
        picture[y : y + 7, x : x + 7] = torch.tensor([40, 40, 200], dtype=torch.uint8)
    motions = torch.cat([places - 0.5, torch.zeros(num, 1)], dim=1)
    return observation_of([pictures], None, ["go there"] * num), motions[:, None].expand(-1, 4, -1)


def test_it_learns_where_a_small_thing_is() -> None:
    torch.manual_seed(0)
    policy = ConvPolicy(actions=ACTIONS, tasks=["go there"], chunk=4, num_knots=2)
    learnt, held_out = (policy.record_of(*dots(num, seed)) for num, seed in ((256, 0), (64, 1)))
    optimizer = torch.optim.AdamW(policy.parameters(), 2e-3)
    for k in range(60):
        rows = torch.arange(k * 32, k * 32 + 32) % 256
        policy.cloning_loss({name: value[rows] for name, value in learnt.items()}, generators(1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        error = (policy.means(held_out) - held_out["knots"])[..., :2].square().mean()
    assert error < 0.1 * held_out["knots"][..., :2].square().mean()
    assert policy.act(dots(3, 2)[0], mode="greedy", generators=generators()).actions_E_A_D[..., 2].eq(0).all()


def test_it_is_read_as_it_was_written_and_refuses_what_it_was_not_cloned_on(tmp_path: Path) -> None:
    state = {"q01": [0.0], "q99": [2.0]}
    policy = ConvPolicy(
        actions=ACTIONS, tasks=["left", "right"], chunk=4, num_knots=4, num_views=2, state=state, size=30
    )
    torch.nn.init.normal_(policy.task.weight)
    shown = torch.randint(0, 256, (2, 3, 48, 40, 3), dtype=torch.uint8, generator=generators(1)[0])
    observation = observation_of([*shown], torch.tensor([[0.0], [1.0], [9.0]]), ["left", "right", "left"])
    again, _ = read_policy(str(write_policy(tmp_path / "policy", policy, {})))
    for mode in ("greedy", "sample"):
        first, second = (one.act(observation, mode=mode, generators=generators()) for one in (policy, again))
        assert torch.equal(first.actions_E_A_D, second.actions_E_A_D)
    assert first.record["state"].flatten().tolist() == [-1, 0, 2], "far beyond what was recorded is cut off"
    other = policy.act({**observation, "task_description": ["right"] * 3}, mode="greedy", generators=generators())
    plain = policy.act(observation, mode="greedy", generators=generators())
    assert (plain.actions_E_A_D == other.actions_E_A_D).flatten(1).all(dim=1).tolist() == [False, True, False]
    with pytest.raises(ConfigError, match=r"not cloned on the task 'lefd'.*Did you mean left"):
        policy.act({**observation, "task_description": ["lefd"] * 3}, mode="greedy", generators=generators())
    with pytest.raises(ConfigError, match="2 cameras, but is shown 1"):
        policy.act(
            {**observation, "wrist_image": shown[:1, :, None][:, :, :0][0]}, mode="greedy", generators=generators()
        )
    for width in (0, 2):
        with pytest.raises(ConfigError, match=f"cloned on 1 numbers of the state, but is shown {width}"):
            policy.act({**observation, "state": torch.zeros(3, width)}, mode="greedy", generators=generators())
    other = {**observation, "task_description": ["left", "up", "right"]}
    recorded = policy.record_of(other, torch.full((3, 4, 3), 9.0))
    assert recorded["task"].tolist() == [0, 2, 1] and recorded["knots"].max() == 1, "a sentence held out, and a spike"
    with pytest.raises(ConfigError, match=r"policy\.noize.*Did you mean noise"):
        ConvPolicy(actions=ACTIONS, tasks=["left"], noize=0.1)
    with pytest.raises(ConfigError, match=r"policy\.path is empty"):
        ConvPolicy()
    with pytest.raises(ConfigError, match="no multiple"):
        ConvPolicy(actions=ACTIONS, tasks=["left"], chunk=4, num_knots=3)


def test_a_run_that_began_with_a_clone_is_read_and_begun_with_again(tmp_path: Path) -> None:
    clone = ConvPolicy(actions=ACTIONS, tasks=["go there"], chunk=4, num_knots=2, noise=0.35, correlation=0.5)
    path = write_policy(tmp_path / "clone", clone, {"sentences": ["go there"]})
    target = "cosmos_predict2.rl.policies.conv.ConvPolicy"
    tree = {"model": {"config": {"policy": {"_target_": target, "path": str(path), "noise": 0.1}}}}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(json.dumps(tree))
    learnt = {f"net.{name}": value + 1 for name, value in clone.state_dict().items()}
    (tmp_path / "run/checkpoints/model").mkdir(parents=True)
    torch.save(learnt, tmp_path / "run/checkpoints/model/iter_000000001.pt")
    (tmp_path / "run/checkpoints/latest_checkpoint.txt").write_text("iter_000000001.pt")
    read, card = read_policy(str(tmp_path / "run"))
    again = ConvPolicy(path=str(tmp_path / "run"))
    for policy in (read, again):
        assert policy.config.noise == 0.1 and policy.config.chunk == 4 and list(card.about["sentences"]) == ["go there"]
        assert torch.equal(policy.out.bias, clone.out.bias + 1)
    no_start: Any = None
    begun = ConvPolicy.to_clone(no_start, base=str(path))
    assert (begun.config.noise, begun.config.correlation) == (0.35, 0.5), "its draws are those of its base"
    toy = write_policy(tmp_path / "toy", ToyPolicy(width=8), {})
    with pytest.raises(ConfigError, match=r"toy.*holds a policy of class .*ToyPolicy"):
        ConvPolicy(path=str(toy))
