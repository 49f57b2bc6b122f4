"""Boxes that an estimate plans with: kinds of devices with their links."""

from pydantic import Field

from collapipe.emulation.device_profiles import DeviceProfile, ProfileName, device_profile
from collapipe.emulation.links import LinkValues
from collapipe.emulation.named_tables import StrictModel


class Box(StrictModel):
    """A box that runs one host."""

    profile: ProfileName
    """Name or short name of a device profile."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """Memory that training may use. `None` means that of the profile."""
    flops_per_second: float | None = Field(default=None, gt=0)
    """Operations of training per second. `None` means those of the profile."""
    link: LinkValues = LinkValues()
    """Its link to the network that all boxes share."""

    @property
    def device(self) -> DeviceProfile:
        profile = device_profile(self.profile)
        flops = self.flops_per_second or profile.flops_per_second
        return profile.model_copy(update={"flops_per_second": flops})

    @property
    def training_bytes(self) -> int:
        """Memory that training may use."""
        return self.memory_bytes or self.device.memory_bytes
