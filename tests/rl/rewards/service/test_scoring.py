# SPDX-License-Identifier: Apache-2.0
"""Inside a worker: portions, decoding, faulty requests, and the settings of a service."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards import wire
from cosmos_predict2.rl.rewards.service import scoring
from cosmos_predict2.rl.rewards.service.queue import Limits
from cosmos_predict2.rl.rewards.service.scoring import Scorer, build_decoder
from cosmos_predict2.rl.rewards.service.settings import (
    DecodeSettings,
    RewardSettings,
    ServiceSettings,
    read_settings,
    version_of,
)
from cosmos_predict2.rl.rewards.verifiable import Agreement
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from imaginaire.config.registry import load_toml
from imaginaire.errors import ConfigError
from scripts import reward_service
from tests.programs import call
from tests.rl.rewards.doubles import ROOT, Pixels, body, mean

TINY = DecodeSettings(model_path="tiny")


def scored(function: Any, *bodies: bytes, max_clips: int = 8) -> list[Any]:
    return Scorer("x", function, lambda: build_decoder(TINY, "cpu"), max_clips).score(bodies)


def request(latents: Tensor, fps: float = 16.0, **context: Any) -> bytes:
    prompts = [str(k) for k in range(len(latents))]
    return wire.encode(Clips(latents, None, prompts, fps), {"x": 1.0}, media="latent", context=context)


def test_requests_of_one_form_are_scored_together_and_others_apart() -> None:
    sizes: list[int] = []

    def counting(clips: Clips, context: Mapping[str, Any]) -> Mapping[str, Tensor]:
        assert not torch.is_grad_enabled()
        sizes.append(len(clips.prompts))
        return mean(clips, context)

    bodies = [body("a", "b"), body("c", value=2.0), request(torch.ones(1, 16, 2, 4, 4)), body("d", "e", "f")]
    found = scored(counting, *bodies, max_clips=4)
    assert sizes == [4, 2, 1]
    assert [one["scores"]["x"] for one in found] == [[1.0, 1.0], [2.0], [1.0], [1.0] * 3]


ONE, TWO = torch.ones(1, 16, 1, 2, 2), torch.ones(1, 2)
APART = {  # requests, and what a reward sees of each that it is asked for
    "rates": ([request(ONE), request(ONE, 8.0)], lambda clips, context: clips.fps, [16.0, 8.0]),
    "contexts": ([request(ONE), request(ONE, actions=TWO)], lambda clips, context: "actions" in context, [False, True]),
    "types": (
        [request(ONE), request(ONE.half())],
        lambda clips, context: clips.latents_B_C_T_H_W.dtype,
        [torch.float32, torch.float16],
    ),
    "types of a context": (
        [request(ONE, actions=TWO), request(ONE, actions=TWO.half())],
        lambda clips, context: context["actions"].dtype,
        [torch.float32, torch.float16],
    ),
}


@pytest.mark.parametrize("name", APART)
def test_clips_of_several_forms_are_scored_apart(name: str) -> None:
    bodies, look, wanted = APART[name]
    seen: list[Any] = []

    def noted(clips: Clips, context: Mapping[str, Any]) -> Tensor:
        seen.append((look(clips, context), len(clips.prompts)))
        return torch.full((len(clips.prompts),), float(len(seen)))

    found = scored(noted, *bodies, bodies[0])
    assert seen == [(wanted[0], 2), (wanted[1], 1)]
    assert [one["scores"]["x"] for one in found] == [[1.0], [2.0], [1.0]]


def test_each_clip_has_its_own_rate_context_and_conditioning_frames() -> None:
    def told(clips: Clips, context: Mapping[str, Any]) -> Mapping[str, Any]:
        assert isinstance(context["goal"], Tensor) and isinstance(context["word"], list)
        rates = [clips.fps] * len(clips.prompts)
        numbers = context["num_conditional_frames"]
        return dict(value=context["actions"][:, 0], goal=context["goal"], word=context["word"], fps=rates, n=numbers)

    latents = torch.ones(3, 16, 1, 2, 2)
    context = {"actions": torch.arange(6.0).reshape(3, 2), "goal": [1, 2.5, 3], "word": ["u", "v", "w"]}
    rates = b'[{"video_fps": 8}, {}, {"fps": 8}]'
    data = request(latents, **context)
    data = data.replace(b'[{"video_fps": 16.0}, {"video_fps": 16.0}, {"video_fps": 16.0}]', rates)
    found, given = scored(told, data, request(latents, **context, num_conditional_frames=[0, 2, 3]))
    columns = dict(x=[0.0, 2.0, 4.0], goal=[1.0, 2.5, 3.0], word=["u", "v", "w"], fps=[8.0, 16.0, 8.0], n=[1, 1, 1])
    assert found["scores"] == columns
    assert given["scores"]["n"] == [0, 2, 3]


def test_a_result_says_what_was_scored_and_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 1.0, 5.0])
    monkeypatch.setattr(scoring, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    video = torch.arange(2 * 3 * 1 * 4 * 4).reshape(2, 3, 1, 4, 4).to(torch.uint8)
    data = [wire.encode(Clips(None, clip[None], ["a"], 8.0), {"x": 1.0}, media="video") for clip in video]
    assert scored(Pixels(), *data)[1] == {
        "status": "done",
        "scores": {"x": [71.5]},
        "valid": [True],
        "input_info": {
            "shape": "[1, 3, 1, 4, 4]",
            "dtype": "torch.uint8",
            "min": "48.0",
            "max": "95.0",
            "video_infos": [{"video_fps": 8.0}],
        },
        "duration": "2.00",  # a half of what both took
        "decoded_duration": "0.50",
        "type": "x",
    }


def test_pixels_are_rounded_and_never_wrap() -> None:
    levels = torch.tensor([-1.5, -1.0, -0.999, 0.0, 0.5, 0.9999, 1.0, 1.5, float("nan")])
    decoder = SimpleNamespace(dtype=torch.float16, decode=lambda latent: levels.to(latent.dtype))
    pixels = Scorer("x", mean, lambda: decoder)._decode(torch.ones(1, 16, 1, 2, 2))  # type: ignore[arg-type, return-value]
    assert pixels.tolist() == [0, 0, 0, 128, 191, 255, 255, 255, 0]
    one, two = (build_decoder(attrs.evolve(TINY, device=name), "meta") for name in ("cpu", ""))
    assert (one.device.type, two.device.type) == ("cpu", "meta")


def test_what_is_no_number_is_invalid_wherever_it_is() -> None:
    broken = torch.ones(3, 16, 1, 2, 2)
    broken[0, 3, 0, 1, 1] = float("nan")
    said = {"value": torch.tensor([1.0, 2.0, -float("inf")]), "prediction": ["Good", "Good", "Bad"]}
    (found,) = scored(lambda clips, context: said, request(broken))
    assert found["scores"] == {"x": [None, 2.0, None], "prediction": [None, "Good", None]}
    assert found["valid"] == [False, True, False]


@pytest.mark.parametrize("number", [1, 2])
def test_a_worker_does_not_outlive_its_gpu(number: int) -> None:
    def lost(clips: Clips, context: Mapping[str, Any]) -> Tensor:
        if len(clips.prompts) == 2 or clips.prompts == ["full"]:
            raise RuntimeError("CUDA out of memory")
        raise RuntimeError("CUDA error: an illegal memory access")

    with pytest.raises(SystemExit, match="illegal"):
        scored(lost, *[body("a")] * number)
    assert "out of memory" in str(scored(lost, body("full"))[0])


def test_a_faulty_request_fails_alone() -> None:
    found = scored(mean, body("a"), b"nonsense", body("raise"), body("b", "c"))
    assert [isinstance(one, Exception) for one in found] == [False, True, True, False]


def test_a_score_that_does_not_fit_the_clips_is_a_failure() -> None:
    for wrong in (lambda clips, context: torch.ones(3), lambda clips, context: {"part": torch.ones(1)}):
        assert isinstance(scored(wrong, body("a"))[0], Exception)


def test_latents_are_decoded_where_pixels_are_needed() -> None:
    tokenizer = TinyTokenizer()
    latents = tokenizer.encode(torch.rand(1, 3, 5, 16, 24) * 2 - 1)
    expected = ((tokenizer.decode(latents).clamp(-1, 1) + 1) * 127.5).round()
    (found,) = scored(Pixels(), request(latents))
    assert found["scores"]["x"][0] == pytest.approx(float(expected.mean()), abs=1e-3)
    assert scored(mean, request(latents))[0]["decoded_duration"] == "N/A"


def test_the_true_future_travels_as_latents_or_as_video() -> None:
    tokenizer = TinyTokenizer()
    latents = tokenizer.encode(torch.rand(2, 3, 9, 16, 24) * 2 - 1)
    true, numbers = latents.roll(1, 0), torch.tensor([1, 1])
    pixels = ((tokenizer.decode(true).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    found = []
    for context in ({"true_latents": true}, {"true_video": pixels}, {"true_video": pixels, "true_latents": latents}):
        found += scored(Agreement(), request(latents, **context, num_conditional_frames=numbers))
    assert found[0]["scores"] == found[1]["scores"] == found[2]["scores"]  # of a video that came, latents do not matter
    assert found[0]["valid"] == [True, True]
    assert isinstance(scored(Agreement(), request(latents))[0], Exception)


def test_without_a_decoder_the_cure_is_named() -> None:
    (found,) = Scorer("x", Pixels(), lambda: build_decoder(DecodeSettings(), "cpu")).score([body("a")])
    assert isinstance(found, ConfigError) and "decode_args" in str(found)


def test_a_version_is_of_all_that_a_result_follows_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "judge_of_mine.py").write_text("def judge(clips, context): return 1")
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "a.json").write_text("1")

    def version(decode: DecodeSettings = TINY, **options: Any) -> str:
        told = dict(reward_type="x", make="judge_of_mine:judge", model_path=str(weights), arguments={"scale": 1.0})
        return version_of(RewardSettings(**{**told, **options}), decode)

    first = version()
    assert version() == first == version(max_batch=3, timeout_s=9.0, device="cpu")
    others = [
        version(make="judge_of_mine:other"),
        version(arguments={"scale": 2.0}),
        version(dtype="float16"),
        version(DecodeSettings(model_path="tiny", dtype="float16")),
        version(arguments={"scale": 1.0, "prompt": str(weights / "a.json")}),
    ]
    (weights / "a.json").write_text("22")
    others.append(version())
    others.append(version(arguments={"scale": 1.0, "prompt": str(weights / "a.json")}))
    (tmp_path / "judge_of_mine.py").write_text("def judge(clips, context): return 22")
    others.append(version())
    assert len({first, *others}) == len(others) + 1
    assert version(make="no.such.module:judge", model_path="a/hub-name")
    asked = {"question": "Is the cup on the plate? " * 200}  # longer than the name of a file may be
    assert version(arguments=asked) != version(arguments={"question": asked["question"] + "Say yes or no."})


SERVICE_TOML = """
host = "localhost"
port = 8081
redis_host = "somewhere"
redis_port = 6379
[decode_args]
model_path = "tiny"
dtype = "float16"
chunk_duration = 81
load_mean_std = false
[[reward_args]]
reward_type = "smoothness"
download_path = "/workspace"
device = ["cpu", "cpu"]
[[reward_args]]
reward_type = "motion"
enable = false
"""


def test_the_published_file_is_read_and_what_does_nothing_is_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "service.toml"
    path.write_text(SERVICE_TOML)
    with caplog.at_level("INFO"):
        found = read_settings(str(path), port=9000)
    assert (found.host, found.port, found.decode.dtype) == ("localhost", 9000, "float16")
    assert [reward.reward_type for reward in found.rewards] == ["smoothness"]
    assert found.rewards[0].device == ["cpu", "cpu"]
    for name in ("redis_host", "chunk_duration", "download_path"):
        assert name in caplog.text
    assert [one.reward_type for one in read_settings(str(path), ["agreement"]).rewards] == ["agreement"]
    assert read_settings(str(path), ["smoothness"], port=0).rewards[0].device == ["cpu", "cpu"]
    assert read_settings(str(path), port=0).port == 0


def test_the_page_shows_the_values_that_hold_without_a_file(tmp_path: Path) -> None:
    page = (ROOT / "documentations" / "reward_service_operation.md").read_text()
    (tmp_path / "shown.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    shown = load_toml(str(tmp_path / "shown.toml"))
    settings, reward = ServiceSettings(), RewardSettings(reward_type="smoothness")
    top = {name: value for name, value in shown.items() if name not in ("queue", "decode_args", "reward_args")}
    assert top == {name: getattr(settings, name) for name in top}
    assert {"max_queue_gb", "max_wait_s", "grace_s"} <= {*top}
    row = {name: shown["reward_args"][0][name] for name in ("max_batch", "timeout_s")}
    assert row == {name: getattr(reward, name) for name in row}
    assert replace(Limits(), max_bytes=0) == replace(settings.limits(), max_bytes=0)


def test_the_token_is_that_of_the_first_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, token in (("REMOTE_REWARD_TOKEN", "r"), ("WFM_REWARD_TOKEN", "w")):
        monkeypatch.setenv(name, token)
        assert read_settings(None, ["smoothness"]).token == token
    monkeypatch.setenv("WFM_REWARD_TOKEN", "w w")
    with pytest.raises(ConfigError, match="visible ASCII"):
        read_settings(None, ["smoothness"])


@pytest.mark.parametrize(
    ("text", "arguments", "named"),
    [
        (SERVICE_TOML.replace("port =", "prot ="), [], "prot"),
        (SERVICE_TOML.replace("8081", '"8081"'), [], "port"),
        (SERVICE_TOML.replace("8081", "70000"), [], "port"),
        (SERVICE_TOML.replace("float16", "int4"), [], "dtype"),
        (SERVICE_TOML.replace('"smoothness"', '"smoothnes"'), [], "smoothness"),
        (SERVICE_TOML.replace('"motion"\nenable = false', '"smoothness"'), [], "twice"),
        (SERVICE_TOML + "\ntoken = 'x'", [], "token"),
        ("port =", [], "TOML"),
        ("max_attempts = 1" + SERVICE_TOML, [], "max_attempts"),
        ("port = 1", [], "--rewards"),
        (SERVICE_TOML, ["--host", "0.0.0.0"], "WFM_REWARD_TOKEN"),
        (SERVICE_TOML, ["--host", "no.such.host.invalid"], "WFM_REWARD_TOKEN"),
        ("lease_s = true" + SERVICE_TOML, [], "lease_s"),
        (SERVICE_TOML.replace('["cpu", "cpu"]', "[]"), [], "device"),
        (SERVICE_TOML.replace('["cpu", "cpu"]', '["cpu", 1]'), [], "device"),
        (SERVICE_TOML, ["--queue", "amqp://x"], "--queue"),
        (SERVICE_TOML, ["--rewards", "a=b"], "module:Class"),
    ],
)
def test_wrong_settings_are_named(
    text: str, arguments: list[str], named: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.delenv("WFM_REWARD_TOKEN", raising=False)
    arguments = ["--config", str(tmp_path / "service.toml"), *arguments]
    (tmp_path / "service.toml").write_text(text)
    assert call(reward_service, *arguments) == 2
    assert named in capsys.readouterr().err
