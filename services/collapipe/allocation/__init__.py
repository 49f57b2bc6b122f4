"""The mathematics of docs/scheduling.md: pure functions, without network, torch or files.

Read `round_model` first, then `strategies`, then `search`, which is the strategy `dssra`.
"""

from collapipe.allocation.round_model.limits import violations as violations
from collapipe.allocation.round_model.prediction import ClusterPrediction as ClusterPrediction
from collapipe.allocation.round_model.prediction import RoundPrediction as RoundPrediction
from collapipe.allocation.round_model.prediction import idle_joules as idle_joules
from collapipe.allocation.round_model.prediction import predict as predict
from collapipe.allocation.round_model.problem import BlockShare as BlockShare
from collapipe.allocation.round_model.problem import ClusterPlan as ClusterPlan
from collapipe.allocation.round_model.problem import ClusterProblem as ClusterProblem
from collapipe.allocation.round_model.problem import Convergence as Convergence
from collapipe.allocation.round_model.problem import Host as Host
from collapipe.allocation.round_model.problem import LinkPlan as LinkPlan
from collapipe.allocation.round_model.problem import ModelCost as ModelCost
from collapipe.allocation.round_model.problem import RadioLink as RadioLink
from collapipe.allocation.round_model.problem import RoundPlan as RoundPlan
from collapipe.allocation.round_model.problem import RoundProblem as RoundProblem
from collapipe.allocation.round_model.problem import Segment as Segment
from collapipe.allocation.round_model.problem import StagePlan as StagePlan
from collapipe.allocation.round_model.problem import UploadPlan as UploadPlan
from collapipe.allocation.round_model.problem import WiredLink as WiredLink
from collapipe.allocation.round_model.problem import exchange_bps as exchange_bps
from collapipe.allocation.round_model.problem import push_overlap as push_overlap
from collapipe.allocation.round_model.virtual_queue import backlogs_after as backlogs_after
from collapipe.allocation.strategies.decide import decide_round as decide_round
from collapipe.allocation.strategies.decide import reference_seconds as reference_seconds
