"""What gRPC says about a connection that fails, in words for users."""

from __future__ import annotations

FINAL = {
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not valid for the ca.crt of this client; use the folder "
    "that `defedavg deploy keys` made for it together with the server's keys",
    "Hostname Verification Check failed": "the server's certificate is for another host; name this one with --host "
    "of `defedavg deploy keys`",
    "WRONG_VERSION_NUMBER": "the server sends plain text; start it with --keys, or join with --insecure on loopback",
}
"""A part of gRPC's text -> what it means. Another attempt would not help."""

PASSING = {
    "Connection refused": "nothing listens there; start the server, or correct HOST:PORT",
    "Domain name not found": "the host name is not known; correct HOST:PORT",
    "No route to host": "there is no route to the host; check the network, or correct HOST:PORT",
}
"""A part of gRPC's text -> what it means. Another attempt may help."""

PLAIN_TEXT_CLOSED = "the server closed the connection; if it was started with --keys, join with --keys, too"


def final_fault(text: str) -> str | None:
    """Return what a fault means that another attempt would not mend; None: another attempt may help."""
    return next((meaning for sign, meaning in FINAL.items() if sign in text), None)


def plain_reason(text: str, *, secure: bool) -> str:
    """Return why there is no connection; ``secure``: the client uses TLS."""
    for sign, meaning in PASSING.items():
        if sign in text:
            return meaning
    if not secure and "Socket closed" in text:
        return PLAIN_TEXT_CLOSED
    return text.rpartition("last error: ")[2]  # gRPC's own words, without those that every failure starts with
