# SPDX-License-Identifier: Apache-2.0
"""Windows of AgiBot episodes against golden values."""

import pytest

from cosmos_predict2.tools.prepare.agibot.windows import WindowName, cut_windows
from tests.goldens import Value

AREA = "training"


@pytest.mark.golden_cases("frame_selection.json", "agibot_windows")
def test_windows_and_their_names_match(case: Value) -> None:
    fps = case["fps"].use()
    windows = cut_windows(case["duration"].use(), case["window_size"].use(), case["min_last_window"].use())
    assert len(windows) == len(case["windows"])
    for i, (window, golden) in enumerate(zip(windows, case["windows"])):
        golden["file"].compare(f"{WindowName('327', '685393', i, *window.frames(fps)).stem}.mp4")
        golden["start"].compare(window.start, atol=1e-9)
        golden["length"].compare(window.length, atol=1e-9)
        clip = WindowName.of(golden["file"].use().removesuffix(".mp4"))
        assert clip is not None and (clip.first, clip.last) == window.frames(fps)
