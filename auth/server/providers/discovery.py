"""A provider's discovery document: where its doors are (OpenID Connect Discovery 1.0).

The document must name as its issuer exactly the issuer that it was asked of, letter for letter:
that equality is what ties the addresses in it, and later every ID token, to the provider that the
moderator chose. Every address in it is https, or http to this machine where the issuer is that too.
"""

from __future__ import annotations

from typing import Final

import msgspec

from auth.server.providers.fetching import Fetcher
from auth.server.providers.web_addresses import fault_in, is_loopback_http

WELL_KNOWN: Final = "/.well-known/openid-configuration"


class Metadata(msgspec.Struct, frozen=True):
    """What we use of the document; the rest is ignored."""

    issuer: str
    jwks_uri: str
    token_endpoint: str
    authorization_endpoint: str = ""
    device_authorization_endpoint: str = ""
    userinfo_endpoint: str = ""
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    authorization_response_iss_parameter_supported: bool = False


def document_address(issuer: str) -> str:
    return issuer.removesuffix("/") + WELL_KNOWN


async def discover(fetcher: Fetcher, issuer: str) -> Metadata:
    """The issuer's document, checked; ProviderUnavailable when there is no such thing."""
    url = document_address(issuer)
    answer = await fetcher.get(url)
    if answer.status != 200:
        raise fetcher.misconfigured(f"it answered with status {answer.status}", url)
    metadata = answer.read(Metadata)
    if metadata is None:
        raise fetcher.unavailable("what is there is no discovery document", url)
    if metadata.issuer != issuer:
        raise fetcher.misconfigured(
            f"the document is of another issuer ({metadata.issuer!r} instead of {issuer!r})", url
        )
    local = is_loopback_http(issuer)
    for name in (
        "jwks_uri",
        "token_endpoint",
        "authorization_endpoint",
        "device_authorization_endpoint",
        "userinfo_endpoint",
    ):
        address: str = getattr(metadata, name)
        optional = not address and name not in ("jwks_uri", "token_endpoint")
        fault = None if optional else fault_in(address, loopback_http=local)
        if fault:
            raise fetcher.misconfigured(f"the document's {name} {fault}", url)
    return metadata
