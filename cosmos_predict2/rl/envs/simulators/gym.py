# SPDX-License-Identifier: Apache-2.0
"""Any registered environment of gymnasium as a simulator: what differs between packages is found by one probe step.

    WorkerEnv(partial(GymTask, "gym_pusht:gym_pusht/PushT-v0", image_size=96), num_envs=4)

Or by name in every program that takes a suite, with settings behind a question mark; those that are not of `GymTask`
are arguments of the environment itself:

    --suite "gym:Meta-World/MT1?env_name=reach-v3&camera_name=corner2&repeat=4&max_steps=24"
"""

import gc
import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from cosmos_predict2.rl.envs.simulators import Floats, Pictures, Seen, seeded
from imaginaire.errors import ConfigError, alike, near, optional_module

SUCCESS_KEYS = ("success", "is_success")  # of info; others by name
UNITS = ("scaled", "native")  # of actions
REWARDS = ("success", "own")
BUILD_SEED = 0  # of the numbers that a constructor draws, such as MetaWorld's list of tasks
_THRESHOLD = re.compile(r"(reward|return)>=(-?[0-9.]+(?:e-?[0-9]+)?)")


class GymTask:
    """One environment of gymnasium, see `TaskEnv`; a trial is the seed of its reset.

    Actions in [-1, 1] are scaled to the bounds of its action space (``low`` and ``high`` where it has none); with
    ``actions`` "native" they are in its own unit, within the same bounds. ``success`` "return>=NUMBER" is of the sum of
    its rewards; "auto" takes the entry success or is_success. What is paid is 1 for success, or with ``reward`` "own"
    the environment's rewards. Pictures are rendered, or taken from the observation where
    nothing is rendered. ``state`` "observation" is all of one that is an array; none by default, because a world model
    imagines pictures alone. ``settings`` go to the environment's constructor.
    """

    num_tasks, num_trials = 1, 2**31 - 1

    def __init__(
        self,
        env_id: Any,
        image_size: int | Sequence[int] = 64,
        repeat: int = 1,
        max_steps: int | None = None,
        success: str = "auto",
        reward: str = "success",
        state: Sequence[str] = (),
        wrist: Sequence[str] = (),
        sentence: str = "",
        low: float | Sequence[float] | None = None,
        high: float | Sequence[float] | None = None,
        actions: str = "scaled",
        **settings: Any,
    ) -> None:
        gymnasium = optional_module("gymnasium", "gym")
        spec = spec_of(env_id) if isinstance(env_id, str) else env_id
        self._name, self._repeat = spec.id, repeat
        sides = [image_size] if isinstance(image_size, int | str) else list(image_size)
        for key, number in [("repeat", repeat), ("max_steps", max_steps), *(("image_size", side) for side in sides)]:
            if number is not None and not (isinstance(number, int) and number >= 1):
                raise ConfigError(f"{self._name}: {key}={number} is not a whole number above 0.")
        for key, chosen, known in (("actions", actions, UNITS), ("reward", reward, REWARDS)):
            if chosen not in known:
                raise ConfigError(f"{self._name}: {key}={chosen}: {' or '.join(known)}.{near(chosen, known)}")
        self._is_native, self._pays_success = actions == "native", reward == "success"
        with seeded(BUILD_SEED):
            self._env: Any = _made(gymnasium, spec, image_size, settings)
        steps = self._env.spec.max_episode_steps
        if max_steps is None and steps is None:
            raise ConfigError(f"{self._name} has no longest episode: give max_steps, the actions of an episode.")
        longest: Any = max_steps if steps is None else -(-steps // repeat)
        if max_steps and max_steps > longest:  # the robot would stand still behind the environment's end
            registered = f"it ends after {steps} steps, {longest} actions, as it is registered"
            cure = f"Give max_episode_steps={max_steps * repeat} besides"
            raise ConfigError(f"{self._name}: max_steps={max_steps}, but {registered}. {cure}.")
        self.max_steps = max_steps or longest
        self._low, self._high = self._bounds(gymnasium, low, high)
        self.action_dim = len(self._low)
        self.sentence = sentence or re.sub(r"-v\d+$", "", self._name.split("/")[-1])
        self._state = [str(state)] if isinstance(state, (str, int, float)) else list(state)
        self._wrist = [str(wrist)] if isinstance(wrist, (str, int, float)) else list(wrist)
        self._observed, _ = self._seeded_reset(0)
        self.image_size = _size(image_size, self._picture().shape)
        self.metadata = {"suite": f"gym:{self._name}", "control_hz": self._env.metadata.get("render_fps", 10) / repeat}
        ends = {"low": self._low.tolist(), "high": self._high.tolist()}
        prefix = "action" if self._is_native else "scaled"
        self.metadata |= {f"{prefix}_{end}": values for end, values in ends.items()}
        self._state_of(self._observed)
        self._wrists()
        self._success = success = str(success)
        if (found := _THRESHOLD.fullmatch(success)) and found[1] == "return" and float(found[2]) <= 0:
            raise ConfigError(
                f"{self._name}: success={success} holds before anything is done, as a return begins at 0. Give a number"
                " above 0, reward>=NUMBER, or an entry of info."
            )
        self._require_reproducible_starts()
        if success != "auto" and (success == "terminated" or _THRESHOLD.fullmatch(success)):
            return
        names = SUCCESS_KEYS if success == "auto" else (success,)
        self._success = self._success_key(names)

    def reset(self, task_id: int, trial_id: int, seed: int) -> Mapping[str, Any]:
        self._observed, _ = self._seeded_reset(trial_id)
        self._is_over, self._is_success, self._return = False, False, 0.0
        return self._seen()

    def step(self, action: Floats) -> tuple[Mapping[str, Any], float, bool]:
        """Steps after the environment's own end change nothing: some raise errors then."""
        total, is_success = 0.0, False
        self._begins = False
        for _ in range(self._repeat):
            if self._is_over:
                is_success = is_success or self._is_success
                break
            self._observed, reward, terminated, truncated, info = self._env.step(self._scaled(action))
            self._is_over = bool(terminated or truncated)
            self._return += float(reward)
            total += float(reward)
            self._is_success = self._judged(float(reward), bool(terminated), info)
            is_success = is_success or self._is_success
        return self._seen(), float(is_success) if self._pays_success else total, is_success

    def close(self) -> None:
        """Free the renderer now: one of MuJoCo that is freed later takes the next environment's context with it."""
        if self._env is not None:
            self._env.close()
        self._env = None
        gc.collect()  # a renderer and its environment know each other

    def _success_key(self, names: Sequence[str]) -> str:
        """The one of these entries that info has; some environments have it at the end of an episode alone."""
        middle = (self._low + self._high) / 2 if self._is_native else numpy.zeros(self.action_dim)
        seen: set[str] = set()
        for _ in range(self.max_steps * self._repeat):
            _, _, terminated, truncated, info = self._env.step(self._scaled(middle))
            seen.update(map(str, info))
            if found := [name for name in names if name in info]:
                return found[0]
            if terminated or truncated:
                break
        raise ConfigError(
            f"{self._name}: info of a step has no {' or '.join(names)}, only {sorted(seen)}. Say what success is:"
            " gym:ID?success=KEY of these, success=terminated, success=reward>=NUMBER or success=return>=NUMBER."
        )

    def _judged(self, reward: float, terminated: bool, info: Mapping[str, Any]) -> bool:
        if self._success == "terminated":
            return terminated
        if found := _THRESHOLD.fullmatch(self._success):
            return (reward if found[1] == "reward" else self._return) >= float(found[2])
        found = info.get(self._success, False)
        try:
            return bool(numpy.any(numpy.asarray(found, dtype=numpy.float64) > 0.5))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self._name}: info['{self._success}'] of a step is {found!r}; True or False is expected, or a number,"
                " above 0.5 for success. Give one of them, or name another entry: gym:ID?success=KEY."
            ) from error

    def _scaled(self, action: NDArray[Any]) -> NDArray[Any]:
        space, found = self._env.action_space, numpy.asarray(action, dtype=numpy.float64)
        if not self._is_native:
            found = self._low + (found + 1.0) / 2.0 * (self._high - self._low)
        return found.reshape(space.shape).astype(space.dtype)

    def _bounds(self, gymnasium: Any, low: Any, high: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Box):
            raise ConfigError(
                f"{self._name}: its actions are {space}, but numbers (a Box) are expected."
                " Register a wrapper of yours that takes numbers, gymnasium.ActionWrapper."
            )
        ends = [
            numpy.broadcast_to(own if given is None else given, space.shape).astype(numpy.float64).reshape(-1)
            for own, given in ((space.low, low), (space.high, high))
        ]
        if not numpy.isfinite(ends).all() or (ends[0] >= ends[1]).any():
            raise ConfigError(f"{self._name}: actions from {ends[0]} to {ends[1]}: give finite low and high.")
        return ends[0], ends[1]

    def _seeded_reset(self, seed: int) -> tuple[Any, Any]:
        """A reset that the seed alone decides: some packages draw from the environment's own numbers or NumPy's."""
        gymnasium = optional_module("gymnasium", "gym")
        self._env.unwrapped.np_random = gymnasium.utils.seeding.np_random(seed)[0]
        with seeded(seed):
            found: tuple[Any, Any] = self._env.reset(seed=seed)
        _place(self._renderer)
        self._begins = True
        return found

    @property
    def _renderer(self) -> Any:
        """The renderer of an environment of gymnasium on MuJoCo, with its model and data; others have none."""
        return getattr(self._env.unwrapped, "mujoco_renderer", None)

    def _require_reproducible_starts(self) -> None:
        starts = [(self._seeded_reset(seed), self._picture())[1] for seed in (1, 2, 1)]
        if not numpy.array_equal(starts[0], starts[2]):
            raise ConfigError(
                f"{self._name} begins otherwise each time with the same seed, so that policies cannot be compared."
                " Register an environment of yours whose reset(seed=...) decides all that is drawn."
            )

    def _picture(self) -> Pictures:
        found = self._env.render() if self._env.render_mode else None
        if found is None:
            found = next((entry for entry in _entries(self._observed).values() if _upright(entry) is not None), None)
        if (picture := _upright(found)) is None:
            drawn = numpy.zeros(0) if found is None else numpy.asarray(found)
            raise ConfigError(
                f"{self._name} draws no picture: render_mode='rgb_array' gives {drawn.dtype} {list(drawn.shape)},"
                " and its observation has no uint8 [height, width, 3], or floats from 0 to 1. Register a wrapper of"
                " yours whose render() gives one."
            )
        if self._begins and not picture.any():  # later ones may fade
            raise ConfigError(
                f"{self._name} draws black pictures. Close other environments of this process before it is made, or"
                " try another renderer: MUJOCO_GL=egl, glfw or osmesa, of pygame SDL_VIDEODRIVER=offscreen."
            )
        return picture

    def _wrists(self) -> Pictures:
        """uint8 [V, H, W, 3], in the size of the other pictures."""
        pictures = [averaged(self._view(name), self.image_size) for name in self._wrist]
        return numpy.stack(pictures) if pictures else numpy.zeros((0, *self.image_size, 3), numpy.uint8)

    def _view(self, name: str) -> Pictures:
        """A picture of the observation, or that of another camera of a MuJoCo model."""
        observed = _entries(self._observed)
        if (picture := _upright(observed.get(name))) is not None:
            return picture
        renderer = self._renderer
        model = getattr(renderer, "model", None)
        cameras = [] if model is None else [model.camera(i).name for i in range(model.ncam)]
        if renderer is None or name not in cameras:
            raise ConfigError(
                f"{self._name}: wrist={name} is no picture of its observation, and no camera of its model."
                f"{near(name, [*observed, *cameras])}"
            )
        own, renderer.camera_id = renderer.camera_id, cameras.index(name)
        try:
            return numpy.asarray(renderer.render("rgb_array"))
        finally:
            renderer.camera_id = own

    def _state_of(self, observed: Any) -> Floats:
        entries = _entries(observed)
        if unknown := [name for name in self._state if name not in entries]:
            raise ConfigError(f"{self._name}: its observation has no '{unknown[0]}'.{near(unknown[0], list(entries))}")
        parts = [numpy.asarray(entries[name], dtype=numpy.float32).reshape(-1) for name in self._state]
        return numpy.concatenate(parts) if parts else numpy.zeros(0, numpy.float32)

    def _seen(self) -> Mapping[str, Any]:
        pictures = {"full_image": lambda: averaged(self._picture(), self.image_size), "wrist_image": self._wrists}
        return Seen(pictures, {"state": self._state_of(self._observed), "task_description": self.sentence})


