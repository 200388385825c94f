"""Files of models in this machine's cache of Hugging Face. Nothing is downloaded.

content = cached_file("openai-community/gpt2", "config.json", largest=256 << 10)
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from models.errors import WrongSettings
from models.extras import install

NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,96}(/[A-Za-z0-9._-]{1,96})?")


def cached_file(name: str, file: str, *, largest: int) -> bytes:
    """WrongSettings if there is no such model or file, or if it is larger than `largest` bytes."""
    if not NAME.fullmatch(name):
        raise WrongSettings(
            f"{name!r:.100} is not the name of a model.", advice='Write "owner/name", and no path.'
        )
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise WrongSettings(
            f"{name} needs the library huggingface_hub, which is not installed here.",
            advice=install("transformers"),
        ) from None
    try:
        found = try_to_load_from_cache(name, file)
    except ValueError as error:  # the library's own rules for names are stricter
        raise WrongSettings(f"{name!r} is not the name of a model.", why=str(error)) from None
    if not isinstance(found, str):
        raise WrongSettings(
            f"The {file} of {name} is not in this machine's cache of Hugging Face.",
            why="potluck downloads nothing from there by name.",
            advice=f"Fetch it: `hf download {name} {file}`.",
        )
    return read_limited(Path(found), f"The {file} of {name}", largest)


def read_limited(file: Path, what: str, largest: int) -> bytes:
    try:
        with file.open("rb") as opened:
            content = opened.read(largest + 1)
    except OSError as error:
        raise WrongSettings(f"{what} cannot be read: {error.strerror or error}.") from None
    if len(content) > largest:
        raise WrongSettings(f"{what} has more than {largest:,} bytes.")
    return content
