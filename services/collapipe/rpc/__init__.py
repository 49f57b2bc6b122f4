"""The only package that knows gRPC's options, credentials and status codes."""

from collapipe.rpc.call_shaping import link_to_caller as link_to_caller
from collapipe.rpc.channel import ChannelPool as ChannelPool
from collapipe.rpc.channel import call as call
from collapipe.rpc.channel import open_authority_channel as open_authority_channel
from collapipe.rpc.channel import open_channel as open_channel
from collapipe.rpc.channel import why_unreachable as why_unreachable
from collapipe.rpc.credentials import Presented as Presented
from collapipe.rpc.credentials import Security as Security
from collapipe.rpc.grants import check_push as check_push
from collapipe.rpc.grants import check_session as check_session
from collapipe.rpc.grants import check_stage_caller as check_stage_caller
from collapipe.rpc.grants import sign_grant as sign_grant
from collapipe.rpc.permissions import check_addresses as check_addresses
from collapipe.rpc.permissions import check_is_caller as check_is_caller
from collapipe.rpc.permissions import check_is_owner as check_is_owner
from collapipe.rpc.permissions import describe_caller as describe_caller
from collapipe.rpc.permissions import is_owner as is_owner
from collapipe.rpc.permissions import owner_name as owner_name
from collapipe.rpc.server import Server as Server
from collapipe.rpc.server import serve as serve
from collapipe.rpc.status import explain_unexpected as explain_unexpected
from collapipe.rpc.status import to_error as to_error
from collapipe.rpc.streams import SIGN_OF_LIFE_SECONDS as SIGN_OF_LIFE_SECONDS
from collapipe.rpc.streams import Outbox as Outbox
from collapipe.rpc.streams import within_silence as within_silence
from collapipe.rpc.streams import work_with_signs_of_life as work_with_signs_of_life
