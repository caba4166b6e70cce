#!/usr/bin/env python3
"""Ask a Flower service whether it is well: healthcheck http[s]://HOST:PORT/PATH [CA.crt], or grpc://HOST:PORT."""

from __future__ import annotations

import http.client
import ssl
import sys
from urllib.parse import SplitResult, urlsplit

TIMEOUT = 5.0


def http_status(url: SplitResult, authority: str | None) -> int:
    """Return the HTTP status of a GET; a server certificate must be signed by `authority` and bear the host's name."""
    # http.client goes straight to the host, whatever the proxy variables say.
    if url.scheme == "https":
        trust = ssl.create_default_context(cafile=authority)
        connection = http.client.HTTPSConnection(url.netloc, timeout=TIMEOUT, context=trust)
    else:
        connection = http.client.HTTPConnection(url.netloc, timeout=TIMEOUT)
    connection.request("GET", url.path)
    return connection.getresponse().status


def grpc_serving(address: str) -> bool:
    """Say whether gRPC's standard health service answers SERVING."""
    import grpc  # only SuperExec needs it, and it takes a tenth of a second

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        # The messages HealthCheckRequest() and HealthCheckResponse(SERVING) in bytes.
        return bool(channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=TIMEOUT) == b"\x08\x01")


def main() -> None:
    """Exit with 0 if the service is well, else with 1 and the reason."""
    url, authority = urlsplit(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    try:
        well = grpc_serving(url.netloc) if url.scheme == "grpc" else http_status(url, authority) == 200
    except Exception as error:  # whatever it is, the service is not well
        sys.exit(f"{sys.argv[1]}: {error}")
    sys.exit(0 if well else f"{sys.argv[1]}: not well")


if __name__ == "__main__":
    main()
