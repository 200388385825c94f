"""The pages that a browser sees during a login: plain HTML, no script, nothing from elsewhere.

The threat is a link. Whoever sends a stranger the address of a login that they began themselves
would get the stranger's access, if the stranger only clicked on. So the first page says whose
login it is and what must stand in the reader's own terminal, and goes nowhere by itself.

Everything that is shown passes through `escape`: a login name, a provider's title and a run's
name are chosen by others.

Easy to get wrong: `form-action` in a content security policy also governs where a form's answer
redirects to, in some browsers. It has to let them through to the provider.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from html import escape

STYLE = (
    "body{font:1.1rem/1.5 system-ui,sans-serif;max-width:34rem;margin:12vh auto;padding:0 1rem;"
    "color:#222;background:#fff}"
    "strong.word{display:block;font-size:1.8rem;letter-spacing:.05em;margin:1rem 0}"
    "code{font-size:.85rem;overflow-wrap:anywhere}"
    "button{font:inherit;padding:.6rem 1.4rem}"
    "p.small{font-size:.9rem;color:#555}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}p.small{color:#aaa}}"
)
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()


def page_headers(public_url: str) -> Mapping[str, str]:
    """The headers of every page of the server at this address."""
    # A provider's page for people may lie on another host than its issuer does, so that the
    # policy can say no more about the form's way than that it is encrypted.
    onwards = "https:" if public_url.startswith("https:") else "https: http:"
    return {
        "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; "
        f"form-action 'self' {onwards}; frame-ancestors 'none'; base-uri 'none'",
        "x-frame-options": "DENY",
        # not no-referrer: with that, browsers hide the origin of our own form from us
        "referrer-policy": "same-origin",
        "cross-origin-opener-policy": "same-origin",
    }


def confirmation_page(
    *, run: str, provider: str, confirmation: str, peer_id: str, started_from: str, form_token: str
) -> bytes:
    """Whose login is this, and shall it go on?"""
    return _page(
        f"Join {run}",
        f"""<p>A computer asks to take part in the run <b>{escape(run)}</b> in your name, after you
log in with {escape(provider)}.</p>
<p>The terminal in which you started it shows this word:</p>
<strong class="word">{escape(confirmation)}</strong>
<form method="post"><input type="hidden" name="form_token" value="{escape(form_token)}">
<button>The same word is in my terminal: continue</button></form>
<p>If you see no such word in a terminal of your own, somebody else sent you here: close this page.
Going on would give <b>them</b> access in your name.</p>
<p class="small">The computer's key: <code>{escape(peer_id)}</code><br>
It asked from: <code>{escape(started_from)}</code></p>""",
    )


def done_page(*, run: str, provider: str, confirmation: str, login: str) -> bytes:
    """Logged in; the rest happens in the terminal."""
    return _page(
        "Logged in",
        f"""<p>{escape(provider)} says that you are <b>{escape(login)}</b>. The terminal that shows
<b>{escape(confirmation)}</b> now learns whether that name may take part in
<b>{escape(run)}</b>.</p>
<p>You can close this page.</p>""",
    )


def failed_page(*, what: str, why: str, advice: str) -> bytes:
    """What went wrong, in three sentences."""
    sentences = "".join(f"<p>{escape(text)}</p>" for text in (why, advice) if text)
    return _page("That did not work", f"<p><b>{escape(what)}</b></p>{sentences}")


def _page(title: str, content: str) -> bytes:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{content}</body></html>"
    ).encode()
