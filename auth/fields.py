"""The types of fields that documents share, each with its range and the reason for it.

A text that people see must not be able to imitate another. So names are plain ASCII letters, digits
and a few signs that mean nothing to a shell, a terminal, a page or a path: no space, no control
character, no letter of another script that looks the same.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from auth.keys import FINGERPRINT_BYTES, KEY_ID_BYTES, PUBLIC_KEY_BYTES, SIGNATURE_BYTES

LARGEST_TIME_MS = (1 << 53) - 1  # the largest exact integer in JSON and JavaScript; 285,000 years
LARGEST_COUNT = (1 << 63) - 1  # SQLite's largest integer
LONGEST_RUN = 64
LONGEST_USERNAME = 100  # `provider:login`; logins are at most 39 at GitHub, mail addresses longer
LONGEST_ADDRESS = 256  # a relayed multiaddr with two peer ids has about 180 characters
LONGEST_URL = 512
MOST_ADDRESSES = 16
LONGEST_TEXT = 500  # characters of a sentence to a person

RUN_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z"
USERNAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@+:~-]*\Z"
PRINTABLE_PATTERN = r"^[!-~]*\Z"
URL_PATTERN = r"^(https?://[!-~]+)?\Z"

RunName = Annotated[str, Meta(max_length=LONGEST_RUN, pattern=RUN_PATTERN)]
Username = Annotated[str, Meta(max_length=LONGEST_USERNAME, pattern=USERNAME_PATTERN)]
PublicKey = Annotated[bytes, Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
KeyId = Annotated[bytes, Meta(min_length=KEY_ID_BYTES, max_length=KEY_ID_BYTES)]
PinnedKey = Annotated[bytes, Meta(min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)]
TimeMs = Annotated[int, Meta(ge=0, le=LARGEST_TIME_MS)]
Serial = Annotated[int, Meta(ge=1, le=LARGEST_COUNT)]
Address = Annotated[str, Meta(min_length=1, max_length=LONGEST_ADDRESS, pattern=PRINTABLE_PATTERN)]
Addresses = Annotated[tuple[Address, ...], Meta(max_length=MOST_ADDRESSES)]
Url = Annotated[str, Meta(max_length=LONGEST_URL, pattern=URL_PATTERN)]
Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
