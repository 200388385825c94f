"""A volunteer, our auth server, and oidc-provider: from an invite to a pass, over real sockets.

Three parties speak HTTP on loopback: the volunteer's client with the auth server, a person's
browser with the auth server and with the provider, and the auth server with the provider.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
import trio.testing

from auth.server.audit import Act
from auth.server.auth_server import AuthServer
from auth.server.moderation import Moderation
from auth.server.settings import read_settings
from auth.server.store import Store, create_store, open_store
from auth.server.views import AuditRow
from node.core.access.auth_client import (
    AccessDenied,
    AuthClient,
    GrantedPass,
    LoginNotFinished,
    OfferedProvider,
    PendingLogin,
    open_auth_client,
)
from node.core.access.auth_http import Outage
from node.core.access.server_time import ServerTime
from node.net.clocks import machine_clocks
from protocols.identity import Identity
from tests.strangers.oidc.browser import Browser, Page
from tests.strangers.oidc.process import OpenIdStranger

RUN = "demo"
ME = Identity.from_seed(b"\x07" * 32)
DEVICE = OfferedProvider("corp", "device")
IN_BROWSER = OfferedProvider("corp", "browser")
NOWHERE = "https://nowhere.invalid/"  # an address that no redirect leads to


@dataclass
class Running:
    store: Store
    server: AuthServer
    client: AuthClient

    def moderation(self) -> Moderation:
        return Moderation(self.store, providers=("corp",))

    def refusals(self) -> list[AuditRow]:
        """The refusals in the audit log."""
        return list(self.moderation().audit(act=Act.REFUSED.value).rows)


@asynccontextmanager
async def running(
    folder: Path, provider: OpenIdStranger, client: str = "potluck-loopback"
) -> AsyncIterator[Running]:
    """An auth server with this provider, where alice is on the list, and a volunteer's client."""
    file = folder / "auth.toml"
    file.write_text(f"""\
run = "{RUN}"
public_url = "http://127.0.0.1"
[server]
listen = ["127.0.0.1:0"]
[[provider]]
id = "corp"
kind = "oidc"
title = "Corp"
issuer = "{provider.issuer}"
client_id = "{client}"
""")
    made = create_store(folder / "auth", RUN, actor="local:test")
    with open_store(folder / "auth") as store:
        Moderation(store, providers=("corp",)).allow("corp:alice-online", actor="local:test")
        server = AuthServer(read_settings(file), store, version="0", insecure_http=True)
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve)
            async with open_auth_client(
                ME,
                url=server.public_url,
                run=RUN,
                fingerprint=made.fingerprint,
                time=ServerTime(machine_clocks()),
            ) as asking:
                await asking.meet()
                yield Running(store, server, asking)
            nursery.cancel_scope.cancel()


async def begin(here: Running, entry: OfferedProvider) -> PendingLogin:
    pending = await here.client.log_in(entry)
    assert isinstance(pending, PendingLogin)
    return pending


async def poll(
    here: Running, clock: trio.testing.MockClock, login: PendingLogin
) -> GrantedPass | float:
    await here.client.meet()  # so that the connection is not idle, which the jump would lengthen
    clock.jump(login.interval)
    return await here.client.poll_login(login)


async def press_the_button(browser: Browser, login: PendingLogin) -> Page:
    """Compare the word on our page with the one in the terminal, and go on."""
    page = await browser.open(login.url)
    assert login.confirmation in page.text
    return await browser.send(page, page.forms[0], {})


async def test_a_device_login_ends_in_a_pass(
    tmp_path: Path, provider: OpenIdStranger, clock: trio.testing.MockClock
) -> None:
    async with running(tmp_path, provider) as here, Browser(NOWHERE) as browser:
        login = await begin(here, DEVICE)
        assert isinstance(await poll(here, clock, login), float | int)
        page = await browser.open(login.verification_uri)
        page = await browser.send(page, page.forms[0], {"user_code": login.user_code})
        await browser.log_in(page, "alice")
        granted = await poll(here, clock, login)
        assert isinstance(granted, GrantedPass)
        token = granted.opened.token
        assert (token.username, token.peer) == ("corp:alice-online", ME.public_key)
        again = await here.client.poll_login(login)  # the answer may have been lost
        assert isinstance(again, GrantedPass)
        assert again.signed == granted.signed


async def test_a_browser_login_ends_in_a_pass(
    tmp_path: Path, provider: OpenIdStranger, clock: trio.testing.MockClock
) -> None:
    async with running(tmp_path, provider) as here, Browser(NOWHERE) as browser:
        login = await begin(here, IN_BROWSER)
        page = await browser.log_in(await press_the_button(browser, login), "alice")
        assert page.url.startswith(f"{here.server.public_url}/login/callback?")
        assert page.status == 200
        assert "alice-online" in page.text
        assert login.confirmation in page.text
        granted = await poll(here, clock, login)
        assert isinstance(granted, GrantedPass)
        assert granted.opened.token.username == "corp:alice-online"