def _place(renderer: Any) -> None:
    """Move what is drawn to where a reset has put it: MetaWorld's changes its model alone, which shows a step later."""
    if (data := getattr(renderer, "data", None)) is not None:
        optional_module("mujoco", "gym").mj_forward(renderer.model, data)


def spec_of(env_id: str) -> Any:
    """The registered environment of ``ID`` or ``MODULE:ID``."""
    gymnasium = optional_module("gymnasium", "gym")
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except ImportError as error:
        is_itself = f"{module}.".startswith(f"{error.name}.")
        cure = f"Start in the folder of {module}.py, or name that folder in PYTHONPATH" if is_itself else "Install it"
        raise ConfigError(f"gymnasium has no environment '{env_id}': {error}. {cure}.") from error
    except gymnasium.error.Error as error:
        what = str(error).partition(". ")[0].rstrip(".")  # behind it, it offers Hopper for Nope
        what += f".{alike(name, gymnasium.registry, cutoff=0.8)}"
        cure = "Install the package that registers it, and name its module: gym:MODULE:ID, or --import MODULE"
        raise ConfigError(f"gymnasium has no environment '{env_id}': {what} {cure}.") from error


def for_workers(env_id: str) -> Any:
    """``env_id`` of `GymTask` for another process, which has not imported what this one has."""
    spec = spec_of(env_id)  # a function that makes it may be one without a name: its module registers it there, too
    if spec.entry_point is None:
        raise ConfigError(f"{env_id} is registered as a vector of environments alone: register one environment.")
    return spec if isinstance(spec.entry_point, str) else f"{spec.entry_point.__module__}:{spec.id}"


