# SPDX-License-Identifier: Apache-2.0
"""A small policy for the toy world: it finds the things on a picture by their colours and decides on a chunk at once.

Letters: E environments, K knots of a chunk (each is held for A / K actions), N = 2 entries of a knot (dx, dy),
P pixels, C the features of a picture.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cosmos_predict2.rl.interfaces import Decision, Generators, LogProb, Mode, Observation, PolicyDefaults
from cosmos_predict2.rl.policies.files import load_weights
from cosmos_predict2.toy_world.physics import ACTION_LAYOUTS, action_layout
from cosmos_predict2.toy_world.rendering import BITS, THINGS, shares
from imaginaire.errors import ConfigError

LOOKS_FOR = ("gripper", "puck", "ring")
NUM_FEATURES = 10  # three places, and two differences of places

_MIDDLE_WEIGHT = 0.5  # pixels that a thing seems to have in the middle of the picture: its place where it is not seen
_DIFFERENCE_PX = 12.0  # a difference of places of this size is 1
_KNOT_ENTRIES = 2


class ToyPolicy(nn.Module, PolicyDefaults):
    """Places of gripper, puck and ring -> an MLP -> ``num_knots`` motions, with normal noise where it samples.

    Actions are clipped to [-1, 1]; the log-probability is that of the draw before it is clipped. ``path`` names weights
    to begin with: a policy's file, or a run that trained one.
    """

    cloning: ClassVar[dict[str, Any]] = dict(demonstrations=20, windows=[0, 12], steps=1500, lr=1e-3, batch_size=64)
    shares: Tensor

    def __init__(
        self,
        action_dim: int = 4,
        chunk: int = 12,
        num_knots: int = 4,
        width: int = 256,
        num_layers: int = 3,
        noise: float = 0.2,
        path: str = "",
    ) -> None:
        super().__init__()
        if action_dim not in ACTION_LAYOUTS:
            raise ConfigError(
                f"its actions have {action_dim} numbers, but a ToyPolicy acts in the toy world alone, whose things it"
                " finds by their colours. Give --policy openvla_oft or pi05."
            )
        if num_knots < 1 or chunk % num_knots:
            raise ConfigError(f"policy.chunk={chunk} is no multiple of policy.num_knots={num_knots}: choose another.")
        if noise <= 0:
            raise ConfigError(f"policy.noise={noise} must be above 0: it is the standard deviation of what is drawn.")
        self.action_dim, self.chunk, self.num_knots, self.noise = action_dim, chunk, num_knots, noise
        self.arguments = dict(  # that build it again
            action_dim=action_dim, chunk=chunk, num_knots=num_knots, width=width, num_layers=num_layers, noise=noise
        )
        self.entries = action_layout(action_dim)[:_KNOT_ENTRIES]
        sizes = [NUM_FEATURES, *[width] * num_layers]
        layers = [layer for n, m in itertools.pairwise(sizes) for layer in (nn.Linear(n, m), nn.SiLU())]
        self.mlp = nn.Sequential(*layers, nn.Linear(width, num_knots * _KNOT_ENTRIES))
        columns = [THINGS.index(thing) for thing in LOOKS_FOR]
        self.register_buffer("shares", torch.from_numpy(shares()[:, columns].copy()), persistent=False)
        if path:
            load_weights(self, path)

    def act(
        self, observation: Observation, *, mode: Mode, generators: Generators, temperature: float = 1.0
    ) -> Decision:
        with torch.no_grad():
            features_E_C = self.see(observation)
            knots_E_K_N, log_prob_E_K_N = self.means(features_E_C), None
            if mode == "sample" and temperature > 0:
                shape, std = knots_E_K_N.shape[1:], self.noise * temperature
                draws = [torch.randn(shape, generator=each, device=each.device) for each in generators]
                noise_E_K_N = torch.stack(draws).to(knots_E_K_N)
                knots_E_K_N = knots_E_K_N + std * noise_E_K_N
                log_prob_E_K_N = -0.5 * noise_E_K_N.square() - math.log(std * math.sqrt(2 * math.pi))
            record = {"features": features_E_C, "knots": knots_E_K_N}
            return Decision(self.actions(knots_E_K_N), record, log_prob_E_K_N)

    def log_prob(self, record: Mapping[str, Tensor]) -> LogProb:
        mean_B_K_N = self.means(record["features"])
        log_std = math.log(self.noise)
        off_B_K_N = (record["knots"] - mean_B_K_N) / self.noise
        log_prob_B_K_N = -0.5 * off_B_K_N.square() - log_std - 0.5 * math.log(2 * math.pi)
        entropy = 0.5 + 0.5 * math.log(2 * math.pi) + log_std
        return LogProb(log_prob_B_K_N, torch.full_like(log_prob_B_K_N, entropy))

    def record_of(self, observation: Observation, actions_B_A_D: Tensor) -> dict[str, Tensor]:
        """The record of a demonstrator who saw this and did that: each knot the mean of what it holds."""
        knots_B_K_N = actions_B_A_D[..., self.entries].unflatten(1, (self.num_knots, -1)).mean(dim=2)
        return {"features": self.see(observation), "knots": knots_B_K_N.to(self.shares)}

    def cloning_loss(self, record: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """The negative log-probability of an element; nothing is drawn."""
        return -self.log_prob(record).log_prob_B_K_N.mean()

    def see(self, observation: Observation) -> Tensor:
        """The features of what is shown; those of a subclass may be others."""
        return self.features(observation["full_image"])

    def means(self, features_E_C: Tensor) -> Tensor:
        """The motions [E, K, 2] that it is most likely to choose."""
        knots_E_KN: Tensor = self.mlp(features_E_C)
        return knots_E_KN.unflatten(1, (self.num_knots, _KNOT_ENTRIES))

    def actions(self, knots_E_K_N: Tensor) -> Tensor:
        """Actions [E, A, D] that hold each knot; entries that are no motion are 0."""
        held_E_A_N = knots_E_K_N.clamp(-1, 1).repeat_interleave(self.chunk // self.num_knots, dim=1)
        actions_E_A_D = held_E_A_N.new_zeros(*held_E_A_N.shape[:2], self.action_dim)
        actions_E_A_D[..., self.entries] = held_E_A_N
        return actions_E_A_D

    @torch.no_grad()
    def features(self, full_image_E_H_W_C: Tensor) -> Tensor:
        """Features of uint8 pictures, [E, 10], about -1 to 1.

        A thing's place is the centre of its colour, drawn a little to the middle, where it is if nothing is seen.
        """
        images = full_image_E_H_W_C.to(self.shares.device)
        height, width = images.shape[1:3]
        code = images.flatten(1, 2).int() >> (8 - BITS)
        code_E_P = (code[..., 0] << 2 * BITS) | (code[..., 1] << BITS) | code[..., 2]
        share_E_P_3 = self.shares[code_E_P]
        y, x = torch.meshgrid(_from_middle(height, share_E_P_3), _from_middle(width, share_E_P_3), indexing="ij")
        moments_3_P = torch.stack([torch.ones_like(x), x, y]).flatten(1)
        area_E_3, x_E_3, y_E_3 = (moments_3_P @ share_E_P_3).unbind(1)
        place_E_3_2 = torch.stack([x_E_3, y_E_3], dim=-1) / (area_E_3 + _MIDDLE_WEIGHT)[..., None]
        gripper, puck, ring = place_E_3_2.unbind(1)
        places_E_6 = place_E_3_2.flatten(1) / (0.5 * max(height, width))
        return torch.cat([places_E_6, (puck - gripper) / _DIFFERENCE_PX, (ring - puck) / _DIFFERENCE_PX], dim=1)


def _from_middle(size: int, like: Tensor) -> Tensor:
    return torch.arange(size, device=like.device, dtype=like.dtype) + 0.5 - size / 2
