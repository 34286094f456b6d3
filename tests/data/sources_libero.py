# SPDX-License-Identifier: Apache-2.0
"""A miniature of the LIBERO benchmark's demonstrations, in the layout of its public HDF5 files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy

SUITES = {
    "libero_spatial": ["pick_up_the_black_bowl_next_to_the_plate_and_place_it_on_the_plate"],
    "libero_10": ["KITCHEN_SCENE3_turn_on_the_stove_and_put_the_moka_pot_on_it"],
}
CAMERAS = ("agentview_rgb", "eye_in_hand_rgb")


def libero_tree(
    root: Path, *, suites: Mapping[str, Sequence[str]] = SUITES, num_demos: int = 3, num_steps: int = 16, side: int = 16
) -> Path:
    """Every picture is grey, of the frame's own brightness, with a bright top left corner."""
    import h5py

    for suite, tasks in suites.items():
        for task in tasks:
            path = root / suite / f"{task}_demo.hdf5"
            path.parent.mkdir(parents=True, exist_ok=True)
            with h5py.File(path, "w") as file:
                for k in range(num_demos):
                    group = file.create_group(f"data/demo_{k}")
                    for name, values in demo(k, num_steps, side).items():
                        group[name] = values
    return root


def demo(number: int, num_steps: int, side: int = 16) -> dict[str, numpy.ndarray]:
    """The tables of one demonstration."""
    generator = numpy.random.default_rng(number)
    fingers = generator.uniform(0, 0.04, num_steps)
    pictures = {}
    for offset, camera in enumerate(CAMERAS):
        frames = numpy.zeros((num_steps, side, side, 3), dtype=numpy.uint8)
        frames += (20 + 5 * numpy.arange(num_steps) + 60 * offset).astype(numpy.uint8)[:, None, None, None]
        frames[:, : side // 2, : side // 2] += 80
        pictures[f"obs/{camera}"] = frames
    return {
        "actions": numpy.concatenate(
            [generator.uniform(-1, 1, (num_steps, 6)), generator.choice([-1.0, 1.0], (num_steps, 1))], axis=1
        ),
        "dones": (numpy.arange(num_steps) == num_steps - 1).astype(numpy.uint8),
        "rewards": (numpy.arange(num_steps) == num_steps - 1).astype(numpy.uint8),
        "obs/ee_pos": numpy.cumsum(generator.normal(0, 0.01, (num_steps, 3)), axis=0) + [0.1, 0.0, 1.0],
        "obs/ee_ori": numpy.cumsum(generator.normal(0, 0.02, (num_steps, 3)), axis=0) + [3.1, 0.0, 0.0],
        "obs/gripper_states": numpy.stack([fingers, -fingers], axis=1),
        **pictures,
    }