def _entries(observed: Any, under: str = "") -> dict[str, Any]:
    """The entries of an observation by name, those of dictionaries in it as OUTER.INNER, too."""
    if not isinstance(observed, Mapping):
        return {"observation": observed}
    entries = {f"{under}{name}": entry for name, entry in observed.items()}
    for name, entry in list(entries.items()):
        if isinstance(entry, Mapping):
            del entries[name]
            entries |= _entries(entry, f"{name}.")
    return entries


def _upright(entry: Any) -> Pictures | None:
    """uint8 [height, width, 3] of a picture, also of one with channels first or of floats from 0 to 1; else None."""
    picture = numpy.asarray(0 if entry is None else entry)
    if picture.ndim == 3 and picture.shape[-1] not in (3, 4) and picture.shape[0] == 3:
        picture = picture.transpose(1, 2, 0)
    if picture.ndim != 3 or picture.shape[-1] not in (3, 4):
        return None
    picture = picture[..., :3]  # without transparency
    if picture.dtype.kind == "f" and picture.size and picture.min() >= 0 and picture.max() <= 1:
        picture = numpy.rint(255 * picture).astype(numpy.uint8)
    return picture if picture.dtype == numpy.uint8 else None


def averaged(picture: Pictures, size: Sequence[int]) -> Pictures:
    """A picture in another size, where each new pixel is the mean of the area that it covers."""
    if tuple(picture.shape[:2]) == tuple(size):
        return numpy.ascontiguousarray(picture)
    rows, columns = (_areas(old, new) for old, new in zip(picture.shape[:2], size, strict=True))
    mean = numpy.einsum("hi,ijc,wj->hwc", rows, picture, columns, optimize=True)
    return numpy.rint(mean).astype(numpy.uint8)


