# SPDX-License-Identifier: Apache-2.0
"""Tasks of public simulators on MuJoCo, registered as their users would do it.

Of MetaWorld and gymnasium-robotics those below, where a reset's seed draws the places.
MetaWorld's camera stands beside the table, so that the arm hides neither hand nor object. Shadows are left out: without
a GPU they cost ten times the rest of a picture.
"""

from typing import Any

import gymnasium
import numpy

METAWORLD = {
    "reach": "reach-v3",
    "plate": "plate-slide-v3",
    "faucet": "faucet-open-v3",
    "drawer": "drawer-open-v3",
    "door": "door-close-v3",
    "window": "window-close-v3",
    "button": "button-press-v3",
    "mug": "coffee-push-v3",
    "sweep": "sweep-into-v3",
    "lock": "door-lock-v3",
    "hammer": "hammer-v3",
    "pull": "coffee-pull-v3",
    "pushv": "push-v3",
    "stick": "stick-push-v3",
}
SENTENCES = {
    "reach": "move the gripper to the red ball",
    "plate": "slide the plate into the goal",
    "faucet": "open the faucet",
    "drawer": "open the drawer",
    "door": "close the door",
    "window": "close the window",
    "button": "press the button",
    "mug": "push the mug under the coffee machine",
    "sweep": "sweep the block into the hole",
    "lock": "lock the door",
    "hammer": "hammer",
    "pull": "coffee-pull",
    "pushv": "push",
    "stick": "push the bottle with the stick",
    "push": "push the block to the red goal",
    "touch": "move the gripper to the red ball",
    "maze": "roll the green ball to the red one",
}
FETCH = {"push": "FetchPush-v4", "touch": "FetchReach-v4"}
FETCH_CAMERAS = {  # its distance, its elevation in degrees, where it looks
    "FetchPush-v4": (0.75, -50.0, (1.36, 0.75, 0.42)),
    "FetchReach-v4": (0.65, -35.0, (1.36, 0.75, 0.53)),
}
MAZE = {"maze": "PointMaze_Open-v3"}
STEPS = {  # of the simulator for an action
    **dict.fromkeys(METAWORLD, 4),
    "window": 6,
    **dict.fromkeys(FETCH, 2),
    **dict.fromkeys(MAZE, 5),
}
SUITES = {
    name: f"gym:{__name__}:Bench/{name}-v0?repeat={repeat}&max_steps=24&image_size=64" for name, repeat in STEPS.items()
}
SUITES["touch"] += "&low=-0.25&high=0.25"  # it would be there after two actions of 24
BESIDE, TABLE, FIELD = (0.95, 0.45, 0.75), (0.0, 0.68, 0.08), 38.0  # the camera, where it looks, its angle in degrees
CLOSE = {"coffee-push-v3": ((0.0, 0.62, 0.08), 26.0)}  # small things, which are seen larger: their place and angle


def table(task: str, render_mode: str | None = None, **drawn: Any) -> Any:
    import metaworld

    env = metaworld.ALL_V3_ENVIRONMENTS[task](render_mode=render_mode, camera_name="corner2", **drawn)
    env._set_task_called = True  # no list of tasks: each reset draws a goal
    env._freeze_rand_vec, env.seeded_rand_vec = False, True
    _look(env.model, env.model.camera("corner2").id, *CLOSE.get(task, (TABLE, FIELD)))
    return _without_shadows(env)


def _look(model: Any, camera: int, place: tuple[float, ...], degrees: float) -> None:
    import mujoco

    back = numpy.subtract(BESIDE, place)  # a camera looks along -z of its own
    right = numpy.cross([0, 0, 1], back)
    axes = numpy.stack([right, numpy.cross(back, right), back], 1)
    axes /= numpy.linalg.norm(axes, axis=0)
    model.cam_pos[camera], model.cam_fovy[camera] = BESIDE, degrees
    mujoco.mju_mat2Quat(model.cam_quat[camera], axes.ravel())


def fetch(task: str, render_mode: str | None = None, **drawn: Any) -> Any:
    import gymnasium_robotics

    gymnasium.register_envs(gymnasium_robotics)
    distance, elevation, place = FETCH_CAMERAS[task]
    camera = dict(distance=distance, azimuth=100.0, elevation=elevation, lookat=numpy.array(place))
    settings = dict(default_camera_config=camera, disable_env_checker=True, **drawn)
    return _without_shadows(gymnasium.make(task, render_mode=render_mode, **settings).unwrapped)


def maze(task: str, render_mode: str | None = None, **drawn: Any) -> Any:
    import gymnasium_robotics

    gymnasium.register_envs(gymnasium_robotics)
    square = [[1] * 5, *([1, "c", "c", "c", 1] for _ in range(3)), [1] * 5]  # c: where the ball and its goal may be
    made = gymnasium.make(task, render_mode=render_mode, disable_env_checker=True, maze_map=square, **drawn)
    env: Any = made.unwrapped
    above = dict(distance=4.6, elevation=-90.0, azimuth=90.0, lookat=numpy.zeros(3))
    env.point_env.mujoco_renderer.default_cam_config = above
    _without_shadows(env.point_env)
    return env


def _without_shadows(env: Any) -> Any:
    quality = env.model.vis.quality
    quality.shadowsize, quality.offsamples = 0, 0
    return env


for made, steps, tasks in ((table, 500, METAWORLD), (fetch, 50, FETCH), (maze, 300, MAZE)):
    for name, task in tasks.items():
        entry = f"{__name__}:{made.__name__}"
        gymnasium.register(f"Bench/{name}-v0", entry_point=entry, max_episode_steps=steps, kwargs={"task": task})
