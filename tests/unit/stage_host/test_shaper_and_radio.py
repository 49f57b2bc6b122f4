"""The shaper and the radio that a host uses."""

import logging

import pytest

from collapipe.emulation.emulation_file import EmulationFile
from collapipe.errors import InvalidInputError
from collapipe.stage_host.host import StageHostSettings, choose_radio, choose_shaper
from collapipe.traffic_shaping.pacing import PacedShaper
from collapipe.traffic_shaping.radio_driver import EmulatedRadioDriver


def settings_of(**values: object) -> StageHostSettings:
    return StageHostSettings.model_construct(**values)


@pytest.mark.parametrize("option", [{"shaper": "tc"}, {"radio": "iw"}])
def test_missing_interface_is_refused(option: dict[str, str]) -> None:
    settings = settings_of(**option)
    with pytest.raises(InvalidInputError, match=r"(tc|iw) needs --interface NAME"):
        choose_shaper(settings)
        choose_radio(settings, EmulationFile(None))


def test_refusal_of_the_kernel_falls_back_to_pacing_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        shaper = choose_shaper(settings_of(shaper="tc", interface="no-such0"))
    assert isinstance(shaper, PacedShaper)
    assert "paced inside this process instead" in caplog.text


def test_radio_is_emulated_by_default() -> None:
    nothing = EmulationFile(None)
    assert isinstance(choose_radio(settings_of(), nothing), EmulatedRadioDriver)
    assert choose_radio(settings_of(radio="none"), nothing) is None