async def test_somebody_who_is_not_on_the_list_is_refused_under_the_servers_signature(
    tmp_path: Path, provider: OpenIdStranger, clock: trio.testing.MockClock
) -> None:
    async with running(tmp_path, provider) as here, Browser(NOWHERE) as browser:
        login = await begin(here, IN_BROWSER)
        await browser.log_in(await press_the_button(browser, login), "mallory")
        with pytest.raises(AccessDenied) as denied:
            await poll(here, clock, login)
        assert denied.value.exit_code == 3
        (row,) = here.refusals()
        assert "corp:mallory-online" in f"{row.name} {row.reason} {row.detail}"
        assert here.moderation().verify().sound


@pytest.mark.parametrize("entry", [DEVICE, IN_BROWSER], ids=["device", "browser"])
async def test_a_person_who_says_no_is_a_refusal_that_is_signed_and_logged(
    tmp_path: Path, provider: OpenIdStranger, clock: trio.testing.MockClock, entry: OfferedProvider
) -> None:
    async with running(tmp_path, provider) as here, Browser(NOWHERE) as browser:
        login = await begin(here, entry)
        if entry is DEVICE:
            page = await browser.open(login.verification_uri)
            page = await browser.send(page, page.forms[0], {"user_code": login.user_code})
            await browser.send(page, page.forms[0], {"abort": "yes"})
        else:
            page = await press_the_button(browser, login)
            page = await browser.open(page.links["[ Cancel ]"])
            assert page.status == 403
            assert "said no" in page.text
        for _ in range(2):
            with pytest.raises(AccessDenied) as denied:
                await poll(here, clock, login)
            assert denied.value.code == "login-denied"
        (row,) = here.refusals()  # once, however often it was told
        assert "said no" in f"{row.reason} {row.detail}"
        assert row.peer == str(ME.peer_id)


async def test_a_code_that_expires_is_neither_a_pass_nor_a_refusal(
    tmp_path: Path, provider: OpenIdStranger, clock: trio.testing.MockClock
) -> None:
    async with running(tmp_path, provider, "hurried") as here:
        login = await begin(here, DEVICE)
        with pytest.raises(LoginNotFinished):
            await poll(here, clock, login)


async def test_a_token_for_another_program_is_a_refusal(
    tmp_path: Path, provider: OpenIdStranger, clock: trio.testing.MockClock
) -> None:
    async with running(tmp_path, provider, "confused") as here, Browser(NOWHERE) as browser:
        login = await begin(here, DEVICE)
        page = await browser.open(login.verification_uri)
        page = await browser.send(page, page.forms[0], {"user_code": login.user_code})
        await browser.log_in(page, "alice")
        with pytest.raises(AccessDenied) as denied:
            await poll(here, clock, login)
        assert denied.value.code == "login-id-token"


async def test_a_provider_that_is_down_is_an_outage_and_its_return_ends_it(
    tmp_path: Path, mortal_provider: OpenIdStranger, clock: trio.testing.MockClock
) -> None:
    async with running(tmp_path, mortal_provider) as here, Browser(NOWHERE) as browser:
        mortal_provider.stop()
        with pytest.raises(Outage) as outage:
            await here.client.log_in(DEVICE)
        assert not isinstance(outage.value, LoginNotFinished)
        assert here.server.status()["provider_troubles"]["corp"]
        mortal_provider.start("second")
        clock.jump(6)  # a failure is remembered for five seconds
        login = await begin(here, DEVICE)
        page = await browser.open(login.verification_uri)
        page = await browser.send(page, page.forms[0], {"user_code": login.user_code})
        await browser.log_in(page, "alice")
        assert isinstance(await poll(here, clock, login), GrantedPass)


async def test_a_link_sent_to_a_victim_leads_nowhere_without_our_page(
    tmp_path: Path, provider: OpenIdStranger, clock: trio.testing.MockClock
) -> None:
    """Mallory presses the button, sends alice on to the provider, and waits for her access."""
    async with (
        running(tmp_path, provider) as here,
        Browser(provider.issuer) as mallory,
        Browser(NOWHERE) as alice,
    ):
        login = await begin(here, IN_BROWSER)
        link = (await press_the_button(mallory, login)).url
        assert link.startswith(provider.issuer)
        page = await alice.open(link)
        page = await alice.log_in(page, "alice")
        assert page.status == 403
        assert "not the one that began this login" in page.text
        assert isinstance(await poll(here, clock, login), float | int)
