"""The one canonical byte form of everything that an auth key signs.

    document = MessagePack array of its fields, in MessagePack's shortest form
               followed by 64 bytes of Ed25519 signature over domain and array

A document is checked in three steps: its size (before anything is parsed), its form (types, counts
and ranges of a msgspec struct, and encoding it again must give *the same bytes*), and last, by a
caller that knows the key, the signature. So each document has exactly one byte form, and the
verified bytes are the ones that were read.

Promise: `read` raises MalformedDocument and nothing else, whatever the bytes.

Easy to get wrong: `read` does not check the signature. Call `genuine` before trusting the contents.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from auth.errors import MalformedDocument
from auth.keys import SIGNATURE_BYTES, SigningKey, VerifyingKey

T = TypeVar("T", bound=msgspec.Struct)

LONGEST_REASON = 200  # characters of msgspec's words about what did not fit

_ENCODER = msgspec.msgpack.Encoder()
encode = _ENCODER.encode

# msgspec raises these for bytes that do not fit: its own errors, UnicodeDecodeError (a
# ValueError), RecursionError for deep nesting.
WHAT_BAD_BYTES_RAISE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)


class Canonical(Generic[T]):
    """Reads a struct only from exactly the bytes that it would be written as."""

    def __init__(self, type_: type[T], name: str, limit_bytes: int) -> None:
        self.name = name
        self.limit_bytes = limit_bytes
        self._decoder = msgspec.msgpack.Decoder(type_)

    def read(self, data: bytes) -> T:
        if len(data) > self.limit_bytes:
            raise MalformedDocument(
                f"The {self.name} has {len(data):,} bytes; {self.limit_bytes:,} are allowed."
            )
        try:
            value = self._decoder.decode(data)
        except WHAT_BAD_BYTES_RAISE as error:
            reason = str(error)[:LONGEST_REASON]
            raise MalformedDocument(f"These bytes are not a {self.name}: {reason}.") from None
        if encode(value) != data:
            raise MalformedDocument(f"This {self.name} is not in its one canonical form.")
        return value

    def write(self, value: T) -> bytes:
        """The bytes of a document of our own; ValueError if no reader would accept them."""
        data = encode(value)
        try:
            self.read(data)
        except MalformedDocument as error:
            raise ValueError(error.what) from None
        return data


class DocumentType(Generic[T]):
    """A kind of signed document: its fields, the domain of its signature, its greatest size."""

    def __init__(self, type_: type[T], name: str, domain: bytes, limit_bytes: int) -> None:
        self.name = name
        self.domain = domain
        self.limit_bytes = limit_bytes
        self._canonical = Canonical(type_, name, limit_bytes - SIGNATURE_BYTES)

    def sign(self, document: T, key: SigningKey) -> bytes:
        """The signed bytes; ValueError for a document that no reader would accept."""
        body = self._canonical.write(document)
        return body + key.sign(self.domain, body)

    def read(self, data: bytes) -> T:
        """The contents, from anybody; MalformedDocument unless they are in canonical form."""
        if len(data) <= SIGNATURE_BYTES:
            raise MalformedDocument(
                f"These bytes are not a signed {self.name}: there are only {len(data)}."
            )
        return self._canonical.read(data[:-SIGNATURE_BYTES])

    def genuine(self, data: bytes, key: VerifyingKey) -> bool:
        """Whether the owner of this key signed exactly these bytes."""
        return key.verify(self.domain, data[-SIGNATURE_BYTES:], data[:-SIGNATURE_BYTES])