def _areas(old: int, new: int) -> NDArray[numpy.float64]:
    """The share of each old pixel in each new one [new, old]."""
    edges = numpy.arange(new + 1) * (old / new)
    first, last = numpy.arange(old), numpy.arange(old) + 1
    covered = numpy.minimum(edges[1:, None], last) - numpy.maximum(edges[:-1, None], first)
    return numpy.clip(covered, 0.0, None) * (new / old)


def _size(asked: int | Sequence[int], shape: Sequence[int]) -> tuple[int, int]:
    """Height and width; of a height alone the width follows from the picture, in multiples of 8."""
    if isinstance(asked, int):
        return asked, max(8, round(asked * shape[1] / shape[0] / 8) * 8)
    height, width = (int(one) for one in asked)
    return height, width


def _made(gymnasium: Any, spec: Any, size: int | Sequence[int], settings: Mapping[str, Any]) -> Any:
    """The environment, which draws in the right size where its constructor takes one: drawing is what takes time."""
    height, width = (size, size) if isinstance(size, int) else size
    if "render_mode" in settings:
        raise ConfigError(f"{spec.id}: render_mode={settings['render_mode']}: it is rgb_array here. Leave it out.")
    for drawn in ({"width": width, "height": height}, {"render_width": width, "render_height": height}, {}):
        try:
            return gymnasium.make(spec, render_mode="rgb_array", disable_env_checker=True, **{**drawn, **settings})
        except TypeError as error:
            if not drawn or not re.search("width|height", str(error)):
                own = [name for name in inspect.signature(GymTask).parameters if name not in ("env_id", "settings")]
                meant = next(filter(None, (near(name, own) for name in settings)), "")
                raise ConfigError(f"{spec.id} cannot be built with {dict(settings)}: {error}.{meant}") from error
        except ImportError as error:
            raise ConfigError(f"{spec.id} cannot be built: {error}. Install what it imports.") from error
        except gymnasium.error.Error as error:
            raise ConfigError(f"{spec.id}: {error}") from error
    raise AssertionError("unreachable")
