"""Identity providers: OpenID Connect, GitHub, or enrolment codes without a provider.

`open_logins` (logins.py) is the entry: it takes the settings of every provider and returns one
object that starts logins, is polled about them, and serves the browser pages' needs. The auth
server is the OAuth client throughout: neither a volunteer's node nor their terminal ever sees a
token of the provider, only the short code or the address that a person needs.
"""
