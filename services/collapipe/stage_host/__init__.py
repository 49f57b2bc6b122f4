"""Stage hosts run stages and serve them on the network: control units, devices and edge servers."""

from collapipe.stage_host.host import StageHostSettings as StageHostSettings
from collapipe.stage_host.host import frozen_weights as frozen_weights
from collapipe.stage_host.host import make_data_root as make_data_root
from collapipe.stage_host.host import start_stage_host as start_stage_host
from collapipe.stage_host.host_resources import HostResources as HostResources
from collapipe.stage_host.servicer import StageServicer as StageServicer
from collapipe.stage_host.session import StageSession as StageSession
