"""Boxes that an estimate plans with: kinds of devices with their links."""

from pydantic import Field, field_validator

from collapipe.emulation.device_profiles import DeviceProfile, device_profile
from collapipe.emulation.links import LinkValues
from collapipe.emulation.named_tables import StrictModel
from collapipe.errors import InvalidInputError


class Box(StrictModel):
    """A box that runs one host."""

    profile: str
    """Name or short name of a device profile."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """Memory that training may use. `None` means that of the profile."""
    link: LinkValues = LinkValues()
    """Its link to the network that all boxes share."""

    @field_validator("profile")
    @classmethod
    def _check_profile(cls, profile: str) -> str:
        try:
            device_profile(profile)
        except InvalidInputError as error:
            raise ValueError(str(error)) from None
        return profile

    @property
    def device(self) -> DeviceProfile:
        return device_profile(self.profile)

    @property
    def training_bytes(self) -> int:
        """Memory that training may use."""
        return self.memory_bytes or self.device.memory_bytes
