# SPDX-License-Identifier: Apache-2.0
"""The tiny models that come with the code: trained on the toy world, for any CPU."""

from pathlib import Path

NAME = "tiny_video2world.safetensors"


def tiny_video2world_path() -> str:
    """Path of its weights: the averaged ones, in half precision. README.md beside them has their making."""
    return str(Path(__file__).with_name(NAME))


def tiny_action_path() -> str:
    """Path of the averaged weights of the world model with actions; the config.yaml of its run lies beside them."""
    return str(Path(__file__).with_name("tiny_action") / "model.safetensors")


def tiny_policy_path() -> str:
    """Path of a policy of the toy world, of `scripts.train_policy`'s default kind, cloned from 20 demonstrations."""
    return str(Path(__file__).with_name("tiny_policy.safetensors"))
