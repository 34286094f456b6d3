# SPDX-License-Identifier: Apache-2.0
"""The blocklist, guardrails in a row, and their line at start-up."""

from pathlib import Path

import pytest

from cosmos_predict2.guardrail import GuardrailConfig, GuardrailRunner, PromptRefinerConfig, status_line
from cosmos_predict2.guardrail.runner import (
    Blocklist,
    create_guardrail,
    create_text_guardrail_runner,
    run_text_guardrail,
    words_of,
)
from cosmos_predict2.interfaces import Verdict
from cosmos_predict2.released import DEFAULT_NEGATIVE_PROMPT
from imaginaire.errors import CheckpointError, ConfigError
from tests.guardrail.tiny_guards import guard


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Blocklist:
    return Blocklist(str(tmp_path_factory.mktemp("nothing_here")))


def _release(folder: Path, **lists: str) -> Blocklist:
    """A blocklist in the layout of the release: folders of text files, one entry per line."""
    for name, text in lists.items():
        place = folder / "nvidia" / "Cosmos-Guardrail1" / "blocklist" / name
        place.mkdir(parents=True)
        (place / "words").write_text(text)
    return Blocklist(str(folder))


# The embedded list ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        "A man kills another man.",
        "KILL",
        "killing spree",
        "They stabbed someone with a knife.",
        "a suicide bomber in a market",
        "two pornos",
        "raping",
        "an AK-47 on the table",
        "k1ll the guard",
        "k!ll",
        "k i l l",
        "k.i.l.l.",
        "kiiiill",
        "kíll",
        "Ｋｉｌｌ",  # noqa: RUF001
        "*kill*",
        "f**k",
        "f*ck this",
        "$ex tape",
        "p0rn",
        "the kill switch kills everyone",
        "",
        "   \n",
    ],
)
def test_blocked_prompts_are_refused(prompt: str, embedded: Blocklist) -> None:
    verdict = embedded.check_prompt(prompt)
    assert not verdict.is_safe and verdict.message


@pytest.mark.parametrize(
    "prompt",
    [
        "The robot arm is performing a task. Pick up the red apple and put it on the plate.",
        "push the red puck to the green ring",
        "A humanoid robot shoots a basketball through the hoop.",
        "The arm strikes the nail with a hammer, then cuts the wire with a wire stripper.",
        "A gloved hand presses the emergency kill switch; the kill switches glow.",
        "Heat gun, glue gun and nail gun lie on the bench.",
        "The naked eye cannot see the crack in the pipe.",
        "Slicing a blood orange with a chef's knife.",
        "A skilled operator assembles 5 parts at 720p and 16 fps for $100.",
        "A classic grass field in Essex, a cockpit, a peacock and a bottle of cumin.",
        "Grapes and therapists; an assassin bug is not mentioned.",
        "Move 4 a little, then stop! 100% done: a+b=c @ 3.5 m/s",
        "A robot dies-casts parts: the die is cast",
        "机器人拿起红色的苹果",
        DEFAULT_NEGATIVE_PROMPT,
    ],
)
def test_descriptions_of_work_pass(prompt: str, embedded: Blocklist) -> None:
    assert embedded.check_prompt(prompt) == Verdict(True)


def test_the_message_names_the_words_as_they_stand(embedded: Blocklist) -> None:
    assert embedded.check_prompt("They st4bbed someone.").message == "the prompt contains 'st4bbed someone'"


def test_every_caption_of_the_toy_world_passes(embedded: Blocklist) -> None:
    from cosmos_predict2.toy_world import make_episodes

    captions = {caption for mix in ("expert", "mixed") for caption in make_episodes(200, 0, mix=mix).captions}
    assert captions and all(embedded.check_prompt(caption).is_safe for caption in captions)


# The released list ----------------------------------------------------------------------------------------------------


