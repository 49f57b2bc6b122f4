"""Runs a range of units as one stage of a 1F1B pipeline. It uses torch, but no network."""

from collapipe.stage_runtime.compute_device import CPU as CPU
from collapipe.stage_runtime.compute_device import ComputeDevice as ComputeDevice
from collapipe.stage_runtime.emulated_processor import EmulatedProcessor as EmulatedProcessor
from collapipe.stage_runtime.mailbox import Mailbox as Mailbox
from collapipe.stage_runtime.optimizer import clip_scale as clip_scale
from collapipe.stage_runtime.resident_units import ResidentUnit as ResidentUnit
from collapipe.stage_runtime.resident_units import ResidentUnits as ResidentUnits
from collapipe.stage_runtime.sequence_slices import cut_into_slices as cut_into_slices
from collapipe.stage_runtime.stage import Stage as Stage
from collapipe.stage_runtime.stage_context import StageContext as StageContext
from collapipe.stage_runtime.stage_metrics import StageMetrics as StageMetrics
