# SPDX-License-Identifier: Apache-2.0
"""Three tasks of public simulators on MuJoCo, registered as their users would do it.

MetaWorld's reach-v3 and drawer-open-v3, where a reset's seed draws the goal, and FetchPush-v4 of gymnasium-robotics.
The camera stands near the table, and shadows are left out: without a GPU they cost ten times the rest of a picture.
"""

from typing import Any

import gymnasium
import gymnasium_robotics
import numpy

REACH, DRAWER, PUSH = "Bench/Reach-v0", "Bench/Drawer-v0", "Bench/Push-v0"
SUITES = {  # episodes of 24 actions, each held for some of the simulator's steps
    "reach": f"gym:{__name__}:{REACH}?repeat=4&max_steps=24&image_size=64",
    "drawer": f"gym:{__name__}:{DRAWER}?repeat=4&max_steps=24&image_size=64",
    "push": f"gym:{__name__}:{PUSH}?repeat=2&max_steps=24&image_size=64",
}
_NEAR = [0.75, 0.075, 0.7]  # where corner2 of MetaWorld stands otherwise, the table fills a quarter of the picture


def _metaworld(name: str, render_mode: str | None, **drawn: Any) -> Any:
    import metaworld

    env = metaworld.ALL_V3_ENVIRONMENTS[name](render_mode=render_mode, camera_name="corner2", **drawn)
    env._set_task_called = True  # no list of tasks: each reset draws a goal
    env._freeze_rand_vec, env.seeded_rand_vec = False, True
    env.model.cam_pos[env.model.camera("corner2").id] = _NEAR
    return _without_shadows(env)


def reach(render_mode: str | None = None, **drawn: Any) -> Any:
    return _metaworld("reach-v3", render_mode, **drawn)


def drawer(render_mode: str | None = None, **drawn: Any) -> Any:
    return _metaworld("drawer-open-v3", render_mode, **drawn)


def push(render_mode: str | None = None, **drawn: Any) -> Any:
    camera = dict(distance=1.05, azimuth=180.0, elevation=-50.0, lookat=numpy.array([1.32, 0.75, 0.42]))
    settings = dict(default_camera_config=camera, disable_env_checker=True, **drawn)
    return _without_shadows(gymnasium.make("FetchPush-v4", render_mode=render_mode, **settings).unwrapped)


def _without_shadows(env: Any) -> Any:
    quality = env.model.vis.quality
    quality.shadowsize, quality.offsamples = 0, 0
    return env


gymnasium.register_envs(gymnasium_robotics)
for env_id, entry_point, steps in ((REACH, "reach", 500), (DRAWER, "drawer", 500), (PUSH, "push", 50)):
    gymnasium.register(env_id, entry_point=f"{__name__}:{entry_point}", max_episode_steps=steps)