def test_the_released_files_are_used_where_they_are(tmp_path: Path) -> None:
    allowed = "zorp lamp\nglim\nglim zorp\n"
    custom = "zorp\nbad thing\nlamp oil\n"
    blocklist = _release(tmp_path, custom=custom, whitelist=allowed, exact_match="Mickey Mouse\n")
    assert "4 entries" in blocklist.source
    refused = ["zorps everywhere", "the BAD things", "draw Mickey-Mouse now", "zorp lamp and zorp", "a zorp lamp oil"]
    passing = ["a zorp lamp", "zorped-out is no word of it: xzorp", "a mickey and a mouse", "kill", "mickey mouses"]
    passing.append("a glim zorp")  # the longest phrase that begins there counts
    assert [p for p in refused if blocklist.check_prompt(p).is_safe] == []
    assert [p for p in passing if not blocklist.check_prompt(p).is_safe] == ["zorped-out is no word of it: xzorp"]


def test_an_incomplete_release_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"scripts\.download_checkpoints"):
        _release(tmp_path, whitelist="fine\n")


def test_the_folder_follows_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _release(tmp_path, custom="zorp\n")
    monkeypatch.setenv("COSMOS_PREDICT2_ARGS", f"--checkpoints {tmp_path}")
    assert not Blocklist().check_prompt("zorp").is_safe
    assert not create_text_guardrail_runner(GuardrailConfig().checkpoint_dir).run_safety_check("zorp").is_safe


def test_letters_on_their_own_are_joined_only_in_a_row() -> None:
    assert words_of("A K i l L x yz") == ["akillx", "yz"]
    assert words_of("plan a b then c") == ["plan", "a", "b", "then", "c"]


# The row --------------------------------------------------------------------------------------------------------------


def test_the_first_objection_decides_and_is_named() -> None:
    verdicts = {"a": Verdict(True), "b": Verdict(False, "too loud"), "c": Verdict(False, "no")}
    parts = [guard(name, "check_prompt", verdict) for name, verdict in verdicts.items()]
    assert GuardrailRunner(parts).run_safety_check("x") == Verdict(False, "b: too loud")
    assert [part.check_prompt.call_count for part in parts] == [1, 1, 0]


def test_a_guardrail_that_fails_has_cleared_nothing(caplog: pytest.LogCaptureFixture) -> None:
    runner = GuardrailRunner([guard("model", "check_prompt", RuntimeError("out of memory"))])
    verdict = runner.run_safety_check("x")
    assert not verdict.is_safe and "model" in verdict.message and "out of memory" in verdict.message
    assert "Traceback" in caplog.text
    assert run_text_guardrail("x", runner) is False


def test_no_guardrails_are_safe_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert GuardrailRunner([]).run_safety_check("x").is_safe
    assert "no guardrail" in caplog.text


# Settings -------------------------------------------------------------------------------------------------------------


def test_what_is_not_built_in_is_an_error() -> None:
    for parts in (["blocklist", "llama_guards"], ["blocklists"], ["qwen3guard"]):
        with pytest.raises(ConfigError, match=f"no guardrail '{parts[-1]}'"):
            create_guardrail(GuardrailConfig(parts=parts))


def test_one_line_reports_what_was_asked_and_what_is_active() -> None:
    on, refiner = GuardrailConfig(), PromptRefinerConfig()
    line = status_line(on, refiner, create_guardrail(on))
    assert "\n" not in line
    assert (
        "guardrail: blocklist (built-in list" in line
        and "asked: on" in line
        and "not downloaded: llama_guard, video_filter, face_blur" in line
    )
    assert "prompt refiner: off, asked: on (not downloaded)" in line
    off = GuardrailConfig(enabled=False)
    assert create_guardrail(off) is None
    line = status_line(off, PromptRefinerConfig(enabled=False), None)
    assert "guardrail: off, asked: off" in line and "licence" in line
    assert line.endswith("prompt refiner: off, asked: off")
    assert "licence" not in status_line(off, PromptRefinerConfig(enabled=False), None, is_released=False)
