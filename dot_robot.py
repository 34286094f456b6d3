import gymnasium
import numpy


class Dot(gymnasium.Env):  # a blue dot that is to go home, to the green diamond
    metadata, render_mode = {"render_modes": ["rgb_array"], "render_fps": 10}, "rgb_array"
    action_space = gymnasium.spaces.Box(-1, 1, (2,), numpy.float32)
    observation_space = gymnasium.spaces.Box(0, 64, (2, 2), numpy.float64)

    def __init__(self, render_mode="rgb_array"):
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.places = self.np_random.uniform(10, 54, (2, 2))  # of the dot, and of its home
        return self.places.copy(), {}

    def step(self, action):
        self.places[0] = numpy.clip(self.places[0] + 3 * numpy.clip(action, -1, 1), 4, 60)
        is_home = bool(numpy.linalg.norm(self.places[0] - self.places[1]) < 5)
        return self.places.copy(), float(is_home), is_home, False, {"success": is_home}

    def render(self):
        dot, home = numpy.moveaxis(numpy.mgrid[:64, :64], 0, -1)[None] - self.places[:, None, None]
        picture = numpy.full((64, 64, 3), 235, numpy.uint8)
        picture[abs(home).sum(-1) < 9] = 60, 160, 60
        picture[(dot**2).sum(-1) < 30] = 30, 30, 200
        return picture


gymnasium.register("Dot-v0", entry_point="dot_robot:Dot", max_episode_steps=24)
