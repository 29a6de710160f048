"""The direct gRPC transport: one long-lived stream per client, opened by the client, with mutual TLS.

``frames`` defines the bytes on the wire. ``identities`` reads certificates and the revocation list. ``stream_server``
and ``link`` are the server's side, and ``stream_transport`` connects them to the coordinator. ``stream_client`` is the
client's side, and ``refusals`` has its words for failed connections. ``local_clients`` starts the clients of ``deploy
local``.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # failed attempts are reported in this program's own words
